"""Which tests continuous integration runs: prints `all` where what only `./dev test all` tests has changed.

They take long. Where git does not tell what has changed (a clone without history), this
takes the plain tests, and says so. Like ./dev, it needs the standard library only, and has no syntax newer than Python 3.6.
"""

import subprocess
import sys
from pathlib import Path

# The suites themselves. What they test has tests of its own in every run.
PATHS = (
    "docs/guide/frameworks.md",
    "p4",
    "requirements/frameworks.txt",
    "tests/corpus.py",
    "tests/horovod",
    "tests/live_switch.py",
    "tests/scripts",
    "tests/test_frameworks.py",
    "tests/torch_suite",
    "tests/translator.py",
)


def choose(root):
    """The argument of `./dev test` (empty for the plain tests), and the reason."""
    base, name = find_base(root)
    if base is None:
        return "", "git does not know an earlier commit, so nobody can tell what has changed"
    changed = git(root, "diff", "--name-only", base, "--", *PATHS)
    if changed is None:
        return "", f"git cannot compare with {name}"
    files = changed.split("\n") if changed else []
    if not files:
        return "", f"nothing that only `./dev test all` tests has changed since {name}"
    others = f" and {len(files) - 3} others" if len(files) > 3 else ""
    return "all", f"changed since {name}: {', '.join(files[:3])}{others}"


def find_base(root):
    """The commit to compare with, and its name: where this branch left main, or on main itself the commit before."""
    head, fork = git(root, "rev-parse", "HEAD"), git(root, "merge-base", "origin/main", "HEAD")
    if fork and fork != head:
        return fork, f"the merge base with origin/main ({fork[:10]})"
    before = git(root, "rev-parse", "--verify", "--quiet", "HEAD~1")
    return before, f"HEAD~1 ({before[:10]})" if before else ""


def git(root, *arguments):
    """What git prints; None where it fails, or is not there."""
    try:
        done = subprocess.run(["git", *arguments], cwd=str(root), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return None
    return done.stdout.decode().strip() if done.returncode == 0 else None


if __name__ == "__main__":
    size, reason = choose(Path(__file__).resolve().parent.parent)
    print(f"ci: ./dev test {size}".rstrip() + f": {reason}", file=sys.stderr, flush=True)
    print(size)
