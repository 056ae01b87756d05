"""Whose an exception is: what goes wrong in the recorder must not end the script, and what the script raises must."""

from __future__ import annotations

import os
from pathlib import Path

import torch

__all__ = ["is_of_script"]

_OURS = (str(Path(__file__).parents[3]) + os.sep, str(Path(torch.__file__).parent) + os.sep)
_PYTHON = str(Path(os.__file__).parent) + os.sep


def is_of_script(error: BaseException) -> bool:
    """Whether the script's own code raised it, in the midst of ours: a signal's handler, for a time limit, say."""
    traceback = error.__traceback__
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    file = traceback.tb_frame.f_code.co_filename
    return not file.startswith(_OURS) and (not file.startswith(_PYTHON) or "-packages" in file)
