"""The trace, CSV and JSON of a profile: valid, complete, exact, and written whole or not at all."""

from __future__ import annotations

import csv as library
import dataclasses
import json as decoder
import os
import pathlib
import random
import re
import resource
import stat
import statistics
import tracemalloc
from collections import defaultdict
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

import profiled
from penstock.errors import Config
from penstock.profiling.breakdown import PHASES, Breakdown, Moving, Share
from penstock.profiling.divide import divide, each_step
from penstock.profiling.readers import load
from penstock.profiling.record import Event, Operation, Readings, Record, Sample, Step
from penstock.profiling.usage import groups
from penstock.profiling.utilisation import Drop
from penstock.profiling.writers import csv, from_json, json, kineto, perfetto, steps_csv, usage_csv
from profiles import data_parallel, header, pipeline, shifted, uneven, wild
from test_profile_divide import a_job
from test_profile_remembered import told

MS = 1_000_000


def loaded(path: pathlib.Path) -> list[dict[str, Any]]:
    """The events of a trace, which is checked as a viewer would."""
    trace = decoder.loads(path.read_text(encoding="utf-8"))
    events = trace["traceEvents"]
    spans: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    arrows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        assert event["ph"] in {"X", "M", "s", "f", "C", "i"}
        assert isinstance(event["ts"], (int, float)) and event["ts"] >= 0, event
        if event["ph"] == "X":
            assert event["dur"] >= 0
            start = round(event["ts"] * 1000)
            spans[event["pid"], event["tid"]].append((start, start + round(event["dur"] * 1000)))
        if event["ph"] in "sf":
            arrows[event["id"]].append(event)
    # On a track an event lies within another one or beside it.
    for track, each in spans.items():
        open_: list[int] = []
        for start, end in sorted(each, key=lambda span: (span[0], -span[1])):
            while open_ and open_[-1] <= start:
                open_.pop()
            assert not open_ or end <= open_[-1], f"events of {track} cross"
            open_.append(end)
    for two in arrows.values():
        assert [arrow["ph"] for arrow in two] == ["s", "f"] and two[1]["bp"] == "e"
        assert two[0]["ts"] <= two[1]["ts"]
        # Both ends are in an event of their track: without one, viewers leave the arrow out.
        for arrow in two:
            at = round(arrow["ts"] * 1000)
            assert any(start <= at < max(end, start + 1) for start, end in spans[arrow["pid"], arrow["tid"]])
    return events


def test_a_trace_has_a_process_a_rank_and_shows_what_was_planted(tmp_path: pathlib.Path) -> None:
    """Tracks by name, phases with their lengths, operations with waits, arrows from the rank that came last."""
    perfetto(data_parallel(3, late_ns={1: 7 * MS}, sampled=(3,)), tmp_path / "t.json")
    events = loaded(tmp_path / "t.json")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0 on a", 1: "rank 1 on a", 2: "rank 2 on a"}
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"training thread", "waits of the training thread", "operators", "group 0"} <= tracks
    of_rank = [event for event in events if event["pid"] == 0 and event["ph"] == "X"]
    steps = [event for event in of_rank if event["name"].startswith("ProfilerStep#")]
    assert [event["name"] for event in steps] == [f"ProfilerStep#{number}" for number in range(12)]
    assert {event["dur"] for event in steps} == {85_000}
    assert {event["dur"] for event in of_rank if event["name"] == "forward"} == {20_000}
    (still,) = [event for event in of_rank if event["name"] == "no operator in the backward pass"]
    assert still["dur"] == 17_000
    operations = [event for event in of_rank if event["name"] == "all_reduce"]
    assert [event["args"]["waits for rank"] for event in operations] == [1, 1, 1]
    assert all(event["args"]["wait (us)"] == 7_000 for event in operations)
    assert sum(event["name"] == "wait for rank 1" for event in of_rank) == 3
    starts = [event for event in events if event["ph"] == "s"]
    # Of three buckets, to each of the two other ranks.
    assert len(starts) == 6 and {event["pid"] for event in starts} == {1}


