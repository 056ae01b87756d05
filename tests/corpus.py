"""Where the programs of other people are that tests run: outside of this repository, in the folder ``PENSTOCK_CORPUS``.

The default is ``../shared/corpus`` beside the checkout; its README.md says which file is from where, under which licence.
Without it, what needs it is skipped with a reason.
"""

from __future__ import annotations

import os
import pathlib

import pytest

DEFAULT = pathlib.Path(__file__).resolve().parent.parent.parent / "shared" / "corpus"
CORPUS = pathlib.Path(os.environ.get("PENSTOCK_CORPUS") or DEFAULT).resolve()
SCRIPTS = CORPUS / "scripts"
HOROVOD = CORPUS / "horovod"

MISSING = "" if CORPUS.is_dir() else f"there is no corpus at {CORPUS}: set PENSTOCK_CORPUS to where it is"

needed = pytest.mark.skipif(bool(MISSING), reason=MISSING)
