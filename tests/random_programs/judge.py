"""Holds the ranks' reports against what the program allows. Pure: reports in, complaints out."""

from __future__ import annotations

import re
from typing import Any

from random_programs import faults, gradients, horovod_optimizers, horovod_sessions, mutants

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
    found += _barriers(program, reports)
    found += _states(program, reports)
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


def _barriers(program: dict[str, Any], reports: dict[int, Report | None]) -> list[str]:
    """Nobody leaves a barrier before the last one has come."""
    found, came, left = [], {}, {}
    wrong, calls = program["wrong"], program["calls"]
    # A rank that leaves out a barrier is in its next one when the others are in that one (seed 100004636).
    left_out = wrong["call"] if wrong is not None and wrong["kind"] == "missing" else None

    def is_shifted(name: str) -> bool:
        return (
            left_out is not None
            and calls[left_out]["call"] == calls[name]["call"] == "barrier"
            and calls[left_out]["group"] == calls[name]["group"]
            and int(name) > int(left_out)
        )

    for rank, report in reports.items():
        for end in report["ends"] if report else []:
            if "from_s" not in end or "kinds" in end:
                continue
            if end["step"] == "issue":
                came[end["call"]] = max(came.get(end["call"], (0.0, 0)), (end["from_s"], rank))
            else:
                left[end["call"]] = min(left.get(end["call"], (float("inf"), 0)), (end["to_s"], rank))
    for name, (at_s, rank) in left.items():
        if name in came and at_s < came[name][0] and not is_shifted(name):
            found.append(f"call {name}: rank {rank} left the barrier before rank {came[name][1]} came")
    return found


def _states(program: dict[str, Any], reports: dict[int, Report | None]) -> list[str]:
    """What errors say of their group, they say in their text and in ``group_lives``."""
    found = []
    for rank, report in reports.items():
        for end in report["ends"] if report else []:
            says = "The group is still usable" in end.get("text", "")
            if "PenstockError" in end.get("kinds", ()) and says != end["lives"]:
                found.append(f"an error whose group_lives is {end['lives']}: {_said(program, rank, end)}")
    return found


def _judge_wrong(program: dict[str, Any], wrong: dict[str, Any], reports: dict[int, Report | None]) -> list[str]:
    """Errors are of the kinds that the deviation allows, name an operation and a rank, and come in time; and the deviation does
    not go by unseen. Where the group outlives it, all else goes on and is right."""
    if wrong["kind"] == "hvd":
        return _judge_horovod(program, wrong, reports)
    if wrong["kind"] == "sparse" or gradients.is_outlived(program["calls"][wrong["call"]], wrong.get("how")):
        return _judge_survived(program, wrong, reports)
    allowed, limit_s, must = _ALLOWED[wrong["kind"]]
    if wrong["kind"] == "missing" and _blocks_unseen(program, wrong):
        allowed, limit_s = (*allowed, "Timeout"), max(limit_s, program["timeout_s"] + _SLACK_S)
    if (wrong["kind"] == "root" or _sends_in_vain(program, wrong)) and _is_last(program, wrong):
        must = ""
    if wrong["kind"] == "order" and any(
        0 in program["calls"][wrong[one]].get("counts", ()) for one in ("call", "other")
    ):
        # An operation without elements sends nothing that could be compared, and the ranks may then wait for each other (seed
        # 9000868).
        allowed, limit_s, must = (*allowed, "Timeout"), program["timeout_s"] + _SLACK_S, ""
    if wrong["kind"] == "order" and _wait_unseen(program, wrong):
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
        if not _is_allowed(end, allowed):
            found.append(f"not an error that a wrong {wrong['kind']} allows ({', '.join(allowed)}): {text}")
        elif (unnamed := _unnamed(program, wrong, rank, end, {one for one, _ in errors})) is not None:
            found.append(f"an error that does not name {unnamed}: {text}")
        elif must == "mismatch" and spec.get("group", group) != group and spec.get("call") != "new_group":
            found.append(f"an error in another group than {group}: {text}")
    if must == "mismatch" and not any({"Mismatch", "Config"} & set(_kinds(end)) for _, end in errors):
        found.append(f"nobody noticed the wrong {wrong['kind']} of rank {wrong['rank']} in call {wrong['call']}")
    if _concerns_everybody(program, wrong):
        # A rank that is still joining when the others find the difference is told there.
        joins = [
            name for name, spec in program["calls"].items() if spec["call"] == "new_group" and spec["group"] == group
        ]
        told = {rank for rank, end in errors if end["call"] in (wrong["call"], *joins, *[""] * (end["step"] == "init"))}
        found += [
            f"nobody noticed on rank {rank} the wrong {wrong['kind']} of rank {wrong['rank']} in call {wrong['call']}"
            for rank in reports
            if rank in program["groups"][group] and rank not in told
        ]
    numbers = {number for _, end in errors for number in _OPERATION_NUMBER.findall(_reason(end["text"]))}
    if len(_operations(program, wrong)) == 1 and len(numbers) > 1:
        found.append(f"errors do not name one operation, but {', '.join(f'#{number}' for number in sorted(numbers))}")
    if must == "error" and not errors:
        found.append(f"nobody noticed the wrong {wrong['how']} of rank {wrong['rank']} in call {wrong['call']}")
    if must == "timeout" and not any("Timeout" in _kinds(end) for _, end in errors):
        found.append(f"nobody noticed that rank {wrong['rank']} came too late to call {wrong['call']}: no time-out")
    return found


