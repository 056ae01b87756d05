"""Stands between torchrun and a rank: takes the rank's output and exit code where the testbed can see them.

torchrun mixes the output of a host's ranks, and says 1 whatever a rank's exit code was. Started as
``python -I -S rank.py REPORTS OUTPUT... -- COMMAND...``: one OUTPUT a rank, REPORTS for lines ``rank code``.
It takes 20 ms and imports nothing of Penstock.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def main(arguments: list[str]) -> None:
    divider = arguments.index("--")
    reports, *outputs = arguments[:divider]
    command = arguments[divider + 1 :]
    number = int(os.environ["RANK"])
    report = os.open(reports, os.O_WRONLY)
    output = os.open(outputs[number], os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    process = os.fork()
    if process == 0:
        # torchrun kills us, not the rank: when we go, however, so must it.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)
    for forwarded in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(forwarded, lambda which, _: os.kill(process, which))
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    os.write(report, f"{number} {code}\n".encode())
    os._exit(code if code >= 0 else 128 - code)


PR_SET_PDEATHSIG = 1  # linux/prctl.h

if __name__ == "__main__":
    main(sys.argv[1:])
