"""The bench: that its definitions are right, that it notices what it is there to notice, and that it ends cleanly."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import click
import click.testing
import psutil
import pytest
import torch
import torch.distributed as dist
from rich.console import Console

import forked
from penstock.tools.bench import backends, cli, figures, options, readiness, readiness_rank, report, training, tuner
from penstock.tools.bench.collectives import COLLECTIVES, PERIOD, Run, most_ranks
from penstock.tools.bench.launcher import BenchError
from penstock.tools.bench.mesh import Mesh
from penstock.tools.bench.pattern import DTYPES, Pattern, exact_limit
from penstock.tools.bench.session import (
    Point,
    RankGroup,
    Series,
    Settings,
    launching,
    least_sent,
    measure,
    unavailable,
)
from penstock.tools.bench.task import Task, WrongResult
from penstock.tools.testbed.bed import Loopback
from penstock.tools.testbed.link import LinkSpec
from penstock.tools.testbed.system import unavailable as testbed_unavailable
from penstock.tune import Setting, Tuner
from ranks import run as run_ranks
from samples import bench_outcome

GLOO = backends.BACKENDS["gloo"]
HERE = [each for each in backends.BACKENDS.values() if unavailable(each, on_testbed=False) is None]
"""The backends that can run on this machine."""

needs_testbed = pytest.mark.skipif(testbed_unavailable() is not None, reason=str(testbed_unavailable()))


# Definitions


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_layouts_say_what_a_collective_computes(name: str, ranks: int) -> None:
    """The values that each rank must find are those that plain Python computes from what all ranks put in."""
    collective = COLLECTIVES[name]
    elements = collective.elements(4 * 31 * ranks, ranks, 4)
    layouts = [collective.layout(rank, ranks, elements) for rank in range(ranks)]
    sources = [_values((layout.source,)) if layout.source else [] for layout in layouts]
    expected = _reference(name, sources)
    for layout, want in zip(layouts, expected, strict=True):
        if layout.result is None:
            assert want is None
        else:
            assert _values(layout.result) == want


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_traffic_agrees_with_the_bus_factor(ranks: int) -> None:
    """busbw is what the busiest rank sends or receives a second: that is what makes it comparable with a link."""
    nbytes = ranks * 4096
    for collective in COLLECTIVES.values():
        sent, received = [0] * ranks, [0] * ranks
        for (src, dst), count in collective.traffic(ranks, nbytes).items():
            sent[src] += count
            received[dst] += count
        assert max(sent + received) == pytest.approx(collective.bus_factor(ranks) * nbytes), collective.name


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_no_plan_sends_less_than_must_cross(ranks: int) -> None:
    """The bound that detours are caught with holds for every plan, and is met exactly by two hosts of one rank."""
    for collective in COLLECTIVES.values():
        nbytes = collective.elements(ranks * 4096, ranks, 4) * 4
        least = least_sent(collective, ranks, nbytes, lambda rank: rank)
        sent = dict.fromkeys(range(ranks), 0)
        for (src, _), count in collective.traffic(ranks, nbytes).items():
            sent[src] += count
        if collective.name == "barrier":
            continue
        assert all(sent[host] >= least[host] for host in sent), collective.name
        if ranks == 2:
            assert sent == least, collective.name


def test_least_sent_counts_a_host_once() -> None:
    """Ranks of one host add up before they send: four ranks on two hosts must send one vector each way."""
    assert least_sent(COLLECTIVES["all-reduce"], 4, 1000, lambda rank: rank // 2) == {0: 1000, 1: 1000}
    assert least_sent(COLLECTIVES["broadcast"], 4, 1000, lambda rank: rank // 2) == {0: 1000, 1: 0}
    assert least_sent(COLLECTIVES["all-to-all"], 4, 1000, lambda rank: rank // 2) == {0: 1000, 1: 1000}


def test_copy_bound_of_an_all_reduce() -> None:
    """Each rank reads n parts to reduce and the rest to collect, and writes its result once."""
    (share, *others) = COLLECTIVES["all-reduce"].memory(4, 4000)
    assert others == [share] * 3
    assert share.sources * share.reduced + share.collected == 4000 + 3000
    assert share.reduced + share.collected == 4000


# Checking


@pytest.mark.parametrize("dtype", DTYPES)
def test_pattern_accepts_what_it_wrote_and_nothing_else(dtype: str) -> None:
    """Every kind of wrong byte is seen, and the message says what it looks like."""
    pattern = Pattern(dtype, ranks=3)
    whole = Run(0, 3 * (1 << 18) + 5, 0b111)  # several pieces and an odd end
    tensor_N = torch.empty(whole.count, dtype=DTYPES[dtype])
    pattern.fill(tensor_N, whole, turn=4)
    pattern.check(tensor_N, (whole,), 4, "it")

    def damaged(change: str) -> str:
        with pytest.raises(WrongResult) as caught:
            pattern.check(tensor_N, (whole,), 4, "it")
        pattern.fill(tensor_N, whole, turn=4)
        assert "it: element" in str(caught.value), change
        return str(caught.value)

    last = whole.count - 1
    tensor_N[last] = 0
    assert f"element {last} " in (text := damaged("unwritten")) and "nothing was written" in text
    tensor_N[700_000] = tensor_N[700_000] * 5 / 7 if tensor_N.is_floating_point() else tensor_N[700_000] // 7 * 5
    assert "sum over ranks [0, 2], where [0, 1, 2] must be" in damaged("a rank is missing")
    tensor_N[0] += 1
    assert "no sum of ranks" in damaged("torn")
    if tensor_N.is_floating_point():
        tensor_N[9] = float("nan")
        assert "is nan" in damaged("not a number")
    pattern.fill(tensor_N, whole, turn=3)
    damaged("an earlier operation")
    for shift in (1, 2, 1 << 14, 1 << 16, 3 * (1 << 12)):
        tensor_N.copy_(tensor_N.roll(shift))
        damaged(f"moved by {shift} elements")


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_exact_up_to_the_limit_and_refused_above(dtype: str) -> None:
    """At the largest number of ranks every sum is exact; one rank more is refused."""
    most = 1
    while PERIOD * ((1 << most + 1) - 1) <= exact_limit(DTYPES[dtype]):
        most += 1
    limit = PERIOD * ((1 << most) - 1)
    assert torch.tensor(limit, dtype=DTYPES[dtype]) != torch.tensor(limit - 1, dtype=DTYPES[dtype])
    assert most == most_ranks(dtype)
    Pattern(dtype, most)
    with pytest.raises(ValueError, match="use fewer ranks"):
        Pattern(dtype, most + 1)


# Probes


@pytest.mark.parametrize("split", ["pull", "equal", "saturate"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_raw_sockets_move_the_traffic(ranks: int, split: str) -> None:
    """Every rank gets at least the bytes of each of several transfers in a row, and nothing is left under way. A connection of
    somebody else is closed."""
    meshes = [Mesh(rank, ranks, "127.0.0.1") for rank in range(ranks)]
    other = socket.create_connection(meshes[0].address)
    other.sendall(b"GET / HTTP/1.1\r\n\r\n")
    moved: list[dict[int, int]] = [{} for _ in range(ranks)]
    traffics = [
        collective.traffic(ranks, collective.elements(nbytes, ranks, 1))
        for nbytes in (1, 3_000_001)
        for collective in COLLECTIVES.values()
    ]

    def rank_main(mesh: Mesh) -> None:
        mesh.connect([other.address for other in meshes], flows=3)
        for number, traffic in enumerate(traffics):
            transfer = mesh.transfer(traffic, 3, split)
            mesh.barrier()
            transfer.run()
            transfer.drain()
            moved[mesh.rank][number] = sum(transfer.received.values())
            assert sum(transfer.sent.values()) >= sum(transfer.to_send.values())

    threads = [threading.Thread(target=rank_main, args=(mesh,)) for mesh in meshes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    other.close()
    for rank in range(ranks):
        for number, traffic in enumerate(traffics):
            due = sum(count for (_, dst), count in traffic.items() if dst == rank)
            assert moved[rank][number] >= due if split == "saturate" else moved[rank][number] == due
    for mesh in meshes:
        for pair in mesh.pairs.values():
            for flow in pair.flows:
                with pytest.raises(BlockingIOError):
                    flow.recv(1)
    for mesh in meshes:
        mesh.close()


# Running


@pytest.fixture
def bed() -> Iterator[Loopback]:
    with Loopback(hosts=1) as loopback:
        yield loopback


@pytest.mark.parametrize("series", HERE, ids=lambda series: series.label)
def test_every_collective_and_dtype(series: Series, bed: Loopback, tmp_path: pathlib.Path) -> None:
    """Each backend that is here delivers right results in every collective, measured and checked the way that users do it."""
    with launching(bed) as launcher:
        settings = Settings("all-reduce", [8], [3], timeout_s=60)
        group = RankGroup(bed, launcher, series, 3, 0, tmp_path / "control", settings)
        try:
            group.join()
            for name, dtype in itertools.product(COLLECTIVES, DTYPES):
                if (name == "barrier" and dtype != "float32") or (series.role == "mpi" and dtype == "bfloat16"):
                    continue
                nbytes = COLLECTIVES[name].elements(3 * 8 * 1000, 3, 8) * 8
                warm_up = group.order(Task(name, nbytes, dtype, slots=3).order(), f"{name} of {dtype}")
                answers = group.order({"do": "measure", "blocks": 2}, f"{name} of {dtype}")
                assert [len(answer["spans"]) for answer in warm_up + answers] == [1, 1, 1, 2, 2, 2]
                assert all(begin < end for answer in answers for begin, end in answer["spans"])
            group.leave()
        finally:
            group.close()


def test_small_mode(tmp_path: pathlib.Path) -> None:
    """The command runs all backends that are here, at several ranks and sizes, and its table, JSON, plot and report say the
    same."""
    labels = [each.label for each in HERE]
    paths = [tmp_path / "bench.json", tmp_path / "bench.svg", tmp_path / "bench.html"]
    sizes = ["--ranks", "2,3", "--sizes", "1K,1M", "--rounds", "2", "--turn", "0.01", "--limit-flows", "2"]
    outputs = ["--json", str(paths[0]), "--plot", str(paths[1]), "--report", str(paths[2])]
    done = _bench(["all-reduce", *sizes, "--backends", ",".join(labels), *outputs])
    assert done.returncode == 0, done.stderr
    document = json.loads(paths[0].read_text())
    assert {"date", "hardware", "system", "versions", "runs"} <= set(document)
    assert document["versions"]["torch"] == torch.__version__.partition("+")[0] and document["system"]["kernel"]
    (run,) = document["runs"]
    assert run["does_not_show"] and run["config"]["ranks"] == [2, 3]
    points = {(point["ranks"], point["nbytes"], point["label"]): point for point in run["points"]}
    probes = ["sockets x2"] + (["copy"] if any(each.limit == "copy" for each in HERE) else [])
    want = {(ranks, nbytes, label) for ranks in (2, 3) for nbytes in (1 << 10, 1 << 20) for label in labels}
    assert set(points) == want | {(ranks, 1 << 20, label) for ranks in (2, 3) for label in probes}
    for (ranks, nbytes, label), point in points.items():
        seconds = point["seconds"]
        assert len(seconds) >= 2 and min(seconds) == point["min_s"] <= point["median_s"] <= point["p90_s"]
        assert point["algbw"] == pytest.approx(nbytes / point["median_s"] / 1e9)
        assert point["busbw"] == pytest.approx(point["algbw"] * 2 * (ranks - 1) / ranks)
        if label in labels and nbytes == 1 << 20:
            bound = points[ranks, nbytes, point["limit"]]
            assert point["limit_share"] == pytest.approx(bound["median_s"] / point["median_s"])
        assert label in done.stdout
    assert "<svg" in paths[1].read_text() and f"Report: {paths[2]}" in done.stdout
    page = paths[2].read_text()
    cells = re.findall(r"<td>([\d.]+ (?:s|ms|µs))</td>", page)
    assert len(cells) == 3 * len(points) and all(cell in done.stdout for cell in cells)
    assert re.search(r"<h1>all-reduce of 1\sMiB, 3 ranks: penstock-\w+ is [\d.]+\s× as fast as gloo", page)


def test_a_wrong_result_fails_the_bench(tmp_path: pathlib.Path) -> None:
    """A backend that loses one rank's part of one element in the second of many operations does not get a figure."""
    cheat = "if t.numel() == 1 << 18 and dist.get_rank() == 1 and (calls := calls + 1) == 2: t[77] = t[77] / 3"
    done = _bench_with_patched_all_reduce(tmp_path, cheat, ["--ranks", "2", "--sizes", "1M", "--no-limit"])
    assert done.returncode == 1
    assert "patched, rank 1 of 2, all-reduce of 1 MiB: WrongResult" in done.stderr
    assert "element 77 " in done.stderr and "sum over ranks [0], where [0, 1] must be" in done.stderr
    assert "median" not in done.stdout