def _judge_survived(program: dict[str, Any], wrong: dict[str, Any], reports: dict[int, Report | None]) -> list[str]:
    """One call fails on all ranks that make it, with an error that names the rank and says that the group lives. Everything else
    works, on all ranks: the generator sees to it that something is called in the group afterwards."""
    found = []
    members = program["groups"][program["calls"][wrong["call"]]["group"]]
    for rank, report in reports.items():
        if report is None:
            found.append(f"rank {rank} died")
            continue
        failed = False
        for end in report["ends"]:
            text = _said(program, rank, end) if "kinds" in end else ""
            if end["seconds"] > _SLACK_S:
                found.append(
                    f"rank {rank}: call {end['call']}: {end['step']} took {end['seconds']} s, more than {_SLACK_S} s"
                )
            if not text:
                continue
            failed = True
            if end["call"] != wrong["call"]:
                found.append(f"an error elsewhere than in call {wrong['call']}, after which the group lives: {text}")
            elif "Mismatch" not in _kinds(end) or "The group is still usable" not in end["text"]:
                found.append(
                    f"not an error that a wrong {wrong['kind']} allows (Mismatch, and the group lives): {text}"
                )
            elif (unnamed := _unnamed_of_all(wrong, members, end["text"])) is not None:
                found.append(f"an error that does not name {unnamed}: {text}")
        if rank in members and not failed:
            found.append(f"nobody noticed on rank {rank} the wrong {wrong['kind']} of rank {wrong['rank']}")
    return found


def _unnamed_of_all(wrong: dict[str, Any], members: list[int], text: str) -> str | None:
    """What an error does not name that all ranks make from what each of them has. It counts ranks of the group."""
    own = members.index(wrong["rank"])
    if wrong["kind"] == "sparse":
        # What each rank gave stands there; the rank's stands there once.
        given = dict(re.findall(r"rank (\d+) (\w+ of \([^)]*\) with \d+)", text))
        others = {what for rank, what in given.items() if int(rank) != own}
        is_named = len(given) == len(members) and len(others) == 1 and given[str(own)] not in others
        return None if is_named else f"what rank {own} of the group gave"
    told = re.search(r"is another on rank\(s\) ([\d, ]+) of the group than on rank 0", text)
    wanted = [rank for rank in range(len(members)) if rank] if own == 0 else [own]
    is_named = told is not None and [int(one) for one in told[1].split(",")] == wanted
    return None if is_named else f"rank {own} of the group"


