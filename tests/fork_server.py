"""What the fork server of `ranks` imports before it makes the first rank, so that no rank has to.

A rank begins as a copy of this process, and memory is copied when it is written to: a garbage collection in a rank would
write to every object that torch's import has made (a quarter of a second of processor time). So they are frozen: no
collection looks at them.
"""

import atexit
import contextlib
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
# Its own end need not tidy up what it has imported, which takes a second. (Ranks clear what is registered here.)
atexit.register(os._exit, 0)
