"""The functions that a converted script gets, each only if a rule uses it.

They are ordinary ``torch.distributed`` code, written into the script where its reader can see and change them: a
converted script imports nothing of ours. What stands in braces is a name: the same one, or another where the script has that.
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
    register_optimizer_step_post_hook({compare_ranks})
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
    import random

    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)
''',
    "seed_apart": '''

def {seed_apart}():
    """From here on each rank draws random numbers of its own: dropout, noise and augmentation differ between ranks."""
    if {RANK} > 0:
        {seed_all}((torch.initial_seed() + {RANK}) % 2**32)
''',
    "averaged": '''

{averaged_optimizers} = weakref.WeakKeyDictionary()  # in the order in which they were made, the same on all ranks


@torch.no_grad()
def {averaged}(optimizer):
    """`optimizer`, or a list of them: its parameters become those of rank 0, and `{average_gradients}` serves it from now on."""
    for each in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
        for group in each.param_groups:
            for parameter in group["params"]:
                value = parameter.detach().clone(memory_format=torch.contiguous_format)
                torch.distributed.broadcast(value, 0)
                parameter.copy_(value)
        {averaged_optimizers}[each] = True
    return optimizer
''',
    "average_gradients": '''

@torch.no_grad()
def {average_gradients}():
    """After a backward pass: the gradients of all parameters that `{averaged}` has seen become their means over ranks."""
    groups = [group for optimizer in {averaged_optimizers} for group in optimizer.param_groups]
    parameters = list({{id(each): each for group in groups for each in group["params"] if each.requires_grad}}.values())
    # A rank that has no gradient for a parameter, for which another has one, takes part with zeros.
    exists = torch.tensor([each.grad is not None for each in parameters], dtype=torch.int32)
    torch.distributed.all_reduce(exists, torch.distributed.ReduceOp.MAX)
    kinds = {{}}
    for parameter, anywhere in zip(parameters, exists.tolist()):
        if anywhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            kinds.setdefault((parameter.grad.dtype, parameter.grad.device), []).append(parameter)
    for together in kinds.values():
        dense = [each.grad.to_dense() if each.grad.is_sparse else each.grad for each in together]
        flat = torch.cat([each.reshape(-1) for each in dense])
        torch.distributed.all_reduce(flat)
        flat /= {WORLD_SIZE}
        for parameter, gradient, mean in zip(together, dense, flat.split([each.numel() for each in dense])):
            if parameter.grad.is_sparse:
                parameter.grad = mean.view_as(gradient).to_sparse(1)
            else:
                parameter.grad.copy_(mean.view_as(gradient))
''',
    "compare_ranks": '''

{steps_taken} = weakref.WeakKeyDictionary()


@torch.no_grad()
def {compare_ranks}(optimizer, *_):
    """After the 1st, 2nd, 4th, 8th ... step of an optimizer: every gradient and parameter must be the same on all ranks."""
    steps = {steps_taken}[optimizer] = {steps_taken}.get(optimizer, 0) + 1
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    if {WORLD_SIZE} == 1 or steps & (steps - 1) or not parameters:
        return
    rows = []
    for value in (value for each in parameters for value in (each.grad, each)):
        value = torch.zeros(1) if value is None else value.to_dense() if value.is_sparse else value
        value = torch.view_as_real(value) if value.is_complex() else value
        rows.append(torch.stack([value.double().sum(), value.double().norm()]).cpu())
    lowest = torch.nan_to_num(torch.stack(rows))
    highest = lowest.clone()
    torch.distributed.all_reduce(lowest, torch.distributed.ReduceOp.MIN)
    torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX)
    for index in ((highest - lowest) > 1e-4 * highest[:, 1:]).any(1).nonzero().flatten().tolist()[:1]:
        parameter, names = parameters[index // 2], []
        for module in gc.get_objects():
            if issubclass(type(module), torch.nn.Module):
                names += [f"{{type(module).__name__}}.{{name}}" for name, each in module.named_parameters() if each is parameter]
        name = min(names, key=lambda each: (each.startswith("Distributed"), -len(each)), default="without a module")
        low, high = lowest[index, 1].item(), highest[index, 1].item()
        raise RuntimeError(
            f"parameter {{name}} of shape {{tuple(parameter.shape)}} is not trained alike on all ranks: after step {{steps}} of "
            f"{{type(optimizer).__name__}} its {{'value' if index % 2 else 'gradient'}} differs between them "
            f"(norms from {{low:.6g}} to {{high:.6g}}). The ranks would train different models from here on. Let its loss pass "
            f"through a model in DistributedDataParallel, or average its gradient over ranks after each backward pass."
        )
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
    "rank_zero_write": '''

def {rank_zero_write}(text):
    """`sys.stdout.write`, on rank 0 alone; the text is computed on every rank."""
    return sys.stdout.write(text) if {RANK} == 0 else len(text)
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
    "join_ranks": ["seed_all", "compare_ranks"],
    "averaged": ["average_gradients"],
    "seed_apart": ["seed_all"],
    "sharded": ["shared_seed", "per_rank_batch"],
    "mean_over_ranks": ["sum_over_ranks"],
}

# What a helper needs imported, besides os and torch, which every converted script gets.
IMPORTS = {
    "join_ranks": ["from torch.optim.optimizer import register_optimizer_step_post_hook"],
    "seed_all": ["import sys"],
    "rank_zero_write": ["import sys"],
    "compare_ranks": ["import gc", "import weakref"],
    "averaged": ["import weakref"],
    "one_rank_first": ["import contextlib"],
    "sharded": ["from torch.utils.data.distributed import DistributedSampler"],
    "next_epoch": ["from torch.utils.data.distributed import DistributedSampler"],
    "unwrap": ["from torch.nn.parallel import DistributedDataParallel"],
}


def close(used: Iterable[str]) -> list[str]:
    """`used` and what they call, in the order in which they are written."""
    todo, found = list(used), set()
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += NEEDS.get(name, [])
    first = [name for name in ("seed_all", "compare_ranks") if name in found]
    return [*first, *(name for name in HELPERS if name in found and name not in first)]


def write(name: str, names: dict[str, str]) -> str:
    """The text of helper `name`, or of the constants, with the names that the script leaves free."""
    text = CONSTANTS if name == "constants" else HELPERS[name]
    return text.format(**names)


def every_name() -> list[str]:
    """All names that a conversion may bring into a script."""
    texts = "".join([CONSTANTS, *HELPERS.values()])
    return [*HELPERS, *re.findall(r"^\{(\w+)\} =", texts, re.MULTILINE)]
