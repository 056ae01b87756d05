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
    "pytest",
    "hypothesis",
    "ranks",
    "forked",
    "penstock.torch",
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
gc.collect()
gc.freeze()


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