def test_a_killed_rank_is_named(tmp_path: pathlib.Path) -> None:
    """A rank that dies in mid measurement ends the run at once, with its number, the signal and its last output."""
    death = (
        "if t.numel() == 1 << 18 and dist.get_rank() == 2 and (calls := calls + 1) == 7:"
        " print('last words', flush=True); os.kill(os.getpid(), 9)"
    )
    done = _bench_with_patched_all_reduce(tmp_path, death, ["--ranks", "3", "--sizes", "1M", "--no-limit"])
    assert done.returncode == 1
    assert "patched, rank 2 of 3, all-reduce of 1 MiB: it was killed by SIGKILL" in done.stderr
    assert "last words" in done.stderr and "leave patched out of --backends" in done.stderr


def test_a_backend_that_cannot_start_says_why(bed: Loopback) -> None:
    """The message holds the cause from the rank itself, and how to go on without the backend."""
    series = Series("nonsense", "torch:gloo", {"GLOO_SOCKET_IFNAME": "no-such-interface"})
    settings = Settings("all-reduce", [1024], [2], timeout_s=60)
    with pytest.raises(BenchError) as caught:
        measure(bed, [series], settings, lambda *_: None)
    assert "nonsense, rank" in str(caught.value) and "joining the group" in str(caught.value)
    assert "no-such-interface" in str(caught.value) and "leave nonsense out of --backends" in str(caught.value)


