"""torch's own ``DistributedTest``, from the wheel that is installed, on gloo and on Penstock, compared test by test.

    python -m tests.torch_suite --world 3                  every test on both backends, and what differs
    python -m tests.torch_suite --world 4 --only sparse    tests whose names match a regular expression
    python -m tests.torch_suite --world 3 --backend gloo   one backend alone, without a comparison
    python -m tests.torch_suite --debian                   more of torch's tests: see `debian`

A test that passes on gloo must pass on Penstock. A test that gloo runs and Penstock skips counts as failed. What may differ
stands in ``exceptions.txt`` with its reason, and an exception that is no longer one is reported too.

Nothing of torch's code is copied or changed. `suite` imports the module with the word "gloo" in its guards, and then gives it
Penstock to test.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence

HERE = pathlib.Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one test ended on one backend."""

    how: str
    """ "passed", "skipped" or "failed"."""
    seconds: float
    text: str
    """The failure's traceback, or why the test was skipped."""
    used: bool = True
    """Whether the test asked for a group of the backend."""


Outcomes = dict[str, Outcome]


def compare(world: int, only: str = "", say: Callable[[str], object] = print) -> tuple[Outcomes, Outcomes]:
    """Run the tests whose names match ``only`` on both backends at the same time. Blocks until both have ended.

    Returns: the outcomes with gloo and with Penstock, by name.
    """
    outcomes: dict[str, Outcomes] = {}
    threads = [
        threading.Thread(target=lambda name=name: outcomes.update({name: run(name, world, only, say)}))
        for name in ("gloo", "penstock")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes["gloo"], outcomes["penstock"]


def run(backend: str, world: int, only: str = "", say: Callable[[str], object] = print) -> Outcomes:
    """Run the tests whose names match ``only`` on one backend, in a process of their own, one after the other.

    Args:
        say: gets a line for each test that has ended.
    """
    outcomes: Outcomes = {}
    with tempfile.TemporaryFile(mode="w+") as errors:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "WORLD_SIZE": str(world),
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TIMEOUT_S),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "torch_suite.suite", backend, only]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith(MARK):
                    continue  # what torch prints
                name, *rest = json.loads(line.removeprefix(MARK))
                outcomes[name] = outcome = Outcome(*rest)
                say(f"{backend:8} {outcome.how:7} {outcome.seconds:6.1f} s  {name}")
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(f"the suite on {backend} ended with code {process.returncode}:\n{errors.read()[-4000:]}")
    return outcomes


def exceptions(text: str | None = None) -> dict[str, str]:
    """What may differ from gloo, and why: the name of a test, a colon, a space and the reason on each line; # begins a remark."""
    text = (HERE / "exceptions.txt").read_text() if text is None else text
    lines = (line.strip() for line in text.splitlines())
    pairs = (line.partition(": ") for line in lines if line and not line.startswith("#"))
    return {name.strip(): reason.strip() for name, _, reason in pairs}


def judge(gloo: Outcomes, penstock: Outcomes, allowed: Mapping[str, str]) -> Sequence[str]:
    """What is wrong, one text each; nothing if Penstock passes whatever gloo passes."""
    wrong = []
    for name, expected in gloo.items():
        got = penstock.get(name, Outcome("failed", 0.0, "the run ended before it"))
        passes = got.how == "passed"
        if expected.how == "passed" and not passes and name not in allowed:
            wrong.append(f"{name} passes on gloo and {'is ' if got.how == 'skipped' else 'has '}{got.how}:\n{got.text}")
        if name in allowed and (passes or expected.how != "passed"):
            wrong.append(f"{name} is in exceptions.txt, but {'passes' if passes else 'does not pass on gloo either'}")
    return wrong


MARK = "torch_suite: "
"""Begins the lines of `suite` among what torch prints."""
TIMEOUT_S = 100
"""For a test. The longest takes a tenth of that on a machine with two cores."""
