"""Penstock: a communication backend for ``torch.distributed`` that fills the network.

``torch.distributed.init_process_group("penstock")`` is all that a training script changes. This module only makes
that word known and names what users call; it imports neither torch nor the native engine by itself, so that
``penstock --help`` answers at once.

How the word becomes known, without a hook into Python's import system:

- ``import torch`` calls `_autoload` through the entry point group ``torch.backends``, with or without an
  ``import penstock`` anywhere.
- ``import penstock`` after ``import torch`` registers at once, if autoload has not.
- ``import penstock`` before ``import torch`` leaves it to torch's autoload when that is going to happen. When it is
  not (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``, or a source tree on PYTHONPATH that was never installed), it imports
  torch and registers now, because there is no later moment.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock._core import __version__ as __version__
    from penstock.cluster.deployment import init as init
    from penstock.runtime.urgency import priority as priority
    from penstock.tools.flight import flight_record as flight_record
    from penstock.torch import empty as empty
    from penstock.torch import stats as stats

__all__ = ["__version__", "empty", "flight_record", "init", "priority", "stats"]


def __getattr__(name: str) -> Any:
    """Import what is asked for, when it is asked for (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOME))


def _autoload() -> None:
    """Make the backend name "penstock" known to torch.distributed.

    torch calls this at the end of ``import torch``. Whatever is wrong with this installation, a script that never
    asked for Penstock must still run, so a failure becomes one line in the log and the name stays unknown.
    Registering twice is harmless.
    """
    global _registered
    if _registered:
        return
    _registered = True
    try:
        import torch.distributed

        if torch.distributed.is_available():
            importlib.import_module("penstock.torch").register()
    except Exception as error:
        import logging

        # A log line, not a warning: `python -W error` turns warnings into exceptions, which would break `import torch`.
        logging.getLogger("penstock").warning(
            'the torch.distributed backend "penstock" is not available: %s: %s '
            "(`import penstock.torch` shows where this comes from)",
            type(error).__name__,
            error,
        )


def _torch_will_autoload() -> bool:
    """Whether a later ``import torch`` is going to call `_autoload`."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return False
    # importlib.metadata would answer this, too, and take as long as all else here. Where it finds what this does not (in an
    # archive, say), torch is imported now.
    for folder in sys.path:
        try:
            [record] = [name for name in os.listdir(folder or ".") if _is_ours(name)]
            with open(os.path.join(folder, record, "entry_points.txt"), encoding="utf-8") as points:
                return "[torch.backends]" in points.read()
        except (OSError, ValueError):
            continue
    return False


def _is_ours(name: str) -> bool:
    """Whether a name is that of the folder in which installers keep this package's metadata."""
    return name.startswith("penstock-") and name.endswith(".dist-info")


# Where each public name lives.
_HOME = {
    "__version__": "penstock._core",
    "empty": "penstock.torch",
    "flight_record": "penstock.tools.flight",
    "init": "penstock.cluster.deployment",
    "priority": "penstock.runtime.urgency",
    "stats": "penstock.torch",
}

_registered = False

if "torch" in sys.modules or not _torch_will_autoload():
    _autoload()
