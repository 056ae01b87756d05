"""Optimizers: the names that users import (docs/guide/optim.md). `penstock.training.optim` defines them."""

from __future__ import annotations

from penstock.training.optim import *  # noqa: F403 (its names are listed there, once)
from penstock.training.optim import __all__ as __all__