def test_sizes_that_do_not_fit_are_refused(bed: Loopback) -> None:
    """Before any process starts, with the numbers and what to do."""
    settings = Settings("all-reduce", [1 << 45], [2])
    with pytest.raises(BenchError, match=r"needs about .* of memory, and .* are available: use smaller --sizes"):
        measure(bed, [GLOO], settings, lambda *_: None)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_bench_leaves_nothing_behind(how: signal.Signals) -> None:
    """Ctrl-C, a supervisor's SIGTERM, and even SIGKILL end every rank within seconds, in mid measurement."""
    bench = forked.Popen(
        [
            *BENCH,
            "all-reduce",
            "--ranks",
            "2",
            "--sizes",
            "1M",
            "--backends",
            "gloo",
            "--turn",
            "600",
            "--rounds",
            "99",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert bench.stderr is not None
        while "2 ranks · 1 MiB" not in (line := bench.stderr.readline()):
            assert line, "the bench ended before it measured"
        workers = {each: each.cmdline() for each in psutil.Process(bench.pid).children(recursive=True)}
        os.kill(bench.pid, how)
        _, stderr = bench.communicate(timeout=20)
    finally:
        bench.kill()
    assert bench.returncode == (-signal.SIGKILL if how == signal.SIGKILL else 130)
    if how != signal.SIGKILL:
        assert "interrupted" in stderr and "Traceback" not in stderr
    assert sum("penstock.tools.bench.launcher" in argv for argv in workers.values()) == 5, (
        "the launcher, 2 ranks, 2 probes"
    )
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


# The emulated cluster


@needs_testbed
def test_testbed_counts_what_crosses(tmp_path: pathlib.Path) -> None:
    """On emulated hosts the interfaces' counters agree with the plan, and flows, link share and control are there."""
    path = tmp_path / "bench.json"
    link = "--hosts 2 --rate 2000 --flow 500 --limit-flows 4"
    arguments = f"all-reduce {link} --sizes 4M --rounds 1 --joins 2 --turn 0.01 --backends gloo".split()
    done = _bench([*arguments, "--json", str(path)])
    assert done.returncode == 0, done.stderr
    points = {point["label"]: point for point in json.loads(path.read_text())["runs"][0]["points"]}
    assert set(points) == {"gloo", "sockets x4", "saturated x4", "equal split x4"}
    assert points["gloo"]["planned"] == {"0": 4 << 20, "1": 4 << 20}
    # Headers are 66 bytes on each segment, of 1448 bytes or, with offloads, of many more; acknowledgements are as much again.
    assert 1.0 <= points["gloo"]["wire_ratio"] < 1.1
    assert 0 < points["gloo"]["link_share"] < 1
    for label in ("sockets x4", "saturated x4", "equal split x4"):
        # Four connections in classes of their own, and the control connection.
        assert points[label]["class_flows"][0]["0"] == [1, 1, 1, 1, *[0] * 11, 1]
    assert [len(points["gloo"][name]) for name in ("class_flows", "class_shares", "seconds")] == [2, 2, 2]
    assert sum(points["gloo"]["class_shares"][1]["0"]) == pytest.approx(1)
    assert "Flows by class" in done.stdout


@needs_testbed
def test_a_run_that_bypasses_the_link_fails(tmp_path: pathlib.Path) -> None:
    """A backend whose results are right though nothing crossed the link gets no figure for it."""
    cheat = "return t.mul_(3 / (1 << dist.get_rank()))"  # what the sum over both ranks must be
    arguments = ["--hosts", "2", "--sizes", "1M", "--no-limit", "--rounds", "1", "--joins", "1"]
    done = _bench_with_patched_all_reduce(tmp_path, cheat, arguments)
    assert done.returncode == 1
    assert "patched: host 0 sent" in done.stderr and "bypassed the link" in done.stderr


@needs_testbed
@pytest.mark.usefixtures("forks")
def test_ranks_by_turns(tmp_path: pathlib.Path) -> None:
    """Dealt by turns, ranks that reduce within their host first put one vector on each link; told to be a ring, still ordered by
    host, one and a half."""
    path = tmp_path / "turns.json"
    variants = [
        f"--variant={name}=penstock,PENSTOCK_SHM=1,PENSTOCK_ALGORITHM={name}" for name in ("ring", "hierarchical")
    ]
    few = [
        "--hosts=2",
        "--ranks=4",
        "--by-turns",
        "--sizes=8M",
        "--no-limit",
        "--rounds=1",
        "--joins=1",
        "--backends=penstock-tcp",
    ]
    arguments = ["all-reduce", *few, *variants, f"--json={path}"]
    done = click.testing.CliRunner().invoke(cli.command, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "ranks by turns" in done.output
    points = {one["label"]: one for one in json.loads(path.read_text())["runs"][0]["points"]}
    for name, vectors in (("ring", 1.5), ("hierarchical", 1.0)):
        for sent in points[name]["sent"].values():
            assert vectors <= sent / (8 << 20) < 1.3 * vectors, (name, sent)


# Command line and report


def test_sizes_ranks_and_variants_are_parsed() -> None:
    """What users write, and what they are told when it is wrong."""
    assert options.parse_sizes("1K..256M") == [1024 * 4**power for power in range(10)]
    assert options.parse_sizes("100,2KiB,1G") == [100, 2048, 1 << 30]
    assert options.parse_ranks("2..4,8") == [2, 3, 4, 8]
    variant = backends.parse_variant("wide=penstock,PENSTOCK_SHM=0,PENSTOCK_STREAMS=16")
    assert (variant.label, variant.role, variant.limit) == ("wide", "torch:penstock", "sockets")
    assert variant.env == {"PENSTOCK_SHM": "0", "PENSTOCK_STREAMS": "16"}
    assert backends.parse_variant("there=cpu:gloo").role == "torch:cpu:gloo"
    for parse, text in [
        (options.parse_sizes, "1X"),
        (options.parse_sizes, "4M..1K"),
        (options.parse_sizes, "0"),
        (options.parse_ranks, "1"),
        (options.parse_ranks, "two"),
        (backends.parse_variant, "penstock"),
        (backends.parse_variant, "a=penstock,X"),
        (backends.parse_variant, "=penstock"),
        (backends.parse_variant, "a=,X=1"),
    ]:
        with pytest.raises(click.BadParameter):
            parse(text)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["all-reduce", "--flow", "200"], "--flow is of an emulated link"),
        (["all-reduce", "--rate", "100"], "--rate is of an emulated link"),
        (["broadcast", "--loss", "0.1"], "--loss is of an emulated link"),
        (["training", "cnn", "--hosts", "1", "--delay", "3"], "--delay is of an emulated link"),
        (["all-reduce", "--limit-flows", "abc"], "numbers of connections"),
        (["all-reduce", "--limit-flows", "0"], "numbers of connections"),
        (["all-reduce", "--plot", "x.bmp"], "x.bmp: plots are"),
        (["all-reduce", "--report", "nowhere/x.html"], "nowhere/x.html: there is no such folder"),
        (["figures", "--json", "/proc/x.json"], "Invalid value for --json: /proc/x.json: "),
        (["all-reduce", "--ranks", "99"], "99: float32 holds the sums of at most 20 ranks exactly"),
        (["all-reduce", "--ranks", "2..5", "--dtype", "bfloat16"], "5: bfloat16 holds the sums of at most 4 ranks"),
        (["training", "cnn", "--ranks", "99"], "99 is not in the range 1<=x<=64"),
        (["readiness", "--ranks", "99"], "99 is not in the range"),
        (["tuner", "--ranks", "99"], "99 is not in the range"),
        (
            ["all-reduce", "--variant", "x=penstock-tcp,PENSTOCK_STREAMS=many"],
            "PENSTOCK_STREAMS='many': must be a number",
        ),
        (["all-reduce", "--variant", "x=penstock-tcp,PENSTOCK_STREAM=4"], "did you mean PENSTOCK_STREAMS?"),
        (["training", "cnn", "--ways", "ddp,fast"], "no way fast: there are ddp, deferred, "),
        (["training", "cnn", "--losses", "12"], "--losses trains char-gpt"),
    ],
)
def test_options_that_cannot_count_are_refused(arguments: list[str], words: str) -> None:
    """Before anything runs."""
    ended = click.testing.CliRunner().invoke(cli.command, arguments)
    assert ended.exit_code == 2 and words in ended.output, ended.output


