"""Horovod's names, where Horovod has them (docs/guide/horovod.md). `penstock.fronts.horovod` defines them."""

from __future__ import annotations

from penstock.fronts.horovod import *  # noqa: F403 (its names are listed there, once)
from penstock.fronts.horovod import __all__ as __all__
from penstock.horovod import runner as runner
