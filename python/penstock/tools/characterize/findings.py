"""The findings of the characterisation paper (Dai et al., IEEE Micro 44(2), 2024), each with what a matrix shows of it.

A finding is judged where cells of the matrix differ in what it is about and in nothing else. Whether one number is more than
another, or than a threshold, is said only beyond the noise of the runs (`results.ratio`, `results.averages`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from penstock.profiling.divide import WARM_UP_STEPS
from penstock.tools.characterize.means import Means, apart, groups, link, means, parameters, scaled
from penstock.tools.characterize.results import Estimate, Outcome, averages, ratio
from penstock.tools.profile.run import PERIOD_MS

__all__ = ["ABSENT", "AGREES", "DIFFERS", "NOISE", "Finding", "findings"]

AGREES, DIFFERS, NOISE, ABSENT = "agrees", "does not", "within noise", "not in this matrix"


@dataclass(frozen=True)
class Finding:
    """A statement of the paper beside a measurement."""

    where: str
    """Section, figure or observation of the paper."""
    says: str
    here: str
    """What was measured, in numbers; where nothing was, what the matrix lacks."""
    verdict: str
    """One of the four above."""


def findings(outcomes: Sequence[Outcome]) -> list[Finding]:
    """All of them, in the paper's order. Pure."""
    cells = means(outcomes)
    data = [each for each in cells if each.cell.parallel == "data"]
    pipeline = [each for each in cells if each.cell.parallel == "pipeline"]
    strong, weak = ([each for each in data if each.cell.scaling == scaling] for scaling in ("strong", "weak"))
    return [
        *_data_strong(strong, data),
        *_data_weak(weak, data),
        *_pipelines(pipeline, data),
        *_batches(data, pipeline),
        _largest_scale(data),
        _bubble(pipeline),
    ]


# Strong scaling in data parallelism: figure 3, observations 1 and 2


def _data_strong(of: Sequence[Means], data: Sequence[Means]) -> list[Finding]:
    where = "strong scaling, fig. 3"
    linked = _linked(of)
    return [
        _strong_computing(of),
        _more(
            (f"{where}, obs. 1", "all-reduce takes longer with more ranks: 4.7 times, from 2 to 8"),
            apart(linked, "ranks"),
            _communication,
            ("data parallel cells with strong scaling over a link and several ranks", "{} times{ranks}"),
        ),
        _most((f"{where}, obs. 1", "all-reduce takes most of a step: 53 to 92 %, with 8 ranks"), linked, "strong"),
        _slower_link((where, "a slower network takes a larger share: 92 % with 10 Gbit/s, 53 % with 100"), linked),
        _faster_link((f"{where}, obs. 2", "a faster network carries more: 30 to 60 Gbit/s instead of 8 to 9"), linked),
        _filled(linked),
        _more(
            (f"{where}, obs. 2", "the largest model uses most of the network: 30 Gbit/s, the smallest 20"),
            _sizes(linked),
            _received,
            ("data parallel cells with two sizes of a model over a link", "{} times{models}"),
        ),
        _both_ways(linked),
        _falls((f"{where} and 4", "rates fall for checkpoints and evaluations"), _linked(data)),
    ]


def _strong_computing(of: Sequence[Means]) -> Finding:
    about = ("strong scaling, fig. 3, obs. 1", "more ranks compute faster: 57 % efficiency forward, 72 % backward")
    pairs = apart(of, "ranks")
    if not pairs:
        return _absent(about, "data parallel cells with strong scaling and several ranks")
    times = {phase: ratio(_runs(pairs, _work(phase))) for phase in ("forward", "backward")}
    told = [f"{phase} {_efficiency(pairs, phase):.0%}" for phase in times]
    verdict = _all(_verdict(1 - each.value, each) for each in times.values())
    return Finding(*about, f"{', '.join(told)}{_ranks(pairs)}{_crowded(pairs)}", verdict)


def _filled(of: Sequence[Means]) -> Finding:
    about = ("strong scaling, fig. 3", "a faster network is filled less: 30 to 60 of 100 Gbit/s, 8 to 9 of 10")
    pairs = [pair for pair in apart(of, "link_mbit") if min(each.received for each in pair) > 0]
    if not pairs:
        return _absent(about, "data parallel cells with strong scaling over two links")
    found = ratio(_runs(pairs, lambda run: run.receive_mbit / run.cell.link_mbit))
    told = [
        f"{statistics.fmean(pair[at].received / pair[at].cell.link_mbit for pair in pairs):.0%} of "
        f"{_links([pair[at] for pair in pairs])}"
        for at in (0, 1)
    ]
    return Finding(*about, ", ".join(told), _verdict(1 - found.value, found))


