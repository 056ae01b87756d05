"""Plants the faults of `engine_faults` in a copy of the tree, each by itself, and runs virtual programs until one complains, or
the test that must fail with the fault."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator

from random_programs.engine_faults import FAULTS, EngineFault, Test


class Defective(Exception):
    """The fault itself is wrong: it cannot be planted, is not built, makes the tester die, or its test does not fail."""


@dataclasses.dataclass
class Found:
    """How a hunt has ended."""

    programs: int
    """How many programs it took, or ran in vain."""
    complaint: str | None


def hunt(names: list[str], *, root: pathlib.Path, seed: int | None, count: int, minutes: float) -> int:
    """Look for these faults, one after the other, and print a line each. ``seed``: instead of each fault's own.

    Returns: 1 if one was not found, or is defective.
    """
    failed = 0
    copy = _copy(root)
    for name in names:
        fault = FAULTS[name]
        started_s = time.monotonic()
        first = fault.seed if seed is None else seed
        try:
            with planted(copy.tree, fault):
                if fault.test and seed is None:
                    said = _failure(copy.build(fault.test), fault.test)
                    print(
                        f"{name}: {fault.test} fails ({time.monotonic() - started_s:.0f} s): {said[:200]}", flush=True
                    )
                    continue
                found = _look(copy.build(PROGRAMS), first, count, minutes)
        except Defective as reason:
            failed = 1
            print(f"{name}: ERROR: {reason}", flush=True)
            continue
        seconds = time.monotonic() - started_s
        if found.complaint is not None:
            at = f"found by program {found.programs} (seed {first + found.programs - 1}, {seconds:.0f} s)"
            print(f"{name}: {at}: {found.complaint[:200]}", flush=True)
        elif fault.expected:
            print(f"{name}: not found by {found.programs} programs, as expected: {fault.expected}", flush=True)
        else:
            failed = 1
            print(f"{name}: NOT FOUND by {found.programs} programs ({seconds:.0f} s)", flush=True)
    return failed


@contextlib.contextmanager
def planted(tree: pathlib.Path, fault: EngineFault) -> Iterator[None]:
    """The fault is in the tree within.

    Raises:
        Defective: its text does not stand in its file exactly once.
    """
    file = tree / "crates" / fault.file
    whole = file.read_text()
    if (times := whole.count(fault.text)) != 1:
        raise Defective(f"its text stands {times} times in crates/{fault.file}, and must stand there once")
    file.write_text(whole.replace(fault.text, fault.replacement))
    try:
        yield
    finally:
        # With a new time, so that cargo builds it again.
        file.write_text(whole)


@dataclasses.dataclass
class _Copy:
    """A copy of what the crates are built from, and the folder of its builds."""

    tree: pathlib.Path
    target: pathlib.Path

    def build(self, test: Test) -> pathlib.Path:
        """The binary that holds a test."""
        target = ["--test", test.file] if test.file else ["--lib"]
        command = ["cargo", "test", "-p", test.package, *target, "--locked", "--no-run", "--message-format=json"]
        environment = {**os.environ, "CARGO_TARGET_DIR": str(self.target)}
        done = subprocess.run(
            command,
            cwd=self.tree,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode:
            errors = [one["message"]["rendered"] for one in messages if one.get("message", {}).get("level") == "error"]
            raise Defective(f"it is not built: {' '.join((errors or [done.stderr])[0].split())[:400]}")
        binaries = [one["executable"] for one in messages if one.get("executable")]
        return pathlib.Path(binaries[-1])


def _copy(root: pathlib.Path) -> _Copy:
    """The copy, brought up to date. It stays, with what was built there, so that the next hunt need not begin anew."""
    home = root / "target" / "engine-faults"
    copy = _Copy(home / "tree", home / "build")
    listed = [
        "git",
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "Cargo.toml",
        "Cargo.lock",
        "crates",
    ]
    names = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    wanted = {name for name in names if name and (root / name).is_file()}
    for file in copy.tree.rglob("*"):
        if file.is_file() and str(file.relative_to(copy.tree)) not in wanted:
            file.unlink()
    for name in sorted(wanted):
        source, file = root / name, copy.tree / name
        # Only what differs, with a new time: cargo compares times, and not contents.
        if not file.exists() or file.read_bytes() != source.read_bytes():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(source.read_bytes())
    return copy


def _look(binary: pathlib.Path, first: int, count: int, minutes: float) -> Found:
    """Run programs until one complains."""
    environment = {
        **os.environ,
        "PENSTOCK_VIRTUAL_SEEDS": f"{first}..{first + count}",
        "PENSTOCK_VIRTUAL_MINUTES": str(minutes),
        "RUST_BACKTRACE": "0",
    }
    command = [str(binary), PROGRAMS.name, "--exact", "--nocapture"]
    with tempfile.TemporaryFile("w+") as errors:
        running = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, stdin=subprocess.DEVNULL
        )
        # The binary looks at the time between programs only, and a fault may keep one from its end.
        end = threading.Timer(60 * minutes + _PATIENCE_S, running.kill)
        end.start()
        try:
            assert running.stdout is not None
            found = read(running.stdout, first)
            if found is not None:
                running.kill()
            running.wait()
        finally:
            end.cancel()
            running.kill()
            running.wait()
            running.stdout.close()  # type: ignore[union-attr]
        errors.seek(0)
        said = errors.read().strip()
    if found is None:
        raise Defective(f"the tester ended ({running.returncode}) without a complaint: {said[-300:]}")
    if found.complaint is not None and found.complaint.startswith("panic:"):
        found.complaint = f"panic: {' '.join(said.split())[:160]}"
    return found


def _failure(binary: pathlib.Path, test: Test) -> str:
    """Run a test; what it fails with.

    Raises:
        Defective: it does not fail, or is not there.
    """
    command = [str(binary), test.name, "--exact", "--nocapture"]
    environment = {**os.environ, "RUST_BACKTRACE": "0"}
    with tempfile.TemporaryFile("w+") as output:
        running = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL
        )
        try:
            running.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise Defective(f"{test} has not ended after {_PATIENCE_S:.0f} s") from None
        finally:
            running.kill()
            running.wait()
        output.seek(0)
        return failure(output.read(), test)


def failure(said: str, test: Test) -> str:
    """What a test has panicked with, from what its binary prints.

    Raises:
        Defective: it has not failed, or is not there.
    """
    if "running 1 test" not in said:
        raise Defective(f"there is no test {test}")
    if "test result: FAILED" not in said:
        raise Defective(f"{test} does not fail")
    panic = re.search(r"^thread .* panicked at [^\n]*\n(.*?)^note: ", said, re.DOTALL | re.MULTILINE)
    return " ".join((panic[1] if panic else said).split())


def read(lines: Iterable[str], first: int) -> Found | None:
    """The first complaint in what the tester prints, or its summary. None if it has neither."""
    program = None
    for line in lines:
        if begins := re.match(r"seed (\d+): ", line):
            program = int(begins[1]) - first + 1
        elif program is not None and (complaint := re.match(r" {4}(\S.*)", line)):
            return Found(program, complaint[1])
        elif summary := re.match(r"(\d+) programs with \d+ calls, 0 failed", line):
            return Found(int(summary[1]), None)
    return None


# The programs.
PROGRAMS = Test("penstock-engine", "virtual_time::programs")
# How long a test may take, or a program when the time is over.
_PATIENCE_S = 60.0
