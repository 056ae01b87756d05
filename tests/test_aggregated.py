"""Proves that all-reduces through servers and aggregators are exact, and what happens when any process on the way dies.

Every result is held against `_sum`, which computes what docs/design/quantisation.md says comes out, in numpy and apart from the
engine; bit by bit wherever integers travel.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import gc
import http.server
import itertools
import json
import os
import pathlib
import signal
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fake_cuda
import penstock
import penstock.torch
import ranks
from daemons import Daemon
from penstock import _core
from penstock.cluster import deployment, jobs
from penstock.errors import Config as ConfigError
from penstock.tools import testbed
from penstock.tools.bench.aggregated.cluster import Cluster
from penstock.tools.bench.aggregated.rank import group_of
from penstock.torch import GradientReducer, backend

BLOCK_BYTES = 1024


def _deployment(tmp_path: pathlib.Path, servers: str, settings: str = "") -> dict[str, str | None]:
    """A deployment file, as the environment of ranks."""
    text = "version: 1\naggregated:\n" + textwrap.indent(
        f"block_bytes: {BLOCK_BYTES}\nmin_bytes: 2000\nwindow: 32\n{textwrap.dedent(settings)}servers:\n"
        + textwrap.indent(textwrap.dedent(servers).strip("\n"), "  "),
        "  ",
    )
    path = tmp_path / "deployment.yaml"
    path.write_text(text + "\n")
    return {"PENSTOCK_DEPLOYMENT": str(path)}


# ------------------------------------------------------------------------------------------------ what comes out


@dataclasses.dataclass(frozen=True)
class _Case:
    """One all-reduce."""

    elements: int
    dtype: torch.dtype
    op: str = "SUM"

    def contribution(self, rank: int) -> torch.Tensor:
        """Blocks of different magnitudes, with zeros and denormals among them."""
        random = torch.Generator().manual_seed(1000 * rank + self.elements)
        values = torch.randn(self.elements, generator=random)
        scale = torch.arange(self.elements) // 300 % 4
        values *= torch.tensor([1.0, 1e-3, 0.0, 1e4])[scale]
        values[::97] *= 1e-38
        return values.to(self.dtype)


CASES = [
    _Case(40_000, torch.float32),
    _Case(1000, torch.float32, "AVG"),
    _Case(501, torch.float32),
    _Case(20_001, torch.bfloat16),
    _Case(3000, torch.float16, "AVG"),
]


def _sum(case: _Case, world: int, integer_bits: int, cuts: list[float]) -> np.ndarray[Any, Any]:
    """docs/design/quantisation.md, block by block; float64 holds every count and product exactly."""
    significand = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[case.dtype]
    share = (2 ** (integer_bits - 1) - 1) // world
    largest = {bits: 2**bits - (0 if bits < significand else 2 ** (bits - significand)) for bits in range(32)}
    bits = max(bits for bits, value in largest.items() if value <= share)
    size = case.dtype.itemsize
    block = BLOCK_BYTES // (integer_bits // 8)
    contributions = [case.contribution(rank).double().numpy() for rank in range(world)]
    out = np.zeros(case.elements, np.float32)
    lines = -(-case.elements * size // 64)
    edges = [min(int(lines * cut + 1e-9) * 64 // size, case.elements) for cut in [0.0, *cuts, 1.0]]
    for start, end in itertools.pairwise(edges):
        for at in range(start, end, block):
            part = slice(at, min(at + block, end))
            values = [contribution[part] for contribution in contributions]
            top = max(np.abs(value).max() for value in values)
            if top == 0:
                continue
            unit = 2.0 ** (np.frexp(top)[1] - bits)
            out[part] = sum(np.rint(value / unit) for value in values) * unit
    result = torch.from_numpy(out).to(case.dtype)
    return (result / world if case.op == "AVG" else result).float().numpy()


def _all_reduces(repeats: int = 1) -> tuple[list[np.ndarray[Any, Any]], dict[str, Any]]:
    dist.init_process_group("penstock")
    tensors = []
    for _ in range(repeats):
        tensors = [case.contribution(dist.get_rank()) for case in CASES]
        works = [
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, case.op), async_op=True)
            for tensor, case in zip(tensors, CASES, strict=True)
        ]
        for work in works:
            work.wait()
    small = torch.ones(4)
    dist.all_reduce(small)
    assert small.tolist() == [dist.get_world_size()] * 4
    stats = penstock.torch.stats()["aggregated"]
    dist.destroy_process_group()
    return [tensor.float().numpy() for tensor in tensors], stats


def _assert_sums(
    values: list[Any], world: int, integers: dict[torch.dtype, int], cuts: list[float], repeats: int = 1
) -> None:
    for rank, (tensors, stats) in enumerate(values):
        (group,) = stats.values()
        assert group["operations"] == len(CASES) * repeats
        assert group["fallback"] is None
        for case, tensor in zip(CASES, tensors, strict=True):
            expected = _sum(case, world, integers[case.dtype], cuts)
            np.testing.assert_array_equal(
                tensor.view(np.int32), (expected + 0.0).view(np.int32), f"{case} on rank {rank}"
            )


NARROW = {torch.float32: 32, torch.float16: 16, torch.bfloat16: 16}


def test_one_server(tmp_path: pathlib.Path) -> None:
    """Three ranks and a server: every rank gets the bits of the definition, for every type and for averages."""
    with Daemon("server") as server:
        env = _deployment(tmp_path, f"- address: {server.address}")
        values = ranks.run(_all_reduces, count=3, env=env)
        assert server.get("/jobs")["jobs"] == [], "the job is closed at the end"
    _assert_sums(values, 3, NARROW, [])


def test_aggregators_in_a_hierarchy_with_loss(tmp_path: pathlib.Path) -> None:
    """Two racks below a core, a worker beside them, four shards in a rack, 3 % of all packets lost in every daemon: the same
    bits."""
    drop = ("--drop", "0.03")
    with (
        Daemon("server", *drop) as server,
        Daemon("aggregator", *drop) as core,
        Daemon("aggregator", *drop) as left,
        Daemon("aggregator", *drop) as right,
    ):
        env = _deployment(
            tmp_path,
            f"""
            - address: {server.address}
              tree:
                - aggregator: {core.address}
                  children:
                    - {{aggregator: "{left.address}", workers: [0, 2]}}
                    - {{aggregator: "{right.address}", workers: [1]}}
            """,
        )
        values = ranks.run(_all_reduces, count=4, args=(4,), env=env)
        lost = [daemon.get("/jobs")["socket"]["dropped_on_purpose"] for daemon in (server, core, left, right)]
    _assert_sums(values, 4, NARROW, [], repeats=4)
    assert all(lost), f"nothing was lost at some daemon: {lost}"


def test_two_servers_and_shards(tmp_path: pathlib.Path) -> None:
    """Two servers share the tensors by fractions, one below an aggregator of two shards."""
    with Daemon("server") as one, Daemon("server") as two, Daemon("aggregator", "--shards", "2") as rack:
        env = _deployment(
            tmp_path,
            f"""
            - address: {one.address}
              fraction: 0.25
              tree: [{{aggregator: "{rack.address}", workers: [1, 0]}}]
            - address: {two.address}
              fraction: 0.75
            """,
        )
        values = ranks.run(_all_reduces, count=2, env=env)
    _assert_sums(values, 2, NARROW, [0.25])


def test_ipv6(tmp_path: pathlib.Path) -> None:
    """Two servers, aggregators with shards, one below another, and ranks, all on IPv6, with 1 % loss: the same bits."""
    if not ranks.has_ipv6():
        pytest.skip("no IPv6 here")
    drop = ("--drop", "0.01")
    with (
        Daemon("server", *drop, host="::1") as one,
        Daemon("server", *drop, host="::1") as two,
        Daemon("aggregator", *drop, host="::1") as core,
        Daemon("aggregator", "--shards", "4", *drop, host="::1") as rack,
    ):
        env = _deployment(
            tmp_path,
            f"""
            - address: "{one.address}"
              fraction: 0.5
              tree:
                - aggregator: "{core.address}"
                  children: [{{aggregator: "{rack.address}", workers: [0, 2]}}]
            - address: "{two.address}"
              fraction: 0.5
              tree: [{{aggregator: "{rack.address}", workers: [1, 0, 2]}}]
            """,
        )
        values = ranks.run(_all_reduces, count=3, args=(2,), env={**env, "PENSTOCK_INTERFACE": "::1"})
        assert one.get("/jobs")["jobs"] == [] == rack.get("/jobs")["jobs"], "jobs are closed at the end"
    _assert_sums(values, 3, NARROW, [0.5], repeats=2)
    for rank, (_, stats) in enumerate(values):
        servers = stats["0"]["servers"]
        assert [server["address"] for server in servers] == [one.address, two.address]
        assert [server["parent"] for server in servers] == [None if rank == 1 else rack.address, rack.address]


def _ones() -> dict[str, Any]:
    dist.init_process_group("penstock")
    values = torch.ones(100_000)
    dist.all_reduce(values)
    assert values.eq(dist.get_world_size()).all()
    stats = penstock.torch.stats()["aggregated"]["0"]
    dist.destroy_process_group()
    return dict(stats)


def _counted() -> list[tuple[int, int]]:
    """Operations, and pushes to the server, after each of a hundred all-reduces."""
    dist.init_process_group("penstock")
    counts = []
    for _ in range(100):
        dist.all_reduce(torch.ones(20_000))
        stats = penstock.torch.stats()["aggregated"]["0"]
        counts.append((stats["operations"], stats["servers"][0]["pushed"]))
    dist.destroy_process_group()
    return counts


def test_counters_are_whole_when_an_operation_ends(tmp_path: pathlib.Path) -> None:
    """Each of equal operations adds as many pushes, whenever a rank asks."""
    with Daemon("server") as server:
        tree = f"- address: {server.address}"
        for counts in ranks.run(_counted, count=2, env=_deployment(tmp_path, tree)):
            assert counts[0][1] > 0
            assert counts == [(number, number * counts[0][1]) for number in range(1, 101)]


def _urgent() -> list[float]:
    dist.init_process_group("penstock")
    rank, bulk = dist.get_rank(), torch.ones(1 << 20)
    group = dist.new_group()
    values = []
    for turn in range(10):
        with penstock.priority(200) as later:
            first = dist.all_reduce(bulk.fill_(turn), async_op=True)
        small = torch.full((4096,), float(rank))
        with penstock.priority(0):
            dist.all_reduce(small, group=group)
        later.change(turn)
        first.wait()
        values += [float(small.sum()), float(bulk.sum())]
    dist.destroy_process_group()
    return values


def test_urgent_ones_in_a_group_of_their_own(tmp_path: pathlib.Path) -> None:
    """Groups hold each other up while they are urgent, and what is held comes out."""
    with Daemon("server") as server:
        for values in ranks.run(_urgent, count=2, env=_deployment(tmp_path, f"- address: {server.address}")):
            assert values == [value for turn in range(10) for value in (4096.0, 2.0 * turn * (1 << 20))]


@pytest.mark.parametrize("aggregated", ["both", "bulk", "urgent"])
def test_bulk_of_another_group_gives_way_on_a_link(aggregated: str) -> None:
    """An urgent sum of 8 MiB ends before 6 MiB of bulk that were there first, each over streams or through aggregators. If both
    had half of the link, it would end last."""
    with Cluster(2, rate_mbit=100) as cluster:
        deployment = cluster.deployment("int32", 256)
        for ended in ranks.run(_share, count=2, args=(deployment, aggregated), bed=cluster.bed):
            assert list(ended) == ["urgent", "bulk"], ended


def _share(deployment: str, aggregated: str) -> dict[str, float]:
    """What has ended when, in seconds since the urgent one was issued; in that order."""
    dist.init_process_group("penstock")
    groups = {
        name: group_of(deployment) if aggregated in (name, "both") else dist.new_group() for name in ("bulk", "urgent")
    }
    ended: dict[str, float] = {}
    bulk, urgent = torch.ones(6 << 18), torch.ones(8 << 18)
    for size in (2 << 20, 6 << 18):
        for one in groups.values():
            # Until rates are known, and until something was urgent, streams have more on the way.
            dist.all_reduce(torch.ones(size), group=one)
            with penstock.priority(0):
                dist.all_reduce(torch.ones(1 << 10), group=one)

    def wait(name: str, work: dist.Work) -> None:
        work.wait()
        ended[name] = time.monotonic() - began

    began = time.monotonic()
    with penstock.priority(200):
        works = {"bulk": dist.all_reduce(bulk, group=groups["bulk"], async_op=True)}
    with penstock.priority(0):
        works["urgent"] = dist.all_reduce(urgent, group=groups["urgent"], async_op=True)
    threads = [threading.Thread(target=wait, args=one) for one in works.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bool((bulk == 2).all()) and bool((urgent == 2).all())
    assert penstock.torch.stats()["aggregated"], "they went past the servers"
    dist.destroy_process_group()
    return ended


def _collected_by_its_own_thread() -> list[str]:
    """Make a reducer, and let the thread that looks after its jobs, on rank 0, collect it; what could not be raised there."""
    dist.init_process_group("penstock")
    own, model = backend.of(), torch.nn.Linear(100, 100)
    GradientReducer(model)
    if dist.get_rank() == 1:
        del model
        gc.collect()
        assert not own._channels
        dist.destroy_process_group()
        return []
    (thread,) = [one.aggregation._jobs._thread for one in own._channels.values() if one.aggregation is not None]
    raised, request = [], jobs._request

    def collecting(*args: Any) -> Any:
        if threading.current_thread() is thread:
            gc.collect()
        return request(*args)

    gc.disable()
    sys.unraisablehook = lambda unraisable: raised.append(repr(unraisable.exc_value))
    jobs._request = collecting
    del model
    until = time.monotonic() + 30
    while own._channels or thread.is_alive():
        assert time.monotonic() < until, own._channels
        time.sleep(0.01)
    dist.destroy_process_group()
    return raised


def _two_reducers() -> list[dict[str, int]]:
    """What `stats` counts with two reducers, and after the first was closed."""
    dist.init_process_group("penstock")
    models = [torch.nn.Linear(100, 100) for _ in range(2)]
    reducers = [GradientReducer(model) for model in models]
    counts = []
    for reducer in reducers:
        for model in models:
            model(torch.full((1, 100), 1.0 + dist.get_rank())).sum().backward()
        counts.append({name: one["operations"] for name, one in penstock.torch.stats()["aggregated"].items()})
        reducer.close()
    assert list(penstock.torch.stats()["aggregated"]) == ["0"]
    dist.destroy_process_group()
    return counts


def test_the_statistics_of_two_reducers(tmp_path: pathlib.Path) -> None:
    """Each has its own, under the name of its channel with a number, until it is closed. The second took the place of the first,
    and the end of one removed the other's."""
    with Daemon("server") as server:
        tree = f"- address: {server.address}"
        for first, second in ranks.run(_two_reducers, count=2, env=_deployment(tmp_path, tree)):
            assert (
                list(first) == ["0", "0/buckets", "0/buckets (2)"] and first["0/buckets"] == first["0/buckets (2)"] > 0
            )
            assert second == {"0": first["0"], "0/buckets": 2 * first["0/buckets"]}


