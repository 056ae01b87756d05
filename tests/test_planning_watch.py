"""Proves that a running job's deployment follows its network: what is measured, what is decided, that no gradient is lost."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import penstock.torch
import ranks
from daemons import Daemon
from penstock.cli import main
from penstock.cluster import deployment as deployments
from penstock.cluster import file, generate
from penstock.cluster.network import Cluster
from penstock.planning.deploy import deployment
from penstock.planning.evaluate import evaluate
from penstock.planning.replan import Gone, Loads, Patience, State, decide, left_of
from penstock.planning.scheme import Scheme
from penstock.tools.bench.aggregated.cluster import Daemons, Orders
from penstock.tools.bench.program import run_program
from penstock.tools.plan import watched
from penstock.tools.testbed import LinkSpec, Testbed, system
from test_testbed_cluster import datagram, invoke

REASON = system.unavailable(LinkSpec(loss=0.1))
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=f"no testbed here: {REASON}")

MBIT = 1_000_000
FIRST_WAY = ("a1", "leaf1-spine0", "leaf0-spine0", "s0")
OTHER_WAY = ("a1", "leaf1-spine1", "leaf0-spine1", "s0")
SCHEME = Scheme({"s0": 1.0}, {"s0": ("a0", "a0", "a1")}, routes={"s0": {"a1": FIRST_WAY}})
"""50 Mbit/s a worker by each of two spines."""


def cluster() -> Cluster:
    """Three workers and a host that sends what is not the job's, on two leaves; a server on the first."""
    made = generate.leaf_spine(2, 2, 2, servers=1, rate_bit_s=100 * MBIT, mtu=9000, uplink={"rate_bit_s": 50 * MBIT})
    for name, rate in (("h3", 40), ("a0", 300), ("a1", 300), ("s0", 200)):
        made = made.with_link(name, rate_bit_s=rate * MBIT)
    return dataclasses.replace(made, jobs=(dataclasses.replace(made.jobs[0], workers=("h0", "h1", "h2")),))


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "cluster.yaml").write_text(file.dump(cluster()))
    found = tmp_path / "deployment.yaml"
    found.write_text(deployment(cluster(), cluster().jobs[0], SCHEME, "cluster.yaml"))
    return found


