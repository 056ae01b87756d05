"""Runs Horovod's own tests on the ranks of a job, each test on all ranks at the same time, in the same order."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import sys
import time
import traceback
import unittest
import warnings

import corpus

HERE = pathlib.Path(__file__).parent

# Tests that are not run, and why.
SKIPPED = {
    "test_delta_optimizer": "it asks for MPI and a GPU; test_horovod.py's adasum_training does the same on the CPU",
    "test_broadcast_state_gpu": "Horovod skips it, and it needs a GPU",
}
# Files of Horovod's tests for PyTorch that are not in the corpus, and why. (Those for Spark, Ray, and the inside of horovodrun
# test launchers that there are none of here.)
NOT_IN_CORPUS = {
    "test/integration/test_elastic_torch.py": "it starts horovodrun with a script that finds hosts, and lets hosts come and go; "
    "there is no horovodrun here, and torchrun restarts all workers then. What it asks of a worker, test_horovod.py does with "
    "programs.elastic, and with a rank that is killed under torchrun",
}
# Why tests skip themselves. Of what they need a GPU for, our own tests do on the CPU: SyncBatchNorm and Adasum.
NEEDS_GPU = re.compile("No GPUs available|Not enough GPUs available")


def names() -> set[str]:
    """The names of all tests in Horovod's files."""
    return {
        name
        for path in corpus.HOROVOD.glob("*/test_*.py")
        for name in re.findall(r"^    def (test_\w+)", path.read_text(), re.MULTILINE)
    }


def run(path: str, only: str = "") -> dict[str, tuple[str, str, float]]:
    """Run the tests of the file at `path` on this rank; returns for each its outcome ("passed", "skipped", "failed"), why, and
    how long it took in seconds."""
    sys.path.insert(0, str(HERE))
    import aliases
    import torch

    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    # So that the tests take the way without MPI: they end Horovod after each test, and start it again.
    os.environ.update(HOROVOD_RANK=rank, HOROVOD_SIZE=size, HOROVOD_LOCAL_RANK=rank, HOROVOD_LOCAL_SIZE=size)
    # A test that fails on one rank keeps the others waiting: not for long.
    os.environ.update(HOROVOD_STALL_CHECK_TIME_SECONDS="10", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="12")
    aliases.install()
    sys.modules["common"] = aliases.stand_in_for_test_utils()
    # The tests try every optimizer that torch has. Muon, which is younger than they are, takes matrices only.
    if hasattr(torch.optim, "Muon"):
        torch.optim.Muon.__module__ = "younger.than.the.tests"
    # Adasum was only made for MPI on the CPU; its tests of stability ask for that, and run without.
    import penstock.horovod.torch as hvd

    if "adasum" in path:
        hvd.mpi_enabled = lambda: True
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    warnings.simplefilter("ignore")
    outcomes = {}
    for test in _flat(unittest.defaultTestLoader.loadTestsFromModule(module)):
        name = test.id().rpartition(".")[2]
        if only and only not in name:
            continue
        began_s = time.monotonic()
        outcome, why = ("skipped", SKIPPED[name]) if name in SKIPPED else _one(test)
        outcomes[name] = (outcome, why, time.monotonic() - began_s)
    return outcomes


def _one(test: unittest.TestCase) -> tuple[str, str]:
    import penstock.horovod.torch as hvd

    result = unittest.TestResult()
    # Two operations of one name are an error only while the first is negotiated. Horovod takes a millisecond for that.
    os.environ["HOROVOD_CYCLE_TIME"] = "20" if "duplicate_name" in test.id() else "0"
    try:
        test.run(result)
    except BaseException:
        return "failed", traceback.format_exc()
    finally:
        hvd.shutdown()
    for _, trace in [*result.failures, *result.errors]:
        return "failed", trace
    for _, why in result.skipped:
        return "skipped", why
    return "passed", ""


def _flat(suite: unittest.TestSuite) -> list[unittest.TestCase]:
    return [test for part in suite for test in (_flat(part) if isinstance(part, unittest.TestSuite) else [part])]
