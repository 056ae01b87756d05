"""Files of other profilers that are broken or hostile: an error of ours or a partial result, and bounded memory."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

import profiled
from penstock.errors import Config
from penstock.profiling import record
from penstock.profiling.breakdown import Breakdown
from penstock.profiling.divide import divide
from penstock.profiling.readers import load
from penstock.profiling.readers.source import Text
from penstock.profiling.record import Record
from penstock.tools.profile import command as profile_command
from penstock.tools.profile import report
from profiled import LOG, NEWER, check_sums, loaded, written


@pytest.mark.parametrize(
    ("content", "want"),
    [
        (b"", "is empty"),
        (b"SQLite format 3\0" + b"\0" * 100, "a database"),
        (b"PK\x03\x04" + b"\0" * 100, "a zip archive: unpack it first"),
        (b"\x80\x04\x95" + b"\0" * 100, "never read"),
        (b"\0\1\2\3" * 100, "is no text"),
        (b"hello\nworld\n", "no log of Megatron-LM"),
        (b" iteration 1/ 2 | elapsed time per iteration (ms): 3.0 |", "without timers"),
        (b'{"a": 1}', "no list traceEvents"),
        (b'{"traceEvents": []}', "not of torch.profiler"),
        (b'[{"ph": "X", "cat": "other", "name": "n", "ts": 1, "dur": 1}]', "not of torch.profiler"),
        (b'{"format": "penstock-profile/9"}\n', "read it with the penstock that wrote it"),
        (b'{"header": {"n_ranks": 1}}\n{"coll_perf"', "holds no collective"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: pathlib.Path, content: bytes, want: str) -> None:
    """The error says which file, what it is, and what is read; plain and packed."""
    path = tmp_path / "some.file"
    path.write_bytes(content)
    with pytest.raises(Config, match=want) as said:
        load(path)
    assert str(path) in str(said.value)
    if want not in ("is empty", "a database") and b"\0" not in content:
        path.write_bytes(gzip.compress(content))
        with pytest.raises(Config, match=want):
            load(path)


def test_a_rank_of_another_version_is_refused(tmp_path: pathlib.Path) -> None:
    """By the command, as an error of one line that names the file, both versions and what to do; also beside a rank that could
    be read, whose numbers alone would be of half a job."""
    for rank, version in ((0, 1), (1, 2)):
        head = record.line(profiled.record(rank, 2).header).replace("penstock-profile/1", f"penstock-profile/{version}")
        steps = "".join(map(record.line, profiled.record(rank, 2).steps))
        (tmp_path / f"rank-{rank}.jsonl").write_text(head + steps)
    told = CliRunner().invoke(profile_command, ["--read", str(tmp_path)])
    assert told.exit_code == 1 and isinstance(told.exception, SystemExit)
    assert told.output == (
        f"Error: {tmp_path / 'rank-1.jsonl'} is a penstock-profile/2, and this penstock reads penstock-profile/1: read it with "
        "the penstock that wrote it, or record anew with this one\n"
    )
    (tmp_path / "rank-1.jsonl").unlink()
    assert CliRunner().invoke(profile_command, ["--read", str(tmp_path)]).exit_code == 0


@pytest.mark.parametrize("text", ["\x1b]0;owned\x07", "\r\x9b2J", "\ud800", "\u202e"])
def test_texts_of_a_record_are_harmless(tmp_path: pathlib.Path, text: str) -> None:
    """On the terminal, in the page and in all tables, wherever they stand; of an exception's text the other lines stay."""
    one = profiled.record(0, 1)
    one.header.about.update({"command": text, "job": text, "backend": text, "device": {text: text}})
    steps = [step._replace(spans=(*step.spans, record.Span(text, step.start_ns, step.end_ns))) for step in one.steps]
    operations = [dataclasses.replace(each, name=text, group=text) for each in one.samples[0].operations]
    sample = dataclasses.replace(one.samples[0], operations=tuple(operations))
    header = dataclasses.replace(one.header, host=text)
    event = record.Event(10**9, "exception", f"one\n{text}two")
    path = tmp_path / "rank-0.jsonl"
    path.write_text("".join(map(record.line, [header, *steps, sample, event])))
    names = ("html", "csv", "json", "perfetto")
    options = [each for name in names for each in (f"--{name}", str(tmp_path / name))]
    told = CliRunner().invoke(profile_command, ["--read", str(path), "--kineto", str(tmp_path / "k"), *options])
    assert told.exit_code == 0, told.exception
    [read] = loaded(path)
    made = [
        told.output,
        *((tmp_path / name).read_text() for name in names),
        read.events[0].text,
        *divide([read]).problems,
    ]
    assert not any(text in each or json.dumps(text)[1:-1] in each for each in made)
    assert read.events[0].text.startswith("one\n") and read.events[0].text.endswith("two")


