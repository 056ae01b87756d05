"""Compare optimizers and schedules on the character GPT: SGD, AdamW and Penstock's hybrid; step decay and linear decay.

    python examples/optimizers.py                                    # docs/design/optim.md's table: 24 runs, a quarter of an hour
    python examples/optimizers.py --steps 20 --seeds 1 --windows 10  # does it run?

Every method first chooses its learning rate from three, on a seed of its own; then it trains once a seed with the chosen
one. All methods see the same start and the same batches at a seed. No communication takes part.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR, SequentialLR

from penstock.optim import AdamSGD, LinearDecay

sys.path.insert(0, str(Path(__file__).with_name("char_gpt")))
from data import CharData, random_batch  # type: ignore[import-not-found]
from model import CharGPT, GPTConfig  # type: ignore[import-not-found]

CONTEXT, BATCH = 64, 8
TUNING_SEED = 0


def linear(optimizer: Optimizer, steps: int) -> LRScheduler:
    """A twentieth of the run to warm up, then a line to 0."""
    return LinearDecay(optimizer, steps, warmup_steps=steps // 20)


def step_decay(optimizer: Optimizer, steps: int) -> LRScheduler:
    """The same warm-up, then a tenth at half and again at three quarters of the run (He et al. 2016, in proportion)."""
    warmup = max(1, steps // 20)
    rise = LinearDecay(optimizer, steps, warmup_steps=warmup, end_factor=1.0)
    fall = MultiStepLR(optimizer, [steps // 2 - warmup, 3 * steps // 4 - warmup], gamma=0.1)
    return SequentialLR(optimizer, [rise, fall], milestones=[warmup])


def sgd(parameters: Iterable[nn.Parameter], lr: float, steps: int) -> Optimizer:
    return SGD(parameters, lr=lr, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter], lr: float, steps: int) -> Optimizer:
    return AdamW(parameters, lr=lr, weight_decay=0.01)


def hybrid(parameters: Iterable[nn.Parameter], lr: float, steps: int) -> Optimizer:
    """A fifth of the run Adam, three tenths of it mixed, the second half SGD."""
    return AdamSGD(parameters, lr=lr, weight_decay=0.01, adam_steps=steps // 5, mix_steps=3 * steps // 10)


# Learning rates to choose from, a factor of about 3 apart around those that a look at single runs suggested.
METHODS: dict[str, tuple[Callable[..., Optimizer], Callable[..., LRScheduler], list[float]]] = {
    "SGD, step decay": (sgd, step_decay, [0.1, 0.3, 1.0]),
    "SGD, linear decay": (sgd, linear, [0.1, 0.3, 1.0]),
    "AdamW, linear decay": (adamw, linear, [1e-3, 3e-3, 1e-2]),
    "AdamSGD, linear decay": (hybrid, linear, [1e-3, 3e-3, 1e-2]),
}


def train(data: CharData, name: str, lr: float, seed: int, steps: int, windows: int) -> float:
    """Train once; returns the mean loss in nats a character over batches of the validation text, the same for all."""
    make_optimizer, make_schedule, _ = METHODS[name]
    torch.manual_seed(seed)
    model = CharGPT(GPTConfig(len(data.characters), CONTEXT, layers=2, heads=4, width=64))
    optimizer = make_optimizer(model.parameters(), lr, steps)
    schedule = make_schedule(optimizer, steps)
    batches = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        _, loss = model(*random_batch(data.train, BATCH, CONTEXT, batches))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    places = torch.Generator().manual_seed(0)
    with torch.no_grad():
        losses = [model(*random_batch(data.validation, BATCH, CONTEXT, places))[1].item() for _ in range(windows)]
    return statistics.fmean(losses)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument(
        "--seeds", type=int, default=3, help="runs a method, beside those that choose the learning rate"
    )
    parser.add_argument("--windows", type=int, default=100, help="batches of the validation text judged after a run")
    parser.add_argument("--json", help="write every final loss to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = CharData.load()
    began = time.perf_counter()
    document = {"steps": args.steps, "torch": torch.__version__, "machine": platform.machine(), "methods": {}}
    print(f"{args.steps} steps of {BATCH} x {CONTEXT} characters; validation loss, nats a character")
    for name, (_, _, rates) in METHODS.items():
        tried = {lr: train(data, name, lr, TUNING_SEED, args.steps, args.windows) for lr in rates}
        best = min(tried, key=tried.__getitem__)
        final = [train(data, name, best, TUNING_SEED + 1 + k, args.steps, args.windows) for k in range(args.seeds)]
        document["methods"][name] = {"tried": tried, "lr": best, "final": final}
        spread = f"{min(final):.3f} to {max(final):.3f}"
        print(f"{name:24s} lr {best:<6g} mean {statistics.fmean(final):.3f}   {spread}", flush=True)
    print(f"{time.perf_counter() - began:.0f} s")
    if args.json:
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
