"""``python -m penstock.tools.run.torchrun``: torchrun, which ends without a traceback of its own when it is told to end."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    try:
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.run import main as torchrun

        try:
            torchrun()
        except SignalException as told:
            sys.exit(128 + told.sigval)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