@pytest.mark.parametrize(
    "base", [*backends.BACKENDS.values(), *backends.ENGINES.values()], ids=lambda series: series.label
)
def test_a_variant_extends_what_the_bench_has(base: Series) -> None:
    """Every name of --backends is one for --variant: the same role, its settings and more; the limit follows."""
    assert backends.parse_variant(f"it={base.label}") == dataclasses.replace(base, label="it")
    more = backends.parse_variant(f"it={base.label},PENSTOCK_STREAMS=4")
    assert more == dataclasses.replace(base, label="it", env={**base.env, "PENSTOCK_STREAMS": "4"})
    if base.role.endswith(":penstock"):
        assert backends.parse_variant(f"it={base.label},PENSTOCK_SHM=0").limit == "sockets"
        assert backends.parse_variant(f"it={base.label},PENSTOCK_SHM=1").limit == "copy"


def test_a_variant_of_nothing_says_what_there_is() -> None:
    """Before anything has started: the name, what the bench has and what torch has; and what a testbed cannot carry."""
    variant = ["--variant", "x=penstock-tpc,PENSTOCK_STREAMS=4"]
    ended = click.testing.CliRunner().invoke(cli.command, ["all-reduce", "--backends", "gloo", *variant])
    assert ended.exit_code == 2
    for part in ("no backend penstock-tpc", "penstock-tcp", "penstock-empty", "nccl"):
        assert part in ended.output, ended.output
    with pytest.raises(click.UsageError, match=r"x cannot run here: .* penstock-tcp"):
        backends.choose("gloo", ["x=penstock-empty,PENSTOCK_STREAMS=4"], on_testbed=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, so nothing is missing")
@pytest.mark.parametrize("name", list(backends.DEVICES))
def test_tensors_of_a_gpu_need_one(name: str) -> None:
    """Where torch finds none, the bench says so before anything starts, and names what tells more."""
    ended = click.testing.CliRunner().invoke(cli.command, ["all-reduce", "--backends", name])
    assert ended.exit_code == 2 and f"{name} cannot run here: torch finds no CUDA device" in ended.output, ended.output


def test_quantile_is_a_measured_value() -> None:
    """p90 is the smallest sample that nine of ten samples do not exceed."""
    assert report.quantile(list(range(1, 11)), 0.9) == 9
    assert report.quantile([5.0], 0.9) == 5.0
    assert report.quantile([1, 2, 3], 0.5) == 2


def test_rows_read_the_limit_and_the_link() -> None:
    """The limit is the fastest probe of the backend's kind, and the share of the link counts the plan's payload."""
    series = [
        Series("penstock-tcp", "torch:penstock", limit="sockets"),
        GLOO,
        Series("sockets x8", "sockets", flows=8, split="pull"),
        Series("equal split x8", "sockets", flows=8, split="equal"),
        Series("copy", "copy"),
    ]
    took = {"penstock-tcp": 1.25, "gloo": 5.0, "sockets x8": 1.0, "equal split x8": 2.0, "copy": 0.1}
    points = [
        Point("all-reduce", label, 2, 10**8, [seconds], planned={0: 10**8, 1: 10**8}, sent={0: 1.05e8, 1: 1.02e8})
        for label, seconds in took.items()
    ]
    link = LinkSpec(rate_mbit=1000)
    row = report.rows(points, series, link)[0]
    assert (row.limit, row.limit_share, row.times_gloo) == ("sockets x8", 0.8, 4.0)
    assert row.wire_ratio == pytest.approx(1.05)
    assert row.link_share == pytest.approx(8 * 10**8 / 1.25 / (link.payload_mbit or 0) / 1e6)
    assert report.flow_table([row]) is None


def test_the_bench_names_no_link_where_ranks_share_a_host() -> None:
    """On one host the table has no columns of a link; the series and its limit say what goes through memory. On emulated hosts
    ranks of one host put nothing on the link, and have no share of it."""
    outcome = bench_outcome([1 << 20], [2])
    heads = [column.head for column in report.table(outcome.rows, outcome.series, "").columns]
    assert not any("link" in head or "wire" in head for head in heads), heads
    assert {row.point.label: row.limit for row in outcome.rows}["penstock-shm"] == "copy"
    assert report.does_not_show(None) == report.DOES_NOT_SHOW_LOOPBACK

    beside = Point("all-reduce", "penstock-tcp", 2, 10**8, [1.0], planned={0: 0, 1: 0}, sent={0: 0.0, 1: 0.0})
    series = [Series("penstock-tcp", "torch:penstock", limit="sockets")]
    (row,) = report.rows([beside], series, LinkSpec(rate_mbit=1000))
    assert (row.link_share, row.wire_ratio) == (None, None)
    table = report.table([row], series, "")
    cells = dict(zip([column.head for column in table.columns], table.lines[0].cells, strict=True))
    assert (cells["of\nlink"], cells["wire/\nplan"]) == ("", "")


def test_a_slow_job_does_not_hide_behind_the_median() -> None:
    """Of ten fresh jobs three are slow: the median over everything is good, the worst job is shown beside it."""
    series = [Series("penstock-tcp", "torch:penstock", limit="sockets"), Series("sockets x8", "sockets", flows=8)]
    jobs = [[1.0, 1.0]] * 7 + [[1.0, 1.6, 1.6]] * 3
    mine = Point("all-reduce", "penstock-tcp", 2, 10**8, [each for job in jobs for each in job], jobs=jobs)
    raw = [[0.96]] * 10
    bound = Point("all-reduce", "sockets x8", 2, 10**8, [each for job in raw for each in job], jobs=raw)
    row = report.rows([mine, bound], series, None)[0]
    assert row.limit_share == pytest.approx(0.96)
    assert row.job_shares == pytest.approx([0.96] * 7 + [0.6] * 3)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report.table([row], series, "all-reduce").for_terminal())
    assert re.findall(r"\d+%", console.export_text()) == ["96%", "96%", "60%"]


