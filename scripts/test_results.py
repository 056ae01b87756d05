"""What gates and tests have given, over all stages of `./dev test`, and what may not be passed over in silence.

Like ./dev, this needs the standard library only, and has no syntax newer than Python 3.6.
"""

import json
import xml.etree.ElementTree
from pathlib import Path


class Outcomes:
    """How each test of one pytest run ended, by pytest's own report file."""

    def __init__(self, passed=(), skipped=(), failed=None):
        self.passed = list(passed)
        self.skipped = list(skipped)
        self.failed = dict(failed or {})
        """The text of each failure, by the name of its test."""

    @classmethod
    def read(cls, report):
        """Those of a report file; none where pytest has written none."""
        outcomes = cls()
        if not Path(report).exists():
            return outcomes
        for case in xml.etree.ElementTree.parse(str(report)).iter("testcase"):
            name = f"python: {case.get('classname')}::{case.get('name')}"
            texts = [child.text or child.get("message") or "" for child in case if child.tag in ("failure", "error")]
            if texts:
                outcomes.failed[name] = "\n".join(texts)
            elif any(child.tag == "skipped" for child in case):
                outcomes.skipped.append(name)
            else:
                outcomes.passed.append(name)
        # A test that passes and whose tear-down fails may stand there twice.
        outcomes.passed = [name for name in outcomes.passed if name not in outcomes.failed]
        return outcomes


class Tally:
    """What passed and what failed, over gates and both test suites, so that the last line speaks for all."""

    def __init__(self):
        self.passed = 0
        self.skipped = 0
        self.failures = []
        self.only_again = {}
        """Tests that failed and passed when they ran again, with the text of the first failure."""

    def add(self, passed, failures, skipped=0):
        self.passed += passed
        self.skipped += skipped
        self.failures += failures

    def add_all(self, other):
        """What another tally has."""
        self.add(other.passed, other.failures, other.skipped)
        self.only_again.update(other.only_again)

    def to_json(self):
        """For `from_json`."""
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text):
        tally = cls()
        vars(tally).update(json.loads(text))
        return tally

    def add_again(self, first, again):
        """Count the tests that failed in the run `first` by how they ended in the run `again`.

        *Why is a test that passes only then no failure?* Tests wait for other processes, and on a loaded machine one can miss a
        deadline that it keeps by itself. Nobody believes a run for long that is red for that alone. But a race fails in the same
        way, so each such test is counted and named where the result is read, with its first failure. A test that failed, and was
        not seen to pass afterwards, is a failure: its second run is missing, or it was skipped. So is a crash.
        """
        crashed = [name for name, text in first.failed.items() if "crashed while running" in text]
        passed = [name for name in first.failed if name in again.passed and name not in crashed]
        for name in passed:
            self.only_again[name] = first.failed[name]
        unseen = [
            name for name in first.failed if name not in passed and name not in again.failed and name not in crashed
        ]
        failures = [*again.failed, *(f"{name} (it did not pass when run again)" for name in unseen)]
        self.add(len(passed), failures + [f"{name} (its process crashed)" for name in crashed])

    def report(self, file):
        """Print the result, write it into `file` as JSON, and return the exit code."""
        print()
        for name, text in self.only_again.items():
            print(f"FAILED AT FIRST, and passed when run again: {name}\n{text}\n")
        for failure in self.failures:
            print(f"FAILED {failure}")
        if self.skipped:
            print(f"{self.skipped} skipped (the reasons stand above)")
        if self.only_again:
            print(
                f"A test that passes only when run again has a race, or promises too much beside others (first failures: {file})"
            )
        result = {
            "passed": self.passed,
            "failed": self.failures,
            "skipped": self.skipped,
            "passed_only_when_run_again": [
                {"test": name, "first_failure": text} for name, text in self.only_again.items()
            ],
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=1) + "\n")
        print(self.summary(), flush=True)
        return 1 if self.failures else 0

    def summary(self):
        """The last line."""
        names = ", ".join(name.replace("python: ", "", 1) for name in self.only_again)
        again = f", of which {len(self.only_again)} only when run again: {names}" if self.only_again else ""
        return f"{self.passed} passed{again}{';' if again else ','} {len(self.failures)} failed"
