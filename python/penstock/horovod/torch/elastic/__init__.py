"""Horovod's names, where Horovod has them (docs/guide/horovod.md). `penstock.fronts.horovod.torch.elastic` defines them."""

from __future__ import annotations

from penstock.fronts.horovod.torch.elastic import *  # noqa: F403 (its names are listed there, once)
from penstock.fronts.horovod.torch.elastic import __all__ as __all__
from penstock.horovod.torch.elastic import sampler as sampler
from penstock.horovod.torch.elastic import state as state
