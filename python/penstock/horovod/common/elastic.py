"""Horovod's names, where Horovod has them (docs/guide/horovod.md). `penstock.fronts.horovod.common.elastic` defines them."""

from __future__ import annotations

from penstock.fronts.horovod.common.elastic import *  # noqa: F403 (its names are listed there, once)
from penstock.fronts.horovod.common.elastic import __all__ as __all__
