"""The paper's figures 3 to 7, drawn from the runs of a matrix (Dai et al., IEEE Micro 2024). Pure, but for what is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from penstock.profiling.breakdown import EMBEDDING, SYNC
from penstock.profiling.schedules import BACKWARD, FORWARD
from penstock.reports import Axis, Bar, Bars, Curve, Key, Lines, Panel, Part, Picture, Section, series
from penstock.reports.charts import Look
from penstock.tools.characterize.matrix import Cell
from penstock.tools.characterize.means import LEAST_MS, Means, groups, name, network, parameters, pauses, size
from penstock.tools.characterize.memory import Kind, Limit, kind_of
from penstock.tools.characterize.running import COURSE_S, Course

__all__ = ["changed", "first", "sections"]


def first(cells: Sequence[Means]) -> Picture:
    """For the first screen: of many cells a few, from the least to the most that ranks stand still."""
    order = sorted(cells, key=lambda each: each.share)
    chosen = order
    how = f"Bars are means over ranks and runs. {COLOURED}"
    if len(order) > FIRST_BARS:
        chosen = [order[round(index * (len(order) - 1) / (FIRST_BARS - 1))] for index in range(FIRST_BARS)]
        how += f" Of {len(cells)} cells {FIRST_BARS} are shown, from the least to the most."
    low, high = order[0], order[-1]
    least, most = (f"{each.share:.0%}" for each in (low, high))
    see = f"Ranks stand still for {least if least == most else f'{least} to {most}'} of a step."
    labels = [f"{each.cell.model}, {_short(each)}" for each in chosen]
    if len(set(labels)) < len(labels):
        labels = [f"{each.cell.model}, {each.cell.parallel}, {name(each.cell)}" for each in chosen]
    bars = [_bar(each, label) for each, label in zip(chosen, labels, strict=True)]
    return Picture("steps", Bars(STEP, bars, _key(chosen)), see, how)


def changed(pairs: Sequence[tuple[Means, Means]], verdict: str) -> Picture:
    """Steps before and after, of the first few cells.

    Args:
        verdict: of the first.
    """
    bars = []
    for old, new in pairs[:FIRST_BARS]:
        for each, label, colour in ((old, "before", "grey-2"), (new, "after", "series-1")):
            heading = f"{each.cell.model}, {each.cell.parallel}, {name(each.cell)}" if each is old else ""
            bars.append(Bar(label, [Part(each.step.value, colour)], f"{each.step.value:.0f} ms", heading=heading))
    old, new = pairs[0]
    took = f"A step of {old.cell.model} took {old.step.value:.1f} ms, and now {new.step.value:.1f} ms"
    see = f"{took} ({name(old.cell)}): {verdict}."
    how = (
        "Bars are means over ranks and runs; cells that have changed come first, the largest change before the others."
    )
    if len(pairs) > FIRST_BARS:
        how += f" Of {len(pairs)} cells {FIRST_BARS} are shown."
    return Picture("changes", Bars(STEP, bars), see, how)


def sections(
    cells: Sequence[Means],
    limits: Mapping[Kind, Limit],
    course_of: Callable[[Cell], Course | None] = lambda _: None,
) -> list[Section]:
    """A section for each of the paper's figures that the matrix has cells for, and one that says what the others need.

    Args:
        limits: the largest batches that fit, which end the curves of figure 6.
        course_of: what a host's link received in a run of a cell, over time, if its records are still there.
    """
    found: list[Section] = []
    lacking: list[str] = []
    for title, wanted, of in (
        ("Figure 3: strong scaling, data parallel", "data parallel cells, scaling strong", ("data", "strong")),
        ("Figure 4: weak scaling, data parallel", "data parallel cells, scaling weak", ("data", "weak")),
        ("Figure 5: in a pipeline", "cells with parallel: pipeline", ("pipeline", "")),
    ):
        parallel, scaling = of
        chosen = [each for each in cells if each.cell.parallel == parallel and scaling in ("", each.cell.scaling)]
        if not chosen:
            lacking.append(f"{title.partition(':')[0]} needs {wanted}")
            continue
        stem = title.partition(":")[0].lower().replace(" ", "-")
        pictures = _breakdowns(stem, chosen)
        if used := _utilisation(stem, chosen):
            pictures.append(used)
        if over_time := _over_time(stem, chosen, course_of):
            pictures.append(over_time)
        found.append(Section(title, pictures))
    if batches := _batches(cells, limits):
        found.append(Section("Figure 6: larger batches", [batches]))
    else:
        lacking.append("Figure 6 needs cells that differ in nothing but their batch (batches: [8, 32])")
    if scale := _largest_scale(cells):
        found.append(Section("Figure 7: with the most ranks", [scale]))
    else:
        lacking.append("Figure 7 needs data parallel cells")
    return [*found, *([Section("Figures that this matrix does not have", [lacking])] if lacking else [])]


# Figures 3 to 5


def _breakdowns(stem: str, cells: Sequence[Means]) -> list[Picture]:
    """Where steps go: one picture, or one for each model where there are many cells."""
    models = list(dict.fromkeys(each.cell.model for each in cells))
    if len(cells) <= MOST_BARS and len(models) > 1:
        return [_breakdown(stem, cells, models)]
    return [
        _breakdown(f"{stem}-{model}", [each for each in cells if each.cell.model == model], [model]) for model in models
    ]


def _breakdown(label: str, cells: Sequence[Means], models: Sequence[str]) -> Picture:
    shown = [each for model in models for each in cells if each.cell.model == model]
    how = COLOURED
    if len(shown) > MOST_BARS:
        how += f" Of {len(shown)} cells the first {MOST_BARS} are drawn; all stand in the table."
        shown = shown[:MOST_BARS]
    bars, before = [], ""
    for each in shown:
        bars.append(_bar(each, name(each.cell), heading="" if each.cell.model == before else each.cell.model))
        before = each.cell.model
    low, high = (pick(shown, key=lambda each: each.share) for pick in (min, max))
    if len(shown) == 1:
        see = f"Communication takes {low.share:.0%} of a step of {low.cell.model} with {name(low.cell)}."
    else:
        see = (
            f"Communication takes {low.share:.0%} of a step ({_whose(low, models)}) to {high.share:.0%} "
            f"({_whose(high, models)})."
        )
    return Picture(label, Bars(STEP, bars, _key(shown)), see, how)


def _whose(each: Means, models: Sequence[str]) -> str:
    return f"{each.cell.model}, {name(each.cell)}" if len(models) > 1 else name(each.cell)


def _utilisation(stem: str, cells: Sequence[Means]) -> Picture | None:
    """What hosts' links receive on average: what parts (e) to (h) of figures 3 and 4 come to. The paper's figure 5 has none."""
    known = [each for each in cells if each.cell.link_mbit and each.received > 0][:MOST_BARS]
    if not known:
        return None
    bars, before = [], ""
    for each in known:
        peak = each.mean(lambda run: run.receive_peak_mbit)
        share = 100 * each.received / each.cell.link_mbit
        told = f"{each.received:.0f} of {each.cell.link_mbit:g} Mbit/s"
        reach = (share, max(share, 100 * peak / each.cell.link_mbit))
        heading = "" if each.cell.model == before else each.cell.model
        bars.append(Bar(name(each.cell), [Part(share, "series-1")], told, heading=heading, spread=reach))
        before = each.cell.model
    low, high = (pick(known, key=lambda each: each.received / each.cell.link_mbit) for pick in (min, max))
    see = (
        f"A host's link is filled to {high.received / high.cell.link_mbit:.0%} at most, at {high.cell.link_mbit:g} Mbit/s, and "
        f"to {low.received / low.cell.link_mbit:.0%} at least, at {low.cell.link_mbit:g}."
    )
    how = (
        "What is received, by the counters of the interfaces, on average over whole steps; the line reaches to the highest tenth "
        "of a second."
    )
    axis = Axis("received, of the link's rate", "%", from_zero=True)
    return Picture(f"{stem}-link", Bars(axis, bars), see, how)


def _over_time(stem: str, cells: Sequence[Means], course_of: Callable[[Cell], Course | None]) -> Picture | None:
    """Parts (e) to (h) of figures 3 and 4: what a host receives over each network, of each model with the most ranks."""
    alike: dict[str, dict[Cell, list[Means]]] = {}
    for each in sorted(cells, key=lambda one: -one.cell.ranks):
        if each.is_linked:
            alike.setdefault(each.cell.model, {}).setdefault(_but_network(each.cell), []).append(each)
    looks: dict[str, Look] = {}
    panels: list[Panel] = []
    for model, by_rest in list(alike.items())[:MOST_PANELS]:
        most = max(cell.ranks for cell in by_rest)
        chosen = max((of for cell, of in by_rest.items() if cell.ranks == most), key=len)
        drawn = []
        for each in chosen[:MOST_CURVES]:
            if course := course_of(each.cell):
                label = network(each.cell)
                look = looks.setdefault(label, series(len(looks)))
                drawn.append(Curve(label, course.seconds, course.received, look))
        if drawn:
            title = f"({'efgh'[len(panels)]}) {model}, {size(chosen[0].cell)}"
            panels.append(Panel(title, Axis("time", "s"), Axis("received", "Mbit/s", from_zero=True), drawn))
    if not panels:
        return None
    told = ", ".join(f"{max(curve.y):.0f} Mbit/s ({curve.label})" for curve in panels[0].curves)
    see = f"A host receives by turns with computing, of {panels[0].title[4:]} at most {told}."
    how = f"The last {COURSE_S:g} seconds of a run's steps, by the counters of rank 0's host."
    return Picture(f"{stem}-over-time", Lines(panels), see, how)


def _but_network(cell: Cell) -> Cell:
    return replace(cell, transport="", link_mbit=0.0, flow_mbit=0.0, launch="")


# Figure 6


def _batches(cells: Sequence[Means], limits: Mapping[Kind, Limit]) -> Picture | None:
    """Communication's share of a step over the batch."""
    curves: dict[str, dict[str, list[Means]]] = {}
    for parallel in ("data", "pipeline"):
        # Weak and strong scaling are the same run where ranks and batch are.
        of = [each for each in cells if each.cell.parallel == parallel]
        found = [_by_batch(group) for group in groups(of, ["batch", "scaling"])]
        # Of many the most telling: those of a wide range of batches, and over slow networks.
        order = sorted((each for each in found if len(each) > 1), key=_tells)
        curves[parallel] = {f"{each[0].cell.model}, {_joined(each[0])}": each for each in order[:MOST_CURVES]}
    labels = list(dict.fromkeys(label for of in curves.values() for label in of))
    if not labels:
        return None
    looks = {label: series(index) for index, label in enumerate(labels)}
    panels, told, ends = [], [], False
    for parallel, title in (("data", "(a) data parallel"), ("pipeline", "(b) in a pipeline")):
        if not curves[parallel]:
            continue
        drawn = []
        for label, points in curves[parallel].items():
            last = points[-1].cell
            # Searches are made with processors' memory on this host.
            limit = limits.get(kind_of(last)) if (last.launch, last.device) == ("", "cpu") else None
            is_last = limit is not None and limit.batch == last.batch
            ends = ends or is_last
            end = f"full: {limit.mib} MiB" if limit is not None and is_last else ""
            x = [float(each.cell.batch) for each in points]
            drawn.append(Curve(label, x, [100 * each.share for each in points], looks[label], end=end))
        places = sorted({x for curve in drawn for x in curve.x})
        batch = Axis("batch", "sequences", is_log=True, ticks=places)
        panels.append(Panel(title, batch, Axis("communication", "% of a step", from_zero=True), drawn))
        widest = drawn[0]
        where, way = title.partition(" ")[2], "falls" if widest.y[-1] < widest.y[0] else "rises"
        told.append(
            f"{where} it {way} from {widest.y[0]:.0f} to {widest.y[-1]:.0f} % ({widest.label}, batch {widest.x[0]:.0f} to "
            f"{widest.x[-1]:.0f})"
        )
    see = f"Communication's share of a step with larger batches: {'; '.join(told)}."
    how = "The paper has at least 34 % data parallel; in a pipeline it has shares that rise with the batch."
    if ends:
        how += " A curve that is marked full ends with the largest batch for which ranks with so much memory have room."
    return Picture("figure-6", Lines(panels), see, how)


