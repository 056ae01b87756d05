"""Jobs that outlive their workers: the names that users import (docs/guide/elastic.md).

`penstock.training.elastic` defines them.
"""

from __future__ import annotations

from penstock.training.elastic import *  # noqa: F403 (its names are listed there, once)
from penstock.training.elastic import __all__ as __all__
