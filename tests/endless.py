"""A script for the tests of faults: all-reduces until something goes wrong, and says what, as JSON on a line of its own.

Started as ``python endless.py ELEMENTS`` by torchrun or on a testbed's hosts. It prints "running on rank N" once results
have been right a few times.
"""

from __future__ import annotations

import itertools
import json
import sys
import time

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("penstock")
    tensor = torch.full((int(sys.argv[1]),), float(dist.get_rank()))
    for turn in itertools.count():
        try:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        except Exception as error:
            kinds = [cls.__name__ for cls in type(error).__mro__]
            _say(json.dumps({"kinds": kinds, "text": str(error), "at_s": time.monotonic()}))
            sys.exit(3)
        assert tensor[0] == tensor[-1] == dist.get_world_size() - 1
        if turn == 3:
            _say(f"running on rank {dist.get_rank()}")


def _say(line: str) -> None:
    # In one piece: print() writes the end of the line apart, and torchrun's ranks share a pipe.
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
