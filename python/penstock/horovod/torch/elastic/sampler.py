"""Horovod's names, where Horovod has them. `penstock.fronts.horovod.torch.elastic.sampler` defines them."""

from __future__ import annotations

from penstock.fronts.horovod.torch.elastic.sampler import *  # noqa: F403 (its names are listed there, once)
from penstock.fronts.horovod.torch.elastic.sampler import __all__ as __all__
