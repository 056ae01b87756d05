"""A breakdown as a page: what it says and draws. Pure; `penstock.reports` decides how it looks."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from penstock.numbers import duration, plural, share
from penstock.profiling import utilisation
from penstock.profiling.advice import Advice, Change
from penstock.profiling.breakdown import MEASURING, OTHER, Breakdown, Share
from penstock.profiling.record import Record
from penstock.profiling.utilisation import Drop
from penstock.reports import (
    Axis,
    Bar,
    Bars,
    Card,
    Curve,
    Key,
    Lines,
    Next,
    Page,
    Panel,
    Part,
    Picture,
    Section,
    Table,
    series,
)
from penstock.reports.terminal import print_first_screen
from penstock.texts import harmless
from penstock.tools.profile import resources, shown, steps
from penstock.tools.profile.shown import Unit, still_ns, unit

__all__ = ["first_screen", "page", "text"]


def text(
    breakdown: Breakdown, records: Sequence[Record], advice: Advice | None = None, fallen: Sequence[Drop] = ()
) -> str:
    """For a terminal of 80 columns: the page's first screen, then the tables."""
    out = io.StringIO()
    # A width of its own, so that what is piped into a file is as what is seen.
    console = Console(file=out, width=WIDTH, color_system=None, highlight=False, markup=False, emoji=False)
    print_first_screen(first_screen(breakdown, records, advice), console)
    console.print()
    shown.print_details(breakdown, advice, console, _best(advice), fallen)
    return "\n".join(line.rstrip() for line in harmless(out.getvalue()).splitlines()) + "\n"


def page(
    breakdown: Breakdown, records: Sequence[Record], advice: Advice | None = None, fallen: Sequence[Drop] = ()
) -> Page:
    """The report."""
    shares = [each for each in breakdown.shares if each.steps]
    sections = []
    if shares:
        blocks: list[str | list[str] | Picture | Table] = [shown.division(breakdown), HOW_DIVIDED]
        if len(shares) > FIRST_BARS:
            blocks.insert(0, bars("every", shares, MORE_BARS))
        sections.append(Section("Where a step goes", blocks))
        told: list[str | list[str] | Picture | Table] = [shown.communication(breakdown)]
        if waits := shown.waited_for(breakdown):
            told.append(waits)
        sections.append(Section("Communication", told))
        if records:  # a file of sums has no moments at all
            if (every := steps.lengths(records)) is not None:
                sections.append(Section("Every step", [every]))
            sections.append(Section("What the interfaces carry", carried(breakdown, records, fallen)))
            if used := resources.pictures(breakdown, records):
                sections.append(Section("Utilisation", used))
            sections.append(Section("One step, moment by moment", moments(breakdown, shares, records)))
    elif breakdown.shares:
        sections.append(Section("Communication", [shown.collectives(breakdown)]))
    if advice is not None and (advice.causes or advice.changes):
        why: list[str | list[str] | Picture | Table] = []
        if advice.causes:
            why.append(shown.causes(breakdown, advice))
        if advice.changes:
            why += [shown.changes(breakdown, advice), HOW_PREDICTED]
        sections.insert(1 if shares else 0, Section("What to change", why))
    remarks = [*breakdown.notes, *_clocks(breakdown)]
    if remarks:
        sections.append(Section("How this was measured", [remarks]))
    if breakdown.problems and breakdown.shares:
        sections.append(Section("Problems", [list(breakdown.problems)]))
    return replace(first_screen(breakdown, records, advice), cards=cards(breakdown, shares), sections=sections)


# The first screen


def first_screen(breakdown: Breakdown, records: Sequence[Record], advice: Advice | None = None) -> Page:
    """A page without sections. Its next step is the best change of the ``advice`` that there is something to do for; without one,
    what the largest part suggests."""
    shares = [each for each in breakdown.shares if each.steps]
    best = _best(advice)
    next_step = following(breakdown, shares) if best is None else _as_next(best)
    if breakdown.failures and max((each.steps for each in shares), default=0) < FEW_STEPS:
        next_step = Next("Mend what ended the job: figures of so few steps say little.")
    return Page(
        kind="penstock profile",
        answer=shown.answer(breakdown),
        picture=bars("step", shares, FIRST_BARS) if shares else sums(breakdown),
        next=next_step,
        setting=setting(breakdown, shares, records),
        problems=[
            f"Problem: {each}." for each in (*breakdown.failures, *(() if breakdown.shares else breakdown.problems))
        ],
    )


