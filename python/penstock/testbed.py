"""Emulated clusters: the names that users import (docs/guide/testbed.md). `penstock.tools.testbed` defines them."""

from __future__ import annotations

from penstock.tools.testbed import *  # noqa: F403 (its names are listed there, once)
from penstock.tools.testbed import __all__ as __all__
