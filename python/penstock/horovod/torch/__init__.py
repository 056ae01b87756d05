"""Horovod's names, where Horovod has them (docs/guide/horovod.md). `penstock.fronts.horovod.torch` defines them."""

from __future__ import annotations

from penstock.fronts.horovod.torch import *  # noqa: F403 (its names are listed there, once)
from penstock.fronts.horovod.torch import __all__ as __all__

# For type checkers, which do not follow the list's sum.
from penstock.fronts.horovod.torch.mpi_ops import *  # noqa: F403
from penstock.horovod import common as _common  # noqa: F401 (scripts that import this have horovod.common, too)
from penstock.horovod.torch import compression as compression
from penstock.horovod.torch import elastic as elastic  # type: ignore[no-redef]  # in its place here
from penstock.horovod.torch import functions as functions
from penstock.horovod.torch import mpi_ops as mpi_ops
from penstock.horovod.torch import optimizer as optimizer
from penstock.horovod.torch import sync_batch_norm as sync_batch_norm