@pytest.mark.parametrize("job", [["x"], {"a": ["x"]}, None, {"a": "b"}, 1e400, 7])
def test_what_a_header_says_of_its_job_is_not_believed(tmp_path: pathlib.Path, job: Any) -> None:
    """It may be of any kind: told, or refused."""
    header = json.loads(record.line(profiled.record(0, 1).header))
    header["about"] = {"job": job}
    path = tmp_path / "rank-0.jsonl"
    path.write_text(json.dumps(header) + "\n" + "".join(map(record.line, profiled.record(0, 1).steps)))
    told = CliRunner().invoke(profile_command, ["--read", str(path)])
    assert told.exit_code in (0, 1) and isinstance(told.exception, (SystemExit, type(None))), told.exception


@pytest.mark.parametrize("value", ["1e300", "-1e18", "1e18", "NaN", "Infinity", "1e999"])
def test_counters_that_count_nothing_are_left_out(tmp_path: pathlib.Path, value: str) -> None:
    """Their sums and rates would be no numbers, and pictures cannot have such axes."""
    header = record.line(record.Header(0, 1, "a", 1, 0, 0, {"counters": True}))
    lines = [
        f'{{"readings":{at},"values":{{"nic.e.rx_bytes":{each}}}}}\n' for at, each in ((1, "7"), (2, value), (3, "9"))
    ]
    path = tmp_path / "host-a.jsonl"
    path.write_text("".join([header, *lines]))
    found = record.read(path)
    assert [list(each.values.values()) for each in found.readings] == [[7], [9]] and len(found.problems) == 1


@pytest.mark.parametrize("joined", ["whole", "within a line"])
def test_a_second_record_in_a_file_is_left_out(tmp_path: pathlib.Path, joined: str) -> None:
    """Two ranks' files in one, also behind a first that ends within a line: what is read is of the first rank alone, and the
    problem names the line at which the second begins."""
    texts = []
    for rank in range(2):
        one = profiled.record(rank, 2, steps=4 + 3 * rank)
        texts.append("".join(map(record.line, [one.header, *one.steps])))
    if joined == "within a line":
        texts[0] = texts[0][:-20]
    path = tmp_path / "both.jsonl"
    path.write_text("".join(texts))
    [found] = loaded(path)
    whole = 4 if joined == "whole" else 3
    assert found.header.rank == 0 and found.steps == profiled.record(0, 2).steps[:whole]
    [said] = found.problems
    assert said.startswith(f"both.jsonl holds a second record from line {whole + 2} on")


WATCH = record.Watch(1, 9, (record.Ran("all_reduce", 1, 2), record.Ran("send", 2, 3)))


