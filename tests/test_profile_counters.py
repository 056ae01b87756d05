"""The sampler of `penstock profile`: what it writes of real processes, connections and interfaces, and how it ends."""

from __future__ import annotations

import itertools
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import forked
from penstock.profiling import counters, record, sampler, utilisation
from penstock.profiling.divide import divide
from penstock.profiling.measures import Measures
from penstock.profiling.readers import load
from penstock.reports import Picture
from penstock.tools.profile import report, run
from penstock.tools.profile.recorder.counters import Counters
from penstock.tools.profile.recorder.identity import Identity
from penstock.tools.testbed import LinkSpec, Testbed

SAMPLER = [sys.executable, "-m", "penstock.profiling.sampler"]


def test_a_process_is_counted_and_its_end_is_the_samplers(tmp_path: pathlib.Path) -> None:
    """Processor time, disk and threads of a process as it says them itself; the file ends with an `end`, and reads back whole."""
    path = tmp_path / "host.jsonl"
    worker = started(
        f"""
        import os, time
        with open({str(tmp_path / "data")!r}, "wb", buffering=0) as file:
            file.write(bytes(1 << 20))
            os.fsync(file.fileno())
        while time.process_time() < 0.8:
            pass
        print(time.process_time(), flush=True)
        input()
        """
    )
    watching = subprocess.Popen(
        [*SAMPLER, "--pids", str(worker.pid), "--out", path, "--period-ms", "50", "--host", "h"]
    )
    used_s = float(worker.stdout.readline())
    until(lambda: highest(path, f"pid.{worker.pid}.cpu_s") >= used_s, "the processor time is not seen")
    until(lambda: highest(path, f"pid.{worker.pid}.disk_written_bytes") >= 1 << 20, "the written bytes are not seen")
    worker.stdin.close()
    worker.wait()
    assert watching.wait(10) == 0
    found = record.read(path)
    assert not found.problems and found.events[-1].kind == "end"
    assert found.header.host == "h" and found.header.about["counters"] is True
    assert highest(path, f"pid.{worker.pid}.cpu_s") < used_s + 0.5
    assert highest(path, f"pid.{worker.pid}.memory_bytes") > 1 << 20
    assert highest(path, f"pid.{worker.pid}.threads") == 1
    times = [each.time_ns for each in found.readings]
    assert times == sorted(times) and times[0] >= found.header.start_ns


def test_a_rank_s_own_name_and_its_loaders_workers_are_seen(tmp_path: pathlib.Path) -> None:
    """The header names the first rank of the host; what a rank's children use is added up, and does not fall when they end."""
    path = tmp_path / "host.jsonl"
    code = """
        import os, sys, time
        for _ in range(2):
            if (child := os.fork()) == 0:
                while time.process_time() < 0.3:
                    pass
                sys.stdin.readline()
                os._exit(0)
        input()
        """
    rank = started(code, RANK="3", WORLD_SIZE="8")
    sampled = sampler.Sampler([rank.pid], path, 10_000_000)
    now_ns = 0

    def workers_s() -> float:
        nonlocal now_ns
        now_ns += 20_000_000_000
        sampled.tick(now_ns)
        return highest(path, f"pid.{rank.pid}.workers.cpu_s")

    until(lambda: workers_s() >= 0.6, "the workers are not seen")
    rank.stdin.write("\n\n\n")
    rank.stdin.close()
    rank.wait()
    sampled.tick(now_ns + 20_000_000_000)
    assert not sampled.is_needed
    sampled.close(now_ns + 30_000_000_000)
    found = record.read(path)
    assert (found.header.rank, found.header.world) == (3, 8) and found.header.about["ranks"] == {"3": rank.pid}
    seen = [each.values[name] for each in found.readings if (name := f"pid.{rank.pid}.workers.cpu_s") in each.values]
    assert seen == sorted(seen)


