"""Train one of the models: ``torchrun --nproc-per-node 2 -m penstock.workloads.transformer gpt2-tiny --backend penstock``.

Prints one JSON object at the end, on rank 0: milliseconds a step, tokens a second, the losses.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from penstock.profiling.schedules import Order, gpipe, interleaved, one_forward_one_backward
from penstock.workloads.transformer.model import Stage, parameters_of
from penstock.workloads.transformer.pipeline import Pipeline
from penstock.workloads.transformer.shapes import MODELS, Shape

OUT_OF_MEMORY = 3
"""Exit status of a rank that had not enough memory under ``--memory``."""


EVALUATED = 32
"""Micro-batches of an evaluation. Megatron-LM takes 100 by default; these take two steps of a small model or more."""

NO_MEMORY = ("allocate memory", "bad_alloc", "Resource temporarily unavailable", "can't start new thread")
"""Of errors: of torch's allocator, of C++, and of threads whose stacks find no room."""


SCHEDULES: dict[str, tuple[Order, int]] = {
    "gpipe": (gpipe, 1),
    "1f1b": (one_forward_one_backward, 1),
    "interleaved": (interleaved(2), 2),
}
"""Of a pipeline, with how many stages a rank has."""


class _Trained(NamedTuple):
    model: torch.nn.Module
    step: Callable[[list[Tensor], list[Tensor]], float]


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    if args.memory:
        # Of the heap and anonymous mappings, so that code and shared libraries do not count.
        resource.setrlimit(resource.RLIMIT_DATA, (args.memory, args.memory))
    try:
        _train(args)
    except (MemoryError, RuntimeError) as error:
        if args.memory and (isinstance(error, MemoryError) or any(sign in str(error) for sign in NO_MEMORY)):
            print(json.dumps({"out_of_memory": True, "limit": args.memory}), flush=True)
            os._exit(OUT_OF_MEMORY)  # other ranks wait in collectives, and torchrun ends them
        raise


def _train(args: argparse.Namespace) -> None:
    shape = MODELS[args.model]
    device = _device(args.device)
    if "RANK" in os.environ:
        dist.init_process_group(args.backend)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(args.seed)
    sequence = min(args.sequence or shape.context, shape.context)
    replicas = 1 if args.parallel == "pipeline" else world
    micro = args.micro_batch or args.batch // replicas
    if micro < 1 or args.batch % (micro * replicas):
        sys.exit(f"a batch of {args.batch} is no multiple of {micro} sequences on each of {replicas} replicas")
    count = args.batch // micro // replicas
    stages = 1
    if args.parallel == "pipeline":
        order, stages = SCHEDULES[args.schedule or "1f1b"]
        if stages > 1 and count % world:
            sys.exit(f"an interleaved schedule of {world} ranks takes a multiple of {world} micro-batches, not {count}")
        trained = _pipeline(shape, (micro, sequence, shape.width), order, stages, device)
    elif args.schedule:
        sys.exit("--schedule is a pipeline's: add --parallel pipeline")
    else:
        trained = _data_parallel(shape, device)
    optimizer = torch.optim.AdamW(trained.model.parameters(), lr=1e-3)
    batches = _batches(shape, args.seed * 1009 + (0 if args.parallel == "pipeline" else rank), micro, sequence, count)
    seconds, losses = [], []
    for number in range(args.steps):
        began = time.perf_counter()
        tokens, targets = ([each.to(device) for each in given] for given in next(batches))
        losses.append(trained.step(tokens, targets))
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        if args.evaluate_every and (number + 1) % args.evaluate_every == 0 and args.parallel == "data":
            trained.model.eval()
            with torch.no_grad():
                for _ in range(EVALUATED):
                    trained.model([tokens[0]], targets[0])
            trained.model.train()
        if args.checkpoint_every and (number + 1) % args.checkpoint_every == 0 and args.checkpoint:
            torch.save(trained.model.state_dict(), f"{args.checkpoint}-{rank}.pt")
    if dist.is_initialized():
        dist.barrier()
    # The last stage of a pipeline knows the loss.
    if rank == (world - 1 if args.parallel == "pipeline" else 0):
        settled = seconds[min(2, len(seconds) - 1) :]
        step_s = statistics.median(settled)
        stages *= world if args.parallel == "pipeline" else 1
        told = {
            "model": args.model,
            "ranks": world,
            "parallel": args.parallel,
            "batch": args.batch,
            "micro_batches": count,
        }
        told |= {"step_ms": 1e3 * step_s, "tokens_s": args.batch * sequence / step_s, "losses": losses}
        print(json.dumps({**told, "parameters": list(parameters_of(shape, stages))}), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device(kind)
    number, there = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if number >= there:
        sys.exit(f"--device cuda: LOCAL_RANK is {number}, and torch finds {there or 'no'} GPUs on this host")
    torch.cuda.set_device(number)
    return torch.device(kind, number)


def _data_parallel(shape: Shape, device: torch.device) -> _Trained:
    model: torch.nn.Module = Stage(shape).to(device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def step(tokens: list[Tensor], targets: list[Tensor]) -> float:
        total = 0.0
        for at, (given, wanted) in enumerate(zip(tokens, targets, strict=True)):
            is_last = at + 1 == len(tokens)
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = is_last
            loss = model([given], wanted) / len(tokens)
            loss.backward()
            total += loss.item()
        return total

    return _Trained(model, step)


def _pipeline(shape: Shape, states: tuple[int, int, int], order: Order, stages: int, device: torch.device) -> _Trained:
    if not dist.is_initialized() or dist.get_world_size() < 2:
        sys.exit("a pipeline needs two ranks or more: torchrun --nproc-per-node 2 ...")
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        own = [Stage(shape, at * world + rank, stages * world).to(device) for at in range(stages)]
    except ValueError as error:
        sys.exit(str(error))
    pipeline = Pipeline(shape, own, states, order)
    return _Trained(pipeline.model, pipeline.step)


def _batches(
    shape: Shape, seed: int, micro: int, sequence: int, count: int
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Random tokens, as micro-batches of (B, T)."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        drawn = torch.randint(shape.vocabulary, (count, micro, sequence + 1), generator=generator)
        yield list(drawn[:, :, :-1].unbind()), list(drawn[:, :, 1:].unbind())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--parallel", choices=("data", "pipeline"), default="data", help="all ranks")
    told = "of a pipeline; default: 1f1b; interleaved: with two stages a rank"
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), help=told)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step, of all ranks together")
    parser.add_argument("--micro-batch", type=int, default=0, help="sequences at a time; 0: a replica's all at once")
    parser.add_argument("--sequence", type=int, default=0, help="tokens of a sequence; 0: all that the model sees")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--backend", default="penstock")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the GPU of LOCAL_RANK")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of torch, a rank")
    parser.add_argument("--evaluate-every", type=int, default=0, help="steps")
    parser.add_argument("--checkpoint-every", type=int, default=0, help="steps")
    parser.add_argument("--checkpoint", help="file name, to which rank and .pt are added")
    parser.add_argument("--memory", type=int, default=0, help="bytes of memory a rank may have; 0: no limit")
    return parser.parse_args()


if __name__ == "__main__":
    main()
