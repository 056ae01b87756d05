"""HiGHS, through scipy, within a time that it really keeps."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from typing import Any

__all__ = ["linear"]


def linear(program: dict[str, Any], size: int, seconds: float | None) -> Any:
    """scipy's result of a linear program, given as the arguments of `scipy.optimize.linprog`; None if the time ended first.

    HiGHS looks at its limit neither while it reduces a program nor while it cleans up behind the interior-point method. Where
    that takes long, with ``size`` columns, a process of its own solves the program, and is killed when the time is over. Should
    this process be gone by then, it ends by itself.
    """
    if seconds is None or size <= _LARGE:
        from scipy.optimize import linprog

        options = {} if seconds is None else {"time_limit": max(seconds, 1e-3)}
        found = linprog(**program, options=options)
        return None if found.status == _OUT_OF_TIME else found
    if seconds <= 0:
        return None
    until = time.monotonic() + seconds
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(seconds + 1)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        try:
            answer, said = process.communicate(pickle.dumps(program), max(until - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"the solver's process failed: {said.decode(errors='replace').strip()[-300:]}")
    return pickle.loads(answer)


_PROGRAM = """
import pickle, signal, sys
signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]))
from scipy.optimize import linprog
sys.stdout.buffer.write(pickle.dumps(linprog(**pickle.load(sys.stdin.buffer))))
"""
# scipy's number.
_OUT_OF_TIME = 1
# Columns of a program that takes a second or two; a fat-tree of 54 hosts has 7,600. 93,000 took 10 s where 0.5 were allowed.
_LARGE = 20_000
