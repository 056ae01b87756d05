"""Holds the ranks' reports against what the program allows. Pure: reports in, complaints out."""

from __future__ import annotations

import re
from typing import Any

Report = dict[str, Any]


def judge(program: dict[str, Any], reports: dict[int, Report | None]) -> list[str]:
    """What is wrong; nothing if all is as it must be. A report of None: the rank died or did not end."""
    found = []
    for rank, report in reports.items():
        if report is not None:
            found += [f"rank {rank}: {text}" for text in report["complaints"]]
    found += _same_bits(reports)
    found += _barriers(reports)
    wrong = program["wrong"]
    if wrong is None:
        for rank, report in reports.items():
            if report is None:
                found.append(f"rank {rank} died")
                continue
            for end in report["ends"]:
                if "kinds" in end:
                    what = program["calls"].get(end["call"], {}).get("call", "")
                    found.append(
                        f"rank {rank}: call {end['call']} ({what}): {end['step']}: {end['kinds'][0]}: {end['text']}"
                    )
        return found
    return found + _judge_wrong(program, wrong, reports)


def _same_bits(reports: dict[int, Report | None]) -> list[str]:
    found, seen = [], {}
    for rank, report in reports.items():
        for name, digest in (report or {"digests": {}})["digests"].items():
            first = seen.setdefault(name, (rank, digest))
            if first[1] != digest:
                found.append(f"call {name}: ranks {first[0]} and {rank} hold different bits")
    return found


def _barriers(reports: dict[int, Report | None]) -> list[str]:
    """Nobody leaves a barrier before the last one has come."""
    found, came, left = [], {}, {}
    for rank, report in reports.items():
        for end in report["ends"] if report else []:
            if "from_s" not in end or "kinds" in end:
                continue
            if end["step"] == "issue":
                came[end["call"]] = max(came.get(end["call"], (0.0, 0)), (end["from_s"], rank))
            else:
                left[end["call"]] = min(left.get(end["call"], (float("inf"), 0)), (end["to_s"], rank))
    for name, (at_s, rank) in left.items():
        if name in came and at_s < came[name][0]:
            found.append(f"call {name}: rank {rank} left the barrier before rank {came[name][1]} came")
    return found


def _judge_wrong(program: dict[str, Any], wrong: dict[str, Any], reports: dict[int, Report | None]) -> list[str]:
    """Errors are of the kinds that the deviation allows, name an operation and a rank, and come in time; and the deviation does
    not go by unseen."""
    allowed, limit_s, must = _ALLOWED[wrong["kind"]]
    if wrong["kind"] == "missing" and _blocks_unseen(program, wrong):
        allowed, limit_s = (*allowed, "Timeout"), max(limit_s, program["timeout_s"] + _SLACK_S)
    found = []
    errors: list[tuple[int, dict[str, Any]]] = []
    for rank, report in reports.items():
        if report is None:
            if not (wrong["kind"] == "kill" and rank == wrong["rank"]):
                found.append(f"rank {rank} died")
            continue
        for end in report["ends"]:
            if "kinds" in end:
                errors.append((rank, end))
            if end["seconds"] > limit_s:
                found.append(
                    f"rank {rank}: call {end['call']}: {end['step']} took {end['seconds']} s, more than {limit_s} s"
                )
    group = program["calls"][wrong["call"]]["group"]
    for rank, end in errors:
        spec = program["calls"].get(end["call"], {})
        text = f"rank {rank}: call {end['call']} ({spec.get('call', end['step'])}): {end['kinds'][0]}: {end['text']}"
        if not any(kind in allowed for kind in _kinds(end)):
            found.append(f"not an error that a wrong {wrong['kind']} allows ({', '.join(allowed)}): {text}")
        elif "rank" not in end["text"]:
            found.append(f"an error that names no rank: {text}")
        elif must == "mismatch" and spec.get("group", group) != group:
            found.append(f"an error in another group than {group}: {text}")
    if must == "mismatch" and not any({"Mismatch", "Config"} & set(_kinds(end)) for _, end in errors):
        found.append(f"nobody noticed the wrong {wrong['kind']} of rank {wrong['rank']} in call {wrong['call']}")
    if must == "timeout" and not any("Timeout" in _kinds(end) for _, end in errors):
        found.append(f"nobody noticed that rank {wrong['rank']} came too late to call {wrong['call']}: no time-out")
    return found


