"""Checks of a training job that PENSTOCK_CHECK asks for: do ranks hold the same (mismatch), and which rank is slow (slow).

```text
  mismatch   CRC32C of each parameter and gradient ──all-gather──> `first_difference` ──> Diverged, on all ranks
  slow       one `Pass` a rank and step            ──all-gather──> `straggler`        ──> a warning, stats()["slow"]
```
Both decide in pure functions over what all ranks have gathered, so all ranks decide alike. (The check for NaN is in the engine,
since it must come before gradients are summed.) One check needs no asking: do ranks have the same parameters at all
(`check_same_tensors`), before a reducer sends any.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import os
import statistics
import time
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from penstock import _core
from penstock.errors import Closed, Diverged, Mismatch
from penstock.numbers import byte_rate, milliseconds
from penstock.runtime import process
from penstock.torch.gather import Gather

__all__ = [
    "Pass",
    "PassChecks",
    "SlowCheck",
    "Verdict",
    "check_alike",
    "check_same_tensors",
    "compare",
    "first_difference",
    "straggler",
]

log = logging.getLogger("penstock")

# ------------------------------------------------------------------------------------------------------------- mismatch


def check_alike(model: torch.nn.Module | Iterable[torch.nn.Parameter], group: Any = None) -> None:
    """Raise if the ranks of a group hold other bits in a model's parameters or their gradients.

    For training without `GradientReducer` and `ddp_hook`, which do this with PENSTOCK_CHECK=mismatch: call it between
    ``backward()`` and ``optimizer.step()``, on all ranks, as often as its cost allows. Gradients are compared
    where all ranks have them.

    Args:
        model: a module, or an iterable of parameters, on any device; those on a device are copied to the host, one by one.
        group: a process group, of any backend; the default group if None.

    Raises:
        penstock.errors.Diverged: on all ranks; it names the first parameter, in the model's order, and the ranks.

    Blocking: until all ranks have called it.
    Cost: one read of the bytes (CRC32C, some GB/s a core), 16 bytes a parameter and rank on the wire.
    """
    if isinstance(model, torch.nn.Module):
        named = list(model.named_parameters())
    else:
        named = [(f"parameter {index}", parameter) for index, parameter in enumerate(model)]

    compare(_gather_of(group), [(name, one, one.grad) for name, one in named], "(check_alike)")


def _gather_of(group: Any) -> Gather:
    def gather(mine_N: torch.Tensor) -> torch.Tensor:
        all_N = mine_N.new_empty(dist.get_world_size(group) * len(mine_N))
        dist.all_gather_into_tensor(all_N, mine_N, group=group)
        return all_N

    return gather


def check_same_tensors(named: Sequence[tuple[str, torch.Tensor]], group: Any = None) -> None:
    """Raise `penstock.errors.Mismatch` on all ranks of a group if their lists of tensors differ in number, dtypes, shapes, or in
    which of them require gradients. Without it, a rank with fewer tensors goes on while others wait in the broadcast of the last.

    Blocking: until all ranks have called it.
    Cost: 16 bytes a rank; where lists differ, 8 bytes a tensor and rank more.
    """
    kinds = [
        f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}{' trained' * one.requires_grad}" for _, one in named
    ]
    gather = _gather_of(group)
    mine = [len(kinds), zlib.crc32("\n".join(kinds).encode())]
    lists_W2 = gather(torch.tensor(mine, dtype=torch.int64)).view(-1, 2).tolist()
    if all(theirs == mine for theirs in lists_W2):
        return
    most = max(count for count, _ in lists_W2)
    sums = [zlib.crc32(kind.encode()) for kind in kinds] + [-1] * (most - len(kinds))
    table_WN = gather(torch.tensor(sums, dtype=torch.int64)).view(-1, most).tolist()
    at = next(at for at, column in enumerate(zip(*table_WN, strict=True)) if len(set(column)) > 1)
    ranks = [rank for rank, row in enumerate(table_WN) if row[at] != table_WN[0][at]]
    here = f"{named[at][0] or 'without a name'}, {kinds[at]}" if at < len(kinds) else "missing"
    error = Mismatch(
        f"ranks have different models: of the parameters and buffers, number {at + 1} is another on rank(s) "
        f"{', '.join(map(str, ranks))} of the group than on rank 0. On this rank, {dist.get_rank(group)}, it is {here}. "
        f"Numbers of tensors, by rank: {', '.join(str(count) for count, _ in lists_W2)}. Nothing was sent. "
        "The group is still usable."
    )
    error.group_lives = True
    raise error


def compare(gather: Gather, rows: Sequence[tuple[str, torch.Tensor, torch.Tensor | None]], when: str) -> None:
    """Raise `penstock.errors.Diverged` on all ranks if those hold other bits in some (name, parameter, gradient)."""
    if not rows:
        return
    sums_PK = [[NONE if one is None else _sum(one) for one in (parameter, gradient)] for _, parameter, gradient in rows]
    table_WPK = gather(torch.tensor(sums_PK, dtype=torch.int64).view(-1)).view(-1, len(rows), 2)
    found = first_difference(table_WPK.tolist(), [name for name, _, _ in rows])
    if found is not None:
        error = Diverged(
            f"{found} {when}. Nothing was updated yet. Ranks that part never meet again: find what one of them does "
            "alone (a seed, a branch, a damaged host), or broadcast the parameters of a rank that is right."
        )
        error.group_lives = True
        with contextlib.suppress(Closed):  # a group of another backend
            process.engine().core.write_record()  # the engine sees no failure
        raise error


class PassChecks:
    """What PENSTOCK_CHECK asks of every pass of a reducer, and what some optimizers need.

    Args:
        asked: the checks' names.
        gather: nothing else may need its channel between passes.
        rank: this rank in the group.
        job_ranks: the ranks in the job of the group's ranks.
    """

    def __init__(self, asked: Collection[str], gather: Gather, rank: int, job_ranks: Sequence[int]) -> None:
        self._gather = gather
        self.is_compared = "mismatch" in asked
        self.slow = SlowCheck(gather, rank, job_ranks) if "slow" in asked else None

    def compare(self, rows: Sequence[tuple[str, torch.Tensor, torch.Tensor | None]], step: int) -> None:
        """Raise `penstock.errors.Diverged` on all ranks if those hold other bits in some (name, parameter, average)."""
        compare(self._gather, rows, f"in step {step} (PENSTOCK_CHECK=mismatch)")

    def differ(self, number: float) -> bool:
        """Whether ranks hold different numbers. Blocks until all ranks have called it."""
        all_W = self._gather(torch.tensor([number], dtype=torch.float64)).view(torch.int64)
        return bool((all_W != all_W[0]).any())

    def stats(self) -> dict[str, Any]:
        """``slow``, where that was asked for."""
        return {"slow": self.slow.stats()} if self.slow else {}


def first_difference(table_WPK: Sequence[Sequence[Sequence[int]]], names: Sequence[str]) -> str | None:
    """The first difference between ranks as a text, or None. Pure.

    Args:
        table_WPK: by rank and parameter, the checksums of [the parameter, its gradient]; NONE if a rank has none, which is not
            compared. A parameter that differs is named before any gradient: it may be the reason why gradients differ.
    """
    for kind, what in enumerate(("parameter", "reduced gradient of")):
        sums = [[row[at][kind] for row in table_WPK] for at in range(len(names))]
        differing = [at for at, column in enumerate(sums) if NONE not in column and len(set(column)) > 1]
        if not differing:
            continue
        by_sum = collections.defaultdict(list)
        for rank, one in enumerate(sums[differing[0]]):
            by_sum[one].append(rank)
        sides = sorted(by_sum.values(), key=lambda side: (len(side), side))
        if len(sides[-1]) > len(sides[-2]):
            odd = sorted(rank for side in sides[:-1] for rank in side)
            who = f"{_ranks(odd)} {'holds' if len(odd) == 1 else 'hold'} other bits than {_ranks(sides[-1])}"
        else:
            who = f"{' and '.join(_ranks(side) for side in sides)} hold different bits, and no side is the larger"
        more = f", and {len(differing) - 1} more of {len(names)} differ" if len(differing) > 1 else ""
        return f"the {what} {names[differing[0]]} is not alike on all ranks: {who}{more}"
    return None


def _sum(tensor: torch.Tensor) -> int:
    # Values, not memory: ranks may lay a tensor out differently.
    whole = tensor.detach().cpu().contiguous()
    return _core.crc32c(whole.data_ptr(), whole.nbytes)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


NONE = -1
"""The checksum of a tensor that does not exist; others are positive."""


# ----------------------------------------------------------------------------------------------------------------- slow


class Pass(NamedTuple):
    """One rank's measurements of one step, from the end of its last pass to the end of this one."""

    compute_s: float
    """From the end of the last pass to this rank's last gradient: optimizer, data, forward and backward."""
    cpu_s: float
    """Processor time of the process in ``compute_s``, all its threads together."""
    exchange_s: float
    """From its last gradient to the end of the pass."""
    round_s: float
    """In rounds about which gradients are ready: mostly waiting for the slowest rank."""
    load: float
    """The load of its host (1 minute) per processor."""
    rate_bytes_per_s: tuple[float, ...] = ()
    """The estimated rate of its TCP streams to each rank, together; NaN without streams."""


