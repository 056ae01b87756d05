"""Where the programs of other people are that tests run: outside of this repository, in the folder ``PENSTOCK_CORPUS``.

The default is ``../shared/corpus`` beside the checkout; its README.md says which file is from where, under which licence.
Without it, what needs it is skipped with a reason.
"""

from __future__ import annotations

import os
import pathlib

import pytest

DEFAULT = pathlib.Path(__file__).resolve().parent.parent.parent / "shared" / "corpus"
# The tests' processes lose what begins with PENSTOCK_ (`conftest`), and those that run side by side import this anew.
_HANDED_DOWN = "CORPUS_OF_THE_TESTS"
CORPUS = pathlib.Path(os.environ.get("PENSTOCK_CORPUS") or os.environ.get(_HANDED_DOWN) or DEFAULT).resolve()
os.environ[_HANDED_DOWN] = str(CORPUS)
SCRIPTS = CORPUS / "scripts"
HOROVOD = CORPUS / "horovod"

MISSING = "" if CORPUS.is_dir() else f"there is no corpus at {CORPUS}: set PENSTOCK_CORPUS to where it is"

needed = pytest.mark.skipif(bool(MISSING), reason=MISSING)