def test_figures_compare_with_their_targets() -> None:
    """A figure's findings are read from its run, and say how far they are from the target, whichever side is better."""
    plain = [figure for figure in figures.FIGURES if isinstance(figure, figures.Figure)]
    by_name = {figure.name: figure for figure in plain}
    latency = by_name["latency"]
    series = [{**backends.BACKENDS, **backends.ENGINES}[name] for name in latency.backends]
    took = {"penstock-shm": 50e-6, "penstock-tcp": 125e-6, "gloo": 100e-6}
    rows = report.rows([Point("all-reduce", label, 2, 1024, [took[label]]) for label in took], series, None)
    shm, tcp = latency.findings(rows)
    assert (shm.value, shm.of_target, tcp.value, tcp.of_target) == pytest.approx((0.5, 2.0, 1.25, 1.0))
    capped = by_name["capped"]
    points = [
        Point("all-reduce", label, 2, capped.nbytes, [1.0], planned={0: capped.nbytes})
        for label in ("penstock-tcp", "gloo")
    ]
    share, times = capped.findings(report.rows(points, [backends.BACKENDS["penstock-tcp"], GLOO], capped.link))
    assert share.of_target == pytest.approx(capped.nbytes * 8 / 956.4e6 / 0.9, rel=1e-3)
    assert times.of_target == pytest.approx(1 / 4.5)
    for figure in plain:
        variants = [backends.parse_variant(text).label for text in figure.variants]
        labels = {*figure.backends, *variants, "equal split x8"}
        assert {target.label for target in figure.targets} <= labels


