"""``python -m penstock.tools.run.torchrun``: torchrun, which ends with `penstock run`, and without a traceback of its own when
it is told to end."""

from __future__ import annotations

import ctypes
import signal
import sys


def main() -> None:
    # Where `penstock run` is killed, or ended by a signal that it does not hand on, torchrun ends its ranks as after a SIGTERM.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.run import main as torchrun

        try:
            torchrun()
        except SignalException as told:
            sys.exit(128 + told.sigval)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


PR_SET_PDEATHSIG = 1  # linux/prctl.h

if __name__ == "__main__":
    main()
