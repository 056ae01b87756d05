"""The functions that a converted script gets, each only if a rule uses it.

They are ordinary ``torch.distributed`` code, written into the script where its reader can see and change them: a
converted script imports nothing of ours. ``{RANK}``, ``{WORLD_SIZE}`` and ``{LOCAL_RANK}`` are the names that are
free in the script; each helper's own name is given the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

CONSTANTS = """
# Added by `penstock convert`. torchrun starts one process for each rank and says so here; without it there is one rank.
{RANK} = int(os.environ.get("RANK", "0"))
{WORLD_SIZE} = int(os.environ.get("WORLD_SIZE", "1"))
{LOCAL_RANK} = int(os.environ.get("LOCAL_RANK", "0"))
"""

# In the order in which they are written into a script: a helper stands after those that it calls.
HELPERS = {
    "join_ranks": '''

def {join_ranks}():
    """Take this rank's device, join the other ranks, and start from the same random numbers as they do."""
    if torch.cuda.is_available():
        torch.cuda.set_device({LOCAL_RANK} % torch.cuda.device_count())
    if {WORLD_SIZE} > 1:
        torch.distributed.init_process_group("penstock")
        seed = [torch.seed() % 2**32]
        torch.distributed.broadcast_object_list(seed)
        {seed_all}(seed[0])
    else:
        torch.distributed.init_process_group(
            "penstock", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
''',
    "seed_all": '''

def {seed_all}(seed):
    """Seed every generator that the script may draw from."""
    import random{import_numpy}

    random.seed(seed){seed_numpy}
    torch.manual_seed(seed)
''',
    "seed_apart": '''

def {seed_apart}():
    """From here on each rank draws random numbers of its own: dropout, noise and augmentation differ between ranks."""
    if {RANK} > 0:
        {seed_all}((torch.initial_seed() + {RANK}) % 2**32)
''',
    "shared_seed": '''

def {shared_seed}():
    """The seed of rank 0, for what must be drawn alike on all ranks. Every rank must call it."""
    seed = [torch.initial_seed() % 2**32]
    torch.distributed.broadcast_object_list(seed)
    return seed[0]
''',
    "per_rank_batch": '''

def {per_rank_batch}(batch_size):
    """This rank's part of a batch of `batch_size` samples, at least one; all ranks together take the same batch as before where
    it divides."""
    part = max(1, batch_size // {WORLD_SIZE})
    if part * {WORLD_SIZE} != batch_size and {RANK} == 0:
        print(f"{{batch_size}} samples a batch do not divide by {{{WORLD_SIZE}}} ranks: it has {{part * {WORLD_SIZE}}} now")
    return part
''',
    "sharded": '''

def {sharded}(dataset, options):
    """The `options` of a DataLoader, changed so that this rank reads its share of `dataset`."""
    if options.get("sampler") is not None or options.get("batch_sampler") is not None:
        raise ValueError("the loader has a sampler of its own: give it one that knows about ranks")
    shuffle = options.get("shuffle") or False
    sampler = DistributedSampler(dataset, shuffle=shuffle, seed={shared_seed}())
    kept = {{name: value for name, value in options.items() if name != "shuffle"}}
    return {{**kept, "sampler": sampler{sharded_batch}}}
''',
    "next_epoch": '''

def {next_epoch}(loader):
    """Let `loader` draw another order in the epoch that starts, the same on all ranks."""
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(loader.sampler.epoch + 1)
''',
    "unwrap": '''

def {unwrap}(model):
    """The module inside `model`, where that is wrapped: for its attributes, its methods and its state."""
    return model.module if isinstance(model, DistributedDataParallel) else model
''',
    "sum_over_ranks": '''

def {sum_over_ranks}(value):
    """The sum of `value`, a number or a tensor of one element, over all ranks. Every rank must call it."""
    number = value.item() if isinstance(value, torch.Tensor) else value
    total = torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else torch.int64)
    torch.distributed.all_reduce(total)
    return total.item()
''',
    "mean_over_ranks": '''

def {mean_over_ranks}(value):
    """The mean of `value`, a number or a tensor of one element, over all ranks. Every rank must call it."""
    return {sum_over_ranks}(value) / {WORLD_SIZE}
''',
    "rank_zero_decides": '''

def {rank_zero_decides}(condition):
    """Whether `condition` holds on rank 0, so that all ranks go the same way. Every rank must call it."""
    decision = [bool(condition)]
    torch.distributed.broadcast_object_list(decision)
    return decision[0]
''',
    "rank_zero_print": '''

def {rank_zero_print}(*arguments, **options):
    """`print`, on rank 0 alone; the arguments are computed on every rank."""
    if {RANK} == 0:
        print(*arguments, **options)
''',
    "one_rank_first": '''

@contextlib.contextmanager
def {one_rank_first}():
    """Let one rank of each host do it first, such as a download, and the others find it done."""
    if {LOCAL_RANK} > 0:
        torch.distributed.barrier()
    yield
    if {LOCAL_RANK} == 0:
        torch.distributed.barrier()
''',
    "Silent": '''

class {Silent}:
    """Stands for a writer of logs on ranks other than 0: takes every call and does nothing."""

    def __getattr__(self, name):
        return lambda *arguments, **options: None

    def __enter__(self):
        return self

    def __exit__(self, *reason):
        return None
''',
}

NEEDS = {
    "join_ranks": ["seed_all"],
    "seed_apart": ["seed_all"],
    "sharded": ["shared_seed", "per_rank_batch"],
    "mean_over_ranks": ["sum_over_ranks"],
}

# What a helper needs imported, besides os and torch, which every converted script gets.
IMPORTS = {
    "one_rank_first": "import contextlib",
    "sharded": "from torch.utils.data.distributed import DistributedSampler",
    "next_epoch": "from torch.utils.data.distributed import DistributedSampler",
    "unwrap": "from torch.nn.parallel import DistributedDataParallel",
}


def close(used: Iterable[str]) -> list[str]:
    """`used` and what they call, in the order in which they are written."""
    todo, found = list(used), set()
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += NEEDS.get(name, [])
    order = ["seed_all", *(name for name in HELPERS if name != "seed_all")]
    return [name for name in order if name in found]


def write(name: str, names: dict[str, str]) -> str:
    """The text of helper `name`, or of the constants, with the names that the script leaves free."""
    text = CONSTANTS if name == "constants" else HELPERS[name]
    return text.format(**names)


def every_name() -> list[str]:
    """All names that a conversion may bring into a script."""
    return [*HELPERS, *re.findall(r"^\{(\w+)\} =", CONSTANTS, re.MULTILINE)]