# Training


def test_the_bound_of_a_step() -> None:
    """A gradient travels when it is made, at the link's rate, with what an all-reduce between hosts must carry."""
    made = [(1.0, 100), (2.0, 100), (3.0, 800)]
    assert training.bound(made, 2, 1e9) == pytest.approx(3 + 800 / 1e9)
    assert training.bound(made, 2, 100.0) == pytest.approx(1 + 1000 / 100)  # the link is never idle
    assert training.bound(made, 4, 100.0) == pytest.approx(1 + 1.5 * 1000 / 100)
    assert training.bound([(1.0, 500), (9.0, 100)], 2, 100.0) == pytest.approx(9 + 100 / 100)


def test_training_is_summarised_from_its_slowest_rank() -> None:
    """Medians over steps, of the rank that has the longest; what came before the first turn does not count."""

    def said(rank: int, way: str, turn: int, *seconds: float) -> dict[str, object]:
        return {"rank": rank, "way": way, "turn": turn, "seconds": seconds, "stats": {"steps": 4, "rounds": 8}}

    first = [
        said(0, "compute", -1, 9.0),
        said(0, "compute", 0, 0.3),
        said(0, "link", 0, 0.7),
        said(0, "sockets", 0, 0.9),
        said(0, "ddp", 0, 1.0, 2.0),
        said(0, "ddp", 1, 3.0),
    ]
    second = [said(1, "compute", 0, 0.4), said(1, "ddp", 0, 2.0, 4.0), said(1, "ddp", 1, 6.0)]
    records = [
        [{"rank": 0, "ready": [[0.1, 1000], [0.2, 3000]]}, *first],
        [{"rank": 1, "ready": [[0.1, 1000], [0.25, 3000]]}, *second],
    ]
    outcome = training.summarise(records, {"model": "cnn"}, 2, 2, 1e4)
    assert (outcome.gradients, outcome.gradient_bytes, outcome.compute_s) == (2, 4000, 0.4)
    assert [(way.name, way.step_s) for way in outcome.ways] == [("ddp", 4.0)]
    assert (outcome.link_s, outcome.sockets_s) == (0.7, 0.9)
    assert outcome.bound_s == pytest.approx(0.25 + 0.3 + 0.4 - 0.25)
    assert training.summarise(records, {"model": "cnn"}, 2, 1, None).bound_s is None


@needs_testbed
def test_training_on_a_link_has_limits(tmp_path: pathlib.Path) -> None:
    """Raw sockets move the gradients' bytes, alone and beside a step, and count as no way."""
    path = tmp_path / "cnn.json"
    few = ["--ranks", "3", "--batch", "1", "--turns", "1", "--steps", "1", "--ways", "hook", "--json", str(path)]
    run = _bench(["training", "cnn", *few])
    assert run.returncode == 0, run.stderr
    (outcome,) = json.loads(path.read_text())["runs"]
    assert [way["name"] for way in outcome["ways"]] == ["hook"]
    # 6.1 MB at 1 Gbit/s: 49 ms, of which the sockets' buffers may hold a part when the last byte is counted.
    assert outcome["link_s"] > 0.03 and outcome["sockets_s"] > outcome["link_s"] / 2, outcome
    assert "computing beside raw sockets" in run.stdout