def _both_ways(of: Sequence[Means]) -> Finding:
    about = ("strong scaling, fig. 3", "hosts receive as much as they send")
    known = [each for each in of if each.received > 0 and min(each.each(lambda run: run.sent_mbit)) > 0]
    if not known:
        return _absent(about, "data parallel cells with strong scaling over a link")
    found = averages([[each.each(lambda run: run.receive_mbit / run.sent_mbit)] for each in known])
    ratios = [each.value for each in found]
    verdict = _all(_verdict(LIKE - abs(each.value - 1), each) for each in found)
    return Finding(*about, f"{min(ratios):.2f} to {max(ratios):.2f} times as much", verdict)


def _falls(about: tuple[str, str], of: Sequence[Means]) -> Finding:
    """Of each kind of pause that cells have: do the rates that hosts send at fall for it? A pause that may be too short for
    `utilisation.drops` to see, and was not seen, tells nothing."""
    told, verdicts = [], []
    for kind, every in (("checkpoint", "checkpoint_every"), ("evaluation", "evaluate_every")):
        runs = [run for each in of if getattr(each.cell, every) for run in each.runs if run.receive_mbit > 0]
        lengths = [length for run in runs if (length := _pause_steps(run, kind, getattr(run.cell, every)))]
        if not lengths:
            continue
        seen = statistics.fmean(run.drops.get(kind, 0.0) for run in runs)
        longest = max(lengths)
        if seen or longest > SEEN:
            verdicts.append(AGREES if seen else DIFFERS)
            told.append(f"{seen:.1f} times a run for {kind}s of {longest:.1f} steps")
        else:
            told.append(f"{kind}s of {longest:.1f} steps are too short to see")
    if not told:
        return _absent(about, "data parallel cells over a link with checkpoint_every or evaluate_every")
    if not verdicts:
        return _absent(about, f"pause that is long enough: {', '.join(told)}")
    return Finding(*about, ", ".join(told), DIFFERS if DIFFERS in verdicts else AGREES)


def _pause_steps(run: Outcome, phase: str, every: int) -> float:
    """How many steps without pauses one pause is as long as; 0 where the run was too short to have one within its steps."""
    # A pause after a step is a part of the next one, and the first two steps do not count.
    steps = run.steps - WARM_UP_STEPS
    pauses = (run.steps - 1) // every - (WARM_UP_STEPS - 1) // every
    if steps < 1 or pauses < 1:
        return 0.0
    usual_ms = run.step_ms - sum(run.work.get(each, 0.0) for each in ("checkpoint", "evaluation"))
    return run.work.get(phase, 0.0) * steps / pauses / max(usual_ms, PERIOD_MS)


# Weak scaling in data parallelism: figure 4, observations 3 and 4


def _data_weak(of: Sequence[Means], data: Sequence[Means]) -> list[Finding]:
    where = "weak scaling, fig. 4"
    linked = _linked(of)
    return [
        _weak_computing(of),
        _most((f"{where}, obs. 3", "all-reduce takes most of a step: 51 to 91 %, with 8 ranks"), linked, "weak"),
        _gains(linked),
        _more(
            (where, "larger models spend longer in all-reduce"),
            _sizes(linked),
            _communication,
            ("data parallel cells with weak scaling over a link and two sizes of a model", "{} times{models}"),
        ),
        _more(
            (where, "more ranks use more of the network: 1.1 to 1.7 times, from 4 to 8"),
            scaled(linked),
            _received,
            (
                "data parallel cells with weak scaling over a link, several ranks and the same batch on each",
                "{} times{ranks}",
            ),
        ),
        _faster_link((f"{where}, obs. 4", "a faster network carries more under weak scaling, too"), linked),
    ]


def _weak_computing(of: Sequence[Means]) -> Finding:
    about = ("weak scaling, fig. 4, obs. 3", "computing takes as long with more ranks: 97 % forward, 99 % backward")
    pairs = scaled(of)
    if not pairs:
        return _absent(about, "data parallel cells with weak scaling, several ranks and the same batch on each")
    kept = [ratio(_runs([(many, few) for few, many in pairs], _work(phase))) for phase in ("forward", "backward")]
    told = f"forward {kept[0].value:.0%}, backward {kept[1].value:.0%}{_ranks(pairs)}{_crowded(pairs)}"
    return Finding(*about, told, _all(_verdict(each.value - (1 - WEAK_LOSS), each) for each in kept))


