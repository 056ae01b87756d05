"""What `penstock bench recording` starts: it chooses a job, and becomes a rank of that (`recording_rank.py`), with the recorder
or without. It has not loaded torch, which takes seconds.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from penstock.tools.bench.recording import JOBS
from penstock.tools.profile.run import environment


def main() -> None:
    options = json.loads(sys.argv[1])
    rank = int(os.environ["RANK"])
    options["job"], options["rank"] = options["jobs"][rank // options["ranks"]], rank % options["ranks"]
    is_recorded = options["job"] == JOBS[1] and not options["control"]
    env = environment(Path(options["folder"], "profile")) if is_recorded else dict(os.environ)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        env.pop(name, None)
    command = [sys.executable, "-m", "penstock.tools.bench.recording_rank", json.dumps(options)]
    os.execve(sys.executable, command, env)


if __name__ == "__main__":
    main()