def test_training_runs(tmp_path: pathlib.Path) -> None:
    """Every way trains on loopback, and the other model does."""
    few = ["--hosts", "1", "--ranks", "2", "--batch", "1", "--turns", "1", "--steps", "1"]
    every = [*training.WAYS, "hook-bfloat16", "reducer-float16-feedback"]
    for model, ways in (("cnn", every), ("char-gpt", ["hook"])):
        path = tmp_path / f"{model}.json"
        run = _bench(["training", model, *few, "--ways", ",".join(ways), "--json", str(path)])
        assert run.returncode == 0, run.stderr
        (outcome,) = json.loads(path.read_text())["runs"]
        assert [way["name"] for way in outcome["ways"]] == ways
        assert all(way["step_s"] > 0 for way in outcome["ways"])
        assert all(way["name"] in run.stdout for way in outcome["ways"])


def test_rounds_are_timed_from_the_last_to_join_to_the_last_to_know() -> None:
    """Worked out by hand; rounds that a rank has forgotten do not count, nor does the first turn. The last one that was answered
    when a pass had ended is told apart. What agreeing takes is the difference to steps without."""

    def rank(joined: float, answered: float, sent: int) -> list[dict]:
        rounds = [[1, joined, answered], [2, joined + 10, answered + 12]]
        turn = {"seconds": [2.0, 4.0, 3.0], "ends": [17.5], "counts": {"rounds": 4, "buckets": 8, "steps": 2}}
        told = {"seconds": [2.0, 2.5, sent / 10], "counts": {"rounds": 6, "buckets": 6, "steps": 2}}
        return [
            {"sent": sent, "received": 20},
            {"turn": -1, "rounds": [[0, 0, 99]]},
            {"turn": 0, "rounds": rounds, **turn, "told": told},
        ]

    first, second = rank(1.0, 5.0, 10), rank(4.0, 4.5, 30)
    outcome = readiness.summarise([first, second], 7)
    assert (outcome.step_s, outcome.rounds, outcome.round_s, outcome.last_s) == (3.0, 2.0, 2.0, 3.0)
    assert (outcome.share, outcome.last_share, outcome.imbalance) == (pytest.approx(4 / 3), 1.0, 1.5)
    # The slower rank's steps without take 2, 2.5 and 3 s.
    assert (outcome.told_s, outcome.buckets, outcome.told_buckets) == (2.5, 4.0, 3.0)
    assert outcome.cost == pytest.approx(0.5 / 3) and outcome.turn_costs == [outcome.cost]
    assert any("2500.0 ms a step; agreeing takes +500.0 ms, +16.7% of the step" in line for line in outcome.lines())
    del second[2]["rounds"][:]
    with pytest.raises(readiness.BenchError, match="take fewer steps"):
        readiness.summarise([first, second], 7)


def test_readiness_runs(tmp_path: pathlib.Path) -> None:
    """Ranks that train for real; times, rounds and shares of the traffic are there."""
    path = tmp_path / "readiness.json"
    options = ["--ranks=3", "--hosts=1", "--tensors=20", "--width=8", "--batch=2", "--turns=1", "--steps=3"]
    done = _bench(["readiness", *options, f"--json={path}"])
    assert done.returncode == 0, done.stderr
    assert "3 ranks, 20 gradients" in done.stdout
    (outcome,) = json.loads(path.read_text())["runs"]
    assert 0 < outcome["round_s"] < outcome["step_s"] * 100 and outcome["rounds"] >= 1
    assert outcome["last_s"] > 0 and "nothing hides" in done.stdout
    mean = sum(outcome["sent"]) / 3
    assert outcome["imbalance"] >= max(outcome["sent"]) / mean
    assert outcome["told_s"] > 0 and outcome["told_buckets"] == 1 and len(outcome["turn_costs"]) == 1
    assert "with nothing to agree on" in done.stdout


def test_an_order_that_is_told_needs_no_agreement() -> None:
    """The control of `penstock bench readiness` cuts gradients as rounds that end at once would, alike on all ranks, whatever
    their timing; it averages as a GradientReducer does."""
    assert readiness_rank.cut([4, 4, 4, 9, 1], 8) == [[0, 1], [2, 3], [4]]
    assert readiness_rank.cut([9, 9], 8) == [[0], [1]] and readiness_rank.cut([1, 2], 8) == [[0, 1]]
    assert run_ranks(_told, count=2) == [(5, 10)] * 2


def _told() -> tuple[int, int]:
    dist.init_process_group("penstock")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(5)))
    alone = copy.deepcopy(model)
    # A layer's gradients are 32 and 256 bytes: a round, and two buckets, which are whole cache lines at most.
    reducer = readiness_rank.ToldReducer(model, bucket_bytes=288)
    # Layers without a function between them: gradients are affine in the data, so that the average is that of the mean.
    alone(torch.full((1, 8), 1.5)).sum().backward()
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 8), dist.get_rank() + 1.0)).sum().backward()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    stats = reducer.stats()
    assert stats["steps"] == 2
    dist.destroy_process_group()
    return stats["rounds"] // 2, stats["buckets"] // 2