def test_arguments_are_those_of_kineto(tmp_path: pathlib.Path) -> None:
    """Names as in torch's ParamCommsUtils; groups with their ranks; an all_gather's output is larger than its input."""
    records = [Record(header(rank, 4)) for rank in range(4)]
    for rank in (1, 3):
        records[rank].steps.append(Step(0, 0, 100))
        gather = Operation("all_gather", "7", 0, 10, 20, 1000, 2, None, "tensor")
        records[rank].samples.append(Sample(0, (), (gather,)))
    perfetto(records, tmp_path / "t.json")
    (event,) = [each for each in loaded(tmp_path / "t.json") if each["name"] == "all_gather" and each["pid"] == 3]
    wanted = {
        "Collective name": "all_gather",
        "dtype": "Byte",
        "In msg nelems": 1000,
        "Out msg nelems": 2000,
        "In split size": "[]",
        "Out split size": "[]",
        "Global rank start": 1,
        "Global rank stride": 2,
        "Group size": 2,
        "Process Group Name": "7",
        "Process Group Description": "tensor",
        "Process Group Ranks": "[1, 3]",
        "Rank": 3,
        "Seq": 0,
    }
    assert wanted.items() <= event["args"].items()


def test_sends_have_arrows_to_their_receives_on_one_clock(tmp_path: pathlib.Path) -> None:
    """Two hosts with clocks weeks apart: the arrow goes forward in time, from the send to where the receive's wait ends."""
    first, second = Record(header(0, 2, "a")), Record(header(1, 2, "b"))
    for record, name, times in ((first, "send", (5, 6)), (second, "recv", (2, 8))):
        own = [Operation(name, "p", 0, times[0] * MS, times[1] * MS, 8, 2, 1 - record.header.rank)]
        own += [Operation("barrier", "0", n, (10 + n) * MS, (10 + n) * MS + 1000, 0, 2) for n in range(2)]
        record.steps.append(Step(0, 0, 20 * MS))
        record.samples.append(Sample(0, (), tuple(own)))
    perfetto([first, shifted(second, 10**15)], tmp_path / "t.json")
    events = loaded(tmp_path / "t.json")
    ends = {event["ph"]: event for event in events if event["ph"] in "sf" and event["name"] == "sent"}
    assert (ends["s"]["pid"], ends["f"]["pid"]) == (0, 1)
    assert ends["s"]["ts"] == pytest.approx(5000, abs=2) and ends["f"]["ts"] == pytest.approx(5000, abs=2)