def _gains(of: Sequence[Means]) -> Finding:
    about = ("weak scaling, fig. 4", "a network 10 times as fast has all-reduce 8.7 times, steps 4.8 times as fast")
    pairs = [pair for pair in apart(of, "link_mbit") if min(each.mean(_communication) for each in pair) > 0]
    if not pairs:
        return _absent(about, "data parallel cells with weak scaling over two links")
    faster = [(high, low) for low, high in pairs]
    reduced, step = (ratio(_runs(faster, of)) for of in (_communication, _step))
    more = _less(reduced, step)
    verdict = _all([_verdict(step.value - 1, step), _verdict(reduced.value - 1, reduced), _verdict(more.value, more)])
    told = f"all-reduce {reduced.value:.2f} times, steps {step.value:.2f} times{_factor(pairs)}"
    return Finding(*about, told, verdict)


# Model parallelism: figure 5, observation 5


def _pipelines(of: Sequence[Means], data: Sequence[Means]) -> list[Finding]:
    where = "model parallelism, fig. 5"
    return [
        _more(
            (f"{where}, obs. 5", "computing takes longer with more ranks, whose batch grows with them"),
            scaled([each for each in of if each.cell.scaling == "weak"]),
            lambda run: run.work.get("forward", 0.0) + run.work.get("backward", 0.0),
            ("pipeline cells with weak scaling, several ranks and the same batch for each", "{} times{ranks}"),
        ),
        _pipeline_share(of),
        _pipeline_gain(of),
        _less_than_data(of, data),
        _encoder_decoder(of),
    ]


def _pipeline_share(of: Sequence[Means]) -> Finding:
    about = (
        "model parallelism, fig. 5, obs. 5",
        "receiving and the embeddings' all-reduce take most of a step, up to 90 %",
    )
    if not of:
        return _absent(about, "pipeline")
    most = max(each.cell.ranks for each in of)
    chosen = [each for each in of if each.cell.ranks == most]
    shares = [each.share for each in chosen]
    told = f"{min(shares):.0%} to {max(shares):.0%} with {most} ranks"
    [found] = averages([[each.each(_share) for each in chosen]])
    return Finding(*about, told, _verdict(found.value - MOST, found))


def _pipeline_gain(of: Sequence[Means]) -> Finding:
    about = ("model parallelism, fig. 5", "a network 10 times as fast makes steps faster, by 1.2 times only")
    pairs = apart(_linked(of), "link_mbit")
    if not pairs:
        return _absent(about, "pipeline cells over two links")
    found = ratio(_runs([(high, low) for low, high in pairs], _step))
    verdict = _all([_verdict(found.value - 1, found), _verdict(LITTLE - found.value, found)])
    return Finding(*about, f"{found.value:.2f} times{_factor(pairs)}", verdict)


def _less_than_data(of: Sequence[Means], data: Sequence[Means]) -> Finding:
    about = (
        "conclusion",
        "a faster network gains more in data parallelism (4.8 times) than in model parallelism (1.2)",
    )
    found = []
    for cells in (data, of):
        pairs = apart(_linked(cells), "link_mbit")
        if not pairs:
            return _absent(about, "cells of both kinds over two links")
        found.append(ratio(_runs([(high, low) for low, high in pairs], _step)))
    more = _less(*found)
    told = f"data parallel {found[0].value:.2f} times, pipeline {found[1].value:.2f}"
    return Finding(*about, told, _verdict(more.value, more))


def _encoder_decoder(of: Sequence[Means]) -> Finding:
    about = ("model parallelism, fig. 5", "of all models T5 spends the largest share of a step in communication")
    pairs = []
    for group in groups(of, ["model"]):
        own = [each for each in group if each.cell.model.startswith("t5")]
        others = [each for each in group if not each.cell.model.startswith("t5")]
        if own and others:
            pairs.append((max(others, key=lambda each: each.share), max(own, key=lambda each: each.share)))
    if not pairs:
        return _absent(about, "pipeline cells of T5 and of another model")
    other, own_share = (statistics.fmean(pair[at].share for pair in pairs) for at in (0, 1))
    found = ratio(_runs(pairs, _share))
    return Finding(*about, f"{own_share:.0%}, others {other:.0%} at most", _verdict(found.value - 1, found))


# Larger batches: figure 6