def bars(name: str, shares: Sequence[Share], most: int) -> Picture:
    """A step of each rank; of many ranks, of some from the least to the most that they stand still, and the mean."""
    chosen = list(shares)
    in_unit = unit(sum(each.unprofiled_ns for each in shares) / len(shares))
    drawn = []
    how = "Grey is the rank's own work."
    if len(shares) > most:
        order = sorted(shares, key=still_ns)
        count = most - 1
        chosen = [order[round(index * (len(order) - 1) / (count - 1))] for index in range(count)]
        drawn.append(_bar("mean of all", _mean_parts(shares), in_unit))
        how += f" Of {len(shares)} ranks {count} are shown, from the one that stands still least to the one that does most."
    drawn += [_bar(f"rank {each.rank}", _parts(each), in_unit) for each in chosen]
    used = {colour for each in shares for colour, time in _parts(each).items() if time}
    key = [Key(text, colour) for text, colour in KEY if colour in used]
    low, high = (pick(shares, key=_still) for pick in (min, max))
    if len(shares) == 1:
        see = f"Rank {low.rank} stands still for {share(_still(low))} of its step."
    elif share(_still(low)) == share(_still(high)):
        see = f"All ranks stand still for {share(_still(low))} of their step."
    else:
        see = (
            f"Rank {high.rank} stands still most, {share(_still(high))} of its step, and rank {low.rank} "
            f"least, {share(_still(low))}."
        )
    return Picture(name, Bars(Axis("time of a step", in_unit.name), drawn, key), see, how)


def sums(breakdown: Breakdown) -> Picture:
    """Of a file without steps: the time in each collective."""
    totals = {
        name: sum(
            each.communication[name].hidden_wire_ns + each.communication[name].exposed_ns
            for each in breakdown.shares
            if name in each.communication
        )
        / len(breakdown.shares)
        for name in shown.purposes(breakdown.shares)
    }
    in_unit = unit(max(totals.values(), default=1e6))
    order = sorted(totals, key=totals.__getitem__, reverse=True)[:FIRST_BARS]
    drawn = [
        Bar(name, [Part(totals[name] / in_unit.ns, "series-1")], duration(totals[name] / 1e9)) for name in order
    ] or [Bar("nothing", [Part(0.0, "series-1")], "no step was recorded")]
    see = f"{order[0]} takes most of the time in collectives." if order else "There is nothing to show."
    how = "Mean of a process over the whole file." if order else "The problems above say why."
    return Picture("sums", Bars(Axis("time in collectives", in_unit.name), drawn), see, how)


def _best(advice: Advice | None) -> Change | None:
    """The first of the ranked list that says what to do."""
    return None if advice is None else next((each for each in advice.changes if each.how), None)


def _as_next(best: Change) -> Next:
    told = []
    if shown.tells_cause(best) and best.cause is not None:
        told.append(f"{best.cause.text[:1].upper()}{best.cause.text[1:]}.")
    if best.prediction is not None:
        after, before = duration(best.prediction.after_ns / 1e9), duration(best.prediction.before_ns / 1e9)
        told.append(
            f"With {best.what} a step should take {after} instead of {before} (±{100 * best.prediction.error:.0f} %)."
        )
    return Next(" ".join(told), best.how)


def following(breakdown: Breakdown, shares: Sequence[Share]) -> Next:
    """What the largest part of a step suggests."""
    if not shares:
        if breakdown.shares:
            return Next("See what steps these collectives are in.", "penstock profile -- torchrun ... train.py")
        return Next("Profile a script that steps an optimizer.", "penstock profile -- torchrun ... train.py")
    step = sum(each.unprofiled_ns for each in shares) or 1.0
    wire = sum(moved.exposed_wire_ns for each in shares for moved in each.communication.values())
    waits = sum(moved.exposed_wait_ns for each in shares for moved in each.communication.values())
    loading = sum(each.work.get("loading", 0.0) for each in shares)
    most = max(wire, waits, loading)
    if most < 0.05 * step:
        return Next("Look at the operators: this step is computation. A trace (--perfetto) shows them.")
    if most == loading:
        return Next("Loading is the largest loss: give the loader more workers.", "DataLoader(..., num_workers=4)")
    if most == waits:
        pipeline = sum(moved.exposed_wait_ns for each in shares for moved in each.bubbles)
        if pipeline > 0.5 * waits:
            return Next("The wait is the pipeline's bubble: more micro-batches in a step make its share smaller.")
        return Next("Ranks wait for each other: see below for whom, and compare its bar with the others.")
    return Next("See how much of the link the backend fills.", "penstock doctor --links")