@hypothesis.settings(
    max_examples=40, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(seed=st.integers(0, 10**9))
def test_any_record_makes_valid_traces(seed: int, tmp_path: pathlib.Path) -> None:
    """Overlapping operations and marks, missing partners and broken steps: what is on a track nests, arrows meet their events."""
    records = a_job(seed) if seed % 3 else wild(seed, 10**14)
    records[0].events.append(Event(50, "exception", 'a "quoted"\n\\ text'))
    perfetto(records, tmp_path / "t.json")
    loaded(tmp_path / "t.json")
    for path in kineto(records, tmp_path):
        loaded(path)


def test_our_own_traces_are_not_read_back(tmp_path: pathlib.Path) -> None:
    """They have less than the records, and as traces of torch.profiler they would tell something else."""
    records = data_parallel(2, sampled=(3,))
    perfetto(records, tmp_path / "t.json")
    for path in (tmp_path / "t.json", *kineto(records, tmp_path / "ranks"), tmp_path / "ranks"):
        with pytest.raises(Config, match=r"a trace that penstock profile has written.*read the folder of those"):
            load(path)


def test_traces_of_ranks_have_what_holistictraceanalysis_looks_for(tmp_path: pathlib.Path) -> None:
    """A file a rank, with its rank in a line of the head; kernels on streams, of which communication begins as NCCL's; each
    tied to its issue, which lies within its step."""
    paths = kineto(data_parallel(2, sampled=(3,)), tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["rank-0.json", "rank-1.json"]
    head = paths[1].read_text().split('"traceEvents"')[0]
    assert re.search(r'"rank":\s+1\b', head)
    events = loaded(paths[1])
    assert {event["pid"] for event in events} == {1} and not any(event["ph"] in "sf" for event in events)
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert all(event["args"]["stream"] > 0 for event in kernels)
    communication = [event for event in kernels if re.match(r"^nccl.*Kernel", event["name"])]
    assert len(communication) == 3 and {event["name"] for event in kernels} == {"operators", "ncclKernel_all_reduce"}
    issues = {event["args"]["correlation"]: event for event in events if event["name"] == "record_param_comms"}
    for event in communication:
        assert issues[event["args"]["correlation"]]["ts"] == event["ts"]
    (step,) = [event for event in events if event["name"] == "ProfilerStep#3"]
    assert all(step["ts"] <= event["ts"] < step["ts"] + step["dur"] for event in issues.values())


def test_readings_become_counters_on_the_hosts_own_track(tmp_path: pathlib.Path) -> None:
    """What only grows is shown as a rate, what was set back is left out once, levels are shown as they are."""
    host = Record(header(0, 2, "b"))
    for at, (sent, delay) in enumerate([(0, 5.0), (1000, 7.0), (10, 7.0), (1010, 7.0)]):
        host.readings.append(Readings(at * MS, {"nic.eth0.tx_bytes": float(sent), "stream.1.rtt_us": delay}))
    perfetto([*data_parallel(2, hosts=["a", "b"]), host], tmp_path / "t.json")
    events = loaded(tmp_path / "t.json")
    shown = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            shown[event["name"]].extend(event["args"].values())
    assert shown == {"nic.eth0.tx_bytes_per_s": [1e6, 1e6], "stream.1.rtt_us": [5, 7, 7, 7]}
    assert divide([*data_parallel(2), host]) == divide(data_parallel(2))


def test_links_have_tracks_of_their_host(tmp_path: pathlib.Path) -> None:
    """A track for each interface and each stream of a host, by name, with what it carried from reading to reading; nothing of
    streams on the ranks' training threads, but in the trace of one rank, which has no hosts."""
    records = data_parallel(2, hosts=["a", "b"])
    for record, text in zip(
        records, ("7 1000 eth0 10.0.0.1:4 10.0.0.2:5", "9 1001 eth0 10.0.0.2:5 10.0.0.1:4"), strict=True
    ):
        record.events.append(Event(0, "stream", text))
    for at, total in enumerate([0, 1000, 1000, 4000]):
        values = {"stream.7.tx_bytes": float(total), "stream.7.rtt_us": 5.0, "nic.eth0.100.rx_bytes": 2.0 * total}
        records[0].readings.append(Readings(at * MS, {**values, "nic.idle.mtu_bytes": 1500.0}))
    records[1].readings.append(Readings(0, {"memory.available_bytes": 1.0}))
    perfetto(records, tmp_path / "t.json")
    events = loaded(tmp_path / "t.json")
    pids = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    tracks = {
        (event["pid"], event["args"]["name"]): event["tid"]
        for event in events
        if event["name"] == "thread_name" and event["pid"] > 1
    }
    a, b = (pids[f"links and counters of {host}"] for host in "ab")
    stream = "stream 7 (rank 0 to rank 1), eth0, 10.0.0.1:4 to 10.0.0.2:5"
    other = "stream 9 (rank 1 to rank 0), eth0, 10.0.0.2:5 to 10.0.0.1:4"
    assert set(tracks) == {(a, "eth0.100"), (a, stream), (b, other)}
    spans = [event for event in events if event.get("cat") == "link"]
    of_stream, of_interface = (
        [event for event in spans if (event["pid"], event["tid"]) == (a, tracks[a, name])]
        for name in (stream, "eth0.100")
    )
    assert len(spans) == 4, "nothing moved between the second and the third reading"
    assert [event["name"] for event in of_stream] == ["1 MB/s sent, 0 B/s received", "3 MB/s sent, 0 B/s received"]
    assert [event["args"]["rtt_us"] for event in of_stream] == [5, 5]
    assert [(event["ts"], event["dur"]) for event in of_interface] == [(0, 1000), (2000, 1000)]
    assert [event["args"]["rx_bytes_per_s"] for event in of_interface] == [2e6, 6e6]
    assert not any(event["name"] == "stream" for event in events)
    assert any(event["name"] == "stream" for event in loaded(kineto(records, tmp_path)[0]))


def test_a_large_trace_is_written_without_holding_it(tmp_path: pathlib.Path) -> None:
    """2,000 operations are 1 MB of text: writing them takes little beside what their matching takes."""
    records = []
    for rank in range(2):
        operations = tuple(
            Operation("all_reduce", "0", n, n * 1000, n * 1000 + 500 + rank, 8, 2, None, "tensor") for n in range(1_000)
        )
        records.append(Record(header(rank, 2), [Step(0, 0, 10**8)], [Sample(0, (), operations)]))
    tracemalloc.start()
    try:
        perfetto(records, tmp_path / "t.json")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (tmp_path / "t.json").stat().st_size > 700_000
    assert most / 2_000 < 2500


# ----------------------------------------------------------------------------------------------------------- CSV and JSON


def a_breakdown() -> Breakdown:
    return divide(data_parallel(3, late_ns={1: 7 * MS}, hosts=["a", "b"]))


def test_rows_that_are_exposed_sum_to_the_step(tmp_path: pathlib.Path) -> None:
    """Of each rank, in ns and as shares; hidden rows and those of who was waited for stand beside."""
    breakdown = a_breakdown()
    csv(breakdown, tmp_path / "b.csv")
    with (tmp_path / "b.csv").open(newline="") as file:
        rows = list(library.DictReader(file))
    for share in breakdown.shares:
        own = [row for row in rows if int(row["rank"]) == share.rank]
        (step,) = [row for row in own if row["what"] == "step"]
        assert float(step["ns_per_step"]) == pytest.approx(share.step_ns)
        parts = [row for row in own if row["exposed"] == "1"]
        assert sum(float(row["ns_per_step"]) for row in parts) == pytest.approx(share.step_ns, abs=1)
        assert sum(float(row["share_of_step"]) for row in parts) == pytest.approx(1, abs=1e-4)
        (wire,) = [row for row in parts if row["kind"] == "wire"]
        assert wire["what"] == "data-parallel sync"
        assert (float(wire["bytes_per_step"]), wire["operations_per_step"]) == (75e6, "3")
        waited = {int(row["waited_for"]): float(row["ns_per_step"]) for row in own if row["kind"] == "waited for"}
        assert waited == pytest.approx(dict(share.communication["data-parallel sync"].waited_for))
    assert not any("e+" in value for row in rows for value in row.values())


PARTS = ("exposed_wire_ns", "exposed_wait_ns", "hidden_wire_ns", "hidden_wait_ns")


def planted(job: str, seed: int) -> list[Record]:
    if job == "pipeline":
        return pipeline(3, 3, 20, random.Random(seed))
    records = uneven(seed, 3)
    if job == "of an engine":
        return told(records)
    if job == "few samples":
        return [dataclasses.replace(record, samples=record.samples[4::9]) for record in records]
    # A partner is missing: what was wire is told in the proportion of what else is known.
    return [dataclasses.replace(records[0], samples=records[0].samples[:20]), *records[1:]]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("job", ["of an engine", "few samples", "pipeline", "without partners"])
def test_each_step_has_a_row(job: str, seed: int, tmp_path: pathlib.Path) -> None:
    """Its parts sum to it, and where the operations of all are known the mean of those that count is the table's."""
    records = planted(job, seed)
    table = divide(records)
    steps_csv(each_step(records), tmp_path / "s.csv")
    with (tmp_path / "s.csv").open(newline="") as file:
        rows = [
            {name: float(value) if value else None for name, value in row.items()} for row in library.DictReader(file)
        ]
    names = [f"{phase.replace(' ', '_')}_ns" for phase in PHASES]
    for record, share in zip(records, table.shares, strict=True):
        own = [row for row in rows if row["rank"] == share.rank]
        assert [(row["step"], row["start_ns"], row["step_ns"]) for row in own] == [
            (step.number, step.start_ns, step.end_ns - step.start_ns) for step in record.steps
        ]
        assert [row["counted"] for row in own] == [0, 0, *[1] * share.steps]
        assert sum(row["sampled"] for row in own[2:]) == share.sampled
        assert sum(row[PARTS[0]] is not None for row in own[2:]) == share.known
        for row in own:
            assert sum(row[name] for name in (*names, "exposed_ns")) == pytest.approx(row["step_ns"], rel=0.01)
            known = [row[name] is not None for name in PARTS]
            assert all(known) or not any(known)
            if all(known):
                assert row[PARTS[0]] + row[PARTS[1]] == pytest.approx(row["exposed_ns"], abs=2)
            else:
                step = record.steps[int(row["step"])]
                assert row["exposed_ns"] == sum(wait.end_ns - wait.start_ns for wait in step.waits)
        if job == "without partners" and share.rank == 0:
            assert 0 < share.known < share.steps
        if share.known < share.steps:
            continue
        for phase, name in zip(PHASES, names, strict=True):
            mean = statistics.fmean(row[name] for row in own[2:])
            assert mean == pytest.approx(share.work.get(phase, 0.0), rel=1e-6, abs=1), phase
        for name in PARTS:
            mean = statistics.fmean(row[name] for row in own[2:])
            whole = sum(getattr(moving, name) for moving in share.communication.values())
            assert mean == pytest.approx(whole, rel=1e-6, abs=1), name
    assert (job == "few samples") == all(share.known < share.steps for share in table.shares)


def test_steps_are_on_the_first_hosts_clock(tmp_path: pathlib.Path) -> None:
    """As utilisation is. In each step both ranks of the job begin together."""
    first, second = data_parallel(2, 12, range(12), hosts=["a", "b"])
    steps_csv(each_step([first, shifted(second, 12_345 * MS)]), tmp_path / "s.csv")
    with (tmp_path / "s.csv").open(newline="") as file:
        rows = list(library.DictReader(file))
    begun = [[int(row["start_ns"]) for row in rows if row["rank"] == rank] for rank in "01"]
    assert begun[0] == [step.start_ns for step in first.steps]
    assert begun[1] == pytest.approx(begun[0], abs=10 * MS)


def test_what_only_other_tools_files_have_is_in_the_tables(tmp_path: pathlib.Path) -> None:
    """Names of collectives as purposes, phases of their own, and what a reader says of the numbers."""
    share = Share(
        0, 1, 0, 10.0, {"forward": 3.0, "a phase": 2.0}, {"AllReduce": Moving(exposed_wire_ns=5.0, bytes=7.0)}
    )
    breakdown = Breakdown((share,), notes=("a note",))
    csv(breakdown, tmp_path / "b.csv")
    with (tmp_path / "b.csv").open(newline="") as file:
        rows = {(row["what"], row["kind"], row["exposed"]): row["ns_per_step"] for row in library.DictReader(file)}
    assert rows["a phase", "work", "1"] == "2" and rows["AllReduce", "wire", "1"] == "5"
    json(breakdown, tmp_path / "b.json")
    assert from_json(tmp_path / "b.json").notes == ("a note",)


def test_what_was_used_is_in_both_tables(tmp_path: pathlib.Path) -> None:
    """The same lines and points, on the first host's clock; how many lines were left out; and the breakdown reads back. What
    overflows is left out."""
    records, breakdown = profiled.records(40), profiled.breakdown(40)
    for record in records:
        for at, reading in enumerate(record.readings):
            reading.values["disk.vdc.read_bytes"] = 1e308 if at % 2 else 0.0
    used = groups(records, breakdown, 32)
    json(breakdown, tmp_path / "b.json", used=used)
    assert from_json(tmp_path / "b.json") == breakdown
    content = decoder.loads((tmp_path / "b.json").read_text())
    assert content["utilisation_left_out"] == {
        "processor time": 10,
        "processor time of threads": 48,
        "memory of ranks": 8,
    }
    lines = {(each["what"], each["line"]): each for each in content["utilisation"]}
    assert {what for what, _ in lines} == {group.what for group in used} and (
        "read from disk",
        "disk vdc of a",
    ) not in lines
    sent = lines["written to disk", "disk vda of b"]
    assert (sent["unit"], sent["host"], sent["counter"]) == ("bytes/s", "b", "disk.vda.written_bytes")
    assert [value for _, _, value in sent["points"]] == pytest.approx([50e6] * 42)
    # Its clock is 1.25 ms behind.
    assert sent["points"][0][:2] == [5_000 * MS, 5_020 * MS]
    assert [lines["round trip", "stream 2 (rank 0 to rank 1)"]["points"][at][2] for at in (18, 19, 20)] == [
        3e3,
        40e3,
        3e3,
    ]
    usage_csv(used, tmp_path / "u.csv")
    with (tmp_path / "u.csv").open(newline="") as file:
        rows = list(library.DictReader(file))
    assert len(rows) == sum(len(each["points"]) for each in lines.values())
    own = [row for row in rows if (row["what"], row["line"]) == ("written to disk", "disk vda of b")]
    assert [[int(row["start_ns"]), int(row["end_ns"]), float(row["value"])] for row in own] == sent["points"]
    assert {row["counter"] for row in own} == {sent["counter"]} and {row["unit"] for row in own} == {"bytes/s"}
    json(breakdown, tmp_path / "b.json")
    content = decoder.loads((tmp_path / "b.json").read_text())
    assert content["utilisation"] == content["drops"] == []
    fallen = [Drop("a", "eth0", (5, 9), 0.25, "checkpoint", 1, ("rx",)), Drop("b", "eth1", (6, 9), 0.5, "")]
    json(breakdown, tmp_path / "b.json", drops=fallen)
    first, second = decoder.loads((tmp_path / "b.json").read_text())["drops"]
    assert first == {
        "host": "a",
        "interface": "eth0",
        "ways": ["rx"],
        "start_ns": 5,
        "end_ns": 9,
        "share": 0.25,
        "cause": "checkpoint",
        "rank": 1,
    }
    assert (second["ways"], second["cause"], second["rank"]) == (["rx", "tx"], None, None)
    assert from_json(tmp_path / "b.json") == breakdown


SIZES = st.floats(0, 1e15)
BREAKDOWNS = st.builds(
    Breakdown,
    st.lists(
        st.builds(
            Share,
            st.integers(0, 9),
            st.integers(0, 9),
            st.integers(0, 9),
            SIZES,
            st.dictionaries(st.text(), SIZES),
            st.dictionaries(
                st.text(),
                st.builds(Moving, *([SIZES] * 6), st.dictionaries(st.integers(0, 9), SIZES)),
            ),
        )
    ).map(tuple),
    st.dictionaries(st.text(), st.tuples(SIZES, SIZES)),
    st.lists(st.text()).map(tuple),
    st.lists(st.text()).map(tuple),
)


@hypothesis.settings(
    max_examples=25, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(breakdown=BREAKDOWNS)
def test_a_breakdown_survives_its_file(tmp_path: pathlib.Path, breakdown: Breakdown) -> None:
    """`json` and `from_json` are each other's inverse, to the last bit."""
    json(breakdown, tmp_path / "b.json")
    assert from_json(tmp_path / "b.json") == breakdown


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "cut off"),
        ('{"format": "penstock-breakdown/1", "sha', "cut off"),
        ("[" * 100_000, "cut off"),
        ("[1]", "does not say so"),
        ('{"format": 1}', "does not say so"),
        ('{"format": "penstock-breakdown/2"}', "reader of penstock-breakdown/1"),
        ('{"format": "penstock-breakdown/1", "shares": [{}], "offsets_ns": {}, "problems": []}', "makes no sense"),
        ('{"format": "penstock-breakdown/1", "shares": 5, "offsets_ns": {}, "problems": []}', "makes no sense"),
        (
            '{"format": "penstock-breakdown/1", "shares": [], "offsets_ns": {"a": [1, NaN]}, "problems": []}',
            "makes no sense",
        ),
        (
            '{"format": "penstock-breakdown/1", "shares": [], "offsets_ns": {"a": [1]}, "problems": []}',
            "makes no sense",
        ),
    ],
)
def test_a_file_that_is_no_breakdown_is_refused(text: str, says: str, tmp_path: pathlib.Path) -> None:
    """Cut off, foreign, of another version or hostile: one error that says what it is."""
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(Config, match=says):
        from_json(tmp_path / "b.json")


