"""What the fork server of `ranks` imports before it makes the first rank, so that no rank has to.

A rank begins as a copy of this process, and memory is copied when it is written to: a garbage collection in a rank would
write to every object that torch's import has made (a quarter of a second of processor time). So they are frozen: no
collection looks at them.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import sys
from collections.abc import Mapping, Sequence

_MODULES = [
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.optim",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch._dynamo",
    "multiprocessing.popen_forkserver",
    "pytest",
    "hypothesis",
    "ranks",
    "forked",
    "penstock.torch",
    "penstock.torch.backend",
    "penstock.training.checks",
    "penstock.training.ddp",
    "penstock.training.gradients",
    "penstock.tune",
    "penstock.tools.flight",
    "penstock.tools.testbed",
]

# Where a program finds modules, behind its own folder and PYTHONPATH.
PATH = [each for each in sys.path[1:] if each not in os.environ["PYTHONPATH"].split(os.pathsep)]

for _name in _MODULES:
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
# The first folder was for this process alone, which found this module by it (`ranks.fork_server`).
_rest = os.environ.pop("PYTHONPATH").partition(os.pathsep)[2]
if _rest:
    os.environ["PYTHONPATH"] = _rest
del os.environ["FORK_SERVER_ROOM"]
gc.collect()
gc.freeze()


def show(arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    """In a fork that has cleared its environment: put these where /proc/PID/cmdline and environ show what a process was started
    with, the first ones as far as there is room. There a testbed's keeper looks for the mark of its own processes. (prctl(2) can
    move these places, with a right that root has not everywhere.)"""
    with open("/proc/self/stat") as stat:
        places = [int(each) for each in stat.read().rpartition(") ")[2].split()[45:49]]
    room = places[1] - places[0] - 1
    _write(*places[:2], b"".join(os.fsencode(each) + b"\0" for each in arguments)[:room])
    _write(*places[2:], b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in variables.items()))


def _write(begin: int, end: int, text: bytes) -> None:
    assert len(text) <= end - begin, f"{len(text)} bytes of environment: make `ranks._ROOM` larger"
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, text, len(text))


def _use_huge_pages() -> None:
    """Put what this process has written to into pages of 2 MiB, where the kernel can (Linux 6.1). A rank begins with a copy of
    the page tables, which has fewer entries then: it starts and ends with 19 ms of processor time instead of 33."""
    madvise = ctypes.CDLL(None).madvise
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, access, _, _, _, *name = line.split()
            begin, end = (int(each, 16) for each in span.split("-"))
            begin, end = -(-begin // _HUGE) * _HUGE, end // _HUGE * _HUGE
            if access == "rw-p" and begin < end and (not name or name == ["[heap]"]):
                for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
                    madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)


_HUGE = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_use_huge_pages()
# Its own end need not tidy up what it has imported, which takes a second. (Ranks clear what is registered here.)
atexit.register(os._exit, 0)