def setting(breakdown: Breakdown, shares: Sequence[Share], records: Sequence[Record]) -> str:
    if not shares:
        return f"Processes that were seen: {len(breakdown.shares)}."
    count = max(each.steps for each in shares)
    sampled = max(each.sampled for each in shares)
    hosts = len({record.header.host for record in records})
    where = plural(len(shares), "rank") + (f" on {plural(hosts, 'host')}" if hosts else "")
    about = records[0].header.about if records else {}
    what = [str(about[key])[:120] for key in ("command", "reader", "backend") if about.get(key)]
    said = f" ({', '.join(what)})" if what else ""
    seen = f", {sampled} of them seen by torch's profiler" if sampled else ""
    return " ".join(filter(None, [f"{where}{said}; mean of {plural(count, 'step')}{seen}.", shown.left_out(breakdown)]))


def cards(breakdown: Breakdown, shares: Sequence[Share]) -> list[Card]:
    if not shares:
        return []
    step = sum(each.unprofiled_ns for each in shares) / len(shares)
    found = [Card(duration(step / 1e9), "a step", f"{1e9 / step:.3g} a second" if step else "")]
    if rate := shown.examples(breakdown):
        found.append(Card(rate, "examples a second", "of all ranks"))
    for text, name in (("wire, exposed", "exposed_wire_ns"), ("wait, exposed", "exposed_wait_ns")):
        time = sum(getattr(moved, name) for each in shares for moved in each.communication.values()) / len(shares)
        found.append(Card(share(time / step) if step else "0%", text, f"{duration(time / 1e9)} a step"))
    hidden = sum(
        moved.hidden_wire_ns + moved.hidden_wait_ns for each in shares for moved in each.communication.values()
    ) / len(shares)
    if hidden:
        found.append(Card(duration(hidden / 1e9), "hidden communication", "beside the rank's own work"))
    return found


# Below


def carried(
    breakdown: Breakdown, records: Sequence[Record], fallen: Sequence[Drop] = ()
) -> list[str | list[str] | Picture | Table]:
    """Rx and Tx over time, of the interfaces that carried most, and what explains where they fall; and what ranks of a host read
    from one another's memory."""
    found = steps.rates(records, breakdown)
    memory = _through_memory(breakdown, records)
    if not found:
        return memory or [
            "There are no readings of interfaces. `penstock profile -- COMMAND` takes them by itself every 100 ms; traces and "
            "logs of other tools have none."
        ]
    kept = found[:MOST_INTERFACES]
    first = min(each.rx.points[0][0][0] for each in kept)
    several = len({each.host for each in kept}) > 1
    x, y = Axis("since the first reading", "seconds", from_zero=True), Axis("rate", "MB/s", from_zero=True)
    panels = []
    for title, of in (("received", "rx"), ("sent", "tx")):
        curves = [
            Curve(
                f"{each.host} {each.interface}" if several else each.interface,
                [(end - first) / 1e9 for (_, end), _ in utilisation.thinned(getattr(each, of).points, MOST_POINTS)],
                [rate / 1e6 for _, rate in utilisation.thinned(getattr(each, of).points, MOST_POINTS)],
                series(index),
                is_steps=True,
                width_px=1.4,
            )
            for index, each in enumerate(kept)
        ]
        panels.append(Panel(title, x, y, curves))
    top = max(kept, key=lambda each: each.highest)
    see = f"{top.interface} of {top.host} carries {top.highest / 1e6:.3g} MB/s at most, {8 * top.highest / 1e9:.2g} Gbit/s."
    how = "By the counters of the interfaces, each way, whatever process sends."
    if len(found) > len(kept):
        how += f" Of {len(found)} interfaces those {len(kept)} that carried most are shown."
    blocks: list[str | list[str] | Picture | Table] = [Picture("interfaces", Lines(panels), see, how)]
    if fallen:
        blocks += ["Where one carries less than half of what it mostly does:", _fallen(fallen, first)]
    return blocks + memory


def _through_memory(breakdown: Breakdown, records: Sequence[Record]) -> list[str | list[str] | Picture | Table]:
    found = utilisation.memory_reads(records, breakdown)[:MOST_INTERFACES]
    if not found:
        return []
    first = min(each.points[0][0][0] for each in found)
    curves = [
        Curve(
            each.host,
            [(end - first) / 1e9 for (_, end), _ in utilisation.thinned(each.points, MOST_POINTS)],
            [rate / 1e6 for _, rate in utilisation.thinned(each.points, MOST_POINTS)],
            series(index),
            is_steps=True,
            width_px=1.4,
        )
        for index, each in enumerate(found)
    ]
    x, y = Axis("since the first reading", "seconds", from_zero=True), Axis("rate", "MB/s", from_zero=True)
    rates = {each.host: max(rate for _, rate in each.points) for each in found}
    top = max(rates, key=rates.__getitem__)
    see = f"Ranks of {top} read {rates[top] / 1e6:.3g} MB/s at most from one another's memory."
    how = "By the counters of Penstock's engine, all ranks of a host together. No interface carries these bytes."
    return [Picture("memory", Lines([Panel("read from memory", x, y, curves)]), see, how)]