def _unnamed(
    program: dict[str, Any], wrong: dict[str, Any], rank: int, end: dict[str, Any], failed: set[int]
) -> str | None:
    """What an error must name and does not: the rank that deviates (on that rank itself: one that it disagrees with), and the
    operation in which it does. ``failed``: ranks that got an error."""
    kinds, own, reason = _kinds(end), wrong["rank"], _reason(end["text"])
    spec = program["calls"].get(end["call"], {})
    if "Config" in kinds and "The group is still usable" in end["text"]:
        # This rank's own argument, which is refused before anything is sent: the caller knows which rank that is.
        return None if rank == own else f"rank {own}"
    if spec.get("call") == "ddp" and "in this process" in reason:
        return None  # torch's own words, for ranks that find a difference: "[1]: params[0] in this process"
    members = set(program["groups"].get(spec.get("group"), range(program["ranks"])))
    # What is built in a group that has failed is told that group's failure.
    others = members.union(program["groups"].get(program["calls"][wrong["call"]].get("group"), ())) - {rank}
    wanted = others if rank == own else {own}
    if "Mismatch" not in kinds:
        if {"PeerLost", "Closed", "Refused"} & set(kinds):
            # A rank that is told of the loss ends, and that is what others see of it who did not wait for the first one.
            wanted |= failed - {rank}
        else:
            # A time-out names the ranks that its operation waits for. They may wait for the deviating rank in turn, and the first
            # time-out fails the group on all ranks. (So may torch's own errors of DistributedDataParallel.)
            wanted = members - {rank}
    named = _ranks(reason)
    if spec.get("call") in _COUNTS_RANKS_OF_GROUP:
        ordered = program["groups"].get(spec.get("group"), [])
        named |= {ordered[one] for one in named if one < len(ordered)}
    if not named & wanted:
        return f"rank {' or '.join(map(str, sorted(wanted)))}"
    met = _operations(program, wrong)
    if "Mismatch" in kinds and met and not any(one in reason for one in [*met, "was another operation"]):
        return f"the operation {' or '.join(sorted(set(met)))}"
    return None


def _operations(program: dict[str, Any], wrong: dict[str, Any]) -> list[str]:
    """The engine's names of the operations that a deviation may be told in; empty: any."""
    kind, spec = wrong["kind"], program["calls"][wrong["call"]]
    if kind not in ("count", "dtype", "reduce", "root", "splits", "call", "order", "missing"):
        return []
    group = spec["group"]
    if kind in ("count", "dtype", "reduce", "root", "splits"):
        return operations(spec, len(program["groups"][group]))
    # The ranks disagree on the numbers of later operations as well, and any of those may be met first.
    found = ["barrier", "all_reduce", "open_channel", "opened channel"]
    for name, other in program["calls"].items():
        if other["group"] == group and int(name) >= int(wrong["call"]):
            found += operations(other, len(program["groups"][group]))
    return found


def operations(spec: dict[str, Any], size: int) -> list[str]:
    """The engine's names of the operations that a call issues, one after the other, in its own group of ``size`` ranks."""
    call = spec["call"].removeprefix("coalesced ").removeprefix("functional ")
    parts = len(spec.get("counts", [0]))
    if call in ("message", "exchange", "message objects"):
        return ["send/recv"]
    if call in ("all_gather", "reduce_scatter") and parts > 1:
        # Unequal parts, each with its own root.
        return [{"all_gather": "broadcast", "reduce_scatter": "reduce"}[call]] * size
    if call.endswith(("object", "object_list")):
        # The sizes of what is pickled, then its bytes.
        return [*(["all_gather"] if "gather" in call else []), call.split("_object")[0], "broadcast"]
    if call in ("reducer", "ddp"):
        return ["all_gather", "broadcast", "all_reduce"]  # with channels of their own
    name = next((one for one in _ENGINE_NAMES if call.removeprefix("monitored_").startswith(one)), None)
    return [] if name is None else [name] * parts


def _concerns_everybody(program: dict[str, Any], wrong: dict[str, Any]) -> bool:
    """Whether no rank can end the call without what the deviating rank gives, and that one not without the others."""
    spec = program["calls"][wrong["call"]]
    call = spec["call"].removeprefix("coalesced ").removeprefix("functional ")
    if wrong["kind"] not in ("count", "dtype", "reduce") or not call.startswith(_NEEDS_EVERYBODY):
        return False
    # Where one side has nothing to send, the other alone can notice that.
    changed = [
        step[2].get("counts", [1])
        for step in program["steps"][wrong["rank"]]
        if step[0] in ("issue", "call") and step[1] == wrong["call"] and len(step) > 2
    ]
    return 0 not in spec["counts"] and len(changed) == 1 and 0 not in changed[0]


def _reason(text: str) -> str:
    """An error's text without the operation that failed for it, and this rank."""
    return text.split(" failed: ", 1)[-1]