@dataclass(frozen=True)
class Verdict:
    """A rank that keeps the others waiting, and the evidence."""

    rank: int
    kind: str
    """"computes longer", "starved of CPU", "waits" (for what is neither processor nor network) or "slow link"."""
    why: str
    """The evidence, as a text."""


class SlowCheck:
    """One rank's part of PENSTOCK_CHECK=slow: measures its passes, exchanges the results, and warns of a slow rank.

    Args:
        gather: nothing else may need the group when `passed` is called.
        job_ranks: the ranks in the job of the group's ranks, for the engine's counters.

    Cost: two clocks a gradient, and one all-gather a step, of 40 bytes and 8 a rank from each rank.
    """

    def __init__(self, gather: Gather, rank: int, job_ranks: Sequence[int]) -> None:
        self._gather = gather
        self._rank = rank
        self._job_ranks = list(job_ranks)
        self._history: collections.deque[list[Pass]] = collections.deque(maxlen=WINDOW)
        self._steps = 0
        self._verdict: Verdict | None = None
        self._round_s = 0.0
        self._began: tuple[float, float] | None = None
        self._last = (0.0, 0.0)

    def gradient(self) -> None:
        """A gradient is ready on this rank."""
        self._last = (time.perf_counter(), time.process_time())

    def passed(self, round_s: float) -> None:
        """The pass has ended, with so many seconds in rounds since the construction."""
        if self._began is not None:
            (began, began_cpu), (last, last_cpu) = self._began, self._last
            mine = [last - began, last_cpu - began_cpu, time.perf_counter() - last, round_s - self._round_s, _load()]
            table = self._gather(torch.tensor([*mine, *self._rates()], dtype=torch.float64)).tolist()
            self._history.append([_pass(*row) for row in table])
            self._steps += 1
            if self._steps % WINDOW == 0:
                self._verdict = straggler(self._history)
                if self._verdict is not None and self._rank == 0:
                    log.warning("PENSTOCK_CHECK=slow: in the last %d steps %s", WINDOW, self._verdict.why)
        self._round_s = round_s
        self._began = (time.perf_counter(), time.process_time())

    def stats(self) -> dict[str, Any]:
        """``ranks``: for each the medians of the last steps and how often it was ``last``; ``straggler`` and ``why`` are None
        unless the last look, every 20 steps, has found one."""
        verdict = self._verdict
        return {
            "steps": len(self._history),
            "ranks": [vars(one) for one in _summary(self._history)],
            "straggler": verdict and verdict.rank,
            "kind": verdict and verdict.kind,
            "why": verdict and verdict.why,
        }

    def _rates(self) -> list[float]:
        rates = dict.fromkeys(self._job_ranks, math.nan)
        for peer in process.stats()["peers"]:
            delivering = [stream["rate_bytes_per_s"] for stream in peer["streams"] if stream["rate_bytes_per_s"] > 0]
            if peer["medium"] == "tcp" and peer["rank"] in rates and delivering:
                rates[peer["rank"]] = sum(delivering)
        return list(rates.values())


