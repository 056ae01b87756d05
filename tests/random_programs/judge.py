"""Holds the ranks' reports against what the program allows. Pure: reports in, complaints out."""

from __future__ import annotations

import re
from typing import Any

from random_programs import faults, horovod_optimizers, horovod_sessions, mutants

Report = dict[str, Any]


def judge(
    program: dict[str, Any], reports: dict[int, Report | None], struck: dict[str, Any] | None = None
) -> list[str]:
    """What is wrong; nothing if all is as it must be. A report of None: the rank died or did not end. ``struck``: when the
    program's fault came, if it did (`strike.Helper.struck`)."""
    found = []
    for rank, report in reports.items():
        if report is not None:
            found += [f"rank {rank}: {text}" for text in report["complaints"]]
            failed = [end for end in report["ends"] if end.get("is_faults_own")]
            found += [f"rank {rank}: {mutants.DEFECTIVE}{end['kinds'][0]}: {end['text']}" for end in failed]
    found += _same_bits(reports)
    found += _barriers(reports)
    wrong = program["wrong"]
    if struck is not None and program["fault"]["kind"] not in faults.HARMLESS:
        return found + _judge_fault(program, program["fault"], reports, struck)
    if wrong is None:
        for rank, report in reports.items():
            if report is None:
                found.append(f"rank {rank} died")
                continue
            for end in report["ends"]:
                if "kinds" in end:
                    found.append(_said(program, rank, end))
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
    if wrong["kind"] == "hvd":
        return _judge_horovod(program, wrong, reports)
    allowed, limit_s, must = _ALLOWED[wrong["kind"]]
    if wrong["kind"] == "missing" and _blocks_unseen(program, wrong):
        allowed, limit_s = (*allowed, "Timeout"), max(limit_s, program["timeout_s"] + _SLACK_S)
    if wrong["kind"] == "root" and _is_last(program, wrong):
        must = ""
    if wrong["kind"] == "order" and any(
        0 in program["calls"][wrong[one]].get("counts", ()) for one in ("call", "other")
    ):
        # An operation without elements sends nothing that could be compared, and the ranks may then wait for each other (seed
        # 9000868).
        allowed, limit_s, must = (*allowed, "Timeout"), program["timeout_s"] + _SLACK_S, ""
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
        spec, text = program["calls"].get(end["call"], {}), _said(program, rank, end)
        if not any(kind in allowed for kind in _kinds(end)):
            found.append(f"not an error that a wrong {wrong['kind']} allows ({', '.join(allowed)}): {text}")
        elif "rank" not in end["text"] and not (spec.get("call") == "ddp" and "process" in end["text"]):
            found.append(f"an error that names no rank: {text}")
        elif must == "mismatch" and spec.get("group", group) != group and spec.get("call") != "new_group":
            found.append(f"an error in another group than {group}: {text}")
    if must == "mismatch" and not any({"Mismatch", "Config"} & set(_kinds(end)) for _, end in errors):
        found.append(f"nobody noticed the wrong {wrong['kind']} of rank {wrong['rank']} in call {wrong['call']}")
    if must == "error" and not errors:
        found.append(f"nobody noticed the wrong {wrong['how']} of rank {wrong['rank']} in call {wrong['call']}")
    if must == "timeout" and not any("Timeout" in _kinds(end) for _, end in errors):
        found.append(f"nobody noticed that rank {wrong['rank']} came too late to call {wrong['call']}: no time-out")
    return found


def _judge_horovod(program: dict[str, Any], wrong: dict[str, Any], reports: dict[int, Report | None]) -> list[str]:
    """One operation of a life of Horovod fails on all ranks that make it, in Horovod's words; all else goes on."""
    spec = program["calls"][wrong["call"]]
    op, is_missing = spec["ops"][wrong["op"]], wrong["how"] == "missing"
    everybody = horovod_sessions.members(spec, op, program["ranks"])
    concerned = set(everybody) - ({wrong["rank"]} if is_missing else set())
    if op["kind"] == "optimizer":
        concerned = set(horovod_optimizers.fails(wrong["how"], wrong["rank"], everybody))
        is_missing = wrong["how"] != "size of a parameter"
    found = []
    for rank, report in reports.items():
        if report is None:
            found.append(f"rank {rank} died")
            continue
        failed = set()
        for end in report["ends"]:
            if end["seconds"] > _SLACK_S + _HOROVOD_END_S * is_missing:
                found.append(
                    f"rank {rank}: call {end['call']}: {end['step']} took {end['seconds']} s, more than allowed"
                )
            if "kinds" not in end:
                continue
            text = _said(program, rank, end)
            words = "shut( Horovod)? down" if is_missing else "Mismatched"
            if end["call"] != wrong["call"] or end["step"] != f"op {wrong['op']}" or rank not in concerned:
                found.append(f"an error elsewhere than in operation {wrong['op']}: {text}")
            elif end["kinds"][0] != "HorovodInternalError" or not re.search(words, end["text"]):
                found.append(f"not an error that a wrong {wrong['how']} allows (HorovodInternalError: {words}): {text}")
            failed.add(rank)
        if rank in concerned - failed:
            found.append(f"nobody noticed on rank {rank} the wrong {wrong['how']} of rank {wrong['rank']}")
    return found


