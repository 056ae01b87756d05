"""Train a character GPT on Tiny Shakespeare: on one process, or on many under DistributedDataParallel.

    python examples/char_gpt/train.py
    torchrun --nproc-per-node 2 examples/char_gpt/train.py --backend gloo
    torchrun --nproc-per-node 2 examples/char_gpt/train.py --backend penstock
    torchrun --nproc-per-node 2 examples/char_gpt/train.py --backend penstock --hook --tune

The backend is one word, and nothing but ``--hook`` here knows about it. The same seed gives the same batches and the same
start, so that two backends can be compared step by step; `penstock demo` does that with this script.
"""

import argparse
import copy
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from data import CharData, random_batch  # type: ignore[import-not-found]  # a script's neighbours
from model import CharGPT, GPTConfig  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    args = parse_arguments()
    # Ctrl-C ends a rank at once. Python's own handler would have to wait until a collective returns.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(args.threads)
    if "RANK" in os.environ:  # torchrun, or whoever else starts the ranks, sets RANK, WORLD_SIZE and MASTER_ADDR.
        dist.init_process_group(args.backend)
    train(args)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(args: argparse.Namespace) -> None:
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    data = CharData.load()
    config = GPTConfig(len(data.characters), args.context, args.layers, args.heads, args.width)

    # All ranks start from the same weights and draw different batches.
    torch.manual_seed(args.seed)
    model = CharGPT(config)
    batches = torch.Generator().manual_seed(args.seed * world_size + rank)
    parameters = sum(parameter.numel() for parameter in model.parameters())

    # A copy whose steps are timed; what it learns is of no use to anybody.
    twin = measured_alone(copy.deepcopy(model)) if args.compute_every and world_size > 1 else None
    replica = DistributedDataParallel(model) if world_size > 1 else model
    reducer = None
    if args.hook and world_size > 1:
        from penstock.torch import ddp_hook

        # Each gradient leaves as soon as all ranks have it, instead of with its bucket.
        reducer = ddp_hook(replica, tune=args.tune)
    optimizer, schedule = make_optimizer(replica, args)
    twin_optimizer = make_optimizer(twin, args)[0] if twin else None

    log = Log(args.log_file, rank)
    log.write(
        event="start",
        rank=rank,
        world_size=world_size,
        backend=args.backend if world_size > 1 else None,
        parameters=parameters,
        gradient_bytes=sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad),
        arguments=vars(args),
        torch=torch.__version__,
    )
    if rank == 0:
        print(f"{parameters:,} parameters, {world_size} ranks, {args.backend if world_size > 1 else 'no backend'}")

    tokens_per_step = world_size * args.batch * args.context
    began = time.perf_counter()
    for step in range(1, args.steps + 1):
        tokens_BT, targets_BT = random_batch(data.train, args.batch, args.context, batches)
        tuning = reducer is not None and reducer.tuner is not None and reducer.tuner.state.value == "tuning"
        loss, seconds = train_step(replica, optimizer, tokens_BT, targets_BT)
        schedule.step()
        compute = None
        if twin and step % args.compute_every == 0:
            dist.barrier()  # Both ranks compute at the same time, as they do in a real step.
            _, compute = train_step(twin, twin_optimizer, tokens_BT, targets_BT)
            if reducer:
                reducer.exclude_pause()  # The tuner must not take this for a slow step.
        log.write(
            event="step",
            step=step,
            loss=loss,
            tokens=tokens_per_step,
            step_seconds=sum(seconds.values()),
            **seconds,
            compute=compute,
            tuning=tuning,
            elapsed_seconds=time.perf_counter() - began,
        )
        if rank == 0 and (step % args.print_every == 0 or step == args.steps):
            rate = tokens_per_step / sum(seconds.values())
            print(f"step {step:5d}   loss {loss:.4f}   {1e3 * sum(seconds.values()):7.1f} ms   {rate:,.0f} tokens/s")

    validation_loss = evaluate(model, data.validation, args)
    log.write(
        event="end",
        validation_loss=validation_loss,
        weights_sha256=digest(model),
        **buckets(replica),
        **chosen(reducer),
    )
    if rank == 0:
        print(f"validation loss {validation_loss:.4f}")


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens_BT: Tensor, targets_BT: Tensor
) -> tuple[float, dict[str, float]]:
    """One forward pass, backward pass and update.

    Returns: this rank's loss before the update, and the seconds that each of the three took. Under DDP the all-reduce
    of gradients starts during the backward pass and is waited for at its end, so it counts as `backward_seconds`.
    """
    started = time.perf_counter()
    _, loss = model(tokens_BT, targets_BT)
    forward_done = time.perf_counter()
    loss.backward()
    backward_done = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad()
    updated = time.perf_counter()
    return loss.item(), {
        "forward_seconds": forward_done - started,
        "backward_seconds": backward_done - forward_done,
        "optimizer_seconds": updated - backward_done,
    }


