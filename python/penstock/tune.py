"""The tuner: the names that users import (docs/guide/tune.md). `penstock.training.tune` defines them."""

from __future__ import annotations

from penstock.training.tune import *  # noqa: F403 (its names are listed there, once)
from penstock.training.tune import __all__ as __all__
