"""What `penstock profile` puts before a script: Python imports the first module of this name when it starts.

It waits for torch to be imported, and then starts the recorder. Processes without torch notice nothing. The module of this name
that would have been imported otherwise is, too.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


_GIVEN = {name: value for name, value in os.environ.items() if name.startswith("PENSTOCK_PROFILE")}
"""A script may clear its environment before it imports torch."""


def _mark(name: str, text: str = "") -> None:
    """A file from which the command learns how far a script has come."""
    try:
        with open(os.path.join(_GIVEN["PENSTOCK_PROFILE_MARKS"], name), "w", encoding="utf-8") as file:
            file.write(text)
    except (KeyError, OSError):
        pass


def _start() -> None:
    _mark("torch")
    try:
        from penstock.tools.profile.recorder import install

        install.install(_GIVEN)
    except Exception as error:  # whatever is wrong here, the script must run
        _mark(f"problem-{os.getpid()}", f"{type(error).__name__}: {error}")


class _Torch:
    """Finds torch as if this was not here, and calls `_start` when it has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = getattr(spec and spec.loader, "exec_module", None)
        if execute is not None:

            def execute_and_start(module: ModuleType) -> None:
                execute(module)
                _start()

            spec.loader.exec_module = execute_and_start
        return spec


def _chain() -> None:
    """Import the module that this one hides, in its place."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _is_of_rank() -> bool:
    """Whether a rank has started this process: it leaves its number when it trains. After an `exec` it is the rank itself."""
    rank = _GIVEN.get("PENSTOCK_PROFILED", "")
    return rank.isdigit() and int(rank) != os.getpid()


if "PENSTOCK_PROFILE" in _GIVEN and not _is_of_rank():
    _mark("python")
    if "torch" in sys.modules:
        _start()
    else:
        sys.meta_path.insert(0, _Torch())
# The script finds modules where it would without us; its children have PYTHONPATH.
sys.path[:] = [each for each in sys.path if os.path.abspath(each or ".") != _HERE]
_chain()