@pytest.mark.parametrize("name", ["step", "sample", "ended", "watched", "readings", "event"])
def test_lines_with_values_of_any_type_are_left_out_and_counted(tmp_path: pathlib.Path, name: str) -> None:
    """Each field of a line in turn is a number, a text, a list, an object and null. What makes no sense is counted, and the lines
    behind it are read."""
    one = profiled.record(0, 1)
    ended = record.Endings(9, 0, (record.Ended("c", 0, "g", "all_reduce", 1, 2),), 5)
    lines = [
        one.steps[0],
        one.samples[0],
        ended,
        WATCH,
        record.Readings(5, {"a": 1.0}),
        record.Event(9, "end", "text"),
    ]
    whole = next(given for each in lines if name in (given := json.loads(record.line(each))))
    strange = (3, "x", [7], {"a": []}, None, True, 1e400)
    given = [json.dumps({**whole, key: value}) + "\n" for key in whole for value in strange]
    path = tmp_path / "rank-0.jsonl"
    path.write_text(record.line(one.header) + "".join(given) + "".join(map(record.line, one.steps)))
    [found] = loaded(path)
    assert all(step in found.steps for step in one.steps)
    kept = [*found.steps, *found.samples, *found.endings, *found.watches, *found.readings, *found.events]
    bad = len(given) + len(one.steps) - len(kept)
    assert bad > len(whole) and found.problems == [f"rank-0.jsonl: {bad} lines make no sense and are left out"]