def test_one_rank_of_a_host_starts_the_sampler(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that looks, also in a folder that no command has made ready, as those of a bench."""
    begun: list[list[int]] = []
    monkeypatch.setattr(Counters, "_start", lambda _, pids: begun.append(pids))
    for _ in range(2):
        Counters(tmp_path, Identity()).look()
    assert begun == [[os.getpid()]]


def test_a_stop_and_a_ctrl_c(tmp_path: pathlib.Path) -> None:
    """SIGINT, which a terminal sends to all, ends nothing: the ranks may go on for a while. SIGTERM ends it with a whole file."""
    path = tmp_path / "host.jsonl"
    watching = subprocess.Popen([*SAMPLER, "--pids", str(os.getpid()), "--out", path, "--period-ms", "10"])
    until(lambda: path.exists() and path.read_text().count("\n") > 3, "nothing is written")
    watching.send_signal(signal.SIGINT)
    lines = path.read_text().count("\n")
    until(lambda: path.read_text().count("\n") > lines + 3, "it has stopped at SIGINT")
    watching.terminate()
    assert watching.wait(10) == 0
    assert record.read(path).events[-1].kind == "end" and not record.read(path).problems


def test_a_full_disk_ends_it_with_one_line(tmp_path: pathlib.Path) -> None:
    """The file keeps what is whole."""
    path = tmp_path / "host.jsonl"
    done = subprocess.run(
        [*SAMPLER, "--pids", str(os.getpid()), "--out", path, "--period-ms", "10"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000)),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and str(path) in done.stderr
    found = record.read(path)
    assert found.readings and not found.problems and path.stat().st_size <= 4000


@pytest.mark.parametrize(
    "arguments", [["--pids", "x"], ["--pids", "1", "--period-ms", "1"], ["--pids", "1", "--period-ms", "nan"]]
)
def test_arguments_that_make_no_sense_are_named(tmp_path: pathlib.Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sampler.main([*arguments, "--out", str(tmp_path / "host.jsonl")])
    assert ended.value.code == 2 and not (tmp_path / "host.jsonl").exists()


def test_a_file_that_grows_is_read_less_often(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `GROWTH_BYTES` double the period, so a week takes four times what a day does; the file says when."""
    monkeypatch.setattr(sampler, "GROWTH_BYTES", 2000)
    sampled = sampler.Sampler([os.getpid()], tmp_path / "host.jsonl", 100_000_000)
    now_ns = 0
    while sampled.period_ns < 800_000_000:
        now_ns += sampled.period_ns
        sampled.tick(now_ns)
        assert now_ns < 1e12
    monkeypatch.setattr(sampler, "GROWTH_BYTES", 1 << 30)
    end_ns = now_ns + 60_000_000_000
    while now_ns < end_ns:
        now_ns += sampled.period_ns
        sampled.tick(now_ns)
    found = record.read(tmp_path / "host.jsonl")
    assert [event.text.split(":")[0] for event in found.events if event.kind == "period"] == [
        "from here on every 200 ms",
        "from here on every 400 ms",
        "from here on every 800 ms",
    ]
    # What is read less often than each period comes less often, too.
    slow = [each.time_ns for each in found.readings if "cpu.busy_s" in each.values]
    assert slow[-1] - slow[-2] >= 7 * sampler.SLOW_NS


@pytest.mark.parametrize(("period_ms", "details_ms"), [(10, 50), (20, 100), (100, 2000), (500, 2000)])
def test_shorter_periods_are_for_details_too(tmp_path: pathlib.Path, period_ms: int, details_ms: int) -> None:
    """What costs more comes each fifth period, if that is more often than usual."""
    sampled = sampler.Sampler([os.getpid()], tmp_path / "host.jsonl", period_ms * 1_000_000)
    for now_ms in range(period_ms, 20_000, period_ms):
        sampled.tick(now_ms * 1_000_000)
    found = record.read(tmp_path / "host.jsonl")
    for name in ("cpu.busy_s", f"pid.{os.getpid()}.memory_bytes"):
        times = [each.time_ns / 1e6 for each in found.readings if name in each.values]
        assert {b - a for a, b in itertools.pairwise(time for time in times if time > 12_000)} == {details_ms}, name


def test_pids_that_are_nobodys(tmp_path: pathlib.Path) -> None:
    """A process that has ended before the sampler starts, or is a zombie, is not waited for."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    until(lambda: b"Z" in pathlib.Path(f"/proc/{gone.pid}/stat").read_bytes(), "the process does not end")
    done = subprocess.run([*SAMPLER, "--pids", f"{gone.pid},0,999999999", "--out", tmp_path / "host.jsonl"], timeout=20)
    gone.wait()
    assert done.returncode == 0 and record.read(tmp_path / "host.jsonl").events[-1].kind == "end"


def test_connections_come_and_go(tmp_path: pathlib.Path) -> None:
    """Bytes of a connection that has ended still count, those from before the first look do not; IPv6 and IPv4 in its clothes."""
    streams = counters.Streams()
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]

        def connected(address: str) -> tuple[socket.socket, socket.socket]:
            client = socket.create_connection((address, port))
            return client, server.accept()[0]

        def sums() -> tuple[float, float]:
            values: counters.Values = {}
            streams.read(values)
            return values.get("streams.lo.tx_bytes", 0), values.get("streams.lo.rx_bytes", 0)

        first = connected("127.0.0.1")
        moved(*first, 1000)
        assert len(streams.discover([os.getpid()])) >= 2
        before = sums()
        moved(*first, 5000)
        assert sums() == (before[0] + 5000, before[1] + 5000)
        second = connected("::1")
        moved(*second, 700)
        texts = streams.discover([os.getpid()])
        assert len(texts) == 2 and all(f" {os.getpid()} lo [::1]:" in f" {text.split(' ', 1)[1]}" for text in texts)
        assert sums() == (before[0] + 5700, before[1] + 5700)
        for each in (*first, *second):
            each.close()
        assert streams.read({}) is False
        streams.discover([os.getpid()])
        assert sums() == (before[0] + 5700, before[1] + 5700)


def test_one_write_of_many_is_lost_to_nobody(tmp_path: pathlib.Path) -> None:
    """More connections than fit into one question."""
    streams = counters.Streams()
    streams.discover([])
    with socket.create_server(("127.0.0.1", 0), backlog=200) as server:
        pairs = [(socket.create_connection(server.getsockname()), server.accept()[0]) for _ in range(150)]
        for index, pair in enumerate(pairs):
            moved(*pair, 100 + index)
        streams.discover([os.getpid()])
        values: counters.Values = {}
        assert streams.read(values)
        assert values["streams.lo.tx_bytes"] == sum(100 + index for index in range(150))
        for pair in pairs:
            for each in pair:
                each.close()


def test_the_counters_of_a_transfer_between_hosts_are_its_bytes(tmp_path: pathlib.Path) -> None:
    """Eight streams carry 4 MB from one emulated host to another: the sums by interface are the payload to the byte, the
    interface has some headers more, the link's rate is known from its shaper, and each stream has its share."""
    length, count = 500_000, 8
    code = f"""
        import socket, sys
        {{setup}}
        pairs = []
        for _ in range({count}):
            pairs.append({{connect}})
        print("open", flush=True)
        input()
        for pair in pairs:
            {{move}}
        print("moved", flush=True)
        input()
        """
    with Testbed(hosts=2, link=LinkSpec(rate_mbit=200)) as bed:
        address = bed.address(0)
        listen = f"server = socket.create_server(({address!r}, 5000)); print('listens', flush=True)"
        take = f"left = {length}\n            while left: left -= len(pair.recv(65536))"
        programs = [
            code.format(setup=listen, connect="server.accept()[0]", move=take),
            code.format(
                setup="",
                connect=f"socket.create_connection(({address!r}, 5000))",
                move=f"pair.sendall(bytes({length}))",
            ),
        ]
        start = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        ends: list[Any] = []
        for host in (0, 1):
            ends.append(bed.popen(host, [sys.executable, "-c", textwrap.dedent(programs[host])], **start))
            if host == 0:
                assert ends[0].stdout.readline() == "listens\n"
        for end in ends:
            assert end.stdout.readline() == "open\n"
        paths = [tmp_path / f"{host}.jsonl" for host in (0, 1)]
        watching = [
            bed.popen(host, [*SAMPLER, "--pids", str(ends[host].pid), "--out", str(paths[host]), "--period-ms", "20"])
            for host in (0, 1)
        ]
        for path in paths:
            until(
                lambda path=path: path.exists() and len(events(path, "stream")) == count,
                "the connections are not found",
            )
            until(
                lambda path=path: highest(path, "streams.eth0.unsent_bytes", -1.0) >= 0, "the connections are not read"
            )
        for end in reversed(ends):
            end.stdin.write("go\n")
            end.stdin.flush()
        for end in ends:
            assert end.stdout.readline() == "moved\n"
        total = float(length * count)
        until(lambda: highest(paths[0], "streams.eth0.rx_bytes") >= total, "what was received is not seen")
        until(lambda: highest(paths[1], "streams.eth0.tx_bytes") >= total, "what was sent is not seen")
        for each in watching:
            each.terminate()
            assert each.wait(10) == 0
        for end in ends:
            end.stdin.close()
            end.wait()
    assert highest(paths[0], "streams.eth0.rx_bytes") == total
    sent = highest(paths[1], "streams.eth0.tx_bytes") - highest(paths[1], "streams.eth0.resent_bytes")
    assert sent == total
    moved_bytes = grown(paths[1], "nic.eth0.tx_bytes")
    assert total <= moved_bytes <= 1.1 * total + highest(paths[1], "streams.eth0.resent_bytes")
    assert highest(paths[1], "nic.eth0.shaped_bytes_per_s") == 200e6 / 8
    numbers = [int(event.text.split()[0]) for event in events(paths[1], "stream")]
    assert sum(highest(paths[1], f"stream.{number}.tx_bytes") for number in numbers) >= total
    assert all(highest(paths[1], f"stream.{number}.busy_us") > 0 for number in numbers)
    texts = [event.text.split() for event in events(paths[1], "stream")]
    assert {(text[1], text[2], text[4]) for text in texts} == {(str(ends[1].pid), "eth0", f"{address}:5000")}


TRAINING = """
import os, time, torch
import torch.distributed as dist
dist.init_process_group("penstock")
tensor = torch.ones(1 << 20)
dist.all_reduce(tensor)
print("pid", os.getpid(), flush=True)
gate, deadline = os.environ["GATE"], time.monotonic() + 60
while not os.path.exists(gate) and time.monotonic() < deadline:
    dist.barrier()
    time.sleep(0.02)
dist.barrier()
for _ in range(10):
    dist.all_reduce(tensor)
dist.barrier()
open(gate + os.environ["RANK"], "w").close()
while not os.path.exists(gate + "end") and time.monotonic() < deadline:
    time.sleep(0.02)
dist.destroy_process_group()
"""


def test_the_counters_of_ranks_are_what_their_collectives_moved(tmp_path: pathlib.Path) -> None:
    """Ten all-reduces of 4 MiB among two ranks with 16 streams: each rank sends 40 MiB, and some headers of ours."""
    script, gate = tmp_path / "train.py", tmp_path / "gate"
    script.write_text(TRAINING)
    watching: dict[int, Any] = {}
    paths = [tmp_path / f"{host}.jsonl" for host in (0, 1)]
    before: list[float] = []
    with Testbed(hosts=2, link=LinkSpec(rate_mbit=1000)) as bed:

        def on_line(rank: int, text: str) -> None:
            if not text.startswith("pid "):
                return
            pid = text.split()[1]
            watching[rank] = bed.popen(rank, [*SAMPLER, "--pids", pid, "--out", str(paths[rank]), "--period-ms", "20"])
            if len(watching) == 2:
                threading.Thread(target=conduct).start()

        def conduct() -> None:
            for path in paths:
                until(lambda path=path: highest(path, "streams.eth0.unsent_bytes", -1.0) >= 0, "no streams are read")
            before.extend(highest(path, "streams.eth0.tx_bytes") for path in paths)
            gate.touch()
            until(lambda: all(pathlib.Path(f"{gate}{rank}").exists() for rank in (0, 1)), "the ranks do not end", 60)
            for path, start in zip(paths, before, strict=True):
                until(
                    lambda path=path, start=start: highest(path, "streams.eth0.tx_bytes") - start > 41.9e6, "bytes lack"
                )
            pathlib.Path(f"{gate}end").touch()

        command = [sys.executable, str(script)]
        done = bed.run(command, ranks=2, launcher="fork", on_line=on_line, env={"GATE": str(gate)}, timeout_s=100)
        assert done.returncode == 0, done.outputs
        assert [watching[rank].wait(10) for rank in (0, 1)] == [0, 0]
    payload = 10 * (4 << 20)
    for path, start in zip(paths, before, strict=True):
        sent = highest(path, "streams.eth0.tx_bytes") - highest(path, "streams.eth0.resent_bytes") - start
        assert payload <= sent <= 1.05 * payload
        assert len(events(path, "stream")) >= 16


READING = """
import os, time, torch
import torch.distributed as dist
import penstock
dist.init_process_group("penstock")
weight = torch.nn.Parameter(torch.ones(1 << 20))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(100):
    weight.grad = torch.ones(1 << 20)
    dist.all_reduce(weight.grad)
    optimizer.step()
    time.sleep(0.02)
total = penstock.stats()["memory_read_bytes"]
assert total == 100 * (4 << 20), total
path, deadline = f"{os.environ['PENSTOCK_PROFILE']}/rank-{dist.get_rank()}.jsonl", time.monotonic() + 30
while f'memory_read_bytes":{total}' not in open(path).read():
    assert time.monotonic() < deadline
    time.sleep(0.02)
dist.destroy_process_group()
"""


def test_what_ranks_of_a_host_read_from_memory_is_counted(tmp_path: pathlib.Path, forks: None) -> None:
    """100 all-reduces of 4 MiB among two ranks of a host: each reads 400 MiB, which no interface carries. The host's rate has
    both, the page a picture of it."""
    script, folder = tmp_path / "train.py", tmp_path / "profile"
    script.write_text(READING)
    folder.mkdir()
    assert run.run([*forked.TORCHRUN, "--nproc-per-node=2", str(script)], folder) == 0
    records = load(folder)
    assert isinstance(records, list)
    [host] = utilisation.hosts(records)
    read = {name: host.last[name] for name in host.last if name.endswith("memory_read_bytes")}
    assert read == {f"pid.{each.header.pid}.memory_read_bytes": 100 * (4 << 20) for each in records}
    breakdown = divide(records)
    [rate] = utilisation.memory_reads(records, breakdown)
    first = sum(host.counters[name].totals[-1] for name in read)
    assert sum(each * (end - start) for (start, end), each in rate.points) / 1e9 == pytest.approx(first, rel=0.02)
    pictures = {each.name: each for each in report.carried(breakdown, records) if isinstance(each, Picture)}
    assert pictures["memory"].see.startswith(f"Ranks of {host.name} read ")
    # Between two readings, half a second apart, it is taken to grow evenly, also where the training ended there.
    assert Measures(records, breakdown).memory_read_bytes == pytest.approx(4 << 20, rel=0.4)


# Helpers


def started(code: str, **environment: str) -> Any:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    # The kernel closes what ends at `exec`, for which Popen waits, before it shows the environment.
    environ = pathlib.Path(f"/proc/{process.pid}/environ")
    until(lambda: environ.read_bytes() != b"", "it has no environment")
    return process


def until(holds: Callable[[], bool], what: str, deadline_s: float = 30) -> None:
    deadline = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def seen(path: pathlib.Path, name: str) -> list[float]:
    return [each.values[name] for each in read(path).readings if name in each.values]


def read(path: pathlib.Path) -> record.Record:
    """What is there so far; nothing before the first line is whole."""
    if not path.exists() or "\n" not in path.read_text():
        return record.Record(record.Header(0, 1, "", 0, 0, 0))
    return record.read(path)


def highest(path: pathlib.Path, name: str, default: float = 0.0) -> float:
    return max(seen(path, name), default=default)


def grown(path: pathlib.Path, name: str) -> float:
    values = seen(path, name)
    return values[-1] - values[0]


def events(path: pathlib.Path, kind: str) -> Sequence[record.Event]:
    return [event for event in read(path).events if event.kind == kind]


def moved(sender: socket.socket, receiver: socket.socket, length: int) -> None:
    sender.sendall(bytes(length))
    left = length
    while left:
        left -= len(receiver.recv(left))