def _batches(data: Sequence[Means], pipeline: Sequence[Means]) -> list[Finding]:
    return [
        _share_changes(
            ("fig. 6a", "in data parallelism larger batches lower communication's share, to 34 % at least"),
            apart(_linked(data), "batch", ["scaling"]),
            -1,
            "data parallel cells that differ in their batch, over a link",
        ),
        _share_changes(
            ("fig. 6b", "in model parallelism larger batches raise communication's share"),
            apart(pipeline, "batch", ["scaling"]),
            1,
            "pipeline cells that differ in their batch",
        ),
        _share_changes(
            ("fig. 6b", "in model parallelism more ranks lower it, with the same batch"),
            apart([each for each in pipeline if each.cell.scaling == "strong"], "ranks"),
            -1,
            "pipeline cells with strong scaling and several ranks",
        ),
    ]


def _share_changes(about: tuple[str, str], pairs: Sequence[tuple[Means, Means]], way: int, lacks: str) -> Finding:
    if not pairs:
        return _absent(about, lacks)
    before, after = (statistics.fmean(pair[at].share for pair in pairs) for at in (0, 1))
    found = ratio(_runs(pairs, _share))
    return Finding(*about, f"from {before:.0%} to {after:.0%}", _verdict(way * (found.value - 1), found))


# The largest scale: figure 7, observation 6; and ours


def _largest_scale(data: Sequence[Means]) -> Finding:
    about = (
        "fig. 7, obs. 6",
        "with more ranks and the same batch on each, all-reduce still takes most of a step: 73 %",
    )
    pairs = scaled(_linked(data), ["scaling"])
    if not pairs:
        return _absent(about, "data parallel cells over a link with several ranks and the same batch on each")
    before, after = (statistics.fmean(pair[at].share for pair in pairs) for at in (0, 1))
    told = f"{before:.0%}, then {after:.0%}{_ranks(pairs)}"
    [found] = averages([[many.each(_share) for _, many in pairs]])
    return Finding(*about, told, _verdict(found.value - MOST, found))


def _bubble(of: Sequence[Means]) -> Finding:
    about = ("ours", "most of a pipeline's communication is waiting for other stages (the bubble): no bytes move")
    shares = [
        each.each(lambda run: sum(run.waits.values()) / run.communication_ms)
        for each in of
        if min(each.each(_communication)) > 0
    ]
    if not shares:
        return _absent(about, "pipeline")
    low, high = (pick(map(statistics.fmean, shares)) for pick in (min, max))
    [found] = averages([shares])
    return Finding(*about, f"{low:.0%} to {high:.0%} of it is waiting", _verdict(found.value - MOST, found))


# Of several sections


def _more(
    about: tuple[str, str],
    pairs: Sequence[tuple[Means, Means]],
    of: Callable[[Outcome], float],
    words: tuple[str, str],
) -> Finding:
    """The second of each pair has more.

    Args:
        words: what is lacking without pairs; and the measurement, where ``{}`` is how many times as much.
    """
    known = [pair for pair in pairs if min(each.mean(of) for each in pair) > 0]
    if not known:
        return _absent(about, words[0])
    found = ratio(_runs(known, of))
    models = ", ".join(dict.fromkeys(f"{low.cell.model} to {high.cell.model}" for low, high in known))
    told = words[1].format(f"{found.value:.2f}", ranks=_ranks(known), models=f" from {models}")
    return Finding(*about, told, _verdict(found.value - 1, found))


def _most(about: tuple[str, str], of: Sequence[Means], scaling: str) -> Finding:
    """Communication takes most of a step, over each link."""
    if not of:
        return _absent(about, f"data parallel cells with {scaling} scaling over a link")
    ranks = max(each.cell.ranks for each in of)
    by_link: dict[str, list[list[float]]] = {}
    for each in sorted(of, key=lambda each: each.cell.link_mbit):
        if each.cell.ranks == ranks:
            by_link.setdefault(link(each.cell), []).append(each.each(_share))
    found = averages(list(by_link.values()))
    told = ", ".join(f"{each.value:.0%} {where}" for where, each in zip(by_link, found, strict=True))
    return Finding(*about, f"{told}, with {ranks} ranks", _all(_verdict(each.value - MOST, each) for each in found))


def _slower_link(about: tuple[str, str], of: Sequence[Means]) -> Finding:
    pairs = apart(of, "link_mbit")
    if not pairs:
        return _absent(about, "data parallel cells over two links")
    slow, fast = (statistics.fmean(pair[at].share for pair in pairs) for at in (0, 1))
    found = ratio(_runs(pairs, _share))
    told = f"{slow:.0%} at {_links([low for low, _ in pairs])}, {fast:.0%} at {_links([high for _, high in pairs])}"
    return Finding(*about, told, _verdict(1 - found.value, found))


