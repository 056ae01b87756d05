"""Proves that what passes of torch's own DistributedTest on gloo passes on Penstock: a slice of it here, the whole by
``python -m tests.torch_suite --world 3`` and ``--world 4``."""

from __future__ import annotations

import importlib.util
import io
import pathlib
import tarfile

import pytest
import torch

import torch_suite
from torch_suite import Outcome, debian

# One of each kind of what once differed: sparse tensors, profiles, time-outs, and names of ranks that are missing.
SLICE = (
    "test_sparse_all_reduce_sum$|test_all_reduce_coalesced_sum$|test_all_gather_coalesced_simple$"
    "|test_barrier_timeout_full_group$|test_monitored_barrier_gloo$|test_isend_torch_profiler$|test_DistributedDataParallelCPU$"
)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the suite wants a CUDA device for each rank as soon as there is one"
)
@pytest.mark.skipif(importlib.util.find_spec("expecttest") is None, reason="torch's test cases need expecttest")
@pytest.mark.usefixtures("forks")
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


TESTS = """
import unittest, torch, torch.distributed as dist, tempfile

class Group(unittest.TestCase):
    def test_sum(self):
        with tempfile.NamedTemporaryFile() as file:
            dist.init_process_group("gloo", init_method="file://" + file.name, rank=0, world_size=1)
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            self.assertEqual(tensor.tolist(), [1.0, 1.0, 1.0])
    def test_name(self):
        with tempfile.NamedTemporaryFile() as file:
            dist.init_process_group("gloo", init_method="file://" + file.name, rank=0, world_size=1)
            self.assertEqual(dist.get_backend(), "gloo")
    def test_without_a_group(self):
        pass
"""


@pytest.mark.usefixtures("forks")
def test_files_run_on_both_backends(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive is unpacked and its tests run on both backends; differences are found, and tests without a group left out."""
    archive = tmp_path / "pytorch_1.orig.tar.xz"
    with tarfile.open(archive, "w:xz") as tar:
        for name in ("test/distributed/part/test_group.py", "test/test_else.py", "test/distributed/../../escape.py"):
            member = tarfile.TarInfo(f"pytorch-1/{name}")
            member.size = len(TESTS)
            tar.addfile(member, io.BytesIO(TESTS.encode()))
    folder = tmp_path / "unpacked"
    debian.unpack(archive, folder)
    assert [str(path.relative_to(folder)) for path in folder.rglob("*.py")] == ["part/test_group.py"]
    monkeypatch.setattr(debian, "PARTS", ("part/test_*.py",))
    gloo, penstock = debian.compare(folder, jobs=1, say=lambda line: None)
    same, name = (f"part/test_group.py::Group.{test}" for test in ("test_sum", "test_name"))
    assert {key: outcome.how for key, outcome in gloo.items()} == {same: "passed", name: "passed"}, gloo
    assert {key: outcome.how for key, outcome in penstock.items()} == {same: "passed", name: "failed"}, penstock
    [wrong] = torch_suite.judge(gloo, penstock, {})
    assert "'penstock' != 'gloo'" in wrong
    assert not torch_suite.judge(gloo, penstock, torch_suite.exceptions(f"{name}: it asks for the name\n"))


def test_without_apt(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package cannot be fetched, the reason is said and nothing is left behind."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(debian.Unavailable, match="apt-get"):
        debian.fetch(tmp_path / "target")
    assert not (tmp_path / "target").exists()