@pytest.mark.parametrize(
    ("dur", "at", "args"), [(0, 0, {}), (0, 1.7e15, {}), (1, 0, {}), (0, 1.7e15, None), (1, 1.7e15, None)]
)
def test_times_of_nothing_are_told(tmp_path: pathlib.Path, dur: float, at: float, args: Any) -> None:
    """Operations that take 0 ns, also late on the clock, and operations of one rank without arguments."""
    trace: dict[str, Any] = {"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 2}}
    trace["traceEvents"] = [
        {"ph": "X", "pid": 7, "tid": tid, "cat": cat, "name": name, "ts": at + 1000 * step + begin, "dur": took}
        | ({} if args is None else {"args": {"Group size": 2, "In msg nelems": 9, "dtype": "Float"}})
        for step in range(5)
        for cat, tid, name, begin, took in (
            ("user_annotation", 3, f"ProfilerStep#{step}", 0, 900),
            ("user_annotation", 3, "DistributedDataParallel.forward", 10, 200),
            ("cpu_op", 3, "autograd::engine::evaluate_function: X", 300, 300),
            ("cpu_op", 4, "gloo:all_reduce", 400, 300 * dur),
            ("user_annotation", 3, "Optimizer.step#SGD.step", 800, 100),
        )
    ]
    told = CliRunner().invoke(profile_command, ["--read", str(written(tmp_path / "t.json", trace))])
    assert told.exit_code == 0, told.exception


def test_steps_that_take_no_time_are_told(tmp_path: pathlib.Path) -> None:
    """By the command and on the page."""
    one = profiled.record(0, 1)
    one.steps[:] = [step._replace(end_ns=step.start_ns, spans=(), waits=()) for step in one.steps]
    path = tmp_path / "rank-0.jsonl"
    path.write_text("".join(map(record.line, [one.header, *one.steps])))
    told = CliRunner().invoke(profile_command, ["--read", str(path), "--html", str(tmp_path / "html")])
    assert told.exit_code == 0 and "steps take no time" in told.output, told.exception


def test_what_is_no_file(tmp_path: pathlib.Path) -> None:
    """Nothing there, a pipe, a device, a folder without files of ours."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "nothing", tmp_path / "pipe", pathlib.Path("/dev/zero"), tmp_path, pathlib.Path("a\0b")):
        with pytest.raises(Config):
            load(path)


def test_a_trace_that_is_cut_off_gives_what_is_there(tmp_path: pathlib.Path) -> None:
    """At any byte, plain and packed: never more than the whole, and a problem says so."""
    whole = json.dumps(profiled.cuda_trace()).encode()
    path = tmp_path / "t.json"
    path.write_bytes(whole)
    steps = len(loaded(path)[0].steps)
    packed = gzip.compress(whole)
    partial = 0
    for content in [
        *(whole[: len(whole) * i // 40] for i in range(1, 40)),
        *(packed[: len(packed) * i // 10] for i in range(1, 10)),
    ]:
        path.write_bytes(content)
        try:
            (found,) = loaded(path)
        except Config:
            continue
        assert 1 <= len(found.steps) <= steps and any("t.json is" in each for each in found.problems), found.problems
        partial += 1
    assert partial > 30


def test_events_without_sense_are_left_out_and_counted(tmp_path: pathlib.Path) -> None:
    """Times that are no numbers or before others, names and threads of any kind: the rest is read as if they were not there."""
    trace = profiled.cuda_trace()
    path = tmp_path / "t.json"
    clean = loaded(written(path, trace))[0]
    bad: list[Any] = [
        {"ph": "X", "cat": "kernel", "name": "k", "ts": ts, "dur": dur, "tid": [1], "args": []}
        for ts, dur in (
            (float("nan"), 1),
            (1, float("inf")),
            (-5, 1),
            (1, -1),
            ("1", 1),
            (None, 1),
            (True, 1),
            (1, 1e300),
        )
    ]
    trace["traceEvents"] += [*bad, 7, None, "text", []]
    (found,) = loaded(written(path, trace))
    assert found.steps == clean.steps and found.samples == clean.samples
    assert any("8 events have no sensible time" in each for each in found.problems)
    assert any("4 events make no sense" in each for each in found.problems)


def limited(program: str, *arguments: str) -> str:
    """What a program prints that may have 1 GiB of memory more than Python itself, and 60 s."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({1 << 30}, {1 << 30}))\n"
    done = subprocess.run(
        [sys.executable, "-c", limit + program, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


READ = """
import sys, pathlib
from penstock.errors import Config
from penstock.profiling.readers import load
try:
    found = load(pathlib.Path(sys.argv[1]))
    print("read", found[0].problems if isinstance(found, list) else found.problems)
except Config as error:
    print("Config", error)
"""

FILLERS = {
    "spaces": (b'{"traceEvents": [', b" ", b""),
    "nesting": (b'{"traceEvents": [', b"[", b""),
    "objects": (b'{"traceEvents": ', b'{"a":', b""),
    "one string": (b'{"traceEvents": ["', b"a", b""),
    "a number": (b'{"a": ', b"7", b""),
    "one line": (b"iteration 1/2 ", b"x", b""),
    "zeros": (b"", b"\0", b""),
}


@pytest.mark.parametrize("kind", FILLERS)
def test_a_bomb_does_not_fill_the_memory(tmp_path: pathlib.Path, kind: str) -> None:
    """A gzip file of a few hundred KiB that unpacks to 128 MiB of one thing."""
    head, filler, tail = FILLERS[kind]
    path = tmp_path / "t.json.gz"
    pack = zlib.compressobj(1, wbits=31)
    piece = filler * ((1 << 20) // len(filler))
    path.write_bytes(
        b"".join([pack.compress(head), *(pack.compress(piece) for _ in range(128)), pack.compress(tail), pack.flush()])
    )
    assert path.stat().st_size < 4 << 20
    said = limited(READ, str(path))
    assert said.startswith(("Config", "read"))


@pytest.mark.parametrize("filler", [" " * 4000, "[a]:" + " " * 4000 + "|"])
def test_a_log_takes_time_in_proportion_to_its_length(tmp_path: pathlib.Path, filler: str) -> None:
    """4 MB of lines of spaces within tables of timers, whose reading took the square of a line's length. They are read within the
    limits of `limited`, and so is the table behind them."""
    path = tmp_path / "log"
    iteration = " iteration {}/ 10 | elapsed time per iteration (ms): 10.0 |\n"
    table = "(min, max) time across ranks (ms):\n"
    row = "    optimizer ................................: (1.0, 2.0)\n"
    path.write_text(iteration.format(1) + f"{table}{filler}\n" * 1000 + table + row + "\n" + iteration.format(2))
    said = limited(READ + "print(found.shares[0].work['optimizer'])", str(path))
    assert said.splitlines() == ["read ()", "2000000.0"]


def test_text_is_bounded(tmp_path: pathlib.Path) -> None:
    """Lines are cut, packing is limited by its ratio, and several packed parts are one text."""
    path = tmp_path / "text"
    path.write_bytes(gzip.compress(b"one\r\ntwo\n") + gzip.compress(b"a" * (3 << 20) + b"\nthree") + b"\0" * 16)
    with path.open("rb") as file:
        lines = list(Text(file, path).lines())
    assert [each[:5] for each in lines if each] == ["one", "two", "aaaaa", "three"] and len(
        max(lines, key=len)
    ) == 1 << 20


# ---------------------------------------------------------------------------------------------------------------- fuzzing


def mutations(whole: bytes, random_of: random.Random) -> Iterator[bytes]:
    """Bytes that flip, parts that go, come twice or move, and numbers that become what no number should be."""
    strange = [
        b"NaN",
        b"-1",
        b"1e999",
        b"null",
        b"[]",
        b"{}",
        b'"x"',
        b"9" * 400,
        b"true",
        b"-Infinity",
        b"0",
        b"18446744073709551616",
    ]
    while True:
        text = bytearray(whole)
        for _ in range(random_of.choice((1, 1, 2, 5, 20))):
            at = random_of.randrange(len(text) or 1)
            kind = random_of.randrange(5)
            if kind == 0 and text:
                text[at] ^= 1 << random_of.randrange(8)
            elif kind == 1:
                del text[at : at + random_of.randrange(1, 200)]
            elif kind == 2:
                text[at:at] = text[at : at + random_of.randrange(1, 400)]
            elif kind == 3:
                del text[at:]
            else:
                while at < len(text) and not chr(text[at]).isdigit():
                    at += 1
                until = at
                while until < len(text) and (chr(text[until]).isdigit() or text[until] in b".-e"):
                    until += 1
                text[at:until] = random_of.choice(strange)
        yield bytes(text)


def check(found: list[Record] | Breakdown) -> None:
    """What a reader returns can be shown, written and read again."""
    if isinstance(found, Breakdown):
        report.text(found, [])
        check_sums(found.shares)
        return
    for one in found:
        assert 0 <= one.header.rank < one.header.world and one.steps == sorted(
            one.steps, key=lambda step: step.start_ns
        )
        lines = "".join(map(record.line, [one.header, *one.steps, *one.samples]))
        assert all(json.loads(line) for line in lines.splitlines())
        for step in one.steps:
            assert 0 <= step.start_ns <= step.end_ns < 1 << 63
            assert all(
                step.start_ns <= each.start_ns <= each.end_ns <= step.end_ns for each in (*step.spans, *step.waits)
            )
        for sample in one.samples:
            assert all(each.issued_ns <= each.ended_ns for each in sample.operations)


@pytest.mark.parametrize("kind", ["trace", "old trace", "log", "newer log", "inspector", "ours"])
def test_no_mutation_breaks_a_reader(tmp_path: pathlib.Path, kind: str) -> None:
    """Valid files with seeded faults: a result that holds together, or an error of ours."""
    old = profiled.cuda_trace()
    old["traceEvents"] = [each for each in old["traceEvents"] if each["cat"] != "kernel"]
    one = profiled.record(1, 4)
    whole = {
        "trace": json.dumps(profiled.cuda_trace()),
        "old trace": json.dumps(old["traceEvents"]),
        "log": LOG.read_text(),
        "newer log": NEWER.format(number=10, head="(min, max)", least="(1.0, ", end=")") * 2,
        "inspector": profiled.inspector_lines(),
        "ours": "".join(map(record.line, [one.header, *one.steps, *one.samples, *one.endings, WATCH, *one.readings])),
    }[kind].encode()
    path = tmp_path / "file"
    path.write_bytes(whole)
    check(load(path))
    if kind == "log":  # an iteration that takes no time
        path.write_bytes(re.sub(rb"iteration \(ms\): [\d.]+", b"iteration (ms): 0.0", whole))
        check(load(path))
    read = 0
    for seed, content in zip(range(120), mutations(whole, random.Random(kind)), strict=False):
        path.write_bytes(content)
        try:
            check(load(path))
            read += 1
        except Config:
            pass
        except Exception as error:
            raise AssertionError(f"seed {kind!r}, mutation {seed}") from error
    assert read > 20


def test_a_written_record_reads_back(tmp_path: pathlib.Path) -> None:
    """A trace's record is one of ours: what the recorder's format keeps of it is all of it."""
    (found,) = loaded(written(tmp_path / "t.json", profiled.cuda_trace()))
    path = tmp_path / "rank-0.jsonl"
    path.write_text("".join(map(record.line, [found.header, *found.steps, *found.samples])))
    (again,) = loaded(path)
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert loaded(path) == [again]
    assert (again.header, again.steps, again.samples) == (found.header, found.steps, found.samples)


def test_of_a_trace_with_too_many_events_whole_steps_are_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many of its first steps as there is room for, wherever their marks stand in the file; and that is said. They are read as
    if the file had no others. A single step that is too large, or a file without marks, is cut off, and that is said, too."""

    def events(steps: int, each: int) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        usual = {"ph": "X", "pid": 7, "tid": 3}
        for step in range(steps):
            at = step * 10_000.0
            for number in range(each):
                made.append({**usual, "cat": "cpu_op", "name": "aten::mm", "ts": at + 50 * number, "dur": 20.0})
            made.append({**usual, "cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": at, "dur": 9_900.0})
        return made

    monkeypatch.setattr("penstock.profiling.readers.kineto.MOST_EVENTS", 500)
    path = tmp_path / "t.json"
    [found] = loaded(
        written(path, {"traceEvents": sorted(events(20, 100), key=lambda each: each["name"], reverse=True)})
    )
    assert [step.number for step in found.steps] == [0, 1, 2, 3]
    assert "t.json has 2,020 events, more than 500: its first 4 of 20 steps are read" in found.problems
    [alone] = loaded(written(path, {"traceEvents": events(4, 100)}))
    assert (alone.steps, alone.samples, alone.problems) == (found.steps, found.samples, [])
    for made in (events(1, 700), [each for each in events(9, 100) if each["cat"] == "cpu_op"]):
        [cut] = loaded(written(path, {"traceEvents": made}))
        assert any("has more than 500 events: " in each for each in cut.problems) and cut.steps


def test_a_large_trace_takes_little_memory(tmp_path: pathlib.Path) -> None:
    """100,000 operators, 20 MB, are read with less than 300 MiB; as many events of no interest cost nothing."""
    path = tmp_path / "t.json"
    base = profiled.cuda_trace()
    with path.open("w") as file:
        file.write('{"traceEvents": [')
        file.write(",".join(map(json.dumps, base["traceEvents"])))
        for i in range(100_000):
            at = 0.5 + i * 0.9
            file.write(
                f',{{"ph":"X","cat":"cpu_op","name":"aten::add_{i % 50}","pid":7,"tid":3,"ts":{at},"dur":0.5,"args":{{}}}}'
            )
            file.write(
                f',{{"ph":"f","cat":"ac2g","name":"ac2g","pid":7,"tid":3,"ts":{at},"id":{i},"args":{{"more":"{"x" * 60}"}}}}'
            )
        file.write("]}")
    # The kernel's own peak: ru_maxrss has that of the process that started this one.
    program = (
        READ + "\nprint(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])\n"
    )
    said = limited(program, str(path))
    assert said.startswith("read []") and int(said.split()[-1]) < 300 << 10, said
