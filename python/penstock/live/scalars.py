"""The job's numbers as TensorBoard scalars (PENSTOCK_LIVE_TENSORBOARD)."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from penstock.live.view import Snapshot

__all__ = ["Scalars", "scalars", "write"]

log = logging.getLogger("penstock")


class Scalars:
    """Writes to a folder, under the number of the step.

    Raises:
        ImportError: torch or tensorboard is missing.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: str) -> None:
        self._writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter(folder, flush_secs=10)
        self._step = -1

    def write(self, job: Snapshot) -> None:
        """Once a step at most."""
        if job.steps == self._step:
            return
        self._step = job.steps
        for name, value in scalars(job).items():
            self._writer.add_scalar(f"penstock/{name}", value, job.steps)

    def close(self) -> None:
        self._writer.close()


def scalars(job: Snapshot) -> dict[str, float]:
    """By name, with units; what is not known is left out."""
    found = {f"{name}_per_s": rate for name, rate in job.rates.items() if rate or name == "steps"}
    if job.median_s is not None:
        found["step_ms"] = 1e3 * job.median_s
    if job.links:
        link = job.links[0]
        found |= {"sent_MB_per_s": link.sent / 1e6, "received_MB_per_s": link.received / 1e6}
        if link.is_telling:
            found["link_share"] = link.share
    known = [each.numbers for each in job.ranks if each.numbers is not None and each.rank in job.live]
    aggregated = [row for each in known for row in each["aggregated"]]
    if aggregated:
        # Each server's row has the rate of its group.
        groups = [{row[0]: row[3] for row in each["aggregated"]} for each in known]
        found["aggregated_MB_per_s"] = sum(sum(each.values()) for each in groups) / 1e6
        found["aggregated_blocks_again"] = sum(row[4] for row in aggregated)
        found["aggregators_bypassed"] = sum(row[5] for row in aggregated)
    if known:
        found["segments_retransmitted_per_s"] = max(each["retransmitted_per_s"] for each in known)
    if job.straggler is not None:
        found["straggler_rank"] = job.straggler.rank
    found["straggler_late_ms"] = 0.0 if job.straggler is None else 1e3 * job.straggler.late_s
    found["ranks_silent_or_lost"] = len({*job.silent, *job.lost})
    return found


def write(folder: str) -> Scalars | None:
    """Begin to write; None where that cannot be, and a warning says why."""
    try:
        return Scalars(folder)
    except ImportError as error:
        log.warning("PENSTOCK_LIVE_TENSORBOARD=%s: no scalars are written (%s): pip install tensorboard", folder, error)
    except OSError as error:
        log.warning("PENSTOCK_LIVE_TENSORBOARD=%s: no scalars are written there: %s", folder, error)
    return None
