"""One backend's run of torch's DistributedTest: ``python -m torch_suite.suite BACKEND PATTERN``, with WORLD_SIZE set.

The module decides when it is imported, by the word in BACKEND, which tests are for which backend. It is imported with
"gloo" there; then its BACKEND becomes a text that *is* "penstock", and equals "gloo" for guards within tests.

Ranks are forked from this process, which has imported torch, instead of spawned: half a second a test instead of ten.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import time
import unittest
from typing import Any

from torch_suite import MARK


class _Named(str):
    """The name of the backend under test, which guards take for gloo's."""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def load(backend: str) -> Any:
    """torch's module, for ``backend`` in place of gloo."""
    os.environ["BACKEND"] = "gloo"
    from torch.testing._internal.distributed import distributed_test

    module: Any = distributed_test
    if backend != "gloo":
        import penstock  # noqa: F401

        os.environ["BACKEND"] = backend
        module.BACKEND = _Named(backend)
        for list_ in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
            getattr(module, list_).append(backend)
        cases = module.DistTestCases
        for names in (*cases.skip_collective.values(), *cases.backend_feature.values()):
            if "gloo" in names:
                names.add(backend)
    return module


def case(module: Any) -> type[unittest.TestCase]:
    """The tests as a class whose ranks are forked."""

    class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    return Suite


class _Result(unittest.TestResult):
    """Says how each test has ended."""

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._began_s = time.monotonic()
        self._how, self._text = "passed", ""

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        self._how, self._text = "failed", self.errors[-1][1]

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._how, self._text = "failed", self.failures[-1][1]

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._how, self._text = "skipped", reason

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        line = [test.id().rpartition(".")[2], self._how, time.monotonic() - self._began_s, self._text]
        print(f"\n{MARK}{json.dumps(line)}", flush=True)


def main(backend: str, pattern: str) -> None:
    tests = case(load(backend))
    names = [name for name in sorted(dir(tests)) if name.startswith("test_") and re.search(pattern, name)]
    unittest.TestSuite(map(tests, names)).run(_Result())


if __name__ == "__main__":
    main(*sys.argv[1:])