def test_a_disk_that_fills_up_leaves_no_part(tmp_path: pathlib.Path) -> None:
    """A limit on the size of files stands for the full disk: what was there before stays, and nothing else does."""
    (tmp_path / "t.json").write_text("before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(Config, match=r"cannot write .*t\.json: File too large; name a file"):
            perfetto(data_parallel(3), tmp_path / "t.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == ["t.json"] and (tmp_path / "t.json").read_text() == "before"


def test_files_are_written_whole_or_not_at_all(tmp_path: pathlib.Path) -> None:
    """Full disk, missing rights, a folder in the way: the error says what to do, and the file that was there stays."""
    breakdown = a_breakdown()
    for write in (csv, json):
        with pytest.raises(Config, match=r"cannot write .*No space left on device.*name a file"):
            write(breakdown, pathlib.Path("/dev/full"))
        with pytest.raises(Config, match="cannot write"):
            write(breakdown, tmp_path)
        with pytest.raises(Config, match="cannot write"):
            write(breakdown, pathlib.Path("/dev/null/x"))
    target = tmp_path / "b.json"
    target.write_text("before")
    broken = Breakdown((Share(0, 1, 0, float("nan"), {}, {}),))
    with pytest.raises(ValueError):
        json(broken, target)
    assert target.read_text() == "before" and os.listdir(tmp_path) == ["b.json"]
    json(breakdown, target)
    assert from_json(target) == breakdown
    # As readable as the umask lets a file be.
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(target.stat().st_mode) == 0o666 & ~umask
    link = tmp_path / "link.csv"
    link.symlink_to(tmp_path / "real.csv")
    csv(breakdown, link)
    assert link.is_symlink() and (tmp_path / "real.csv").read_text().startswith("rank,")
