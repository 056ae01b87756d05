"""The front for TensorFlow and Keras: the names that users import. `penstock.fronts.tensorflow` defines them."""

from __future__ import annotations

from penstock.fronts.tensorflow import *  # noqa: F403 (its names are listed there, once)
from penstock.fronts.tensorflow import __all__ as __all__
