"""The front for JAX: the names that users import (docs/guide/jax-tensorflow.md). `penstock.fronts.jax` defines them."""

from __future__ import annotations

from penstock.fronts.jax import *  # noqa: F403 (its names are listed there, once)
from penstock.fronts.jax import __all__ as __all__
