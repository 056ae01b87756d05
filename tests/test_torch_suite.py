"""Proves that what passes of torch's own DistributedTest on gloo passes on Penstock: a slice of it here, the whole by
``python -m tests.torch_suite --world 3`` and ``--world 4``."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import torch_suite
from torch_suite import Outcome

# One of each kind of what once differed: sparse tensors, profiles, time-outs, and names of ranks that are missing.
SLICE = (
    "test_sparse_all_reduce_sum$|test_all_reduce_coalesced_sum$|test_all_gather_coalesced_simple$"
    "|test_barrier_timeout_full_group$|test_monitored_barrier_gloo$|test_isend_torch_profiler$|test_DistributedDataParallelCPU$"
)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the suite wants a CUDA device for each rank as soon as there is one"
)
@pytest.mark.skipif(importlib.util.find_spec("expecttest") is None, reason="torch's test cases need expecttest")
def test_slice() -> None:
    """Nothing of the slice passes on gloo and fails here."""
    lines: list[str] = []
    gloo, penstock = torch_suite.compare(3, SLICE, say=lines.append)
    assert sum(outcome.how == "passed" for outcome in gloo.values()) >= 6, lines
    wrong = torch_suite.judge(gloo, penstock, torch_suite.exceptions())
    assert not wrong, "\n".join(wrong)


def test_judgement() -> None:
    """What gloo passes must pass, skips count as failures, and exceptions must be needed and have reasons."""
    passed, failed, skipped = (Outcome(how, 0.1, f"it has {how}") for how in ("passed", "failed", "skipped"))
    gloo = {"a": passed, "b": passed, "c": passed, "d": failed, "e": skipped, "f": passed, "g": passed, "h": passed}
    ours = {"a": passed, "b": failed, "c": skipped, "d": failed, "e": failed, "f": failed, "g": passed}
    wrong = torch_suite.judge(gloo, ours, torch_suite.exceptions("# said\n\nf: it is so\ng: no more\nd : nor here\n"))
    assert [text.split()[0] for text in wrong] == ["b", "c", "d", "g", "h"], wrong
    assert "it has failed" in wrong[0] and "it has skipped" in wrong[1]
    assert all(torch_suite.exceptions().values()), "an exception without a reason"