@dataclass(frozen=True)
class _Rank:
    """One rank over the last steps: medians."""

    compute_s: float
    cpu_s: float
    exchange_s: float
    waited_for_s: float
    """How much longer the other ranks were in rounds than this one."""
    last: int
    """The number of steps in which it computed longest."""
    load: float
    link_bytes_per_s: float | None
    """The highest rate between this rank and any other; None within a host."""


def straggler(history: Sequence[Sequence[Pass]]) -> Verdict | None:
    """The rank that keeps the others waiting, from all ranks' measurements of the last steps. Pure; all thresholds are below.

    It is a rank that computes longer in most steps, by a relevant amount, and for which the others then wait. If there is
    none and steps mostly wait for the network: a rank whose every pair is slow while other pairs are fast. (In a ring
    all wait for the slowest link, so times cannot tell whose it is; and with two ranks nothing can.)
    """
    if len(history) < WINDOW or len(history[0]) < 2:
        return None
    ranks = _summary(history)
    step_s = statistics.median(max(one.compute_s + one.exchange_s for one in step) for step in history)
    at = max(range(len(ranks)), key=lambda rank: (ranks[rank].last, ranks[rank].compute_s))
    slow, others = ranks[at], [one for rank, one in enumerate(ranks) if rank != at]
    usual_s = statistics.median(one.compute_s for one in others)
    if (
        slow.last >= OFTEN * len(history)
        and slow.compute_s >= LONGER * usual_s
        and slow.waited_for_s >= MATTERS * step_s
    ):
        kind, reason = _reason(slow, others)
        return Verdict(
            at,
            kind,
            f"rank {at} was last in {slow.last} of {len(history)}: it computes {milliseconds(slow.compute_s)} a step, the others "
            f"{milliseconds(usual_s)}, and they wait {milliseconds(slow.waited_for_s)} for it. {reason}",
        )
    links = {rank: one.link_bytes_per_s for rank, one in enumerate(ranks) if one.link_bytes_per_s is not None}
    exchange_s = statistics.median(one.exchange_s for one in ranks)
    if len(links) < 3 or exchange_s < LINK_MATTERS * step_s:
        return None
    at = min(links, key=lambda rank: links[rank])
    usual = statistics.median(rate for rank, rate in links.items() if rank != at)
    if links[at] * SLOWER > usual:
        return None
    return Verdict(
        at,
        "slow link",
        f"the link of rank {at} is slow: its streams deliver {byte_rate(links[at])} at best, those of the others "
        f"{byte_rate(usual)}, and {exchange_s / step_s:.0%} of a step is spent on the network. `penstock doctor` measures "
        "it alone.",
    )