def _judge_fault(
    program: dict[str, Any], fault: dict[str, Any], reports: dict[int, Report | None], struck: dict[str, Any]
) -> list[str]:
    """Errors say that a rank was lost, and which, and come in time. Whoever gets none is right, as in any program."""
    found = []
    elastic = any(spec["call"] == "elastic" for spec in program["calls"].values())
    struck_ranks = _ranks_in_generation(program, fault, reports) if elastic else faults.names(fault)
    for rank, report in reports.items():
        is_victim = rank == fault["rank"]
        if report is None:
            if not (is_victim and fault["kind"] == "kill"):
                found.append(f"rank {rank} died")
            continue
        allowed = ["PeerLost", "Closed", "Refused"]
        limit_s = faults.PATIENCE_S + _SLACK_OF_FAULTS_S
        if fault["at"] == ["begin"]:
            # Who has not come to the group is missed at its time-out.
            allowed.append("Timeout")
            limit_s += program["timeout_s"]
        since_s = struck.get("until_s", struck["at_s"]) if is_victim else struck["at_s"]
        if is_victim and fault["kind"].startswith(("cut", "any cut")):
            # It has lost the store as well.
            allowed += ["Config", "DistError"]
        errors = [end for end in report["ends"] if "kinds" in end]
        for end in errors:
            text = _said(program, rank, end)
            took_s = end["at_s"] - since_s
            most_s = limit_s + (_ELASTIC_S if elastic and end["step"] != "generation" else 0)
            is_horovods = program["calls"].get(end["call"], {}).get("call", "").startswith("hvd")
            if not any(kind in [*allowed, "HorovodInternalError" * is_horovods] for kind in _kinds(end)):
                found.append(f"not an error that the fault {fault['kind']!r} allows ({', '.join(allowed)}): {text}")
            elif took_s > most_s:
                found.append(f"{took_s:.1f} s after the fault, more than {most_s} s: {text}")
        named = r"rank(\(s\))? " + (r"\d" if is_victim else f"({'|'.join(map(str, struck_ranks))})\\b")
        # Who is told that it was left behind, or has lost the store, is told that.
        others = {"LeftBehind", "DistError"} | ({"Config"} if is_victim else set())
        told = (end for end in errors if not others & set(end["kinds"]))
        first = next((end for end in told if not _is_of_a_rank_that_left(program, struck_ranks, end)), None)
        if first is not None and not re.search(named, first["text"]):
            found.append(f"an error that does not name {named}: {_said(program, rank, first)}")
        if elastic and not is_victim and errors and errors[-1]["step"] != "generation":
            found.append(f"it has not gone on: {_said(program, rank, errors[-1])}")
        ended_s = max((end["at_s"] for end in report["ends"]), default=since_s) - since_s
        if elastic and ended_s > limit_s + _ELASTIC_S:
            found.append(f"rank {rank} ended {ended_s:.1f} s after the fault, more than {limit_s + _ELASTIC_S} s")
    return found


def _is_of_a_rank_that_left(program: dict[str, Any], struck_ranks: list[int], end: dict[str, Any]) -> bool:
    """Whether an error is of a group that the fault does not concern, and that a rank has left which it does (seed 5200376)."""
    members = program["groups"].get(program["calls"].get(end["call"], {}).get("group"))
    return "Closed" in end["kinds"] and members is not None and not set(struck_ranks) <= set(members)


def _ranks_in_generation(
    program: dict[str, Any], fault: dict[str, Any], reports: dict[int, Report | None]
) -> list[int]:
    """What the rank that was struck is called in an elastic job, where ranks are given by age: the rank that none of the others
    has. All that it may be, where not all of the others say what they are."""
    others = [report["ends"] for rank, report in reports.items() if report is not None and rank != fault["rank"]]
    firsts = [next((end for end in ends if end["step"] == "generation"), None) for ends in others]
    taken = {end["rank"] for end in firsts if end is not None and end["world"] == program["ranks"]}
    return [rank for rank in range(program["ranks"]) if rank not in taken or len(taken) < len(others)]