def _blocks_unseen(program: dict[str, Any], wrong: dict[str, Any]) -> bool:
    """Whether the rank that leaves a call out waits for others before it makes a later collective of that group: they may wait
    for its call meanwhile, and neither issues anything that could be compared."""
    group = program["calls"][wrong["call"]]["group"]
    for step in program["steps"][wrong["rank"]]:
        if step[0] not in ("issue", "call", "wait") or int(step[1]) <= int(wrong["call"]):
            continue
        spec = program["calls"][step[1]]
        is_compared = spec["group"] == group and spec["call"] not in (
            "message",
            "exchange",
            "new_group",
            "destroy_group",
        )
        if is_compared:
            return False
        if step[0] in ("call", "wait"):
            return True
    return False


# Of the ranks of a pool. Deaths of processes are known by their sockets at once, but not always.
PEER_TIMEOUT_S = 10
# How much later than promised a step may end on a machine that does much else.
_SLACK_S = 10.0
# By deviation: the errors that ranks may get, how long any step may take, and what must be seen.
_ALLOWED: dict[str, tuple[tuple[str, ...], float, str]] = {
    "count": (("Mismatch", "Config"), _SLACK_S, "mismatch"),
    "dtype": (("Mismatch", "Config"), _SLACK_S, "mismatch"),
    "reduce": (("Mismatch",), _SLACK_S, "mismatch"),
    "root": (("Mismatch",), _SLACK_S, "mismatch"),
    "call": (("Mismatch",), _SLACK_S, "mismatch"),
    "splits": (("Mismatch", "Config"), _SLACK_S, "mismatch"),
    "order": (("Mismatch",), _SLACK_S, "mismatch"),
    "missing": (("Mismatch", "PeerLost", "Closed"), PEER_TIMEOUT_S + _SLACK_S, ""),
    "leave": (("PeerLost", "Closed", "Refused"), PEER_TIMEOUT_S + _SLACK_S, ""),
    "kill": (("PeerLost", "Closed", "Refused"), PEER_TIMEOUT_S + _SLACK_S, ""),
    "stop": ((), PEER_TIMEOUT_S + _SLACK_S, ""),
    "timeout": (("Timeout", "Closed"), PEER_TIMEOUT_S + _SLACK_S, "timeout"),
}


def _kinds(end: dict[str, Any]) -> list[str]:
    """An error's classes. Where torch's futures and Horovod pass it on as another, its name stands in the text."""
    return [*end["kinds"], *re.findall(r"\b(Mismatch|PeerLost|Timeout|Config|Closed|Refused|Bug)(?=: )", end["text"])]


def kinds(complaints: list[str]) -> set[str]:
    """What sort of failure it is, for `shrink`: the words of complaints, without their numbers and tensors."""
    found = set()
    for text in complaints:
        for sort, word in _SORTS.items():
            if word in text:
                found.add(sort)
                break
        else:
            found.add("other")
    return found


_SORTS = {
    "hang": "did not end in time",
    "death": "a rank died or hung",
    "leak": "leak:",
    "guard": "memory beside the tensor",
    "bits": "hold different bits",
    "value": "are wrong, the first at",
    "tester": "the tester failed",
    "unnoticed": "nobody noticed",
    "slow": "s, more than",
    "mismatch": ": Mismatch:",
    "config": ": Config:",
    "lost": ": PeerLost:",
    "closed": ": Closed:",
    "timeout": ": Timeout:",
    "bug": ": Bug:",
}
