"""What the page and `penstock top` show of a job: texts, made once for both. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from penstock import numbers
from penstock.live.view import Heard, Snapshot, coflows

__all__ = ["event"]


def event(job: Snapshot) -> dict[str, Any]:
    """The job as it goes over ``/events``, as JSON: ``state``, ``answer`` (one line), ``setting``, ``alarms``, ``cards`` (number,
    what, note), ``history`` (step times in ms), ``span`` (a line about it), ``tables`` (title, note, columns, rows) and
    ``complaints``."""
    return {
        "penstock": 1,
        "state": job.state,
        "answer": _answer(job),
        "setting": _setting(job),
        "alarms": _alarms(job),
        "cards": _cards(job),
        "history": [round(1e3 * each, 3) for each in job.history],
        "span": _span(job.history),
        "tables": [
            table
            for table in (_ranks(job), _streams(job), _groups(job), _coflows(job), _aggregated(job))
            if table["rows"]
        ],
        "complaints": [
            f"{time.strftime('%H:%M:%S', time.localtime(when))} rank {rank}: {text}"
            for when, rank, text in job.complaints
        ],
    }


def _answer(job: Snapshot) -> str:
    if job.state == "ended":
        return f"The job has ended after {numbers.plural(job.steps, 'step')}: {job.about['end']}"
    if job.state != "running":
        return f"Between two groups, after {numbers.plural(job.steps, 'step')}"
    trouble = sorted({*job.silent, *job.lost})
    if trouble:
        return f"Rank {', '.join(map(str, trouble[:8]))} {'is' if len(trouble) == 1 else 'are'} silent or lost"
    if job.median_s is None:
        return f"{numbers.plural(job.world, 'rank')}, no step yet"
    if job.stuck_s is not None:
        waits = f": the others wait for rank {job.straggler.rank}" if job.straggler else ""
        return f"No step for {numbers.duration(job.stuck_s)}{waits}"
    told = f"A step takes {numbers.duration(job.median_s)}"
    if job.straggler is not None:
        told += f"; the others wait {numbers.duration(job.straggler.late_s)} of it for rank {job.straggler.rank}"
    return told


def _span(history: Sequence[float]) -> str:
    if len(history) < 2:
        return ""
    least, most = numbers.duration(min(history)), numbers.duration(max(history))
    return f"Step time in the last {len(history)} looks: {least} to {most}."


def _setting(job: Snapshot) -> str:
    about = job.about
    again = f", restarted {numbers.plural(about['generation'], 'time')}" if about["generation"] else ""
    return (
        f"{numbers.plural(job.world, 'rank')}{again}; rank 0 is process {about['pid']} on {about['host']}, up for "
        f"{numbers.duration(about['up_s'])}; penstock {about['version']}"
    )


def _alarms(job: Snapshot) -> list[str]:
    told = [f"{job.deaf}: no other rank is heard of"] if job.deaf else []
    told += [f"rank {rank} is silent since {numbers.duration(age)}" for rank, age in list(job.silent.items())[:8]]
    told += [f"rank {rank} is lost: {why}" for rank, why in list(job.lost.items())[:8]]
    failed: dict[str, str] = {}
    for each in job.ranks:
        for name, _, _, _, why in (each.numbers or {}).get("groups", ()):
            if why:
                failed.setdefault(name, why)
    return told + [f"group {name} has failed: {why}" for name, why in list(failed.items())[:4]]


def _cards(job: Snapshot) -> list[list[str]]:
    cards = []
    if job.median_s is not None:
        last = "" if job.latest_s is None else f"the last one {numbers.duration(job.latest_s)}"
        cards.append([numbers.duration(job.median_s), "a step (median of the last look)", last])
    done = f"{job.steps:,} so far"
    for name in ("tokens", "samples"):
        if job.rates.get(name):
            cards.append([numbers.number(_rounded(job.rates[name])), f"{name} a second", "of all ranks"])
    if "steps" in job.rates:
        cards.append([numbers.number(_rounded(job.rates["steps"])), "steps a second", done])
    if job.links:
        link = job.links[0]
        of = "of the interfaces' speed" if link.is_speed else "of the highest rate seen"
        busiest = "" if len(job.links) == 1 else f" on {link.host.partition('/')[0][:24]}, the busiest host"
        if link.is_telling:
            cards.append(
                [numbers.share(link.share), f"of the link{busiest}", f"{of}: {numbers.byte_rate(link.limit)} one way"]
            )
    if job.straggler is not None and job.stuck_s is None:
        late = numbers.duration(job.straggler.late_s)
        cards.append(
            [f"rank {job.straggler.rank}", "is waited for", f"{late} {'a step' if job.median_s else 'a second'}"]
        )
    return cards


def _ranks(job: Snapshot) -> dict[str, Any]:
    """The worst first where there are too many for a table."""
    shown = job.ranks
    if len(shown) > _MOST_ROWS:

        def trouble(each: Heard) -> tuple[Any, ...]:
            share = (each.numbers or {}).get("in_flight")
            return (
                each.rank not in job.silent and each.rank not in job.lost,
                1.0 if share is None else share,
                each.rank,
            )

        shown = sorted(sorted(shown, key=trouble)[:_MOST_ROWS], key=lambda each: each.rank)
    note = "Under way: the share of the time with a collective of the rank. The rank that the others wait for has the least. "
    note += "Numbers of other ranks than 0 are up to a second older."
    if len(shown) < job.world:
        note += f" {len(shown)} of {job.world} ranks: the silent ones, and those that are waited for."
    columns = ["rank", "state", "step", "under way", "sent", "received", "of tensors", "steps", "host", "waits for"]
    return {"title": "Ranks", "note": note, "columns": columns, "rows": [_rank(job, each) for each in shown]}


def _rank(job: Snapshot, each: Heard) -> list[str]:
    found = each.numbers
    if each.rank in job.silent:
        state = f"silent since {numbers.duration(job.silent[each.rank])}"
    elif job.deaf and each.rank != 0:
        state = "not heard of"
    elif found is None:
        state = "not heard of yet"
    else:
        state = "lost" if each.rank in job.lost else found["state"]
    if found is None:
        return [str(each.rank), state, *[""] * 8]
    waits = ""
    # Operations of a step are under way all the time; one that lasts is worth a word.
    if found["waits"] is not None and found["waits"][1] >= _LASTS_S and state == "running":
        what, since_s, whom = found["waits"]
        waits = f"{what}, since {numbers.duration(since_s + job.age_s[each.rank])}{': ' if whom else ''}{whom}"
    is_running = state == "running"
    return [
        str(each.rank),
        state,
        "" if found["median_s"] is None else numbers.duration(found["median_s"]),
        "" if found["in_flight"] is None or not is_running else numbers.share(found["in_flight"]),
        numbers.byte_rate(found["sent_per_s"]) if is_running else "",
        numbers.byte_rate(found["received_per_s"]) if is_running else "",
        "" if found["reduced_per_s"] is None or not is_running else numbers.byte_rate(found["reduced_per_s"]),
        f"{found['steps']:,.0f}",
        found["host"].partition("/")[0],
        waits,
    ]


def _streams(job: Snapshot) -> dict[str, Any]:
    """To which peers, how: the busiest."""
    rows = []
    for each in job.ranks:
        if each.numbers is None or each.rank not in job.live:
            continue
        for peer, medium, count, sent, received, trip, slowest, fastest, repeated, read in each.numbers["peers"]:
            through = medium if medium != "tcp" else numbers.plural(int(count), "TCP stream")
            each_stream = (
                ""
                if medium != "tcp" or not fastest
                else f"{numbers.byte_rate(slowest)} to {numbers.byte_rate(fastest)}"
            )
            row = [
                f"{each.rank} → {int(peer)}",
                through,
                numbers.byte_rate(sent),
                numbers.byte_rate(received + read),
                each_stream,
            ]
            row += [numbers.duration(trip) if trip else "", f"{int(repeated):,}" if medium == "tcp" else ""]
            rows.append((-(sent + received + read), row))
    rows.sort(key=lambda one: one[0])
    resent = sum(
        max((each.numbers or {}).get("retransmitted_per_s", 0.0) for each in job.ranks if _host(each) == host)
        for host in {_host(each) for each in job.ranks if each.numbers is not None}
    )
    note = (
        "Rates of a stream are those that the engine expects of it. What goes through memory the receiver reads: it counts as "
        f"received. TCP of these hosts sends {numbers.number(_rounded(resent))} segments a second again, for all programs."
    )
    if len(rows) > _MOST_PAIRS:
        note += f" The busiest {_MOST_PAIRS} of {len(rows)} pairs."
    columns = ["from → to", "through", "sent", "received", "a stream", "round trip", "frames sent again"]
    return {"title": "Streams", "note": note, "columns": columns, "rows": [row for _, row in rows[:_MOST_PAIRS]]}


def _groups(job: Snapshot) -> dict[str, Any]:
    """As rank 0 sees them."""
    found = next((each.numbers for each in job.ranks if each.rank == 0 and each.numbers is not None), None)
    rows = [] if found is None else found["groups"]
    columns = ["group/channel", "ranks", "operations", "under way"]
    note = "Groups and channels of rank 0 and their operations. Priorities are not counted."
    return {
        "title": "Operations",
        "note": note,
        "columns": columns,
        "rows": [[row[0], f"{row[1]:.0f}", f"{row[2]:,.0f}", f"{row[3]:.0f}"] for row in rows],
    }


def _coflows(job: Snapshot) -> dict[str, Any]:
    """Those with the most bytes under way."""
    found = coflows(job)
    note = "What belongs to a coflow (penstock.priority) and was under way at the last look, of all ranks together."
    most = max((each.numbers["coflows_active"] or 0 for each in job.ranks if each.numbers is not None), default=0)
    if max(most, len(found)) > min(_MOST_COFLOWS, len(found)):
        note += f" The largest; a rank has {most:.0f}."
    return {
        "title": "Coflows",
        "note": note,
        "columns": ["coflow", "ranks", "operations", "of tensors"],
        "rows": [
            [str(each.number), str(each.ranks), f"{each.operations:,}", numbers.size(each.bytes)]
            for each in found[:_MOST_COFLOWS]
        ],
    }


def _aggregated(job: Snapshot) -> dict[str, Any]:
    rows = []
    for each in job.ranks[:_MOST_ROWS]:
        if each.numbers is None or each.rank not in job.live:
            continue
        for group, server, parent, rate, again, bypasses, why in each.numbers["aggregated"]:
            way = f"fell back: {why}" if why else parent or "straight"
            rows.append(
                [str(each.rank), group, server, way, numbers.byte_rate(rate), f"{again:,.0f}", f"{bypasses:.0f}"]
            )
    columns = ["rank", "group", "server", "by way of", "of tensors", "blocks again", "bypasses"]
    return {"title": "Aggregators and servers", "note": "", "columns": columns, "rows": rows[:_MOST_ROWS]}


def _host(each: Heard) -> str:
    return str((each.numbers or {}).get("host", ""))


def _rounded(value: float) -> float:
    """Three digits."""
    return float(f"{value:.3g}") if value < 1000 else round(value)


_MOST_ROWS = 64
_MOST_PAIRS = 32
_MOST_COFLOWS = 8
_LASTS_S = 1.0
