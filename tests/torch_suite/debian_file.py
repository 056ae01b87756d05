"""Files of torch's tests on one backend, in forks of this process, which has imported torch:

    python -m torch_suite.debian_file BACKEND FOLDER PATTERN

reads lines ``[FILE, NAME...]`` and answers each with a line for each test of the file (or of the names) that matches, and ``[]``.

Each test runs in a fork of its own, with a time-out, and its ranks are forks of that. Where a test names gloo, torch makes a
group of BACKEND: every way to a group passes `Backend("gloo")`, which answers with that name here.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import multiprocessing
import os
import pathlib
import re
import select
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Iterator
from typing import Any, NoReturn

from torch_suite import MARK, TIMEOUT_S


def main(backend: str, folder: pathlib.Path, pattern: str) -> None:
    die_with_parent()
    put_in_gloos_place(backend)
    fork_always()
    for line in sys.stdin:
        file, *names = json.loads(line)
        child = os.fork()
        if child == 0:
            run_file(folder, file, names, pattern)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            say(f"{file}::", "failed", 0.0, f"the process ended with {os.waitstatus_to_exitcode(status)}", True)
        say()


def run_file(folder: pathlib.Path, file: str, names: list[str], pattern: str) -> None:
    die_with_parent()
    path = folder / file
    sys.path.insert(0, str(path.parent))
    try:
        tests = {f"{file}::{name_of(test)}": test for test in flat(load(path))}
    except BaseException:
        # A file that cannot be imported has no tests. It counts where gloo's run had some.
        say(f"{file}::", "failed", 0.0, traceback.format_exc(), bool(names))
        return
    # Nothing that is here now is garbage in a fork, and collecting it there would copy its memory.
    gc.collect()
    gc.freeze()
    for name, test in tests.items():
        if name in names if names else re.search(pattern, name):
            run(name, test)


def put_in_gloos_place(backend: str) -> None:
    """Let each group that is to be gloo's be ``backend``'s. A file named by USED tells that there was one."""
    import torch.distributed as dist

    make = dist.Backend.__new__

    def named(cls: type, name: str) -> Any:
        if str(name).lower() != "gloo":
            return make(cls, name)
        if USED in os.environ:
            pathlib.Path(os.environ[USED]).touch()
        return make(cls, backend)

    dist.Backend.__new__ = named  # type: ignore[assignment]


def fork_always() -> None:
    """Have processes that tests want to spawn be forks. They cost 25 ms instead of 3 s, and keep what is patched here."""
    import torch.multiprocessing

    fork = multiprocessing.get_context("fork")
    for module in (multiprocessing, torch.multiprocessing):
        module.get_context = lambda method=None: fork  # type: ignore[attr-defined]
        module.set_start_method = lambda *_, **__: None  # type: ignore[attr-defined]


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def load(path: pathlib.Path) -> unittest.TestSuite:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return unittest.defaultTestLoader.loadTestsFromModule(module)


def flat(tests: unittest.TestSuite | unittest.TestCase) -> Iterator[unittest.TestCase]:
    if isinstance(tests, unittest.TestSuite):
        for test in tests:
            yield from flat(test)
    else:
        yield tests


def name_of(test: unittest.TestCase) -> str:
    return ".".join(test.id().split(".")[-2:])


def run(name: str, test: unittest.TestCase) -> None:
    """Run one test in a fork, and say how it ended. What it has started is killed afterwards."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        child = os.fork()
        if child == 0:
            run_here(test, folder)
        with open(os.pidfd_open(child)) as process:
            in_time = bool(select.select([process], [], [], TIMEOUT_S)[0])
        # Also the ranks that it has left behind.
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if not in_time:
            how, text = "failed", f"it ran for more than {TIMEOUT_S} s"
        elif not (folder / RESULT).exists():
            how, text = "failed", "its process died"
        else:
            how, text = json.loads((folder / RESULT).read_text())
        if how == "failed":
            text += "\n" + (folder / OUTPUT).read_text(errors="replace")[-4000:]
        say(name, how, time.monotonic() - began_s, text, (folder / "used").exists())


def run_here(test: unittest.TestCase, folder: pathlib.Path) -> NoReturn:
    """In the fork."""
    die_with_parent()
    os.setsid()
    os.environ.update({USED: str(folder / "used"), "TMPDIR": str(folder)})
    tempfile.tempdir = None
    output = os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    result = unittest.TestResult()
    unittest.TestSuite([test]).run(result)
    (folder / RESULT).write_text(json.dumps(ending(result)))
    os._exit(0)


def ending(result: unittest.TestResult) -> tuple[str, str]:
    if not result.wasSuccessful():
        return "failed", "\n".join(text for _, text in [*result.errors, *result.failures])
    if result.skipped:
        return "skipped", result.skipped[0][1]
    return "passed", ""


def say(*line: Any) -> None:
    print(f"\n{MARK}{json.dumps(line)}", flush=True)


PR_SET_PDEATHSIG = 1
OUTPUT, RESULT = "output", "result"
USED = "TORCH_SUITE_USED"
"""Names the file that exists once a test has asked for a group of gloo."""

if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3])
