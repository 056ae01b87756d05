"""Runs a training on emulated hosts behind aggregators, a rank a host: ``python -m ... RANKS MBIT/S NUMBER SECONDS COMMAND ...``.

NUMBER is what gradients travel as (``int32``, ``int16`` or ``float32``), or ``none``: then the ranks sum them as they do
elsewhere, on the same network. After SECONDS the training is ended, with status 124; 0: never.
"""

from __future__ import annotations

import os
import sys

from penstock.tools.bench.aggregated.cluster import Cluster

__all__: list[str] = []

_WINDOW = 256


def main() -> None:
    """Ends with the training's status, after what its ranks have printed."""
    ranks, rate_mbit, number, seconds, *command = sys.argv[1:]
    with Cluster(int(ranks), rate_mbit=float(rate_mbit)) as cluster:
        environment = {name: value for name, value in os.environ.items() if name.startswith(("PYTHON", "PENSTOCK_"))}
        if number != "none":
            environment["PENSTOCK_DEPLOYMENT"] = cluster.deployment(number, _WINDOW)
        hosts = [f"h{host}" for host in range(int(ranks))]
        try:
            done = cluster.bed.run(
                command, ranks=int(ranks), env=environment, on=hosts, timeout_s=float(seconds) or None
            )
        except TimeoutError as error:
            print(error, file=sys.stderr)
            sys.exit(124)
    for output in done.outputs:
        sys.stdout.write(output)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
