"""Horovod's API on Penstock: ``import penstock.horovod.torch as hvd`` in place of ``import horovod.torch as hvd``.

Names, defaults, signatures, exceptions and messages are those that Horovod 0.28.1 documents; docs/reference/horovod.md has the
table and the differences.

- ``torch``: what scripts import.
- ``common``: what Horovod keeps under ``horovod.common``: exceptions, process sets, elastic state.
- ``launch``, ``job``: the launcher of this process, and its life from ``init()`` to ``shutdown()``.
- ``negotiation``: which operations all ranks have, decided alike on all of them and without a master; no I/O.
- ``controller``: the thread that runs the rounds of one process set and starts what they agree on.
- ``operations``, ``adasum``: how agreed operations are executed.
- ``buckets``: gradients through the engine's reducer, where nothing needs a name.
- ``runner``: ``horovod.run``, a function on several ranks of this host.
"""

from penstock.fronts.horovod.runner import run

__all__ = ["run"]