def test_losses_are_compared(tmp_path: pathlib.Path) -> None:
    """All ways begin with the same loss on the same text, learn, and are told beside the first."""
    path = tmp_path / "losses.json"
    few = ["--hosts", "1", "--ranks", "2", "--losses", "12", "--json", str(path)]
    run = _bench(["training", "char-gpt", *few, "--ways", "hook,hook-float16,hook-bfloat16-feedback"])
    assert run.returncode == 0, run.stderr
    (lesson,) = json.loads(path.read_text())["runs"]
    plain, half, kept = lesson["losses"].values()
    assert len(plain) == len(half) == len(kept) == 12
    assert plain[0] == half[0] == kept[0] and plain != half != kept
    assert all(lesson["final"][way] < 0.95 * losses[0] for way, losses in lesson["losses"].items()), lesson
    assert "against hook" in run.stdout and "hook-bfloat16-feedback" in run.stdout


def test_final_losses_are_means_of_the_last_tenth() -> None:
    """A final loss is the mean over the last tenth of the steps, or the last one of a few."""
    lesson = training.Lesson(
        2, {"hook": [5.0] * 18 + [2.0, 4.0], "hook-float16": [5.0] * 19 + [3.3], "short": [7.0, 6.0]}
    )
    assert [lesson.final(way) for way in lesson.losses] == pytest.approx([3.0, 4.15, 6.0])


def test_the_tuner_is_compared_turn_by_turn() -> None:
    """Medians of ratios within a turn, so that what slows the machine down for a while slows down both sides of each."""
    setting = Setting(1, 1 << 20, "auto")
    pinned = Tuner.pinned(setting).record()
    tunings = [
        {"phase": name, "setting": setting.to_json(), "start": setting.to_json(), "steps": 7, "record": pinned}
        for name in ("neighbour", "default", "remembered")
    ]
    grid = {"phase": "grid", "best": setting.to_json(), "settings": [{}, {}], "size": 9}
    turns = [
        {"phase": "turn", "seconds": {"grid": [s], "default": [1.1 * s], "remembered": [0.9 * s], "untuned": [4 * s]}}
        for s in (1.0, 100.0, 2.0)
    ]
    outcome = tuner.summarise([*tunings, grid, *turns], "a link")
    assert outcome.default.behind == pytest.approx(0.1) and outcome.remembered.behind == pytest.approx(-0.1)
    assert (outcome.grid, outcome.space, outcome.best_s, outcome.untuned_s) == (2, 9, 2.0, 8.0)


def test_the_tuner_is_measured(tmp_path: pathlib.Path) -> None:
    """On loopback, small: both tunings end within their budgets, the second begins at a neighbour's, all settings of the grid
    are measured, and the table has what the file has."""
    path = tmp_path / "tuner.json"
    few = ["--hosts", "1", "--ranks", "2", "--layers", "2", "--budget", "24", "--stride", "4", "--grid-steps", "1"]
    run = _bench(["tuner", *few, "--pairs", "2", "--pair-steps", "1", "--json", str(path)])
    assert run.returncode == 0, run.stderr
    (outcome,) = json.loads(path.read_text())["runs"]
    assert outcome["grid"] == 2 * 2 and outcome["space"] == 5 * 5
    assert outcome["default"]["steps"] <= 24 and outcome["remembered"]["steps"] <= 24
    assert len(outcome["turns"]) == 2 and set(outcome["turns"][0]) == {"grid", "default", "remembered", "untuned"}
    assert "neighbour" in run.stdout and f"{outcome['best']['streams']} streams" in run.stdout


# Helpers

BENCH = [sys.executable, "-m", "penstock", "bench"]


def _bench(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return forked.run([*BENCH, *arguments], capture_output=True, text=True, timeout=200)


def _bench_with_patched_all_reduce(
    tmp_path: pathlib.Path, statement: str, arguments: list[str]
) -> subprocess.CompletedProcess[str]:
    """Runs ``all-reduce`` over gloo, with ``statement`` at the end of torch's all_reduce(t) in the ranks of the variant
    ``patched``, or in its place where it returns first."""
    before, after = (statement, "") if statement.startswith("return") else ("", statement)
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'penstock.tools.bench.launcher' in sys.orig_argv:\n"
        "    import torch.distributed as dist\n"
        "    real, calls = dist.all_reduce, 0\n"
        "    def all_reduce(t):\n"
        "        global calls\n"
        "        if 'PATCHED' not in os.environ:\n"
        "            return real(t)\n"
        f"        {before}\n"
        "        real(t)\n"
        f"        {after}\n"
        "    dist.all_reduce = all_reduce\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    options = ["--backends", "gloo", "--variant", "patched=gloo,PATCHED=1", *arguments]
    command = [*BENCH, "all-reduce", *options]
    return forked.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=200)


def _values(runs: tuple[Run, ...]) -> list[int]:
    return [((run.origin + j) % PERIOD + 1) * run.weight for run in runs for j in range(run.count)]


def _reference(name: str, sources: list[list[int]]) -> list[list[int] | None]:
    """What each rank must hold in the end, from what each put in; None where nothing is promised."""
    ranks = len(sources)
    total = [sum(values) for values in zip(*sources, strict=False)]
    part = len(sources[0]) // ranks

    def cut(values: list[int], rank: int) -> list[int]:
        return values[rank * part : (rank + 1) * part]

    everything = [value for source in sources for value in source]
    return {
        "all-reduce": [total] * ranks,
        "reduce-scatter": [cut(total, rank) for rank in range(ranks)],
        "all-gather": [everything] * ranks,
        "broadcast": [sources[0]] * ranks,
        "reduce": [total, *[None] * (ranks - 1)],
        "gather": [everything, *[None] * (ranks - 1)],
        "scatter": [cut(sources[0], rank) for rank in range(ranks)],
        "all-to-all": [[value for source in sources for value in cut(source, rank)] for rank in range(ranks)],
        "send-recv": [sources[rank - 1] for rank in range(ranks)],
        "barrier": [None] * ranks,
    }[name]  # type: ignore[return-value]