def _tells(points: Sequence[Means]) -> tuple[object, ...]:
    first, last = points[0].cell, points[-1].cell
    return -last.batch / first.batch, not first.link_mbit, first.link_mbit, -len(points), -first.ranks


def _by_batch(group: Sequence[Means]) -> list[Means]:
    found: dict[int, Means] = {}
    for each in group:
        same = found.get(each.cell.batch)
        found[each.cell.batch] = each if same is None else Means(same.cell, [*same.runs, *each.runs])
    return [found[batch] for batch in sorted(found)]


# Figure 7


def _largest_scale(cells: Sequence[Means]) -> Picture | None:
    """The largest data parallel job, beside smaller ones with the same batch on each rank."""
    data = [each for each in cells if each.cell.parallel == "data"]
    if not data:
        return None
    most = max(each.cell.ranks for each in data)
    top = max(
        (each for each in data if each.cell.ranks == most),
        key=lambda each: (
            parameters(each.cell.model),
            each.cell.batch,
            each.is_linked,
            -each.cell.link_mbit,
        ),
    )
    alike = [
        each
        for each in data
        if each.cell.model == top.cell.model
        and each.cell.batch * most == top.cell.batch * each.cell.ranks
        and _shape(each.cell) == _shape(top.cell)
    ]
    by_network: dict[str, dict[int, Means]] = {}
    for each in alike:
        by_network.setdefault(network(each.cell), {}).setdefault(each.cell.ranks, each)
    bars: list[Bar] = []
    drawn: list[Means] = []
    for joined, of in list(by_network.items())[:MOST_NETWORKS]:
        if most not in of:
            continue
        drawn += of.values()
        for ranks in sorted(of):
            heading = joined if ranks == min(of) else ""
            bars.append(_bar(of[ranks], f"{ranks} ranks, {of[ranks].cell.batch} sequences", heading=heading))
    few = min((each for each in alike if network(each.cell) == network(top.cell)), key=lambda each: each.cell.ranks)
    see = f"With {most} ranks communication takes {top.share:.0%} of a step of {top.cell.model} ({network(top.cell)})"
    see += f", with {few.cell.ranks} {few.share:.0%}." if few.cell.ranks < most else "."
    how = (
        f"The matrix's largest data parallel job, of {top.cell.batch // most} sequences a rank. The paper's has 16 GPUs, GPT-2 "
        "large and 12 sequences each: all-reduce takes 73 % of a step, about as with 8."
    )
    return Picture("figure-7", Bars(STEP, bars, _key(drawn)), see, how)


