"""Runs a cell's ranks on emulated hosts whose gradients are summed on the way: ``python -m ... CELL STEPS SEED CHECKPOINT``."""

from __future__ import annotations

import json
import os
import sys

from penstock.tools.bench.aggregated.cluster import Cluster
from penstock.tools.characterize.matrix import Cell
from penstock.tools.characterize.running import command_of

__all__: list[str] = []


def main() -> None:
    cell, steps, seed = Cell(**json.loads(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    command = command_of(cell, steps, seed, checkpoint=sys.argv[4])
    with Cluster(cell.ranks, rate_mbit=cell.link_mbit) as cluster:
        environment = {name: value for name, value in os.environ.items() if name.startswith(("PYTHON", "PENSTOCK_"))}
        environment["PENSTOCK_DEPLOYMENT"] = cluster.deployment("int32", 256)
        done = cluster.bed.run(
            command[command.index("--") + 1 :],
            ranks=cell.ranks,
            env=environment,
            on=[f"h{host}" for host in range(cell.ranks)],
        )
    for output in done.outputs:
        sys.stdout.write(output)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