def test_events_from_standard_input(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Loads have to stay for three measurements, a death changes the deployment at once, what comes back waits; the file is a
    deployment with the same parts and another way."""
    output = tmp_path / "next.yaml"
    loads = json.dumps({"loads": {"link leaf0-spine0": "40 Mbit/s"}})

    def run(*events: str) -> Any:
        return CliRunner().invoke(main, ["plan", "watch", str(path), "-o", str(output)], input="\n".join(events))

    said = run(loads, loads)
    assert said.exit_code == 0 and said.output.count("nothing changes") == 2 and not output.exists(), said.output
    assert "400% faster, for 2 of 3 measurements" in said.output
    said = run(loads, loads, loads, '{"loads": {}}')
    assert said.output.count("nothing changes") == 3 and "50 Mbit/s a worker: 400% faster; changed: " in said.output
    read = deployments.parse(output.read_text(), str(output), str(tmp_path))
    assert [server.fraction for server in read.servers] == [1.0] and "spine0" not in output.read_text()
    output.unlink()
    said = run('{"gone": "link leaf1-spine0"}', "", '{"back": "link leaf1-spine0"}')
    assert "link leaf1-spine0 is dead; changed" in said.output and "is back" in said.output, said.output
    assert "spine1" in output.read_text()
    text = output.read_text()
    assert text.startswith("# Changed while the job ran: link leaf1-spine0 is dead\n# Planned: 50 Mbit/s a worker\n"), (
        text
    )
    assert "# Bound: 50 Mbit/s\n# Gap: 0.0% below the bound\n# Full: link " in text
    assert CliRunner().invoke(main, ["plan", "watch", str(path)]).exit_code == 2


def test_a_wrong_event_is_told_and_the_next_one_counts(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A slip of the keyboard ends nothing; what is gone is remembered, also where a worker is cut off by it, until it is back."""
    output = tmp_path / "next.yaml"

    def run(*events: str) -> Any:
        output.unlink(missing_ok=True)
        return CliRunner().invoke(main, ["plan", "watch", str(path), "-o", str(output)], input="\n".join(events))

    dead = '{"gone": "link leaf1-spine0"}'
    for wrong, words in (
        ('{"gone": "aggregator a7"}', "names aggregator a7, which the cluster does not have"),
        ('{"gone": "server s0"}', "names server s0, without which nothing can be summed"),
        ('{"loads": {"link h0": 5}}', "event 1"),
        ("gone", "event 1: 'gone' is none of"),
        ('{"gone": "link h1"}', "link h1: no way is left to worker on h1"),
    ):
        said = run(wrong, '{"back": "link h1"}', dead)
        told = next(line for line in said.output.splitlines() if line.startswith("nothing changes: "))
        assert said.exit_code == 0 and words in told, said.output
        assert "link leaf1-spine0 is dead; changed" in said.output and "spine1" in output.read_text(), said.output
    said = run('{"gone": "link h1"}', dead)
    assert said.output.count("no way is left to worker on h1") == 2 and not output.exists(), said.output
    said = run('{"gone": "link h1"}', dead, '{"back": "link h1"}')
    assert "link leaf1-spine0 is dead; changed" in said.output, said.output


def test_what_is_measured_takes_the_place_of_the_files_background() -> None:
    """Others' load on a link that the file knows of is not counted twice; what is not measured is as the file says."""
    made = cluster().with_link("leaf0-spine0", background_bit_s=20 * MBIT)
    (job,) = made.jobs
    rates = []
    for loads in ({}, {"link leaf0-spine0": 20.0 * MBIT}, {"link leaf0-spine0": 0.0}, {"link leaf0-spine1": 0.0}):
        _, decision = decide(made, job, State(SCHEME), Loads(loads), seconds=0.2)
        rates.append(
            round(evaluate(left_of(made, job, State(SCHEME, background=loads)), job, SCHEME, loads).rate / MBIT)
        )
        assert decision.rate >= rates[-1] * MBIT * (1 - 1e-6)
    assert rates == [30, 30, 50, 30]


@needs_namespaces
@pytest.mark.slow
def test_a_meter_sees_a_link_that_is_down_and_what_ranks_still_use(tmp_path: pathlib.Path) -> None:
    """A link whose interface is down is gone until it is up again. As long as servers have an earlier deployment's tree, its
    loads are the job's own."""
    made = cluster()
    (job,) = made.jobs
    other = Scheme({"s0": 1.0}, {"s0": ("a0", "a0", None)}, routes={"s0": {2: ("h2", *OTHER_WAY[1:])}})
    with Testbed(cluster=made, offloads=False) as bed:
        meter = watched.Meter(bed, job)
        assert meter.events(SCHEME) == [Loads({})]
        for state, event in (("down", Gone("link h1")), ("up", Gone("link h1", is_back=True))):
            bed.popen("h1", ["ip", "link", "set", bed.interface, state]).wait(20)
            # The kernel says so a moment later.
            looks = (meter.events(SCHEME)[0] for _ in range(1000))
            assert next(first for first in looks if not isinstance(first, Loads)) == event
        # Half of a second's look at 10 Mbit/s a worker: the servers tell the first deployment's tree.
        meter.events(other)
        addresses = {each.name: made.address(each) or "" for each in made.aggregators}

        def look(at: float, moved: int, trees: dict[str, frozenset[int]]) -> watched._Look:
            crossed = {link.name: (0, 0) for link in made.links} | {"leaf0-spine0": (moved, moved)}
            return watched._Look(at, crossed, {("s0", 1, "child"): moved}, {("s0", 1): trees})

        first = {addresses["a0"]: frozenset({0, 1}), addresses["a1"]: frozenset({2})}
        for trees, running, left in ((first, SCHEME, {}), ({addresses["a1"]: frozenset({0, 1, 2})}, other, None)):
            meter._before = look(0.0, 0, trees)
            looked = look(1.0, 10 * MBIT // 8, trees)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(meter, "_look", lambda looked=looked: (looked, set()))
                assert meter._running(looked, meter._before) == running
                (loads,) = meter.events(other)
                assert isinstance(loads, Loads)
                assert loads.background == ({"link leaf0-spine0": 10.0 * MBIT} if left is None else left)


@needs_namespaces
@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_a_job_moves_from_a_link_that_others_fill(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Ranks reduce while another host fills the link of their route: after three measurements the flow takes the other spine, and
    every sum before, during and after is right. Before others send, the job's own load changes nothing."""
    made, done, output = cluster(), threading.Event(), tmp_path / "next.yaml"
    (job,) = made.jobs
    said: list[str] = []
    before: list[Any] = []
    name = f"watch-{os.getpid()}"
    invoke("up", "--name", name, "--cluster", str(tmp_path / "cluster.yaml"), "--no-offloads")
    try:
        with Testbed.attach(name) as bed, Daemons(bed) as daemons:

            def fill() -> None:
                with datagram(bed, "h3") as source, datagram(bed, "h1") as sink:
                    while not done.is_set():
                        source.sendto(bytes(8000), sink.getsockname())

            def watch() -> None:
                command = ["plan", "watch", str(path), "--name", name, "-o", str(output), "--every", "0.7"]
                with subprocess.Popen(
                    [sys.executable, "-u", "-m", "penstock", *command],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                ) as process:
                    assert process.stdout is not None
                    for line in process.stdout:
                        said.append(line)
                        if len(said) == 3:
                            threads[1].start()
                        if "changed" in line:
                            before.extend(bed.links())
                            break
                    process.kill()

            threads = [threading.Thread(target=each, daemon=True) for each in (watch, fill)]

            def obey(order: dict[str, Any]) -> None:
                if order["order"] == "begin":
                    threads[0].start()
                else:
                    done.set()

            options = {"deployment": str(path), "elements": 1 << 18, "operations": 80}
            orders = Orders(tmp_path / "state.json", obey, daemons)
            try:
                run_program(
                    bed,
                    "carried_rank",
                    {**options, "state": str(orders.path)},
                    what="watch",
                    ranks=3,
                    timeout_s=240,
                    on=list(job.workers),
                    on_line=orders.on_line,
                )
            finally:
                done.set()
            threads[0].join(30)
            assert before, said
            after = {now.name: now.since(then) for now, then in zip(bed.links(), before, strict=True)}
    finally:
        invoke("down", "--name", name)
    assert not any("changed" in line for line in said[:-1]) and "for 2 of 3 measurements" in said[-2], said
    assert output.read_text().count("spine1") and "spine0" not in output.read_text(), output.read_text()
    # What is left of the job goes over the other spine.
    assert after["leaf1-spine1"].up_bytes > 3_000_000, (said[3:], output.read_text())


@needs_namespaces
@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_a_meter_sees_a_dead_aggregator(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """An aggregator is killed while ranks reduce: the server says that its workers bypass it, the meter that it is gone, and the
    deployment that follows does without it. All sums are right."""
    made = cluster()
    (job,) = made.jobs
    events: list[Any] = []
    ended = threading.Event()
    with Testbed(cluster=made, offloads=False) as bed, Daemons(bed) as daemons:
        meters: list[watched.Meter] = []

        def look() -> None:
            while not ended.wait(0.3):
                events.extend(event for event in meters[0].events(SCHEME) if isinstance(event, Gone))

        looking = threading.Thread(target=look)

        def obey(order: dict[str, Any]) -> None:
            if order["order"] == "begin":
                meters.append(watched.Meter(bed, job))
                looking.start()
                os.kill(daemons.pids["a1"], signal.SIGKILL)

        options = {"deployment": str(path), "elements": 1 << 18, "operations": 20}
        orders = Orders(tmp_path / "state.json", obey, daemons)
        try:
            run_program(
                bed,
                "carried_rank",
                {**options, "state": str(orders.path)},
                what="watch",
                ranks=3,
                timeout_s=240,
                on=list(job.workers),
                on_line=orders.on_line,
            )
        finally:
            ended.set()
            if looking.is_alive():
                looking.join(30)
    assert events[0] == Gone("aggregator a1"), events
    kept = watched.Watched(made, job, SCHEME, Patience(), None, "cluster.yaml")
    decision = kept.take(events[0])
    assert decision.is_changed and "a1" not in decision.scheme.via["s0"], decision


def _steps(path: str, other: str, left: str, steps: int, stopped: str) -> list[list[str]]:
    """Sums in every step, through whichever deployment the file says; rank 0 replaces it in the middle. Another one is older
    than the group."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    penstock.init(deployment=path)
    group = dist.new_group(backend="penstock")
    told: list[str] = []
    seen = logging.Handler()
    seen.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("penstock").addHandler(seen)
    for _ in range(2):
        assert penstock.torch.switched(group, left) is group, "an earlier run's"
    assert sum(left in text and "not switched to" in text for text in told) == (rank == 0), told
    parents = []
    for step in range(steps):
        if step == steps // 2:
            if rank == 0:
                # The aggregator dies, and the deployment that comes is one without it.
                pathlib.Path(stopped).touch()
                os.replace(other, path)
            dist.barrier()
        fresh = penstock.torch.switched(group, path)
        assert (fresh is not group) == (step == steps // 2)
        group = fresh
        tensors = [torch.full((50_000,), float(step + rank + bucket)) for bucket in range(3)]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        for bucket, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
            work.wait()
            expected = sum(step + other + bucket for other in range(world))
            assert torch.equal(tensor, torch.full_like(tensor, float(expected))), (step, bucket, tensor[0])
        [counted] = penstock.torch.stats()["aggregated"].values()
        assert counted["fallback"] is None and counted["operations"] > 0
        parents.append([server["parent"] for server in counted["servers"]])
    with pytest.raises(penstock.errors.Config, match="the default group cannot be replaced"):
        penstock.torch.switched(None, path)
    dist.destroy_process_group()
    return parents


def test_a_job_switches_between_two_steps(tmp_path: pathlib.Path) -> None:
    """Every step's sums are right, through one aggregator before and another after, although the first is killed in between. A
    file that was there before the group is not taken."""
    with Daemon("server") as server, Daemon("aggregator") as first, Daemon("aggregator") as second:
        for name, aggregator in (("now", first), ("next", second), ("left", second)):
            tree = [{"aggregator": aggregator.address, "workers": [0, 1]}]
            section = {"servers": [{"address": server.address, "tree": tree}]}
            (tmp_path / f"{name}.yaml").write_text(json.dumps({"version": 1, "aggregated": section}))
        stopped = tmp_path / "stopped"

        def kill() -> None:
            until = time.monotonic() + 60
            while not stopped.exists() and time.monotonic() < until:
                time.sleep(0.01)
            first.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        arguments = (*(str(tmp_path / f"{name}.yaml") for name in ("now", "next", "left")), 6, str(stopped))
        values = ranks.run(_steps, count=2, args=arguments)
        killer.join()
        assert values == [[[first.address]] * 3 + [[second.address]] * 3] * 2, values


def test_what_is_no_event_is_refused() -> None:
    """Good ones come out as they were told."""
    lines = ['{"gone": "link r0"}', '{"back": "aggregator a"}', '{"loads": {"link r0": "2 Mbit/s"}}']
    assert [watched.event_of(line, 1) for line in lines] == [
        Gone("link r0"),
        Gone("aggregator a", is_back=True),
        Loads({"link r0": 2e6}),
    ]