def _shape(cell: Cell) -> tuple[object, ...]:
    """What steps have in common, whatever the ranks."""
    return cell.micro_batch, cell.sequence, cell.checkpoint_every, cell.evaluate_every, cell.device


# Bars


def _bar(each: Means, label: str, *, heading: str = "") -> Bar:
    forward, backward = each.work("forward"), each.work("backward")
    step = each.step.value
    rest = step - forward - backward - each.mean(lambda run: run.communication_ms)
    computing = zip((forward, backward, max(0.0, rest)), WORK.values(), strict=True)
    # Neighbours of one colour have a line of the page's colour between them.
    moving = [(part, colour) for colour, parts in _moving(each).items() for part in parts]
    parts = [Part(value, colour) for value, colour in (*computing, *moving)]
    return Bar(label, parts, f"{step:.0f} ms, {each.share:.0%} still", heading=heading)


def _moving(each: Means) -> dict[str, tuple[float, float]]:
    """Wire and wait by colour, in the order of the key."""
    found = dict.fromkeys(COMMUNICATION.values(), (0.0, 0.0))
    for purpose, (wire, wait) in each.purposes.items():
        colour = COMMUNICATION.get(purpose, COMMUNICATION[REST])
        found[colour] = (found[colour][0] + wire, found[colour][1] + wait)
    return {colour: parts for colour, parts in found.items() if sum(parts) >= LEAST_MS}


