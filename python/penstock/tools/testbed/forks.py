"""Starts the ranks of a run as forks of one process that has imported torch.

A rank that imports torch by itself spends seconds of processor time on it, a fork some milliseconds. `launch` starts
``python -m penstock.tools.testbed.forks REPORTS JOB``: REPORTS is a path to write lines ``rank code`` to, JOB is
``{"command": [python, ...], "ranks": [{"env": {...}, "output": path, "network": path or null}, ...]}`` as JSON. The ranks stay in
the process group that this process leads, so a signal to the group reaches all of them.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from penstock.tools.testbed import namespace


def main(reports: str, text: str) -> None:
    job = json.loads(text)
    # A collection in a rank would write to every object that exists now, and thereby copy their memory: 100 MB a rank.
    gc.disable()
    for name in MODULES:
        with contextlib.suppress(ImportError):  # a rank that needs it says so
            importlib.import_module(name)
    gc.freeze()
    gc.enable()
    del sys.path[0]  # `python -m` put the working folder there, and `execute` puts what it takes
    running = {}
    for rank, place in enumerate(job["ranks"]):
        process = os.fork()
        if process == 0:
            _become(job["command"], place)
        running[process] = rank
    # The ranks get them as well, and end as they see fit.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    report = os.open(reports, os.O_WRONLY)
    while running:
        process, status = os.wait()
        os.write(report, f"{running.pop(process)} {os.waitstatus_to_exitcode(status)}\n".encode())
    # The interpreter's own end would write to all of torch's objects, to throw them away.
    os._exit(0)


def _become(command: Sequence[str], place: dict[str, Any]) -> NoReturn:
    """In a fork: moves to the place of a rank and runs ``command``."""
    try:
        output = os.open(place["output"], os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        namespace.join(place["network"])
        os.environ.update(place["env"])
        execute(command[1:])
    finally:
        os._exit(1)


def execute(arguments: Sequence[str]) -> NoReturn:
    """Do in this fork what ``python ARGUMENTS`` would do, a script or ``-m`` and a module, and end as it would."""
    code = _run(list(arguments))
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does at its end: waits for threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _run(arguments: list[str]) -> int:
    """The exit code."""
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as told:
        if told.code is None or isinstance(told.code, int):
            return told.code or 0
        print(told.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in _OUR_FRAMES:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


_OUR_FRAMES = {__file__, runpy.__file__, "<frozen runpy>"}

MODULES = (
    "torch.distributed",
    "torch._dynamo",
    "penstock.torch.backend",
    "penstock.training.gradients",
)
"""What programs that train import sooner or later; torch's optimizers import `torch._dynamo` when they are first used."""

if __name__ == "__main__":
    main(*sys.argv[1:])
