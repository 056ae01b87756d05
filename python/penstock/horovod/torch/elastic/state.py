"""Horovod's names, where Horovod has them (docs/guide/horovod.md). `penstock.fronts.horovod.torch.elastic.state` defines them."""

from __future__ import annotations

from penstock.fronts.horovod.torch.elastic.state import *  # noqa: F403 (its names are listed there, once)
from penstock.fronts.horovod.torch.elastic.state import __all__ as __all__