def measured_alone(model: nn.Module) -> DistributedDataParallel:
    """A DDP replica that does everything that DDP does, buckets and copies included, but sends no gradient.

    A step of it takes the compute-only time: what a step would cost if the network were infinitely fast.
    """
    twin = DistributedDataParallel(model)

    def keep_local(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    twin.register_comm_hook(None, keep_local)
    return twin


def make_optimizer(
    model: nn.Module, args: argparse.Namespace
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW, whose learning rate rises over the first tenth of the steps and falls to a tenth along a cosine."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), fused=True)
    warmup = max(1, args.steps // 10)
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=max(1, args.steps - warmup), eta_min=args.learning_rate / 10
    )
    return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], milestones=[warmup])


@torch.no_grad()
def evaluate(model: nn.Module, data: Tensor, args: argparse.Namespace) -> float:
    """Mean loss over windows of the validation text; the same windows on every rank and for every backend."""
    generator = torch.Generator().manual_seed(args.seed)
    losses = [model(*random_batch(data, args.batch, args.context, generator))[1] for _ in range(args.eval_batches)]
    return torch.stack(losses).mean().item() if losses else float("nan")


def digest(model: nn.Module) -> str:
    """SHA-256 of all parameters' bytes: equal digests mean bit-identical weights."""
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return sha.hexdigest()


def buckets(replica: nn.Module) -> dict[str, list[int]]:
    """The sizes in bytes of the buckets that DDP all-reduces, in order, as DDP itself reports them."""
    if not isinstance(replica, DistributedDataParallel):
        return {"bucket_bytes": []}
    report = replica._get_ddp_logging_data()
    sizes = report.get("rebuilt_bucket_sizes") or report.get("bucket_sizes") or ""
    return {"bucket_bytes": [int(size) for size in str(sizes).split(",") if size.strip()]}


def chosen(reducer: Any) -> dict[str, Any]:
    """How the hook sends gradients in the end, if there is one; and what its tuner has measured, if there is one."""
    if not reducer:
        return {}
    setting = reducer.setting
    if reducer.tuner is None:
        return {"setting": setting.to_json()}
    medians, default = reducer.tuner.session.medians, reducer.tuner.space.default
    tuning = {
        "budget": reducer.tuner.options.budget,
        "default": default.to_json(),
        "default_s": medians.get(default),
        "chosen_s": medians.get(setting),
    }
    return {"setting": setting.to_json(), "tuning": tuning}


class Log:
    """One JSON object a line, flushed at once so that a reader can follow. See ``--log-file`` for ``path``."""

    def __init__(self, path: str | None, rank: int):
        self._file: TextIO | None = None
        if path == "-":
            self._file = sys.stdout
        elif path and (rank == 0 or "{rank}" in path):
            self._file = Path(path.replace("{rank}", str(rank))).open("w", encoding="utf-8")  # noqa: SIM115

    def write(self, **record: object) -> None:
        if self._file:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--backend", default="gloo", help="torch.distributed backend, used when torchrun starts several ranks")
    add("--hook", action="store_true", help="under DDP over penstock: penstock.torch.ddp_hook")
    add("--tune", action="store_true", help="with --hook: find out how gradients travel best, in the first 100 steps")
    add("--steps", type=int, default=200)
    add("--seed", type=int, default=1337)
    add("--batch", type=int, default=2, help="sequences a rank and step")
    add("--context", type=int, default=64, help="characters a sequence")
    add("--layers", type=int, default=6)
    add("--heads", type=int, default=6)
    add("--width", type=int, default=192)
    add("--learning-rate", type=float, default=1e-3)
    add("--eval-batches", type=int, default=50, help="batches of the validation text judged at the end")
    add("--threads", type=int, default=1, help="compute threads a rank; ranks x threads should not exceed the cores")
    add("--print-every", type=int, default=10)
    add("--log-file", help="write a JSON line a step, of rank 0, or of each if {rank} is in the name; -: to stdout")
    add("--compute-every", type=int, default=0, help="every so many steps, also time a step without communication")
    return parser.parse_args()


if __name__ == "__main__":
    main()