def _one_closes_its_reducer(first: int) -> list[float]:
    """What the group's all-reduces give while one rank has closed its reducer and the other one keeps its own."""
    dist.init_process_group("penstock")
    reducer, results = GradientReducer(torch.nn.Linear(300, 300)), []
    if dist.get_rank() == first:
        reducer.close()
    dist.barrier()
    ranks.note("closed")
    # A server counts as lost after 4 s.
    for _ in range(7):
        time.sleep(1)
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        results.append(float(tensor[0]))
    dist.destroy_process_group()
    return results


@pytest.mark.parametrize("first", [0, 1])
def test_one_rank_closes_its_reducer_before_the_other(first: int, tmp_path: pathlib.Path) -> None:
    """The other one's is idle meanwhile, and its server has lost the job (which rank 0 closes), or dies: that ends the reducer
    alone, not the group. (It took the server for lost after 4 s, and the group's operations failed on all ranks.)"""
    with Daemon("server") as server:
        env = _deployment(tmp_path, f"- address: {server.address}")
        with ranks.Ranks(_one_closes_its_reducer, count=2, args=(first,), env=env) as job:
            job.await_note("closed", deadline_s=60)
            if first == 1:
                server.kill()
            outcomes = job.outcomes(timeout_s=60)
    assert [outcome.value for outcome in outcomes] == [[2.0] * 7] * 2, "\n".join(map(str, outcomes))


