"""What ranks of the bench have done for them outside of their hosts: links that begin to lose packets, daemons that come back."""

from __future__ import annotations

import json
import os
from pathlib import Path

from penstock.bench.aggregated import Daemons
from penstock.testbed.cluster import Testbed


class Orders:
    """Does what ranks cannot do from within their hosts, and tells them in a file: which orders are done, and who runs where.

    A rank prints ``{"order": "loss", "share": 0.01}``, on every link, or ``{"order": "restart", "node": "a0"}``.
    """

    def __init__(self, bed: Testbed, daemons: Daemons, path: Path) -> None:
        self.path = path
        self._bed, self._daemons = bed, daemons
        self._done = 0
        self._publish()

    def on_line(self, rank: int, line: str) -> None:
        """For `run_program`."""
        if not line.startswith('{"order"'):
            return
        order = json.loads(line)
        if order["order"] == "loss":
            for link in self._bed.topology.links:
                self._bed.set_loss(link, order["share"])
        else:
            self._daemons.restart(order["node"])
        self._done += 1
        self._publish()

    def _publish(self) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps({"done": self._done, "pids": self._daemons.pids}))
        os.replace(fresh, self.path)