def _reason(slow: _Rank, others: Sequence[_Rank]) -> tuple[str, str]:
    """Why a rank computes for longer: because it does more, if its processor time accounts for most of the factor."""
    usual_s = statistics.median(one.compute_s for one in others)
    usual_cpu_s = statistics.median(one.cpu_s for one in others)
    shares = f"{milliseconds(slow.cpu_s)} of processor time against {milliseconds(usual_cpu_s)}"
    if (slow.cpu_s / max(usual_cpu_s, 1e-6)) ** 2 >= slow.compute_s / max(usual_s, 1e-6):
        return "computes longer", f"It computes longer: {shares}; has it more data, other code, or a slower processor?"
    if slow.load > CROWDED:
        told = f"{slow.load:.1f} tasks a processor on its host (load average)"
        return "starved of CPU", f"It is starved of CPU: {shares}, and {told}; what else runs there?"
    told = f"its host is not busy ({slow.load:.1f} tasks a processor)"
    return "waits", f"It waits, not for a processor: {shares}, and {told}; look at its data, its disk, and locks."


def _summary(history: Sequence[Sequence[Pass]]) -> list[_Rank]:
    if not history:
        return []
    count = len(history[0])
    last = collections.Counter(max(range(count), key=lambda rank: step[rank].compute_s) for step in history)

    def median(rank: int, field: str) -> float:
        return statistics.median(getattr(step[rank], field) for step in history)

    def waited_for(rank: int) -> float:
        others = [
            statistics.median(one.round_s for other, one in enumerate(step) if other != rank) - step[rank].round_s
            for step in history
            if count > 1
        ]
        return max(0.0, statistics.median(others)) if others else 0.0

    pairs = [
        (rank, other, rate)
        for rank, one in enumerate(history[-1])
        for other, rate in enumerate(one.rate_bytes_per_s)
        if rank != other and not math.isnan(rate)
    ]
    return [
        _Rank(
            compute_s=median(rank, "compute_s"),
            cpu_s=median(rank, "cpu_s"),
            exchange_s=median(rank, "exchange_s"),
            waited_for_s=waited_for(rank),
            last=last[rank],
            load=median(rank, "load"),
            link_bytes_per_s=max((rate for *pair, rate in pairs if rank in pair), default=None),
        )
        for rank in range(count)
    ]


def _pass(compute_s: float, cpu_s: float, exchange_s: float, round_s: float, load: float, *rates: float) -> Pass:
    return Pass(compute_s, cpu_s, exchange_s, round_s, load, rates)


def _load() -> float:
    return os.getloadavg()[0] / (os.cpu_count() or 1)


WINDOW = 20
"""The number of steps for medians, and between two warnings. A guess: long enough for medians, short against a run."""
OFTEN = 0.75
"""Of two equal ranks one is last in 15 of 20 steps once in 25 windows; the next two thresholds avoid such false warnings."""
LONGER = 1.2
"""Times what the others compute. Steps of equal ranks differ by a tenth on a virtual machine (docs/benchmarks/README.md)."""
MATTERS = 0.1
"""The share of a step for which the others wait: a smaller one is not worth a warning."""
LINK_MATTERS = 0.3
"""The share of a step that the network takes: below it a slow link does little harm."""
SLOWER = 2.0
"""How many times slower than the others' links: rates are estimates, and pairs that carry little show less than they could."""
CROWDED = 1.5
"""Tasks a processor. One is a host that is used; ranks that busy-wait or compute in several threads make a little more."""
