"""Lets programs that were written for Horovod run unmodified: ``horovod`` is another name for ``penstock.horovod`` here.

A user changes the import instead; the files of the corpus stay as they are.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import sys
import tempfile
import types
import unittest
from collections.abc import Iterator


def install() -> None:
    """Make ``import horovod.torch`` and its modules find Penstock's."""
    from penstock import horovod

    sys.modules["horovod"] = horovod
    for module in pkgutil.walk_packages(horovod.__path__, "penstock.horovod."):
        sys.modules[module.name.removeprefix("penstock.")] = importlib.import_module(module.name)


def stand_in_for_test_utils() -> types.ModuleType:
    """What the tests take from Horovod's test/utils/common.py, whose other functions need its launcher."""
    common = types.ModuleType("common")

    def mpi_env_rank_and_size() -> tuple[int, int]:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def skip_or_fail_gpu_test(test: unittest.TestCase, message: str) -> None:
        test.skipTest(message)

    @contextlib.contextmanager
    def temppath() -> Iterator[str]:
        with tempfile.TemporaryDirectory() as folder:
            yield os.path.join(folder, "temp_test_file")

    for function in (mpi_env_rank_and_size, skip_or_fail_gpu_test, temppath):
        setattr(common, function.__name__, function)
    return common
