"""Parts of `./dev test` that run beside others, each in a fork of ./dev.

Like ./dev, this needs the standard library only, and has no syntax newer than Python 3.6.
"""

import ctypes
import os
import shutil
import signal
import sys
import tempfile
import traceback

from test_results import Tally


class Beside:
    """Runs ``work(tally)`` in a fork while the body of the `with` statement runs. At its end it waits for the fork, prints what
    that has printed, and adds its tally to ``tally``.

    With ``gives_way`` the fork gets the processor time that the body leaves: its tests must not depend on time.
    """

    def __init__(self, tally, work, gives_way=False):
        self._tally, self._work, self._gives_way = tally, work, gives_way

    def __enter__(self):
        self._printed, self._counted = tempfile.TemporaryFile(), tempfile.TemporaryFile("w+")
        # Else both processes would print what waits here.
        sys.stdout.flush()
        sys.stderr.flush()
        self._process = os.fork()
        if self._process == 0:
            self._be_fork()
        return self

    def __exit__(self, kind, *_):
        has_ended = False
        try:
            if kind is None:
                os.waitpid(self._process, 0)
                has_ended = True
        finally:
            if not has_ended:
                self._interrupt()
            with self._printed, self._counted:
                for each in (self._printed, self._counted):
                    each.seek(0)
                shutil.copyfileobj(self._printed, sys.stdout.buffer)
                sys.stdout.flush()
                counted = self._counted.read()
        if counted:
            self._tally.add_all(Tally.from_json(counted))
        else:
            self._tally.add(0, ["dev: a part that ran beside others did not come to its end"])

    def _interrupt(self):
        """A Ctrl-C in the terminal does not reach the fork, which leads a session of its own, or soon will."""
        for kill in (os.killpg, os.kill):
            try:
                kill(self._process, signal.SIGINT)
                break
            except ProcessLookupError:
                pass
        os.waitpid(self._process, 0)

    def _be_fork(self):
        code = 1
        try:
            os.setsid()
            # Whatever ends ./dev, this ends with it.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if self._gives_way:
                _give_way()
            for stream in (1, 2):
                os.dup2(self._printed.fileno(), stream)
            sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, errors="replace", closefd=False)
            tally = Tally()
            self._work(tally)
            self._counted.write(tally.to_json())
            self._counted.flush()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _give_way():
    """This process, and those that it will start, run when no other wants the processor."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        os.nice(19)
    try:
        # The kernel may deal time to sessions first, each of which counts as much as another (sched(7), autogroup).
        with open("/proc/self/autogroup", "w") as group:
            group.write("19")
    except OSError:
        pass


_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