def _blocks_unseen(program: dict[str, Any], wrong: dict[str, Any]) -> bool:
    """Whether the rank that leaves a call out waits for others before it makes a later collective of that group: they may wait
    for its call meanwhile, and neither issues anything that could be compared."""
    group = program["calls"][wrong["call"]]["group"]
    for step in program["steps"][wrong["rank"]]:
        if step[0] not in ("issue", "call", "wait") or int(step[1]) <= int(wrong["call"]):
            continue
        spec = program["calls"][step[1]]
        is_compared = spec["group"] == group and spec["call"] not in _NOT_COMPARED
        if is_compared:
            return False
        if step[0] in ("call", "wait"):
            return True
    return False


def _is_last(program: dict[str, Any], wrong: dict[str, Any]) -> bool:
    """Whether no rank makes an operation of the group after this one. Two ranks that take themselves for the root only send, and
    have ended when the other's message comes."""
    group = program["calls"][wrong["call"]]["group"]
    for steps in program["steps"]:
        made = [step[1] for step in steps if step[0] in ("issue", "call")]
        later = made[made.index(wrong["call"]) + 1 :] if wrong["call"] in made else []
        if any(program["calls"][name].get("group") == group for name in later):
            return False
    return True


# Calls that issue no collective of the group that they are made in: messages, and what works in groups of its own.
_NOT_COMPARED = (
    *("message", "message objects", "exchange", "new_group", "destroy_group"),
    *("hvd allreduce", "hvd", "sparse all_reduce"),
)
# How much later than promised a step may end on a machine that does much else.
_SLACK_S = 10.0
# How long a rank that leaves Horovod waits for what was agreed on.
_HOROVOD_END_S = 30.0
# The same for faults: the engine promises a second beyond its patience, and programs pause before they look.
_SLACK_OF_FAULTS_S = 4.0
# What a change of membership may take: the window, a rebuild that fails, and the way to the end.
_ELASTIC_S = faults.ELASTIC["window_s"] + faults.ELASTIC["rebuild_timeout_s"] + 8.0
# By deviation: the errors that ranks may get, how long any step may take, and what must be seen.
_ALLOWED: dict[str, tuple[tuple[str, ...], float, str]] = {
    "count": (("Mismatch", "Config"), _SLACK_S, "mismatch"),
    "dtype": (("Mismatch", "Config"), _SLACK_S, "mismatch"),
    "reduce": (("Mismatch",), _SLACK_S, "mismatch"),
    "root": (("Mismatch",), _SLACK_S, "mismatch"),
    "call": (("Mismatch",), _SLACK_S, "mismatch"),
    "splits": (("Mismatch", "Config"), _SLACK_S, "mismatch"),
    "order": (("Mismatch",), _SLACK_S, "mismatch"),
    # DistributedDataParallel compares shapes itself, without a word to ranks that find nothing.
    "gradients": (
        ("Mismatch", "PeerLost", "Closed", "Refused", "RuntimeError"),
        faults.PEER_TIMEOUT_S + _SLACK_S,
        "error",
    ),
    "missing": (("Mismatch", "PeerLost", "Closed"), faults.PEER_TIMEOUT_S + _SLACK_S, ""),
    "leave": (("PeerLost", "Closed", "Refused"), faults.PEER_TIMEOUT_S + _SLACK_S, ""),
    "kill": (("PeerLost", "Closed", "Refused"), faults.PEER_TIMEOUT_S + _SLACK_S, ""),
    "stop": ((), faults.PEER_TIMEOUT_S + _SLACK_S, ""),
    "timeout": (("Timeout", "Closed"), faults.PEER_TIMEOUT_S + _SLACK_S, "timeout"),
}


def _said(program: dict[str, Any], rank: int, end: dict[str, Any]) -> str:
    what = program["calls"].get(end["call"], {}).get("call", "")
    return f"rank {rank}: call {end['call']} ({what}): {end['step']}: {end['kinds'][0]}: {end['text']}"


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
    "anew": "in a new group",
    "orphan": "orphan",
    "name": "does not name",
    "late": "s after the fault",
    "unnoticed": "nobody noticed",
    "slow": "s, more than",
    "mismatch": ": Mismatch:",
    "config": ": Config:",
    "lost": ": PeerLost:",
    "closed": ": Closed:",
    "timeout": ": Timeout:",
    "bug": ": Bug:",
}