def _ranks(text: str) -> set[int]:
    """The ranks that a text names: "rank 3", "ranks 1 and 2", "rank(s) 0, 2"."""
    lists = re.findall(r"\b[Rr]anks?(?:\(s\))? (\d+(?:(?:, | and )\d+)*)", text)
    return {int(one) for found in lists for one in re.findall(r"\d+", found)}


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
    # What others make after it: they may be in it when this rank waits for them (seed 108004904).
    later = set[str]()
    for steps in program["steps"]:
        made = [step[1] for step in steps if step[0] in ("issue", "call")]
        if wrong["call"] in made:
            later |= set(made[made.index(wrong["call"]) + 1 :])
    for step in program["steps"][wrong["rank"]]:
        if step[0] not in ("issue", "call", "wait"):
            continue
        if int(step[1]) <= int(wrong["call"]) and step[1] not in later:
            continue
        spec = program["calls"][step[1]]
        is_compared = spec["group"] == group and spec["call"] not in _NOT_COMPARED
        if is_compared:
            return False
        if step[0] in ("call", "wait"):
            return True
    return False


def _wait_unseen(program: dict[str, Any], wrong: dict[str, Any]) -> bool:
    """Whether all ranks may wait for each other before two of them have made different operations at one place of the group's
    order: one in the operation that it makes too early, another one for a message that the first sends only afterwards (seed
    118000115)."""
    group = program["calls"][wrong["call"]]["group"]
    everybody = range(program["ranks"])
    makers: dict[str, set[int]] = {}
    for rank in everybody:
        for step in program["steps"][rank]:
            if step[0] in ("issue", "call"):
                makers.setdefault(step[1], set()).add(rank)
    at, order = [0] * len(everybody), [list[str]() for _ in everybody]
    made = [set[str]() for _ in everybody]
    goes_on = True
    while goes_on:
        goes_on = False
        for rank in everybody:
            for step in program["steps"][rank][at[rank] :]:
                if step[0] in ("issue", "call") and step[1] not in made[rank]:
                    made[rank].add(step[1])
                    spec, goes_on = program["calls"][step[1]], True
                    if spec.get("group") == group and spec["call"] not in _NOT_COMPARED:
                        order[rank].append(step[1])
                # As if nothing could be sent before all take part.
                if step[0] in ("call", "wait") and any(step[1] not in made[maker] for maker in makers.get(step[1], ())):
                    break
                at[rank], goes_on = at[rank] + 1, True
    pairs = [(one, other) for one in everybody for other in everybody[:one]]
    is_seen = any(mine != other for a, b in pairs for mine, other in zip(order[a], order[b], strict=False))
    return not is_seen and any(at[rank] < len(program["steps"][rank]) for rank in everybody)


def _sends_in_vain(program: dict[str, Any], wrong: dict[str, Any]) -> bool:
    """Whether the deviating rank only sends, to ranks that expect nothing and have ended before it comes (seed 30000043)."""
    spec = program["calls"][wrong["call"]]
    if wrong["kind"] != "count" or 0 not in spec["counts"]:
        return False
    own = program["groups"][spec["group"]].index(wrong["rank"])
    if spec["call"] in ("gather", "reduce"):
        return bool(own != spec["root"])
    return bool(own == spec.get("root", spec.get("src")))


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
# Calls whose errors count ranks as their group does; those of the engine count them as the job does.
_COUNTS_RANKS_OF_GROUP = ("reducer", "ddp", "new_group", "sparse all_reduce", "monitored_barrier")
# Longer ones first.
_ENGINE_NAMES = (
    "reduce_scatter",
    "all_reduce",
    "all_gather",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
)
_NEEDS_EVERYBODY = ("all_reduce", "all_gather", "reduce_scatter")
_OPERATION_NUMBER = re.compile(r"\b(?:operation|all_to_all|its) #(\d+)")
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


def _is_allowed(end: dict[str, Any], allowed: tuple[str, ...]) -> bool:
    """RuntimeError: torch's own. All errors of ours have it as a base."""
    return any(kind in allowed for kind in _kinds(end) if kind != "RuntimeError" or end["kinds"][0] == kind)


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
    "operation": "do not name one operation",
    "state": "whose group_lives is",
    "elsewhere": "an error elsewhere",
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
