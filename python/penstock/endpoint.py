"""Servers and their clients: the names that users import (docs/guide/endpoints.md). `penstock.torch.endpoint` defines them."""

from __future__ import annotations

from penstock.torch.endpoint import *  # noqa: F403 (its names are listed there, once)
from penstock.torch.endpoint import __all__ as __all__