def _faster_link(about: tuple[str, str], of: Sequence[Means]) -> Finding:
    pairs = [pair for pair in apart(of, "link_mbit") if min(each.received for each in pair) > 0]
    if not pairs:
        return _absent(about, "data parallel cells over two links")
    found = ratio(_runs(pairs, _received))
    told = [
        f"{statistics.fmean(pair[at].received for pair in pairs):.0f} Mbit/s of {_links([pair[at] for pair in pairs])}"
        for at in (0, 1)
    ]
    return Finding(*about, ", ".join(told), _verdict(found.value - 1, found))


def _absent(about: tuple[str, str], lacks: str) -> Finding:
    return Finding(*about, f"the matrix has no {lacks}", ABSENT)


def _all(verdicts: Iterable[str]) -> str:
    """Of a finding that says several things: it agrees if all agree, and does not if one does not."""
    given = set(verdicts)
    return next(each for each in (ABSENT, DIFFERS, NOISE, AGREES) if each in given)


def _less(first: Estimate, second: Estimate) -> Estimate:
    """The first less the second. Noise that both share counts twice, so that the interval is rather too wide."""
    halves = [each.half for each in (first, second) if each.half is not None]
    half = math.hypot(*halves) if halves else None
    return Estimate(first.value - second.value, half, min(first.over, second.over))


def _verdict(by: float, found: Estimate) -> str:
    """Of ``by``, by how much it is as the paper says, beside the noise of ``found``. With one run of each cell noise is not
    known, and what was measured counts."""
    if not found.over:
        return ABSENT
    if found.half is not None and abs(by) <= found.half:
        return NOISE
    return AGREES if by > 0 else DIFFERS


def _linked(of: Sequence[Means]) -> list[Means]:
    return [each for each in of if each.is_linked]


def _sizes(of: Sequence[Means]) -> list[tuple[Means, Means]]:
    """The smallest and the largest model of each group."""
    pairs = []
    for group in groups(of, ["model"]):
        low, high = (pick(group, key=lambda each: parameters(each.cell.model)) for pick in (min, max))
        if parameters(low.cell.model) < parameters(high.cell.model):
            pairs.append((low, high))
    return pairs


def _runs(
    pairs: Sequence[tuple[Means, Means]], of: Callable[[Outcome], float]
) -> list[tuple[Sequence[float], Sequence[float]]]:
    return [(low.each(of), high.each(of)) for low, high in pairs]


def _efficiency(pairs: Sequence[tuple[Means, Means]], phase: str) -> float:
    """Of strong scaling."""
    found = []
    for few, many in pairs:
        took = many.mean(_work(phase)) * many.cell.ranks / few.cell.ranks
        found.append(few.mean(_work(phase)) / took if took else 0.0)
    return statistics.fmean(found)


def _ranks(pairs: Sequence[tuple[Means, Means]]) -> str:
    told = dict.fromkeys(f"{low.cell.ranks} to {high.cell.ranks}" for low, high in pairs)
    return f" from {', '.join(told)} ranks"


def _crowded(pairs: Sequence[tuple[Means, Means]]) -> str:
    """Why computing does not scale, where processors are too few for it."""
    for _, many in pairs:
        if 0 < many.processors < many.cell.ranks:
            return f"; {many.cell.ranks} ranks share {many.processors} processors"
    return ""


def _factor(pairs: Sequence[tuple[Means, Means]]) -> str:
    factors = {high.cell.link_mbit / low.cell.link_mbit for low, high in pairs}
    told = f"{min(factors):g}" if len(factors) == 1 else f"{min(factors):g} to {max(factors):g}"
    return f" with a link {told} times as fast"


def _links(of: Sequence[Means]) -> str:
    links = sorted({each.cell.link_mbit for each in of})
    return ", ".join(f"{link:g}" for link in links) + " Mbit/s"


def _step(run: Outcome) -> float:
    return run.step_ms


def _communication(run: Outcome) -> float:
    return run.communication_ms


def _share(run: Outcome) -> float:
    return run.communication_ms / run.step_ms


def _received(run: Outcome) -> float:
    return run.receive_mbit


def _work(phase: str) -> Callable[[Outcome], float]:
    return lambda run: run.work.get(phase, 0.0)


MOST = 0.5
"""Of a step."""
SEEN = 2
"""Steps: `utilisation.drops` compares means over two of them, so a pause that is longer halves one of these wherever it lies. A
step that is shorter than from one reading of the counters to the next counts as that long."""
WEAK_LOSS = 0.1
"""The paper has 1 and 3 %."""
LITTLE = 1.5
"""The paper has 1.2 times in model parallelism, and 4.8 in data parallelism."""
LIKE = 0.05
"""What is received less than sent, or more, counts as the same: acknowledgements go the other way."""
