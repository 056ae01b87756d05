"""``python -m penstock.elastic.store``: the small process that outlives the workers (`penstock.training.elastic.store`)."""

from __future__ import annotations

from penstock.training.elastic.store import __all__ as __all__
from penstock.training.elastic.store import main as main
from penstock.training.elastic.store import serve as serve

if __name__ == "__main__":
    main()
