"""The unauthenticated peer of `penstock bench aggregated --ways int32,storm`: sends an aggregator packets without the job's key.

``python -m penstock.tools.bench.aggregated.unauthenticated ADDRESS MBIT FLAG`` sends while the file FLAG exists: whole blocks,
MBIT of them in a second, each of which the aggregator must look at up to its MAC. Everybody may ask a daemon over HTTP which
jobs it has. Standard output takes a JSON object a storm: packets ``sent`` and, as the aggregator counts them, ``refused``;
``seconds``.
"""

from __future__ import annotations

import itertools
import json
import socket
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from penstock import _core
from penstock.cluster.deployment import MOST_BLOCK_BYTES as PAYLOAD_BYTES


def main() -> None:
    address, mbit, flag = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
    host, port = address.rsplit(":", 1)
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sender.connect((host, int(port)))
    payload = bytes(PAYLOAD_BYTES)
    gap = len(payload) * 8e-6 / mbit
    while True:
        while not flag.exists():
            time.sleep(0.002)
        job = _jobs(address)[-1]
        before, started = job["refused"]["key"], time.perf_counter()
        due = started
        for sent in itertools.count():
            # 16 at a time: a look at the clock and the file for each would take longer than sending.
            if sent % 16 == 0:
                if not flag.exists():
                    break
                time.sleep(max(0.0, due - time.perf_counter()))
            sender.send(_push(job["job"], job["epoch"], sent) + payload)
            due += gap
        seconds = time.perf_counter() - started
        # What is under way arrives meanwhile. After the last storm jobs are closed, and nothing is told of it.
        until = time.monotonic() + 1
        while (refused := _refused(address, job["job"])) is not None:
            if refused - before >= sent or time.monotonic() > until:
                print(json.dumps({"sent": sent, "refused": refused - before, "seconds": seconds}), flush=True)
                break
            time.sleep(0.01)


def _jobs(address: str) -> list[dict[str, Any]]:
    """The aggregator's."""
    with urllib.request.urlopen(f"http://{address}/jobs") as answer:
        jobs: list[dict[str, Any]] = json.loads(answer.read())["jobs"]
    return jobs


def _refused(address: str, number: int) -> int | None:
    """Packets of a job that were refused for their key; None where it is closed."""
    return next((job["refused"]["key"] for job in _jobs(address) if job["job"] == number), None)


def _push(job: int, epoch: int, seq: int) -> bytes:
    """The header of a push of int32 elements for worker 0, as docs/reference/packets.md draws it, with digest and MAC 0."""
    fields = (
        (0x5041, 2),
        (_core.AGGREGATION_VERSION, 1),
        (1, 1),
        (job, 4),
        (epoch, 2),
        (1, 1),
        (0, 1),
        (seq & 0xFFFF_FFFF, 4),
        (0, 4),
        (0, 4),
    )
    return b"".join(
        value.to_bytes(size, "big") for value, size in (*fields, (0, 2), (PAYLOAD_BYTES, 2), (0, 4), (1, 8), (0, 8))
    )


if __name__ == "__main__":
    main()
