"""The live view: what a running job does, at an address of rank 0 and with `penstock top` (docs/guide/live.md).

- ``count``: what a step has trained on, for samples and tokens a second.

`own` makes a rank's numbers, once a second. `running` puts them into the job's store, under the rank's key, and reads those of
all ranks on rank 0. There `view` makes the job's numbers of them and `shown` the texts of page and terminal; `server` answers
viewers, `metrics` writes them for Prometheus and `scalars` for TensorBoard; `found` is the file by which `penstock top` finds
the job. A rank imports no more than it does. Nothing here imports torch, and nothing runs without PENSTOCK_LIVE.
"""

from penstock.live.counts import count

__all__ = ["count"]
