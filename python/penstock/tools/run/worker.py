"""One rank of ``penstock run``: ``python -m penstock.tools.run.worker CONVERTED ORIGINAL [ARGUMENTS]``, started by torchrun.

The script finds itself as if it had been started as ``python ORIGINAL ARGUMENTS``: ``__name__``, ``__file__``,
``sys.argv``, ``sys.path``, and in tracebacks its own file and lines. Processes that it starts (workers of a DataLoader
under "spawn" or "forkserver") import the original, which has the same functions and classes and joins no ranks.
"""

from __future__ import annotations

import os
import signal
import sys
import types
from pathlib import Path

from penstock.tools.run.lines import compile_as


def main() -> None:
    converted, original, *arguments = sys.argv[1:]
    code = compile_as(Path(original).read_text(encoding="utf-8"), Path(converted).read_text(encoding="utf-8"), original)
    sys.argv = [original, *arguments]
    # `python -m` put the working folder first; a script has its own folder there.
    sys.path[0] = os.path.dirname(os.path.abspath(original))
    module = types.ModuleType("__main__")
    module.__file__ = original
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    interrupted = False

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.default_int_handler(number, frame)

    def is_interrupted() -> bool:
        # Python handles a signal that came within torch's C++ code at the next call of a function: this one.
        return interrupted

    signal.signal(signal.SIGINT, interrupt)
    try:
        try:
            exec(code, module.__dict__)
        except Exception:
            # A KeyboardInterrupt that passes through torch's C++ code arrives as a RuntimeError. So does the loss of a rank that
            # was interrupted, too.
            if not is_interrupted():
                raise
            sys.exit(128 + signal.SIGINT)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
