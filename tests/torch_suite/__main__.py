"""Run torch's DistributedTest and compare; the package's docstring says how."""

from __future__ import annotations

import argparse
import collections
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import torch_suite
from torch_suite import debian


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.torch_suite", description=torch_suite.__doc__.splitlines()[0]
    )
    parser.add_argument("--world", type=int, default=3, help="ranks (default: 3)")
    parser.add_argument("--only", default="", metavar="PATTERN", help="tests whose names match this regular expression")
    parser.add_argument("--backend", help="run this backend alone, and print what fails")
    parser.add_argument("--debian", action="store_true", help="the tests of Debian's source package of pytorch")
    options = parser.parse_args()
    if options.debian:
        try:
            tests = debian.fetch()
        except debian.Unavailable as reason:
            print(f"skipped: {reason}")
            return SKIPPED
        gloo, penstock = debian.compare(tests, options.only)
        wrong = [*torch_suite.judge(gloo, penstock, torch_suite.exceptions())]
        print_counts("gloo", gloo)
        print_counts("penstock", penstock)
    elif options.backend:
        outcomes = torch_suite.run(options.backend, options.world, options.only)
        wrong = [f"{name}:\n{outcome.text}" for name, outcome in outcomes.items() if outcome.how == "failed"]
        print_counts(options.backend, outcomes)
    else:
        gloo, penstock = torch_suite.compare(options.world, options.only)
        wrong = [*torch_suite.judge(gloo, penstock, torch_suite.exceptions())]
        print_counts("gloo", gloo)
        print_counts("penstock", penstock)
    for text in wrong:
        print(f"\n{text}")
    print(f"{len(wrong)} wrong" if wrong else "nothing is wrong")
    return 1 if wrong else 0


def print_counts(backend: str, outcomes: torch_suite.Outcomes) -> None:
    counts = collections.Counter(outcome.how for outcome in outcomes.values())
    print(f"{backend}: " + ", ".join(f"{counts[how]} {how}" for how in ("passed", "failed", "skipped")))


SKIPPED = 77
"""The exit code of a stage that cannot run here. ./dev counts it as skipped."""

if __name__ == "__main__":
    sys.exit(main())