def _key(cells: Sequence[Means]) -> list[Key]:
    """Of the work, and of what communication these cells have."""
    present = {colour for each in cells for colour in _moving(each)}
    moving = [Key(text, colour) for text, colour in COMMUNICATION.items() if colour in present]
    return [*(Key(text, colour) for text, colour in WORK.items()), *moving]


def _short(each: Means) -> str:
    return f"{each.cell.ranks} ranks, {each.cell.parallel}, {network(each.cell)}"


def _joined(each: Means) -> str:
    told = f"{each.cell.ranks} ranks" + (f" by {each.cell.micro_batch}" if each.cell.micro_batch else "")
    told += f", {network(each.cell)}" + (f", {each.cell.sequence} tokens" if each.cell.sequence else "")
    return told + pauses(each.cell)


WORK = {"forward": "grey-1", "backward": "grey-2", "optimizer and others": "grey-3"}
REST = "other communication"
COMMUNICATION = {SYNC: "series-1", FORWARD: "series-2", BACKWARD: "series-3", EMBEDDING: "series-4", REST: "series-5"}
"""The purposes that the paper's figures 3 and 5 tell apart."""
COLOURED = (
    "Coloured is communication for which ranks stand still, by purpose: first wire (bytes move), then, behind a thin gap, wait "
    "(another rank is not there yet)."
)
STEP = Axis("time of a step", "ms")
FIRST_BARS, MOST_BARS, MOST_CURVES, MOST_NETWORKS, MOST_PANELS = 4, 32, 4, 4, 4
"""`FIRST_BARS` fit on the first screen of a phone."""