def _fallen(found: Sequence[Drop], first_ns: int) -> list[str]:
    told = [
        shown.drop(each, f" from second {(each.interval[0] - first_ns) / 1e9:.1f} on") for each in found[:MOST_DROPS]
    ]
    if len(found) > MOST_DROPS:
        told.append(f"and {len(found) - MOST_DROPS} more")
    return told


def moments(
    breakdown: Breakdown, shares: Sequence[Share], records: Sequence[Record]
) -> list[str | list[str] | Picture | Table]:
    """A sampled step as a timeline."""
    if not any(record.samples for record in records):
        return ["There is no sample of a step: torch's profiler runs in a few steps only. Let the script run longer."]
    order = sorted(shares, key=still_ns)
    ranks = [each.rank for each in shares]
    if len(ranks) > MOST_ROWS:
        ranks = sorted({order[round(index * (len(order) - 1) / (MOST_ROWS - 1))].rank for index in range(MOST_ROWS)})
    picture = steps.timeline(records, breakdown, ranks, COLOUR_OF, KEY)
    return [picture] if picture else ["No step was sampled on these ranks."]


def _clocks(breakdown: Breakdown) -> list[str]:
    if len(breakdown.offsets_ns) < 2:
        return []
    told = [
        f"{host}: {offset / 1e6:+.3f} ms, wrong by {error / 1e6:.3f} ms at most"
        for host, (offset, error) in list(breakdown.offsets_ns.items())[1 : MOST_HOSTS + 1]
    ]
    return [
        f"Clocks: what is added to each host's, to have that of {next(iter(breakdown.offsets_ns))}. {'; '.join(told)}."
    ]


# Parts of a bar


def _bar(label: str, parts: dict[str, float], in_unit: Unit) -> Bar:
    step = sum(parts.values())
    still = parts[WIRE] + parts[WAIT]
    told = f"{in_unit.text(step)} {in_unit.name}, {share(still / step) if step else '0%'} still"
    return Bar(label, [Part(time / in_unit.ns, colour) for colour, time in parts.items() if time], told)


def _still(one: Share) -> float:
    """The share of its step for which a rank stands still."""
    return still_ns(one) / (one.unprofiled_ns or 1)


def _parts(one: Share) -> dict[str, float]:
    """Time by colour, without what the profiler itself takes."""
    found = {colour: 0.0 for _, colour in KEY}
    for phase, time in one.work.items():
        if phase == MEASURING:
            continue
        found[COLOUR_OF.get(phase, COLOUR_OF[OTHER])] += time
    found[WIRE] = sum(each.exposed_wire_ns for each in one.communication.values())
    found[WAIT] = sum(each.exposed_wait_ns for each in one.communication.values())
    return found


def _mean_parts(shares: Sequence[Share]) -> dict[str, float]:
    every = [_parts(each) for each in shares]
    return {colour: sum(each[colour] for each in every) / len(every) for colour in every[0]}


WIRE, WAIT = "series-1", "series-2"
KEY = (
    ("forward", "grey-1"),
    ("backward", "grey-2"),
    ("optimizer", "grey-3"),
    ("loading, evaluation, checkpoint", "series-3"),
    ("other", "series-4"),
    ("wire", WIRE),
    ("wait", WAIT),
)
COLOUR_OF = {
    "forward": "grey-1",
    "backward": "grey-2",
    "unscale": "grey-3",
    "inf check": "grey-3",
    "clip": "grey-3",
    "optimizer": "grey-3",
    "loading": "series-3",
    "evaluation": "series-3",
    "checkpoint": "series-3",
    "profiler": "series-4",
    OTHER: "series-4",
}
HOW_DIVIDED = (
    "Times are a rank's mean step. Wire: all ranks of an operation are there, bytes move, and this rank stands still. Wait: it "
    "stands still because a rank is not there yet. What runs beside a rank's own work costs no time and is not in this table."
)
HOW_PREDICTED = (
    "Computed from sampled steps: what the training threads did stays, and operations take as long as the changed network makes "
    "them. The error is how far the model is from the mean step, how far that is chance, and how far samples differ; computing "
    "that becomes slower or faster is not in it. Without an error it is what a cause's rule expects at most. `penstock profile "
    "--apply` makes the first predicted change that needs none of the script, and says how far off its prediction was."
)
WIDTH = 80
FIRST_BARS, MORE_BARS, MOST_ROWS, MOST_INTERFACES, MOST_HOSTS, MOST_DROPS = 7, 16, 6, 5, 16, 12
FEW_STEPS = 3
"""`FIRST_BARS` fit on the first screen of a phone, between the answer and the next step."""
MOST_POINTS = 300