def test_the_watch_outlives_answers_that_break_off() -> None:
    """A daemon that is killed while it answers, and another program that listens there: an OSError, as of one that is silent."""
    for answer in (b"HTTP/1.1 ", b"SSH-2.0-OpenSSH_9.2\r\n"):
        with _answers_once(answer) as address, pytest.raises(OSError, match="no daemon of Penstock"):
            jobs._request("GET", address, "/", b"", None, time.monotonic() + 5)
    with _answers_once(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]") as address, pytest.raises(ValueError):
        jobs._request("GET", address, "/", b"", None, time.monotonic() + 5)


@contextlib.contextmanager
def _answers_once(answer: bytes) -> Iterator[str]:
    """The address of a socket that gives this answer to whatever it is asked first, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def test_a_reducer_that_the_thread_of_its_jobs_collects(tmp_path: pathlib.Path) -> None:
    """Python's collector may run in that thread: the reducer's jobs are closed there, and the thread ends."""
    with Daemon("server") as server, Daemon("aggregator") as rack:
        tree = f"- {{address: {server.address}, tree: [{{aggregator: {rack.address}, workers: [0, 1]}}]}}"
        assert ranks.run(_collected_by_its_own_thread, count=2, env=_deployment(tmp_path, tree)) == [[], []]
        assert server.get("/jobs")["jobs"] == [] == rack.get("/jobs")["jobs"]


def test_ipv6_between_hosts(tmp_path: pathlib.Path) -> None:
    """Over links of MTU 1500, with blocks as long as fits: IPv6's longer header is counted, so no packet is too long."""
    with contextlib.ExitStack() as stack:
        bed = stack.enter_context(testbed.Testbed(hosts=2, racks=1, servers=1))

        def daemon(role: str, node: str) -> Daemon:
            return stack.enter_context(bed.inside(node, lambda: Daemon(role, host=bed.address(node, 6))))

        server, rack = daemon("server", "s0"), daemon("aggregator", "a0")
        tree = [{"aggregator": rack.address, "workers": [0, 1]}]
        document = {"version": 1, "aggregated": {"servers": [{"address": server.address, "tree": tree}]}}
        own = {rank: {"PENSTOCK_INTERFACE": bed.address(rank, 6)} for rank in range(2)}
        path = tmp_path / "deployment.yaml"
        path.write_text(json.dumps(document))
        found = ranks.run(_ones, count=2, env={"PENSTOCK_DEPLOYMENT": str(path)}, env_of_rank=own, bed=bed)
        sockets = (
            bed.inside("s0", lambda: server.get("/jobs"))["socket"],
            bed.inside("a0", lambda: rack.get("/jobs"))["socket"],
        )
    assert all(one["unsent"] == 0 for one in sockets), sockets
    for stats in found:
        (one,) = stats["servers"]
        # 1500 - 40 - 8 - 48 is 1404, of which 1344 are a multiple of 64; before them a header and a packet of exponents.
        assert (stats["operations"], stats["fallback"], one["pushed"]) == (1, None, 2 + -(-400_000 // 1344)), stats


def test_sixteen_bits_for_everything(tmp_path: pathlib.Path) -> None:
    """int16 halves what float32 sends, and the bits are those of the definition still."""
    with Daemon("server") as server, Daemon("aggregator") as rack:
        servers = f"""
            - address: {server.address}
              tree: [{{aggregator: "{rack.address}", workers: [0, 1]}}]
            """
        values = ranks.run(_all_reduces, count=2, env=_deployment(tmp_path, servers, "format: int16\n"))
    _assert_sums(values, 2, dict.fromkeys(NARROW, 16), [])


def test_floats_are_added_in_the_order_of_the_tree(tmp_path: pathlib.Path) -> None:
    """float32 travels as it is: ((2 + 0) + 1), not in the order of arrival."""
    with Daemon("server") as server, Daemon("aggregator") as rack:
        servers = f"""
            - address: {server.address}
              tree: [{{aggregator: "{rack.address}", workers: [2, 0]}}]
            """
        values = ranks.run(_all_reduces, count=3, env=_deployment(tmp_path, servers, "format: float32\n"))
    case = CASES[0]
    parts = [case.contribution(rank).numpy() for rank in range(3)]
    expected = (parts[2] + parts[0]) + parts[1]
    for tensors, _ in values:
        np.testing.assert_array_equal(tensors[0].view(np.int32), expected.view(np.int32))


def _not_finite() -> list[float]:
    dist.init_process_group("penstock")
    values = torch.full((2000,), 0.5)
    if dist.get_rank() == 0:
        values[7], values[1300] = float("inf"), float("nan")
    dist.all_reduce(values)
    dist.destroy_process_group()
    return [float(values[i]) for i in (7, 8, 600, 1300, 1999)]


def test_inf_and_nan_come_out(tmp_path: pathlib.Path) -> None:
    """A block with Inf or NaN is added as floats, on all ranks; others are not touched by it."""
    with Daemon("server") as server, Daemon("aggregator") as rack:
        servers = f"""
            - address: {server.address}
              tree: [{{aggregator: "{rack.address}", workers: [0, 1]}}]
            """
        for found in ranks.run(_not_finite, count=2, env=_deployment(tmp_path, servers)):
            assert found[0] == float("inf")
            assert found[1:3] == [1.0, 1.0]
            assert np.isnan(found[3])
            assert found[4] == 1.0


# ------------------------------------------------------------------------------------------------ tensors on a device


TIME_OUTS = {"time-out": 2.0, "the server dies, and a time-out": 9.0}
"""Of rank 0, in seconds. A server counts as lost after four."""


def _staged(how: str) -> dict[str, Any]:
    """Three all-reduces, of CUDA tensors (fakes) but for the second; rank 0's device is late with the first one's tensor."""
    fake_cuda.install()
    rank = int(os.environ["RANK"])
    seconds = 60.0 if rank else TIME_OUTS.get(how, 60.0)
    dist.init_process_group("penstock", timeout=datetime.timedelta(seconds=seconds))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    late: list[fake_cuda.Event] = []

    class Late(fake_cuda.Event):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            if rank == 0 and not late:
                late.append(self)
                self.has_come.clear()

    torch.cuda.Event = Late
    tensors = [
        fake_cuda.place(torch.full((20_000,), 2.0 if rank else 1e3)),
        torch.full((3000,), 2.0 + rank),
        torch.full((999,), 3.0 + rank),
    ]
    tensors[2] = fake_cuda.place(tensors[2])
    works = [backend.allreduce([tensor], dist.AllreduceOptions()) for tensor in tensors]
    if rank == 0:
        # What the device is still to bring. With the fakes the copy has been made already.
        with torch.inference_mode():
            works[0].tickets[0]._staged.twin(tensors[0]).fill_(1.0)
    ranks.note("running")
    if "server dies" in how:
        until = time.monotonic() + 30
        while not penstock.torch.stats()["aggregated"]["0"]["fallback"]:
            assert time.monotonic() < until
    if how in TIME_OUTS:
        works[0].wait()
    # Rank 1's tensor lacks the other's, which does not come before both ranks have looked.
    assert not any(work.tickets[0].done() for work in works)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"looked {rank}", "")
    store.wait(["looked 0", "looked 1"])
    for event in late:
        event.has_come.set()
    for number, (work, tensor) in enumerate(zip(works, tensors, strict=True), 1):
        work.wait()
        assert tensor.cpu().eq(2 * number + 1).all(), (number, tensor)
    stats = penstock.torch.stats()["aggregated"]["0"]
    dist.destroy_process_group()
    return dict(stats)


@pytest.mark.parametrize("how", ["well", "the server dies", *TIME_OUTS])
def test_tensors_on_a_device(how: str, tmp_path: pathlib.Path) -> None:
    """CUDA tensors (fakes) go through the servers, in the order of the calls among those on the CPU; an operation waits for its
    own rank's device, also when a server dies meanwhile, and its time-out says so."""
    with Daemon("server") as server, Daemon("aggregator") as rack:
        env = _deployment(
            tmp_path, f"- {{address: {server.address}, tree: [{{aggregator: {rack.address}, workers: [0, 1]}}]}}"
        )
        with ranks.Ranks(_staged, count=2, args=(how,), env=env) as job:
            job.await_note("running", deadline_s=60)
            if "server dies" in how:
                server.kill()
            outcomes = job.outcomes(timeout_s=60)
    for outcome in outcomes:
        if how in TIME_OUTS:
            assert outcome.raised is not None and outcome.raised.is_a("Timeout"), str(outcome)
            assert f"Timed out after {TIME_OUTS[how]} s: its tensor was not ready" in outcome.raised.text, str(outcome)
            continue
        assert outcome.ok, str(outcome)
        through, among = (3, 0) if how == "well" else (0, 3)
        assert (outcome.value["operations"], outcome.value["fallback_operations"]) == (through, among)


# ------------------------------------------------------------------------------------------------ training


def _train(steps: int, hook: bool, slow_s: float = 0.0) -> tuple[list[float], dict[str, Any]]:
    """DDP on a small network; notes each step, so that a test can strike in the middle."""
    dist.init_process_group("penstock", timeout=datetime.timedelta(seconds=40))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
    model = DistributedDataParallel(net)
    if hook:
        penstock.torch.ddp_hook(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    random = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(steps):
        inputs = torch.randn(32, 64, generator=random)
        loss = ((model(inputs) - inputs.flip(1)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        ranks.note(f"step {step}")
        if slow_s:
            time.sleep(slow_s)  # computing takes longer in a real model
    stats = penstock.torch.stats()["aggregated"]
    dist.destroy_process_group()
    return losses, stats


def _tree(server: Daemon, left: Daemon, right: Daemon) -> str:
    return f"""
        - address: {server.address}
          tree:
            - {{aggregator: "{left.address}", workers: [0, 1]}}
            - {{aggregator: "{right.address}", workers: [2]}}
        """


def test_training_survives_an_aggregator(tmp_path: pathlib.Path) -> None:
    """kill -9 of an aggregator in the middle of a training, and its return: all losses are those of an undisturbed run."""
    with Daemon("server") as server, Daemon("aggregator") as left, Daemon("aggregator") as right:
        env = _deployment(tmp_path, _tree(server, left, right))
        undisturbed = [losses for losses, _ in ranks.run(_train, count=3, args=(60, False), env=env)]
        with ranks.Ranks(_train, count=3, args=(60, False, 0.05), env=env) as job:
            job.await_note("step 10", deadline_s=60)
            left.kill()
            job.await_note("step 30", deadline_s=30)
            left.start()
            outcomes = job.outcomes(timeout_s=60)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    for outcome, losses in zip(outcomes, undisturbed, strict=True):
        assert outcome.value[0] == losses
    bypasses = [outcome.value[1]["0"]["servers"][0]["bypasses"] for outcome in outcomes]
    assert bypasses[0] >= 1, "nobody noticed"
    assert bypasses[2] == 0, "who sits below the other aggregator has nothing to pass by"
    assert "passed by" in outcomes[0].output or "straight to server" in outcomes[0].output


def test_an_aggregator_comes_back_with_other_shards(tmp_path: pathlib.Path) -> None:
    """The other nodes send to the shards that they know. Workers pass it by, the losses stay, and rank 0 says what to do."""
    with Daemon("server") as server, Daemon("aggregator") as left, Daemon("aggregator") as right:
        env = _deployment(tmp_path, _tree(server, left, right))
        with ranks.Ranks(_train, count=3, args=(60, False, 0.05), env=env) as job:
            job.await_note("step 10", deadline_s=60)
            left.kill()
            left.options = ("--shards", "2")
            left.start()
            outcomes = job.outcomes(timeout_s=60)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    assert f"aggregator {left.address} has 2 shards now, and the job was opened with 1" in outcomes[0].output


@pytest.mark.parametrize("hook", [False, True], ids=["buckets", "reducer"])
def test_training_survives_the_server(tmp_path: pathlib.Path, hook: bool) -> None:
    """kill -9 of the server: training goes on among the ranks, its losses within the bound of quantisation of a run without
    servers; said in the log and in the counters."""
    plain = [losses for losses, _ in ranks.run(_train, count=2, args=(40, hook))]
    with Daemon("server") as server:
        env = _deployment(tmp_path, f"- address: {server.address}")
        with ranks.Ranks(_train, count=2, args=(40, hook), env=env) as job:
            job.await_note("step 12", deadline_s=60)
            server.kill()
            outcomes = job.outcomes(timeout_s=60)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    for outcome, losses in zip(outcomes, plain, strict=True):
        np.testing.assert_allclose(outcome.value[0], losses, rtol=1e-4)
        used = [group for group in outcome.value[1].values() if group["operations"]]
        assert used
        assert all(group["fallback"] and server.address in group["fallback"] for group in used)
        assert all(group["fallback_operations"] for group in used)
        assert "goes on without servers" in outcome.output


def test_the_reducer_goes_through_the_servers(tmp_path: pathlib.Path) -> None:
    """With gradient hooks buckets are aggregated, and losses are those of a run among the ranks, but for quantisation."""
    plain = [losses for losses, _ in ranks.run(_train, count=2, args=(10, True))]
    with Daemon("server") as server:
        env = _deployment(tmp_path, f"- address: {server.address}")
        found = ranks.run(_train, count=2, args=(10, True), env=env)
    for (losses, stats), expected in zip(found, plain, strict=True):
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
        assert stats["0/buckets"]["operations"] >= 10


def _count_groups() -> tuple[int, list[str]]:
    dist.init_process_group("penstock")
    model = torch.nn.Linear(100, 100)
    reducer = GradientReducer(model, tune=True)
    for _ in range(3):
        model(torch.ones(1, 100)).sum().backward()
    stats = penstock.stats()
    (group,) = stats["groups"]
    reducer.close()
    names: list[str] = []
    deadline = time.monotonic() + 10
    while names != ["0/alarm", "0/fallback"]:  # the datagrams' thread closes its own
        (closed,) = penstock.stats()["groups"]
        names = [channel["name"] for channel in closed["channels"]]
        assert time.monotonic() < deadline, names
    dist.destroy_process_group()
    return stats["held"]["groups"], sorted(channel["name"] for channel in group["channels"])


def test_a_reducer_opens_no_group(tmp_path: pathlib.Path) -> None:
    """A reducer with a deployment and a tuner runs in channels of the one group that there is (it had seven more groups)."""
    with Daemon("server") as server:
        env = _deployment(tmp_path, f"- address: {server.address}")
        for groups, channels in ranks.run(_count_groups, count=2, env=env):
            assert groups == 1
            assert channels == [
                "0/alarm",
                "0/buckets",
                "0/buckets/alarm",
                "0/buckets/fallback",
                "0/fallback",
                "0/rounds",
                "0/tuning",
            ]


# ------------------------------------------------------------------------------------------------ ranks that go wrong


def _for_ever() -> None:
    dist.init_process_group("penstock")
    tensors = [torch.ones(100_000), torch.ones(100_000)]
    dist.all_reduce(tensors[0])
    ranks.note("running")
    # One is always under way.
    last = dist.all_reduce(tensors[0], async_op=True)
    while True:
        tensors.reverse()
        work = dist.all_reduce(tensors[0].fill_(1.0), async_op=True)
        last.wait()
        last = work


def test_rank_killed(tmp_path: pathlib.Path) -> None:
    """kill -9 of a rank in the middle of aggregated operations: PeerLost on all others within 5 s, who is lost and in what."""
    with Daemon("server") as server, Daemon("aggregator") as left, Daemon("aggregator") as right:
        env = _deployment(tmp_path, _tree(server, left, right))
        with ranks.Ranks(_for_ever, count=3, env=env) as job:
            job.await_note("running", deadline_s=60)
            killed_s = job.signal(1, signal.SIGKILL)
            outcomes = job.outcomes(timeout_s=15)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.raised is not None, str(outcome)
        assert outcome.raised.is_a("PeerLost"), str(outcome)
        assert "rank 1" in outcome.raised.text
        assert "aggregated all_reduce" in outcome.raised.text
        assert outcome.ended_s - killed_s < 5.0


def _mismatched() -> None:
    dist.init_process_group("penstock")
    dist.all_reduce(torch.ones(5000 if dist.get_rank() == 1 else 6000))


def _gone() -> None:
    dist.init_process_group("penstock")
    dist.all_reduce(torch.ones(5000))
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return
    with contextlib.suppress(TypeError):
        dist.all_reduce(torch.ones(5000))


def _impatient() -> None:
    dist.init_process_group("penstock", timeout=datetime.timedelta(seconds=30))
    if dist.get_rank() == 1:
        dist.recv(torch.ones(1), 0)
    work = dist.all_reduce(torch.ones(5000), async_op=True)
    assert work is not None
    work.wait(datetime.timedelta(seconds=1))


@pytest.mark.parametrize(
    ("program", "kind", "words"),
    [
        (_mismatched, "Mismatch", ["5000 x float32", "6000 x float32"]),
        (_gone, "PeerLost", ["rank 1"]),
        (_impatient, "Timeout", ["rank 0 has given up waiting"]),
    ],
    ids=["mismatch", "gone", "impatient"],
)
def test_ranks_that_disagree(program: Any, kind: str, words: list[str], tmp_path: pathlib.Path) -> None:
    """Another size, a rank that has left, a wait that ends: an error on every rank that waits, which says so, in seconds."""
    with Daemon("server") as server:
        env = _deployment(tmp_path, f"- address: {server.address}")
        with ranks.Ranks(program, count=2, env=env) as job:
            outcomes = job.outcomes(timeout_s=25)
    raised = [outcome for outcome in outcomes if not (program is _gone and outcome.rank == 1)]
    for outcome in raised:
        assert outcome.raised is not None, str(outcome)
        assert outcome.raised.is_a(kind), str(outcome)
        for word in words:
            assert word in outcome.raised.text


def _fork() -> tuple[list[str], dict[str, Any], bool]:
    dist.init_process_group("penstock")
    values = torch.ones(5000)
    dist.all_reduce(values)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # Nothing but the answer may leave the child.
        try:
            answers = []
            for use in (lambda: dist.all_reduce(torch.ones(5000)), penstock.torch.stats):
                try:
                    use()
                    answers.append("nothing")
                except BaseException as error:
                    answers.append(f"{type(error).__name__}: {error}")
            answers += [at for at in map(_link, os.listdir("/proc/self/fd")) if "anon_inode" in at]
            dist.destroy_process_group()
            atexit._run_exitfuncs()
            os.write(writing, json.dumps(answers).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as answer_from_child:
        answers = json.loads(answer_from_child.read())
    ended = os.waitpid(child, 0)[1] == 0
    for _ in range(20):
        dist.all_reduce(values.fill_(1.0))
        assert values.eq(dist.get_world_size()).all()
    stats = penstock.torch.stats()["aggregated"]["0"]
    dist.destroy_process_group()
    return answers, dict(stats), ended


def _link(descriptor: str) -> str:
    with contextlib.suppress(OSError):  # the listing's own
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return ""


def test_fork(tmp_path: pathlib.Path) -> None:
    """A forked child that reduces, destroys the group and ends: it is told, has no descriptors of the group's thread, and its
    parents' jobs go on."""
    with Daemon("server") as server, Daemon("aggregator") as left, Daemon("aggregator") as right:
        found = ranks.run(_fork, count=3, env=_deployment(tmp_path, _tree(server, left, right)))
        assert server.get("/jobs")["jobs"] == [], "the parent has closed it"
    for answers, stats, ended in found:
        assert ended and len(answers) == 2, answers
        assert all("Closed" in answer and "forked" in answer for answer in answers), answers
        assert (stats["operations"], stats["fallback"]) == (21, None)


def _in_flight(who: int, how: str) -> None:
    """Two ranks have an all-reduce under way, for which the third does not come; one of the two ends it."""
    dist.init_process_group("penstock")
    dist.all_reduce(torch.ones(5000))
    work = dist.all_reduce(torch.ones(500_000), async_op=True) if dist.get_rank() < 2 else dist.irecv(torch.ones(1), 0)
    assert work is not None
    store = dist.distributed_c10d._get_default_store()
    store.set(f"waits/{dist.get_rank()}", "")
    store.wait([f"waits/{rank}" for rank in range(3)])
    ranks.note("running")
    if dist.get_rank() == who and how == "abort":
        dist.group.WORLD._get_backend(torch.device("cpu")).abort()
    if dist.get_rank() == who and how == "destroy":
        dist.destroy_process_group()
    work.wait()


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("how", ["abort", "destroy", "interrupt"])
def test_one_ends_what_is_in_flight(how: str, who: int, tmp_path: pathlib.Path) -> None:
    """abort, destroy_process_group, Ctrl-C in the middle of an all-reduce: an error on every rank in seconds, which says who and
    what; and daemons drop the job when rank 0 has ended, long before they would forget it."""
    with Daemon("server") as server, Daemon("aggregator") as left, Daemon("aggregator") as right:
        env = _deployment(tmp_path, _tree(server, left, right))
        with ranks.Ranks(_in_flight, count=3, args=(who, how), env=env) as job:
            job.await_note("running", deadline_s=60)
            began_s = time.monotonic()
            if how == "interrupt":
                job.signal(who, signal.SIGINT)
            outcomes = job.outcomes(timeout_s=20)
            for daemon in (server, left, right):
                assert daemon.get("/jobs")["jobs"] == [], daemon.address
    for outcome in outcomes:
        assert outcome.raised is not None and outcome.exit_code == 0, str(outcome)
        assert outcome.ended_s - began_s < 5
        if outcome.rank == who and how == "interrupt":
            assert outcome.raised.is_a("KeyboardInterrupt"), str(outcome)
            continue
        kind = "PeerLost" if how == "interrupt" else "Closed"
        assert outcome.raised.is_a(kind), str(outcome)
        assert f"rank {who}" in outcome.raised.text, str(outcome)
        if outcome.rank != 2:
            assert "aggregated all_reduce(sum, 500000 x float32) #2 of group 0" in outcome.raised.text, str(outcome)


# ------------------------------------------------------------------------------------------------ opening


# What a deployment names in `switch`, for a daemon in a switch's place: it is given the same body.
COMMAND = """
import sys, urllib.request
address, verb, job, *body = sys.argv[1:]
method, path = ("PUT", "") if verb == "open" else ("DELETE", "?epoch=1")
data = open(body[0], "rb").read() if body else None
request = urllib.request.Request(f"http://{address}/jobs/{job}{path}", data=data, method=method)
print(urllib.request.urlopen(request).status)
"""


def _switched(tmp_path: pathlib.Path, server: Daemon, address: str, command: list[str]) -> dict[str, str | None]:
    tree = f'[{{aggregator: "{address}", workers: [0, 1], switch: {json.dumps(command)}}}]'
    return _deployment(tmp_path, f'- {{address: "{server.address}", tree: {tree}}}', "key: none\n")


def test_a_switch_is_told_by_a_command(tmp_path: pathlib.Path) -> None:
    """The deployment's command opens the job, opens it again when it is lost, and closes it; 16-bit types travel in 32 bits, and
    the bits are those of the definition. (tests/test_p4_live.py has a switch.)"""
    (tmp_path / "tell.py").write_text(COMMAND)
    secret = {"PENSTOCK_SECRET": "hush"}
    with Daemon("server", env=secret) as server, Daemon("aggregator") as rack:
        env = _switched(tmp_path, server, rack.address, [sys.executable, str(tmp_path / "tell.py"), rack.address])
        env |= secret
        values = ranks.run(_all_reduces, count=2, env=env)
        assert rack.get("/jobs")["jobs"] == [], "the job is closed at the end"
        _assert_sums(values, 2, dict.fromkeys(NARROW, 32), [])
        for _, stats in values:
            [one] = stats["0"]["servers"]
            assert one["parent"] == rack.address
        with ranks.Ranks(_for_ever, count=2, env=env) as job:
            job.await_note("running", deadline_s=60)
            rack.kill()
            rack.start()
            deadline = time.monotonic() + 30
            while not rack.get("/jobs")["jobs"]:
                assert time.monotonic() < deadline, f"the job was not opened again\n{job.output(0)}"
                job.still_running(for_s=0.1)
            job.still_running(for_s=0.5)
            assert f"switch {rack.address} is passed by: 201" in job.output(0)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["/nowhere/control"], "No such file"),
        ([sys.executable, "-c", "import sys; sys.exit('all 63 places are taken')"], "all 63 places are taken"),
        ([sys.executable, "-c", "import sys; sys.exit(3)"], "it ended with 3"),
    ],
)
def test_a_switch_that_refuses(command: list[str], words: str, tmp_path: pathlib.Path) -> None:
    """What the command says is said on all ranks, with the switch and the command."""
    secret = {"PENSTOCK_SECRET": "hush"}
    with Daemon("server", env=secret) as server:
        env = {**_switched(tmp_path, server, "127.0.0.1:9", command), **secret}
        _refused(env, "switch 127.0.0.1:9: `", command[0], " open ", words)
        assert server.get("/jobs")["jobs"] == [], "what was opened is closed"


def test_a_switch_beside_a_daemon_without_a_secret(tmp_path: pathlib.Path) -> None:
    """It would never get a packet from there: an error says so, and what to do."""
    with Daemon("server") as server:
        _refused(
            _switched(tmp_path, server, "127.0.0.1:9", ["true"]), server.address, "has no secret", "PENSTOCK_SECRET"
        )


def _init() -> None:
    dist.init_process_group("penstock", timeout=datetime.timedelta(seconds=20))


def _refused(env: dict[str, str | None], *words: str, count: int = 2) -> None:
    with ranks.Ranks(_init, count=count, env=env) as job:
        outcomes = job.outcomes(timeout_s=40)
    for outcome in outcomes:
        assert outcome.raised is not None, str(outcome)
        assert outcome.raised.is_a("PenstockError"), str(outcome)
        for word in words:
            assert word in outcome.raised.text


def test_nobody_listens(tmp_path: pathlib.Path) -> None:
    """A server that is not there fails all ranks at once, with what would start it."""
    with Daemon("server") as server:
        address = server.address
    _refused(
        _deployment(tmp_path, f"- address: {address}"),
        f"server {address} does not answer",
        f"penstock server --listen {address}",
    )


def test_the_store_dies_before_the_jobs_are_agreed_on(tmp_path: pathlib.Path) -> None:
    """An error that names the group and its store, as where the store dies at another moment of a join."""
    with ranks.Ranks(_attach_without_a_store, count=2, env=_deployment(tmp_path, "- address: 127.0.0.1:9")) as job:
        job.await_note("attaching", deadline_s=60)
        job.close_store()
        for outcome in job.outcomes(timeout_s=60):
            assert outcome.raised is not None and outcome.raised.is_a("penstock.errors.Config"), str(outcome)
            assert "the store of group " in outcome.raised.text, outcome.raised.text


def _attach_without_a_store() -> None:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    attach = jobs.attach

    def attach_late(*args: Any, **more: Any) -> Any:
        ranks.note("attaching")
        with pytest.raises(dist.DistError):
            while True:
                store.add("alive", 0)
        return attach(*args, **more)

    jobs.attach = attach_late
    _init()


def test_wrong_secret_role_and_limits(tmp_path: pathlib.Path) -> None:
    """A daemon with another secret, one of the other role, and one without room: errors that say which and what to do."""
    with (
        Daemon("server", env={"PENSTOCK_SECRET": "one"}) as secret,
        Daemon("aggregator") as aggregator,
        Daemon("server", "--slots", "16") as small,
    ):
        env = _deployment(tmp_path, f"- address: {secret.address}")
        _refused({**env, "PENSTOCK_SECRET": "two"}, secret.address, "401", "PENSTOCK_SECRET")
        ranks.run(_all_reduces, count=2, env={**env, "PENSTOCK_SECRET": "one"})
        _refused(_deployment(tmp_path, f"- address: {aggregator.address}"), aggregator.address, "is a aggregator")
        _refused(_deployment(tmp_path, f"- address: {small.address}"), small.address, "32 slots are needed", "--slots")


def test_another_version_of_the_protocol(tmp_path: pathlib.Path) -> None:
    """A daemon that speaks another version is refused on all ranks before a packet is sent, with both versions."""

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"role": "server", "penstock": "9.9.9", "protocol": 9, "shards": 1}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{other.server_port}"
        _refused(
            _deployment(tmp_path, f"- address: {address}"),
            address,
            "9.9.9",
            "version 9",
            f"version {_core.AGGREGATION_VERSION}",
        )
        other.shutdown()


def _init_with(given: Any) -> dict[str, Any]:
    penstock.init(deployment=given if os.environ["RANK"] == "0" else None)
    dist.init_process_group("penstock")
    values = torch.ones(50_000)
    dist.all_reduce(values)
    assert values.eq(dist.get_world_size()).all()
    stats = penstock.torch.stats()["aggregated"]
    # Groups from here on go among the ranks.
    penstock.init(deployment=None)
    group = dist.new_group(backend="penstock")
    dist.all_reduce(values, group=group)
    assert len(penstock.torch.stats()["aggregated"]) == 1
    dist.destroy_process_group()
    [aggregated] = stats.values()
    return dict(aggregated)


def test_a_deployment_from_the_script(tmp_path: pathlib.Path) -> None:
    """`penstock.init(deployment=...)` on rank 0, as a dict or a file, does what the setting does, until it is taken back."""
    with Daemon("server") as server:
        document = {"version": 1, "aggregated": {"block_bytes": 1024, "servers": [{"address": server.address}]}}
        path = tmp_path / "deployment.yaml"
        path.write_text(json.dumps(document))
        for given in (document, str(path), path):
            for group in ranks.run(_init_with, args=(given,), count=2):
                assert (group["operations"], group["fallback"]) == (1, None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("/nowhere/deployment.yaml", "penstock.init(deployment='/nowhere/deployment.yaml'): the file cannot be read"),
        (["a"], "penstock.init(deployment=['a']): a deployment is a file's path, or a dict"),
        ({"version": 1}, "penstock.init(deployment=...)"),
        ({"version": 1, "aggregated": {"servers": [object()]}}, "penstock.init(deployment=...)"),
    ],
)
def test_a_bad_deployment_from_the_script(given: Any, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        penstock.init(deployment=given)
    assert words in str(error.value)


GOOD = """
version: 1
aggregated:
  servers:
    - address: 10.0.0.1:7471
      tree:
        - aggregator: 10.0.0.2:7471
          workers: [0, 1]
"""


def test_deployments_say_what_they_say() -> None:
    """Every key is read; who pushes where follows from the tree."""
    found = deployment.parse(
        GOOD.replace("10.0.0.1:7471\n", "10.0.0.1:7471\n      fraction: 0.5\n")
        + '    - {address: "[fd00::1]:7471", fraction: 0.5}\n'
        + "  format: int16\n  window: 64\n  block_bytes: 1408\n  min_bytes: 0\n  key: none\n  offloads: false\n",
        "p",
    )
    assert (found.format, found.window, found.block_bytes, found.min_bytes) == ("int16", 64, 1408, 0)
    assert (found.key, found.offloads) == (False, False)
    first, second = found.servers
    assert (first.parent(0), first.parent(2), second.parent(0)) == ("10.0.0.2:7471", None, None)
    assert [child if isinstance(child, int) else child.workers for child in first.children(4)] == [(0, 1), 2, 3]
    assert deployment.parse(GOOD, "p").block_bytes is None


@pytest.mark.parametrize(
    ("change", "line", "words"),
    [
        (("version: 1", "version: 2"), 2, "'cluster' is missing: the path of the cluster file"),
        (("version: 1\n", ""), 2, "'version' is missing"),
        (("aggregated:", "aggregate:"), 3, "there is no key 'aggregate' here"),
        (
            ("  servers:", "  formats: int32\n  servers:"),
            4,
            "there is no key 'formats' here; did you mean 'format'? It takes the keys servers, format",
        ),
        (("  servers:", "  format: int8\n  servers:"), 4, "format: must be one of int32, int16, float32, not 'int8'"),
        (("  servers:", "  window: 100\n  servers:"), 4, "window: must be a power of two from 2 to 65536, not '100'"),
        (
            ("  servers:", "  block_bytes: 100\n  servers:"),
            4,
            "block_bytes: must be auto, or a multiple of 64 up to 8896",
        ),
        (("  servers:", "  min_bytes: -1\n  servers:"), 4, "min_bytes: must be a number of bytes"),
        (("  servers:", "  key: secret\n  servers:"), 4, "key: must be one of auto, none"),
        (("  servers:", "  offloads: 1\n  servers:"), 4, "offloads: must be true or false, not '1'"),
        (("10.0.0.1:7471", "10.0.0.1"), 5, "servers[0].address: must be IP:PORT"),
        (("10.0.0.1:7471", "server:7471"), 5, "servers[0].address: must be IP:PORT"),
        (("10.0.0.1:7471", "fd00::1:7471"), 5, "servers[0].address: must be IP:PORT"),
        (("10.0.0.1:7471", '"[10.0.0.1]:7471"'), 5, "servers[0].address: must be IP:PORT"),
        (
            ("10.0.0.1:7471", "0.0.0.0:7471"),
            5,
            "servers[0].address: not all ranks can reach one daemon at '0.0.0.0:7471'",
        ),
        (("10.0.0.1:7471", '"[fe80::1]:7471"'), 5, "not all ranks can reach one daemon at '[fe80::1]:7471'"),
        (
            ("7471\n      tree", "7471\n      fraction: 0\n      tree"),
            6,
            "fraction: must be a number above 0, at most 1",
        ),
        (("7471\n      tree", "7471\n      fraction: 0.5\n      tree"), 5, "add up to 0.5; they must add up to 1"),
        (("[0, 1]", "[0, 0]"), 8, "worker 0 stands twice"),
        (("[0, 1]", "[0, 4096]"), 8, "must be a worker's number, its rank, from 0 to 4095"),
        (
            ("[0, 1]", str([*range(65)])),
            7,
            "an aggregator has at most 64 children, here are 65: put aggregators below it",
        ),
        (("[0, 1]", "[]"), 8, "must be a list that is not empty"),
        (("          workers: [0, 1]\n", ""), 7, "an aggregator needs `workers: [...]`"),
        (("[0, 1]", "[0, 1]\n        - {aggregator: 10.0.0.2:7471, workers: [2]}"), 9, "stands twice in the tree"),
        (("[0, 1]", "[0, 1"), None, "this is not YAML"),
    ],
)
def test_bad_deployments(change: tuple[str, str], line: int | None, words: str) -> None:
    """What is wrong with a deployment is said with its line, its key and what is allowed."""
    assert change[0] in GOOD
    with pytest.raises(ConfigError) as error:
        deployment.parse(GOOD.replace(*change, 1), "deployment.yaml")
    assert words in str(error.value)
    assert str(error.value).startswith("deployment.yaml" + (f":{line}:" if line else ":"))


SWITCH = """
version: 1
aggregated:
  block_bytes: 256
  key: none
  servers:
    - address: 10.0.0.1:7471
      tree:
        - aggregator: 10.0.0.3:7471
          workers: [2]
          children:
            - aggregator: 10.0.0.2:7471
              switch: [python, control.py]
              workers: [0, 1]
"""


def test_a_deployment_with_a_switch() -> None:
    [switch] = deployment.parse(SWITCH, "p").switches
    assert (switch.address, switch.switch, switch.workers) == ("10.0.0.2:7471", ("python", "control.py"), (0, 1))
    assert deployment.parse(GOOD, "p").switches == ()


@pytest.mark.parametrize(
    ("change", "line", "words"),
    [
        (
            ("256", "512"),
            4,
            "block_bytes: aggregator 10.0.0.2:7471 is a switch, and there `block_bytes` must be 64, 256 or 1024",
        ),
        (("256", "auto"), 4, "must be 64, 256 or 1024"),
        (("  block_bytes: 256\n", ""), 4, "`block_bytes` must be 64, 256 or 1024"),
        (("key: none", "key: auto"), 5, "`key` must be none"),
        (("  key: none\n", ""), 4, "`key` must be none"),
        (("key: none", "key: none\n  format: int16"), 6, "`format` must be int32"),
        (("key: none", "key: none\n  format: float32"), 6, "`format` must be int32"),
        (("key: none", "key: none\n  window: 8192"), 6, "`window` must be at most 4096"),
        (
            ("[0, 1]", str([0, 1, *range(3, 18)])),
            12,
            "a switch has at most 16 children, here are 17: put aggregators below it",
        ),
        (("10.0.0.1:7471", "'[fd00::1]:7471'"), 7, "[fd00::1]:7471: a switch reads IPv4 only"),
        (("[python, control.py]", "control.py"), 13, "switch: must be a list that is not empty"),
        (("[python, control.py]", "[python, 3]"), 13, "switch[1]: must be a word of the command"),
    ],
)
def test_bad_deployments_with_a_switch(change: tuple[str, str], line: int, words: str) -> None:
    """What a switch cannot do is said with what to write."""
    assert change[0] in SWITCH
    with pytest.raises(ConfigError) as error:
        deployment.parse(SWITCH.replace(*change, 1), "deployment.yaml")
    assert words in str(error.value)
    assert str(error.value).startswith(f"deployment.yaml:{line}:"), str(error.value)


def test_jobs_of_many_ranks() -> None:
    """A rank has a place below its node. Too many ranks, or children of the server, are told before anything is opened."""
    rack = "        - {{aggregator: 10.0.{0}.9:1, workers: {1}}}\n"
    racks = [rack.format(number, [*range(64 * number, 64 * number + 64)]) for number in range(64)]
    head = "version: 1\naggregated:\n  servers:\n    - address: 10.9.9.9:7471\n      tree:\n"
    full = deployment.parse(head + "".join(racks), "d.yaml")
    full.check_world(4096)
    assert [full.servers[0].place(worker, 4096) for worker in (0, 63, 64, 4095)] == [0, 63, 0, 63]
    with pytest.raises(ConfigError, match=r"d\.yaml: a job of 4097 ranks; servers and aggregators take up to 4096"):
        full.check_world(4097)
    two = deployment.parse(head + "".join(racks[:2]), "d.yaml")
    two.check_world(128 + 62)
    assert two.servers[0].place(189, 190) == 63
    words = (
        r"10\.9\.9\.9:7471 has 65 children in a job of 191 ranks \(63 ranks that are below no aggregator\); at most 64"
    )
    with pytest.raises(ConfigError, match=words):
        two.check_world(191)
    assert (jobs._ranges((7, 0, 1, 2)), jobs._ranges(tuple(range(64, 128)))) == ("0-2,7", "64-127")
    scattered = jobs._ranges(tuple(range(0, 4096, 4)))
    assert len(scattered) <= 64 and scattered.startswith("0,4,8") and scattered.endswith(",...")
    switch = deployment.parse(SWITCH, "d.yaml")
    switch.check_world(64)
    with pytest.raises(ConfigError, match=r"a job of 65 ranks; with a switch \(10\.0\.0\.2:7471\) at most 64"):
        switch.check_world(65)


def test_deployments_that_do_not_fit_the_job(tmp_path: pathlib.Path) -> None:
    """A file that is not there, and a worker that the job does not have: known on all ranks before anything is opened."""
    _refused({"PENSTOCK_DEPLOYMENT": str(tmp_path / "none.yaml")}, "none.yaml", "cannot be read")
    env = _deployment(tmp_path, '- {address: "127.0.0.1:9", tree: [{aggregator: "127.0.0.1:10", workers: [5]}]}')
    _refused(env, "names worker 5", "ranks 0 to 1")
