"""Proves that the live view shows what a job does, to those who have its token and to nobody else, and never harms the job."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import logging
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import click.testing
import pytest
import rich.console
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import browser
import forked
import penstock.live
import penstock.torch
import ranks
from penstock import cli
from penstock.errors import Config
from penstock.live import found, metrics, own, running, scalars, shown, view
from penstock.live.counts import Counts, counts
from penstock.live.server import Answer, Server
from penstock.runtime import config, process
from penstock.tools.top import events, render
from test_reports import MEASURE, SCREENS, check_layout, contrast

TOKEN = "a-token-of-a-test-1234"


@pytest.fixture(autouse=True)
def _files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of jobs lie in a folder of the test's."""
    (tmp_path / "jobs").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "jobs"))
    monkeypatch.setattr(found, "_folders", lambda: [tmp_path / "jobs"])


# ---------------------------------------------------------------------------------------------------------- whole jobs


def test_a_viewer_sees_what_the_job_does(tmp_path: pathlib.Path) -> None:
    """Two ranks of which only rank 0 has the setting: steps, samples, streams, and the rank that the others wait for, on the
    page's events, as metrics and with `penstock top`; then that the job has ended, and nothing is left of it."""
    with job(tmp_path, _train, args=(str(tmp_path), 0.02), env={"PENSTOCK_SHM": "0"}) as (running_job, url):
        events = follow(url)
        seen = until(
            events, lambda event: "wait" in event["answer"] and len(event["tables"]) == len(event["history"][:3]) == 3
        )
        assert re.fullmatch(r"A step takes \S+ m?s; the others wait \S+ m?s of it for rank 1", seen["answer"]), seen[
            "answer"
        ]
        assert seen["state"] == "running" and not seen["alarms"]
        cards = {what: number for number, what, _ in seen["cards"]}
        assert {"samples a second", "steps a second"} <= cards.keys(), cards
        ranks_shown, streams, operations = (table["rows"] for table in seen["tables"])
        assert [(row[0], row[1], row[8]) for row in ranks_shown] == [
            (str(r), "running", os.uname().nodename) for r in (0, 1)
        ]
        assert {row[0] for row in streams} == {"0 → 1", "1 → 0"} and all("TCP stream" in row[1] for row in streams)
        assert operations[0][0] == "0" and operations[0][1] == "2"

        until(events, lambda event: 4 < rate(event, "samples") / rate(event, "steps") < 12)  # 4 a rank

        status, headers, body = get(url, "/metrics")
        assert (status, headers["content-type"]) == (200, metrics.CONTENT_TYPE)
        values = parsed(body.decode())
        assert values['penstock_rank_up{rank="1"}'] == 1 and values["penstock_job_ranks"] == 2
        assert values['penstock_steps_total{rank="1"}'] > 3
        assert values['penstock_straggler_late_seconds{rank="1"}'] > 0.005  # of 0.02
        assert values['penstock_sent_bytes_per_second{rank="0"}'] > 1000

        for words in ([], [url], [urllib.parse.urlsplit(url).netloc]):
            told = top("--once", *words)
            assert told.exit_code == 0, told.output
            assert "A step takes" in told.output and "0 → 1" in told.output and "step time" in told.output

        (tmp_path / "stop").touch()
        last = until(events, lambda event: event["state"] == "ended")
        assert last["answer"].startswith("The job has ended after ") and "rank 0's script is done" in last["answer"]
        outcomes = running_job.outcomes(timeout_s=30)
        assert all(outcome.ok for outcome in outcomes), outcomes
        assert outcomes[0].output.count("token=") == 1 and "token=" not in outcomes[1].output
        assert "WARNING" not in outcomes[1].output.upper(), outcomes[1].output
        assert found.found() == [] and list((tmp_path / "jobs").iterdir()) == []
        with pytest.raises(ConnectionRefusedError):
            get(url, "/")


def test_a_rank_that_is_killed_is_named(tmp_path: pathlib.Path) -> None:
    """The survivors go on to be shown: rank 1 is lost or silent, and why."""
    with job(tmp_path, _survive, args=(str(tmp_path),)) as (running_job, url):
        events = follow(url)
        until(events, lambda event: len(event["tables"][0]["rows"]) == 2 and not event["alarms"])
        running_job.await_note("running", deadline_s=60)
        running_job.signal(1, signal.SIGKILL)
        seen = until(events, lambda event: any("rank 1 is silent since" in alarm for alarm in event["alarms"]))
        assert any("rank 1 is lost: " in alarm for alarm in seen["alarms"]), seen["alarms"]
        assert "Rank 1 is silent or lost" in seen["answer"]
        values = parsed(get(url, "/metrics")[2].decode())
        assert values['penstock_rank_up{rank="1"}'] == 0 and values['penstock_rank_up{rank="0"}'] == 1
        (tmp_path / "stop").touch()
        until(events, lambda event: event["state"] == "ended")


def test_rank_0_is_killed(tmp_path: pathlib.Path) -> None:
    """`penstock top` says that it is gone, its file counts no more, and the next job removes it. A child that rank 0 has forked
    keeps neither its port nor its file."""
    with job(tmp_path, _fork_and_train, args=(str(tmp_path),)) as (running_job, url):
        following = top_in_background(url)
        running_job.await_note("forked", deadline_s=60, of=[0])
        wait_for(lambda: len(found.found()) == 1, "the job's file")
        wait_for(lambda: following.lines and "step" in "".join(following.lines), "a first table")
        running_job.signal(0, signal.SIGKILL)
        result = following.result()
        assert result.exit_code == 1 and "is gone: its rank 0 has ended without a word" in result.output
        assert found.found() == [] and len(list((tmp_path / "jobs").iterdir())) == 1
        with pytest.raises(ConnectionRefusedError):
            get(url, "/")
    told = top("--once")
    assert told.exit_code == 1 and "PENSTOCK_LIVE=0 torchrun" in told.output
    found.found(clean=True)
    assert list((tmp_path / "jobs").iterdir()) == []


def test_a_port_that_is_taken(tmp_path: pathlib.Path) -> None:
    """A warning names it, nothing of the view runs on any rank, and the training goes on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with ranks.Ranks(_threads, count=2, env={"PENSTOCK_LIVE": str(port)}) as running_job:
            outcomes = running_job.outcomes(timeout_s=60)
    assert all(outcome.ok and "penstock-live" not in outcome.value for outcome in outcomes), outcomes
    assert f"cannot listen at 127.0.0.1 port {port}: Address already in use" in outcomes[0].output
    assert "PENSTOCK_LIVE=0" in outcomes[0].output and "port" not in outcomes[1].output


def test_nothing_runs_without_the_setting() -> None:
    """Nor is anything imported, and `count` costs next to nothing."""
    program = (
        "import sys, threading, torch.distributed as dist, torch\n"
        "dist.init_process_group('penstock', rank=0, world_size=1, store=dist.HashStore())\n"
        "assert not [name for name in sys.modules if name.startswith('penstock.live')]\n"
        "assert not sys.modules['torch.optim.optimizer']._global_optimizer_post_hooks\n"
        "import penstock.live, time\n"
        "began = time.process_time()\n"
        "for _ in range(10000): penstock.live.count(samples=8)\n"
        "assert time.process_time() - began < 0.2\n"
        "assert not [each for each in threading.enumerate() if 'live' in each.name]\n"
        "assert 'penstock.live.running' not in sys.modules and 'penstock.reports' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_part_needs_torch(root: pathlib.Path) -> None:
    """Fronts of other frameworks have the view, too; scalars import torch when they are asked for."""
    names = [f"penstock.live.{path.stem}" for path in (root / "python/penstock/live").glob("[a-z]*.py")]
    program = f"import sys, {', '.join(names)}; assert not {{'torch', 'matplotlib', 'numpy'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and len(names) > 8, done.stderr


def test_a_group_that_is_made_again_is_shown_again(tmp_path: pathlib.Path) -> None:
    """Between two groups the page says so. The address stays, the ranks' numbers are those of the new group, and a group of fewer
    ranks changes nothing."""
    with job(tmp_path, _again, args=(str(tmp_path),)) as (running_job, url):
        events = follow(url)
        until(
            events,
            lambda event: event["tables"][0]["rows"][-1][1] == "running" and len(event["tables"][0]["rows"]) == 3,
        )
        (tmp_path / "next").touch()
        until(events, lambda event: event["state"] == "between groups")
        until(
            events,
            lambda event: (
                event["state"] == "running" and [row[1] for row in event["tables"][0]["rows"]] == ["running"] * 3
            ),
        )
        (tmp_path / "stop").touch()
        until(events, lambda event: event["state"] == "ended")
        assert all(outcome.ok for outcome in running_job.outcomes(timeout_s=30))


def test_another_process_becomes_rank_0(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Where a job is rebuilt, the process that is rank 0 now serves, also if it was another rank before; and one that is rank 0
    no longer ends its page."""
    monkeypatch.setattr(running.Job, "current", None)
    first = running.join("word", engine_of(1), torch.distributed.HashStore, range(2))
    assert first is None and running.Job.current.front is None
    running.leave()
    word = running.serve(("127.0.0.1", 0), TOKEN, "", "1")
    assert word not in (None, "word") and running.serve(("127.0.0.1", 0), TOKEN, "", "1") == word
    url = re.search(r"http\S+", capfd.readouterr().err)[0]
    running.join(word, engine_of(0), torch.distributed.HashStore, range(2))
    events = follow(url)
    assert until(events, lambda event: event["state"] == "running")["tables"][0]["rows"][1][1] == "not heard of yet"
    running.leave()
    running.join("other", engine_of(1), torch.distributed.HashStore, range(2))
    assert "another process" in until(events, lambda event: event["state"] == "ended")["answer"]
    assert running.Job.current.front is None and found.found() == []
    running.Job.current._end()


def test_an_exception_that_cannot_be_a_text_ends_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """The view ends as with any other: the last event names the exception."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    monkeypatch.setattr(running.Job, "current", None)
    word = running.serve(("127.0.0.1", 0), TOKEN, "", "1")
    running.join(word, engine_of(0), torch.distributed.HashStore, range(1))
    made = running.Job.current
    monkeypatch.setattr(sys, "last_value", Mute(), raising=False)
    made._end()
    last = latest(made.front.server)
    assert last["state"] == "ended" and last["answer"].endswith(": Mute: (its __str__ raised ValueError)"), last
    assert last["complaints"][0].endswith("the script ends with Mute: (its __str__ raised ValueError)")
    assert found.found() == []


def test_an_observer_that_fails_does_not_keep_the_engine_from_stopping() -> None:
    """Nor from starting, nor the other observers from being called. A warning says what failed, and the rank ends well."""
    for outcome in ranks.Ranks(_with_a_bad_observer, count=2).outcomes(timeout_s=60):
        assert outcome.ok and outcome.value == ["starts", "stops"], outcome
        assert "failed while the engine starts" in outcome.output and "failed while the engine stops" in outcome.output
        assert outcome.output.count("OSError: the reason of a test") == 2


def _with_a_bad_observer() -> list[str]:
    """What an observer behind one that fails was called with."""
    called = []

    def fail(_: object) -> None:
        raise OSError("the reason of a test")

    process.observe(fail)
    process.observe(lambda core: called.append("stops" if core is None else "starts"))
    dist.init_process_group("penstock")
    core = process.engine().core
    dist.destroy_process_group()
    with pytest.raises(RuntimeError):  # it has stopped
        core.stats()
    return called


def engine_of(rank: int) -> running.Engine:
    """An engine that does nothing."""
    held = {"operations": 0}
    stats = {"finished_operations": 0, "memory_bytes": 0, "memory_read_bytes": 0, "held": held}
    stats |= {"peers": [], "groups": [], "aggregated": {}}
    return running.Engine(lambda: stats, lambda: '{"operations": []}', rank, 0, ("lo",))


def test_a_store_that_is_gone(tmp_path: pathlib.Path) -> None:
    """The training goes on, and the page says that it hears of rank 0 alone."""
    with job(tmp_path, _train, args=(str(tmp_path), 0.0)) as (running_job, url):
        events = follow(url)
        until(
            events, lambda event: len(event["tables"][0]["rows"]) == 2 and event["tables"][0]["rows"][1][1] == "running"
        )
        running_job.close_store()
        seen = until(events, lambda event: any("the job's store cannot be used" in alarm for alarm in event["alarms"]))
        assert [row[1] for row in seen["tables"][0]["rows"]] == ["running", "not heard of"], seen
        (tmp_path / "stop").touch()
        outcomes = running_job.outcomes(timeout_s=30)
        assert all(outcome.ok for outcome in outcomes), outcomes


def test_a_store_that_is_a_file(tmp_path: pathlib.Path) -> None:
    """It would grow with every look: rank 0 shows itself alone, says why, and calls nobody silent."""
    with job(tmp_path, _with_a_file, args=(str(tmp_path),)) as (running_job, url):
        events = follow(url)
        seen = until(events, lambda event: event["history"])
        assert ["it is a file" in alarm for alarm in seen["alarms"]] == [True], seen["alarms"]
        assert [row[1] for row in seen["tables"][0]["rows"]] == ["running", "not heard of"]
        (tmp_path / "stop").touch()
        assert all(outcome.ok for outcome in running_job.outcomes(timeout_s=30))


def test_steps_in_parts_stay_in_parts(tmp_path: pathlib.Path) -> None:
    """A reducer with an optimizer steps during the next forward pass unless hooks look at the step; counting does not."""
    with job(tmp_path, _deferred, args=(str(tmp_path),)) as (running_job, url):
        until(follow(url), lambda event: event["history"])
        (tmp_path / "stop").touch()
        outcomes = running_job.outcomes(timeout_s=30)
    assert all(outcome.ok for outcome in outcomes), outcomes
    for outcome in outcomes:
        steps, counted = outcome.value
        assert steps == counted > 2 and "waits for all gradients" not in outcome.output, outcome.output


def test_two_jobs_on_a_host(tmp_path: pathlib.Path) -> None:
    """`penstock top` lists both, and shows the named one until Ctrl-C. The token of one is worth nothing at the other."""
    with job(tmp_path, _train, args=(str(tmp_path), 0.0), count=1) as (one, first):
        with job(tmp_path, _train, args=(str(tmp_path), 0.0), count=1) as (other, second):
            told = top("--once")
            places = [urllib.parse.urlsplit(url).netloc for url in (first, second)]
            assert (
                told.exit_code == 1
                and "2 jobs run here" in told.output
                and all(place in told.output for place in places)
            )
            assert "token" not in told.output
            assert top("--once", places[1]).exit_code == 0
            token = urllib.parse.urlsplit(first).query
            assert get(second.partition("?")[0] + f"?{token}", "/")[0] == 401
            following = top_in_background(first)
            wait_for(lambda: following.lines, "a first table")
            following.interrupt()
            began = time.monotonic()
            assert following.result().exit_code == 0 and time.monotonic() - began < 5
            (tmp_path / "stop").touch()
            assert all(outcome.ok for each in (one, other) for outcome in each.outcomes(timeout_s=30))


def test_the_commands_of_the_guide(tmp_path: pathlib.Path, root: pathlib.Path) -> None:
    """Under torchrun: rank 0 prints the URL, `penstock top` shows the job, and the last event names the exception that ended the
    script."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(stop=str(tmp_path / "stop")))
    environment = {**os.environ, "PENSTOCK_LIVE": "0", "PENSTOCK_LIVE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    # Not `forked`: how an interpreter ends is what is shown.
    with subprocess.Popen(
        [*forked.TORCHRUN, "--nproc-per-node=2", str(script)], env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            errors: list[str] = []
            reader = threading.Thread(target=_collect, args=(process.stderr, errors))
            reader.start()
            wait_for(lambda: any("live view: http" in line for line in errors), lambda: "".join(errors))
            url = re.search(r"http\S+", next(line for line in errors if "live view" in line))[0]
            assert url.endswith(f"?token={TOKEN}")
            assert top("--once").exit_code == 0
            events = follow(url)
            until(events, lambda event: "tokens a second" in {what for _, what, _ in event["cards"]})
            (tmp_path / "stop").touch()
            last = until(events, lambda event: event["state"] == "ended")
            assert "ZeroDivisionError: the end of a test" in last["answer"]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            reader.join()


def _collect(lines: Any, kept: list[str]) -> None:
    for line in lines:
        kept.append(line)


SCRIPT = """
import pathlib, torch, torch.distributed as dist, penstock.live
dist.init_process_group("penstock")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
stop = torch.zeros(1)
while not stop:
    penstock.live.count(tokens=512)
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    stop += pathlib.Path({stop!r}).exists()
    dist.broadcast(stop, 0)
dist.destroy_process_group()
raise ZeroDivisionError("the end of a test")
"""


def _loop(folder: str, late_s: float = 0.0, stop: str = "stop") -> None:
    """Steps until rank 0 sees a file; rank 1 computes longer."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = torch.zeros(1)
    while not told:
        penstock.live.count(samples=4)
        model(torch.randn(4, 64)).square().mean().backward()
        time.sleep(0.01 + (late_s if dist.get_rank() == 1 else 0.0))  # the model's computing
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        told.fill_(float(pathlib.Path(folder, stop).exists()))
        dist.broadcast(told, 0)


def _train(folder: str, late_s: float) -> None:
    dist.init_process_group("penstock")
    _loop(folder, late_s)
    dist.destroy_process_group()


def _with_a_file(folder: str) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("penstock", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    _loop(folder)
    dist.destroy_process_group()


def _deferred(folder: str) -> tuple[int, int]:
    """How many steps there were, and how many the view has counted."""
    dist.init_process_group("penstock")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer = penstock.torch.GradientReducer(model, optimizer=optimizer)
    told, steps = torch.zeros(1), 0
    while not told:
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        told.fill_(float(pathlib.Path(folder, "stop").exists()))
        dist.broadcast(told, 0)
    reducer.close()
    dist.destroy_process_group()
    return steps, counts.steps


def _survive(folder: str) -> None:
    dist.init_process_group("penstock")
    ranks.note("running")
    with contextlib.suppress(ConnectionError):
        _loop(folder)
    wait_for(pathlib.Path(folder, "stop").exists, "stop")


def _fork_and_train(folder: str) -> None:
    dist.init_process_group("penstock")
    if dist.get_rank() == 0:
        if os.fork() == 0:
            assert running.Job.current is None
            signal.pause()
        ranks.note("forked")
    _loop(folder)


def _threads() -> list[str]:
    dist.init_process_group("penstock")
    dist.barrier()
    names = [thread.name for thread in threading.enumerate()]
    dist.destroy_process_group()
    return names


def _again(folder: str) -> None:
    dist.init_process_group("penstock")
    pair = dist.new_group([1, 2])
    if dist.get_rank() in (1, 2):
        dist.barrier(pair)
    _loop(folder, stop="next")
    dist.destroy_process_group()
    time.sleep(1.5)  # a restart takes that long
    dist.init_process_group("penstock")
    _loop(folder)
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------- who may look


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server("127.0.0.1", 0, TOKEN, {"/": lambda: Answer("text/plain", b"the page" + bytes(1 << 20))})
    made.start()
    yield made
    made.close()


@pytest.mark.parametrize(
    "query", ["", "?token=", "?token=wrong", f"?token={TOKEN}x", f"?token={TOKEN[:-1]}", f"?Token={TOKEN}"]
)
@pytest.mark.parametrize("path", ["/", "/events", "/metrics", "/../etc/passwd", "/favicon.ico"])
def test_without_the_token_there_is_nothing(server: Server, path: str, query: str) -> None:
    """401, no body, nothing that says what answers; whatever the path is."""
    status, headers, body = ask(server, f"GET {path}{query} HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (status, body) == (401, b"") and headers["www-authenticate"] == "Bearer" and "server" not in headers


@pytest.mark.parametrize(
    "head",
    ["\r\n\r\n", "GET\r\n\r\n", "GET / HTTP/9\r\n\r\n", "\0\0\0\r\n\r\n", "GET /?token=%ff%fe HTTP/1.1\r\n\r\n"]
    + [
        f"POST / HTTP/1.1\r\nAuthorization: {word}\r\n\r\n"
        for word in ("Bearer", f"Basic {TOKEN}", f"Bearer x{TOKEN}", "Bearer é")
    ],
)
def test_a_request_that_is_none(server: Server, head: str) -> None:
    """It gets the same 401."""
    assert ask(server, head)[::2] == (401, b"")


def test_with_the_token(server: Server) -> None:
    """In the URL or as a bearer; then what is not there is 404 and what is no GET 405. Headers say what a browser must not do."""
    bearer = f"Authorization: bEaReR  {TOKEN}\r\n"
    for first, more in ((f"GET /?token={TOKEN}", ""), (f"GET /?x=1&token={TOKEN}&y", ""), ("GET /", bearer)):
        status, headers, body = ask(server, f"{first} HTTP/1.1\r\n{more}\r\n")
        assert status == 200 and body.startswith(b"the page") and len(body) == int(headers["content-length"])
        assert headers["cache-control"] == "no-store" and headers["referrer-policy"] == "no-referrer"
    assert ask(server, f"GET /nowhere HTTP/1.1\r\n{bearer}\r\n")[0] == 404
    assert ask(server, f"POST / HTTP/1.1\r\n{bearer}\r\n")[0] == 405


def test_a_slow_client_is_closed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time does not start anew with each byte; nor may it send a long head, or leave its answer lying. Others are served
    meanwhile."""
    monkeypatch.setattr("penstock.live.server._HEAD_S", 0.5)
    monkeypatch.setattr("penstock.live.server._TAKES_S", 0.5)
    with connected(server) as slow, connected(server) as lazy, connected(server) as long:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.sendall(f"GET /?token={TOKEN} HTTP/1.1\r\n\r\n".encode())
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() < began + 20:
                slow.sendall(b"G")
                if slow in wait_readable([slow], 0.02):
                    break
        assert slow_is_closed(slow) and 0.4 < time.monotonic() - began < 5
        with contextlib.suppress(OSError):
            long.sendall(b"GET /" + b"a" * 5000)
        assert slow_is_closed(long)
        assert ask(server, f"GET /?token={TOKEN} HTTP/1.1\r\n\r\n")[0] == 200
        wait_for(lambda: not server._peers, "the one that leaves its answer lying is dropped")


def test_many_connections(server: Server) -> None:
    """Unauthenticated ones push out the oldest of them, and a viewer is served beside 200 of them. Followers stay, and there are
    at most 32."""
    follower = connected(server)
    follower.sendall(f"GET /events?token={TOKEN} HTTP/1.1\r\n\r\n".encode())
    wait_for(lambda: any(peer.state == "follows" for peer in server._peers.values()), "a follower")
    crowd = [connected(server) for _ in range(200)]
    try:
        assert ask(server, f"GET /?token={TOKEN} HTTP/1.1\r\n\r\n")[0] == 200
        assert len(server._peers) <= 17
        server.publish('{"a": 1}')
        assert read_until(follower, b'data: {"a": 1}\n\n')
        answers = []
        for _ in range(32):
            each = connected(server)
            crowd.append(each)
            each.sendall(f"GET /events?token={TOKEN} HTTP/1.1\r\n\r\n".encode())
            answers.append(read_until(each, b"\r\n").split(b" ")[1])
        assert answers == [b"200"] * 31 + [b"503"]
    finally:
        for each in [follower, *crowd]:
            each.close()


def test_a_follower_that_does_not_read_is_dropped(server: Server) -> None:
    """What is kept for it is bounded."""
    with connected(server) as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.sendall(f"GET /events?token={TOKEN} HTTP/1.1\r\n\r\n".encode())
        wait_for(lambda: any(peer.state == "follows" for peer in server._peers.values()), "a follower")
        until_s = time.monotonic() + 30
        while server._peers:
            assert (
                time.monotonic() < until_s and sum(len(peer.unsent) for peer in list(server._peers.values())) < 1 << 20
            )
            server.publish("x" * 100_000)
            os.sched_yield()


def test_a_path_that_fails_is_answered_with_500(caplog: pytest.LogCaptureFixture) -> None:
    """The log says why, once, and the server goes on: it answers the next request, of that path and of another."""

    def fail() -> Answer:
        raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "the reason of a test")

    made = Server("127.0.0.1", 0, TOKEN, {"/": lambda: Answer("text/plain", b"the page"), "/bad": fail})
    made.start()
    try:
        answers = [ask(made, f"GET {path}?token={TOKEN} HTTP/1.1\r\n\r\n") for path in ("/bad", "/bad", "/")]
        assert [(status, body) for status, _, body in answers] == [
            (500, b"this page cannot be made: rank 0's log says why\n"),
            (500, b"this page cannot be made: rank 0's log says why\n"),
            (200, b"the page"),
        ]
        assert ask(made, "GET /bad HTTP/1.1\r\n\r\n")[::2] == (401, b"")
    finally:
        made.close()
    assert (
        caplog.text.count("the live view answers /bad with 500") == 1 == caplog.text.count("position 0: the reason of")
    )


def test_settings() -> None:
    """A port, an address and a port, and what is neither."""
    taken = {
        "": None,
        "0": ("127.0.0.1", 0),
        "8080": ("127.0.0.1", 8080),
        "0.0.0.0:80": ("0.0.0.0", 80),
        "[::1]:5": ("::1", 5),
    }
    for text, value in taken.items():
        assert config.read({"PENSTOCK_LIVE": text}).live == value
    for text in ("x", ":80", "70000", "-1", "1.2.3.4", "host:"):
        with pytest.raises(Config, match="PENSTOCK_LIVE="):
            config.read({"PENSTOCK_LIVE": text})
    assert config.read({"PENSTOCK_LIVE_TOKEN": TOKEN}).live_token == TOKEN
    for text in ("short", "with space in it, long", "a" * 200, "ünïcödeünïcödeünï"):
        with pytest.raises(Config, match="PENSTOCK_LIVE_TOKEN="):
            config.read({"PENSTOCK_LIVE_TOKEN": text})


# ------------------------------------------------------------------------------------------------------- what it tells


def test_steps_are_counted_by_one_optimizer() -> None:
    """Of several that step in turn the first counts, or one that is called more often; without one, calls of `count` do."""
    counts = Counts()
    one, two = object(), object()

    def step(optimizer: object) -> None:
        counts.begins(optimizer)
        counts.begins(optimizer)  # of its base class
        counts.stepped(optimizer)
        counts.stepped(optimizer)

    for _ in range(10):
        step(one)
        step(two)
    assert counts.steps == 10 and len(counts.take()) == 9 and counts.take() == []
    for _ in range(10):
        step(two)
    assert counts.steps == 20
    with pytest.raises(Config, match="negative"):
        penstock.live.count(samples=-1)


def test_shares_in_flight() -> None:
    """The union of the operations' times, cut to the window."""

    def operation(issued: float, ended: float | None) -> dict[str, Any]:
        return {"issued_s_ago": issued, "ended_s_ago": ended}

    assert own.in_flight([], 1.0) == 0
    assert own.in_flight([operation(0.5, None)], 1.0) == pytest.approx(0.5)
    assert own.in_flight([operation(9.0, 0.75), operation(0.8, 0.7), operation(0.1, 0.05)], 1.0) == pytest.approx(0.35)
    assert own.in_flight([operation(5.0, 2.0)], 1.0) == 0
    assert own.in_flight([operation(5.0, None)], 1.0) == 1


def test_a_straggler_is_named_only_if_there_is_one() -> None:
    """The rank whose collectives are under way for the shortest time, in most looks; equal ranks have none."""
    for shares, expected in (([0.8, 0.3, 0.8], 1), ([0.5, 0.49, 0.5], None), ([0.8, None, 0.8], None)):
        seen = fed(len(shares), looks=8, numbers=lambda rank, shares=shares: {"in_flight": shares[rank]})
        assert (seen.straggler and seen.straggler.rank) == expected, shares
    assert fed(3, looks=8, numbers=lambda rank: {"in_flight": [0.8, 0.3, 0.8][rank]}).straggler.late_s == pytest.approx(
        0.05
    )


def test_a_step_that_does_not_end() -> None:
    """The answer says for how long there has been none, not what a step took before; the line of step times stands still."""

    def numbers(rank: int) -> dict[str, Any]:
        return {"in_flight": [1.0, 0.0][rank], "since_s": 12.0, "steps": 5}

    seen = fed(2, looks=8, numbers=numbers)
    assert shown.event(seen)["answer"] == "No step for 12 s: the others wait for rank 1" and seen.history == [0.1]
    assert fed(2, looks=8, numbers=lambda rank: {**numbers(rank), "since_s": 0.9}).stuck_s is None


@pytest.mark.parametrize(
    ("said", "is_physical", "limit"), [("1000", True, 125e6), ("10000", False, None), ("-1", True, None)]
)
def test_only_a_device_s_speed_is_believed(
    said: str, is_physical: bool, limit: float | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """veth says 10 Gbit/s, whatever it can do, and a driver that does not know says -1."""
    (tmp_path / "speed").write_text(said)
    monkeypatch.setattr(own, "is_physical", lambda _: is_physical)
    assert own.speed([str(tmp_path)]) == limit


def test_a_link_is_compared_with_its_speed_or_the_highest_rate() -> None:
    """Ranks of one host share it."""
    hosts = ["a/1", "a/1", "b/1"]
    seen = fed(
        3, numbers=lambda rank: {"host": hosts[rank], "sent_per_s": 1e6, "link_limit": 4e6 if rank < 2 else None}
    )
    assert [(link.host, link.sent, link.limit, link.is_speed) for link in seen.links] == [
        ("b/1", 1e6, 1e6, False),
        ("a/1", 2e6, 4e6, True),
    ]
    assert seen.links[1].share == 0.5


def test_what_is_read_from_memory_is_received() -> None:
    """From a peer whose memory is read: its rate is that of the reads, in the table and as metrics, and no part of the link."""
    mine = own.Own(0, ["lo"], Counts(), own.Complaints())

    def looked(read: int, now_s: float) -> dict[str, Any]:
        streams = [{**dict.fromkeys(STREAM, 0), "received_bytes": read // 1000}]
        peer = {"rank": 1, "medium": "memory", "lost": None, "memory_read_bytes": read, "streams": streams}
        stats = {"finished_operations": 0, "memory_bytes": 0, "memory_read_bytes": read, "held": {"operations": 0}}
        return mine.look({**stats, "peers": [peer], "groups": [], "aggregated": {}}, now_s)

    looked(5_000_000, 1.0)
    numbers = looked(11_000_000, 3.0)
    assert (numbers["memory_read_per_s"], numbers["received_per_s"]) == (3_000_000, 3000)
    told = {name: numbers[name] for name in ("peers", "memory_read_per_s", "received_per_s")}
    seen = fed(2, numbers=lambda rank: told if rank == 0 else {})
    [streams] = [table for table in shown.event(seen)["tables"] if table["title"] == "Streams"]
    assert streams["rows"] == [["0 → 1", "memory", "0 B/s", "3 MB/s", "", "", ""]]
    assert max(link.received for link in seen.links) == 3000
    values = parsed(metrics.text(seen))
    assert values['penstock_memory_read_bytes_per_second{rank="0"}'] == 3_000_000
    assert values['penstock_peer_memory_read_bytes_per_second{rank="0",peer="1"}'] == 3_000_000


STREAM = ("sent_bytes", "received_bytes", "repeated_frames", "rate_bytes_per_s", "round_trip_s")
NASTY = '<img src=x onerror="document.title=1">\x1b[31m\n\\"{}'


def test_records_are_not_believed() -> None:
    """What comes from the store may be anything: it is left out, or is a text."""
    for text in (
        b"",
        b"[]",
        b"{",
        b'{"rank": 0}',
        b'{"rank": 1.5, "look": 1, "pid": 1}',
        b"[" * 9000,
        b'{"a":' + b"1" * 20000,
    ):
        assert view.parse(text) is None, text[:40]
    bad: list[Any] = [
        None,
        True,
        -5,
        1e300,
        "x",
        [],
        {},
        [[1, 2]],
        [["a"] * 9],
        NASTY,
        {"1": 5, "x": "y", "9" * 50: "z"},
    ]
    names = [*view._NUMBERS, *view._TEXTS, *view._ROWS, "lost", "waits"]
    for value in bad:
        given = {"rank": 0, "look": 1, "pid": 1, **dict.fromkeys(names, value)}
        made = view.parse(json.dumps(given).encode())
        job_view = view.View(dict(ABOUT))
        job_view.expect([0], 0.0)
        job_view.hear(0, made, 0.0)
        seen = job_view.snapshot(1.0, 1.0)
        json.dumps(shown.event(seen), allow_nan=False)
        parsed(metrics.text(seen))


@pytest.mark.parametrize("when", [1e17, -1e17, 9e17, -1, 253_402_300_800])
def test_no_text_or_time_of_a_rank_stops_the_view(when: float) -> None:
    """Each text of rank 1 has a lone surrogate and marks that control a terminal, and the time of its warning is in no calendar.
    The event, the metrics and the job's end are made all the same; the warning is shown, and no such character is."""
    nasty = "a\ud800\x1b\u202e"
    rows = {
        name: [[when if kind is float else nasty for kind in form] for _ in range(2)]
        for name, form in view._ROWS.items()
    }
    given = {**dict.fromkeys(view._TEXTS, nasty), **rows, "lost": {"0": nasty}, "waits": [nasty, 5.0, nasty]}
    front = running.Front(("127.0.0.1", 0), TOKEN, "", "1")
    try:
        url = f"http://127.0.0.1:{front.server.port}/?token={TOKEN}"
        front.expect([0, 1], 0, anew=True)
        front.hear(0, numbers_of(0, 1))
        for state in (nasty, "running"):
            front.hear(1, numbers_of(1, len(state), **given | {"state": state}))
            front.show(1.0)
            told = next(follow(url))
            assert re.fullmatch(r"\d\d:\d\d:\d\d rank 1: a\ufffd{3}", told["complaints"][0]), told["complaints"]
            status, _, body = get(url, "/metrics")
            assert status == 200 and 'penstock_rank_complaints{rank="1"} 1.0' in body.decode()
            shown_texts = json.dumps(told, ensure_ascii=False) + body.decode()
            assert "a\ufffd\ufffd\ufffd" in shown_texts and not re.search("[\ud800\x1b\u202e]", shown_texts)
        front.pause()
    finally:
        front.end("the end of a test")
    assert "the end of a test" in latest(front.server)["answer"]


def test_groups_aggregation_and_complaints_are_metrics_too() -> None:
    """What the page shows in its tables; of a host's segments the highest that one of its ranks tells, and they are scalars."""
    rows = {
        "groups": [["default/0", 2.0, 30.0, 1.0, None], ["tensor/0", 2.0, 4.0, 0.0, "rank 1 has left"]],
        "aggregated": [
            ["default/0", "10.0.0.1:7400", None, 5e6, 7.0, 1.0, None],
            ["default/0", "10.0.0.2:7400", None, 5e6, 0.0, 0.0, None],
            ["default/1", "s", "rack", 0.0, 0.0, 0.0, "why"],
        ],
        "complaints": [[1.0, "one"], [2.0, "two"]],
    }
    seen = fed(2, numbers=lambda rank: {"host": "a", "retransmitted_per_s": 3.0 + rank, **(rows if rank == 0 else {})})
    values = parsed(metrics.text(seen))
    first, second = (
        '{rank="0",group="default/0",server="10.0.0.1:7400",parent=""}',
        '{rank="0",group="default/1",server="s",parent="rack"}',
    )
    expected = {
        'group_operations_total{group="default/0"}': 30,
        'group_operations_active{group="default/0"}': 1,
        'group_failed{group="default/0"}': 0,
        'group_failed{group="tensor/0"}': 1,
        'aggregated_bytes_per_second{rank="0",group="default/0"}': 5e6,
        f"aggregated_repeated_blocks_total{first}": 7,
        f"aggregated_bypasses_total{first}": 1,
        f"aggregated_fallen_back{first}": 0,
        f"aggregated_fallen_back{second}": 1,
        'host_retransmitted_segments_per_second{host="a"}': 4,
        'rank_complaints{rank="0"}': 2,
    }
    assert {name: values.get(f"penstock_{name}") for name in expected} == expected
    told = scalars.scalars(seen)
    assert (
        told["aggregated_MB_per_s"] == 5 and told["aggregated_blocks_again"] == 7 and told["aggregators_bypassed"] == 1
    )
    assert told["segments_retransmitted_per_s"] == 4


def running_operation(coflow: int, nbytes: int, ended_s_ago: float | None = None) -> dict[str, Any]:
    told = {"operation": "all_reduce", "group": "0", "issued_s_ago": 0.5, "waits_for": None}
    return {**told, "coflow": coflow, "bytes": nbytes, "ended_s_ago": ended_s_ago}


def test_coflows_under_way() -> None:
    """By their numbers: operations and bytes of what has not ended, the largest first and a few of many; of all ranks together in
    the table, and without a label for each number as a metric."""
    mine = own.Own(0, ["lo"], Counts(), own.Complaints())
    operations = [running_operation(7, 100), running_operation(9, 5000), running_operation(7, 200)]
    operations += [running_operation(0, 1 << 30), running_operation(8, 1 << 30, 0.1)]
    mine.see_operations({"operations": operations}, 1.0)
    numbers = mine.look(None, 1.0)
    assert (numbers["coflows"], numbers["coflows_active"]) == ([[9, 1, 5000], [7, 2, 300]], 2)
    told = {name: numbers[name] for name in ("coflows", "coflows_active")}
    seen = fed(3, numbers=lambda rank: told if rank < 2 else {})
    [table] = [table for table in shown.event(seen)["tables"] if table["title"] == "Coflows"]
    assert table["rows"] == [["9", "2", "2", "9.77 KiB"], ["7", "2", "4", "600 B"]] and "largest" not in table["note"]
    values = parsed(metrics.text(seen))
    assert [values.get(f'penstock_coflows_active{{rank="{rank}"}}') for rank in range(3)] == [2, 2, None]

    mine.see_operations({"operations": [running_operation(number, number) for number in range(1, 1025)]}, 2.0)
    numbers = mine.look(None, 2.0)
    assert [row[0] for row in numbers["coflows"]] == list(range(1024, 1016, -1)) and numbers["coflows_active"] == 1024
    seen = fed(1, numbers=lambda _: {name: numbers[name] for name in told})
    [table] = [table for table in shown.event(seen)["tables"] if table["title"] == "Coflows"]
    assert len(table["rows"]) == 8 and table["note"].endswith("The largest; a rank has 1024.")

    mine.see_operations({"operations": operations[3:]}, 3.0)
    seen = fed(1, numbers=lambda _: {name: mine.look(None, 3.0)[name] for name in told})
    assert "Coflows" not in [table["title"] for table in shown.event(seen)["tables"]]


def test_a_coflow_of_a_job_is_shown(tmp_path: pathlib.Path) -> None:
    """On the page and with `penstock top`, while rank 0 waits for its operations."""
    with job(tmp_path, _in_coflows, args=(str(tmp_path),)) as (running_job, url):
        wanted = [["9", "1", "1", "3.91 KiB"], ["7", "1", "2", "800 B"]]
        # A rank may tell its numbers between two operations.
        until(
            follow(url),
            lambda event: wanted in [each["rows"] for each in event["tables"] if each["title"] == "Coflows"],
        )
        told = top("--once", url)
        assert told.exit_code == 0 and "Coflows" in told.output and "3.91 KiB" in told.output, told.output
        (tmp_path / "stop").touch()
        assert all(outcome.ok for outcome in running_job.outcomes(timeout_s=30))


def _in_coflows(folder: str) -> None:
    """Rank 1 comes to the operations when a file is there."""
    dist.init_process_group("penstock")
    if dist.get_rank() == 1:
        wait_for(pathlib.Path(folder, "stop").exists, "stop")
    works = []
    for coflow, elements in ((7, 100), (9, 1000), (7, 100)):
        with penstock.priority(128, coflow=coflow):
            works.append(dist.all_reduce(torch.ones(elements), async_op=True))
    for work in works:
        work.wait()
    dist.destroy_process_group()


def test_channels_of_the_same_name_are_told_apart() -> None:
    """As two reducers have them; also names that are cut."""
    channel = {"name": "buckets", "issued": 3, "active": 0, "failed": None}
    groups = [
        {"name": "default", "world": 2, "issued": 1, "active": 0, "failed": None, "channels": [channel, channel]},
        *(
            {"name": "x" * 70 + end, "world": 2, "issued": 1, "active": 0, "failed": None, "channels": []}
            for end in "ab"
        ),
    ]
    names = [row[0] for row in own._groups(groups)]
    assert len(set(names)) == 5 and {"default/buckets", "default/buckets (2)"} < set(names)


def test_metrics_with_labels_of_any_text() -> None:
    """They are escaped as the format has it."""
    seen = fed(2, numbers=lambda rank: {"host": f"{NASTY}{rank}", "median_s": 0.1, "link_limit": 1e9})
    assert len([key for key in parsed(metrics.text(seen)) if key.startswith("penstock_link_use_ratio")]) == 2


def test_metrics_that_are_not_known_are_left_out() -> None:
    """Of samples and tokens that no script counts, and of links whose limit nobody knows."""
    names = ("samples_per_second", "tokens_per_second", "link_use_ratio", "link_limit_bytes_per_second")
    found = parsed(metrics.text(fed(2, numbers=lambda _: {"median_s": 0.1})))
    assert not [key for key in found if key.startswith(tuple(f"penstock_{name}" for name in names))]
    counted = fed(2, numbers=lambda rank: {"samples_per_s": 8.0 * rank, "link_limit": 1e9})
    found = parsed(metrics.text(counted))
    assert [found[f'penstock_samples_per_second{{rank="{rank}"}}'] for rank in range(2)] == [0.0, 8.0]
    assert not [key for key in found if key.startswith("penstock_tokens")]


def test_a_large_job_is_cut_to_what_matters() -> None:
    """512 ranks: the table has 64 of them, the silent one and the slow one too; an event stays below 64 KiB."""
    seen = fed(512, numbers=lambda rank: {"in_flight": 0.1 if rank == 400 else 0.5, "median_s": 0.1}, silent=[300])
    told = shown.event(seen)
    rows = told["tables"][0]["rows"]
    assert (
        len(rows) == 64
        and {"300", "400"} <= {row[0] for row in rows}
        and "64 of 512 ranks" in told["tables"][0]["note"]
    )
    assert len(json.dumps(told)) < 1 << 16


def test_what_a_rank_tells_is_bounded() -> None:
    """However many peers, groups and warnings there are."""
    complaints = own.Complaints()
    for number in range(100):
        complaints.filter(logging.LogRecord("penstock", logging.WARNING, "", 0, "x" * 5000 + "%d", (number,), None))
    mine = own.Own(0, ["lo"], Counts(), complaints)
    stream = dict.fromkeys(STREAM, 12345678.9)
    peers = [
        {
            "rank": rank,
            "medium": "tcp",
            "memory_read_bytes": 1 << 60,
            "lost": "y" * 9000 if rank % 2 else None,
            "streams": [stream] * 16,
        }
        for rank in range(900)
    ]
    group = {"name": "g" * 999, "world": 900, "issued": 10**9, "active": 10**6, "failed": "z" * 9999}
    stats = {
        "finished_operations": 1,
        "memory_bytes": 1,
        "memory_read_bytes": 1,
        "held": {"operations": 1},
        "peers": peers,
        "groups": [{**group, "channels": [group] * 50}] * 50,
        "aggregated": {f"a{n}": {"bytes": 1, "fallback": "w" * 999, "servers": []} for n in range(100)},
    }
    for look in range(3):
        text = own.text(mine.look(stats, 1.0 + look))
        assert len(text) <= own.MOST_BYTES and view.parse(text.encode()) is not None


def test_warnings_are_still_printed() -> None:
    """The view listens to Penstock's log and takes nothing from it, also where nothing has set up logging."""
    program = (
        "import logging; from penstock.live import own; heard = own.Complaints(); log = logging.getLogger('penstock')\n"
        "log.addFilter(heard); log.warning('on %s', 'stderr'); log.info('not'); log.warning('bad %d', 'x')\n"
        "assert [text for _, text in heard.latest()] == ['on stderr'], heard.latest()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.startswith("on stderr\n"), done.stderr


def test_scalars(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """TensorBoard reads them, once a step; where it is missing one line says which package."""
    made = scalars.write(str(tmp_path))
    assert made is not None
    for step in (7, 7, 9):
        seen = fed(2, numbers=lambda rank, steps=step: {"median_s": 0.25, "steps": steps, "steps_per_s": 4.0})
        made.write(seen)
    made.close()
    read = EventAccumulator(str(tmp_path)).Reload()
    assert {"penstock/step_ms", "penstock/steps_per_s", "penstock/ranks_silent_or_lost"} <= set(read.Tags()["scalars"])
    assert [(each.step, each.value) for each in read.Scalars("penstock/step_ms")] == [(7, 250.0), (9, 250.0)]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert scalars.write(str(tmp_path)) is None
    (line,) = caplog.messages
    assert "pip install tensorboard" in line


# ------------------------------------------------------------------------------------------------------- files of jobs


def test_files_of_jobs(tmp_path: pathlib.Path) -> None:
    """For their user alone. One that is not locked, a link, or nonsense is no job."""
    entry = found.Entry("http://127.0.0.1:1/?token=x", "a job")
    assert entry.path.stat().st_mode & 0o777 == 0o600
    stem = entry.path.name.rpartition("-")[0]
    (tmp_path / "jobs" / f"{stem}-stale.json").write_text('{"url": "http://127.0.0.1:2/", "what": "dead"}')
    (tmp_path / "jobs" / f"{stem}-link.json").symlink_to(entry.path)
    os.mkfifo(tmp_path / "jobs" / f"{stem}-pipe.json")
    assert [job.what for job in found.found()] == ["a job"]
    other = found.Entry("http://127.0.0.1:3/?token=y", "another")
    assert len(found.found()) == 2 and not (tmp_path / "jobs" / f"{stem}-stale.json").exists()
    for each in (entry, other):
        each.remove()
    assert found.found() == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "PENSTOCK_LIVE=0 torchrun"),
        (("http://127.0.0.1:1/?token=x",), "no job answers at 127.0.0.1:1: Connection refused"),
        (("127.0.0.1:1",), "or set PENSTOCK_LIVE_TOKEN"),
        (("1",), "or set PENSTOCK_LIVE_TOKEN"),
        (("http://[::1/",), "http://[::1/ is no URL: Invalid IPv6 URL"),
        (("http://h:99999/",), "is no URL: Port out of range"),
    ],
)
def test_top_says_what_to_do(arguments: tuple[str, ...], said: str) -> None:
    """Where there is no job, or it does not answer."""
    told = top("--once", *arguments)
    assert told.exit_code == 1 and said in told.output.replace("\n", " "), told.output


def test_top_and_a_server_that_is_none_of_ours(server: Server) -> None:
    """A wrong token, and another kind of server."""
    told = top("--once", f"http://127.0.0.1:{server.port}/?token=wrong")
    assert told.exit_code == 1 and "does not take this token" in told.output
    other = Server("127.0.0.1", 0, TOKEN, {"/events": lambda: Answer("text/html", b"hello")}, events="/other")
    other.start()
    told = top("--once", f"http://127.0.0.1:{other.port}/?token={TOKEN}")
    assert told.exit_code == 1 and "shows no job: hello" in told.output
    other.close()


SHOWN = {
    "state": "ended",
    "answer": "a\x1b]0;owned\x07\x9b2J",
    "setting": "\ud800",
    "alarms": ["\r"],
    "cards": [["1", "\u202e", "3"]],
    "history": [1, 2.0],
    "tables": [{"title": "t\x1b", "columns": [], "rows": [["x"]]}],
    "complaints": ["\x00"],
}


def test_top_shows_no_control_characters() -> None:
    """Whatever the texts of an event hold."""
    [event] = sent(json.dumps(SHOWN))
    console = rich.console.Console(file=io.StringIO(), width=80)
    console.print(render(event))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "owned" in said and not re.search("[\x00\r\x07\x1b\x9b\u202e\ud800]", said)


def test_top_leaves_empty_columns_out() -> None:
    """A terminal has no room for them. Rows that are too short or long do no harm."""
    table = {"title": "t", "columns": ["one", "none", "two"], "rows": [["a", "", "b"], ["c"], ["d", "", "e", "f"]]}
    [event] = sent(json.dumps(SHOWN | {"tables": [table]}))
    console = rich.console.Console(file=io.StringIO(), width=80)
    console.print(render(event))
    said = console.file.getvalue().split()  # type: ignore[attr-defined]
    assert {"one", "two", "a", "b", "c", "d", "e"} <= set(said) and not {"none", "f"} & set(said)


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "7", "[" * 200_000, "{", "\xff", "9" * 5000),
        *(json.dumps({key: value for key, value in SHOWN.items() if key != name}) for name in SHOWN),
        *(json.dumps(SHOWN | {name: value}) for name in SHOWN for value in (7, [True], [[]], None, [{}])),
        *(json.dumps(SHOWN | {"history": [1.0, value]}) for value in (float("nan"), float("inf"), 10**400, True, "1")),
    ],
)
def test_top_and_events_of_another_kind(text: str) -> None:
    """They are refused in a line."""
    with pytest.raises(click.ClickException, match="shows no job: it sends events of another kind"):
        sent(text)


def test_top_and_lines_without_an_event() -> None:
    """Comments keep a connection alive; a server that sends nothing else is no job."""
    assert sent("\n".join(["", *[": still here"] * 900, f"data: {json.dumps(SHOWN)}"]), before=":")
    with pytest.raises(click.ClickException, match="shows no job: it sends lines without end"):
        sent("\n".join([":"] * 2000), before=":")


def sent(text: str, before: str = "data:") -> list[dict[str, Any]]:
    """What `penstock top` makes of an event."""
    body = f"{before} {text}\n\n".encode("latin-1")
    server = Server("127.0.0.1", 0, TOKEN, {"/events": lambda: Answer("text/event-stream", body)}, events="/other")
    server.start()
    try:
        return list(events(f"http://127.0.0.1:{server.port}/?token={TOKEN}"))
    finally:
        server.close()


# ------------------------------------------------------------------------------------------------------- a real browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", SCREENS)
def test_the_page_in_a_browser(
    window: browser.Browser, screen: str, scheme: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It follows the events, does not scroll sideways, can be read, runs nothing that a rank's name brings, fetches nothing else,
    and says when the connection is lost and when the job has ended."""
    front = running.Front(("127.0.0.1", 0), TOKEN, "", "1.2.3")
    assert front.server is not None
    url = f"http://127.0.0.1:{front.server.port}/?token={TOKEN}"
    assert url in capfd.readouterr().err
    front.expect(range(3), 2, anew=True)
    for look in range(1, 31):
        for rank in range(3):
            front.hear(rank, numbers_of(rank, look, **BUSY(rank, look)))
        front.show(1.0)
    width, height = SCREENS[screen]
    window.open(url, width, height, scheme)
    text = in_page(window, "document.body.innerText", lambda text: "the others wait" in text)
    assert "for rank 1" in text and NASTY.split("\x1b")[0] in text
    seen = window.evaluate(MEASURE)
    assert seen["scheme"] == scheme and seen["inner"] == width
    check_layout(seen, width)
    for each in seen["texts"]:
        assert each["px"] >= 11, each
        assert contrast(each["colour"], each["ground"]) >= (3 if each["px"] >= 24 else 4.5), each
    assert window.evaluate("document.title").startswith("penstock live: A step takes")
    assert window.evaluate("document.querySelector('polyline').points.length") == 30
    loaded = window.evaluate("performance.getEntriesByType('resource').map(each => new URL(each.name).pathname)")
    assert set(loaded) <= {"/events"}, loaded
    if folder := os.environ.get("REPORT_PICTURES"):
        pathlib.Path(folder, f"live-{screen}-{scheme}.png").write_bytes(window.picture())

    for rank in (0, 2):
        front.hear(rank, numbers_of(rank, 31, **BUSY(rank, 31), lost={"1": "no packet for 4 s"}))
    front.show(1.0)
    in_page(
        window, "document.getElementById('alarms').innerText", lambda text: "rank 1 is lost: no packet for 4 s" in text
    )
    window.evaluate("heard -= 10000")  # as if nothing had come for 10 s
    in_page(
        window, "document.getElementById('state').innerText", lambda text: re.search(r"connection lost 1\d s ago", text)
    )
    if screen == "wide":
        front.end("ValueError: the loss is NaN")
        text = in_page(window, "document.body.innerText", lambda text: "ended" in text.split("\n")[0])
        assert "The job has ended after" in text and "ValueError: the loss is NaN" in text
    else:
        front.server.close()
        window.evaluate("heard -= 10000")
        in_page(window, "document.getElementById('state').innerText", lambda text: "connection lost" in text)
        front.end("")


def BUSY(rank: int, look: int) -> dict[str, Any]:
    """Numbers of a rank that trains, with all that can be there."""
    return {
        "host": f"node-{rank}/1" if rank else f"{NASTY}/1",
        "steps": 1000 + 10 * look,
        "median_s": 0.0871 + 0.002 * (look % 5),
        "latest_s": 0.0902,
        "steps_per_s": 11.4,
        "samples_per_s": 365.0,
        "in_flight": 0.31 if rank == 1 else 0.74,
        "reduced_per_s": 81_200_000,
        "sent_per_s": 79_600_000,
        "received_per_s": 79_100_000,
        "link_limit": 125_000_000,
        "finished_per_s": 250,
        "retransmitted_per_s": 2.5,
        "waits": ["all_reduce(sum, 1000 x float32) of group 0", 1.5, "rank 1"],
        "peers": [
            [peer, "tcp", 16, 39_800_000, 39_500_000, 0.00021, 2e6, 3e6, 0, 0] for peer in range(3) if peer != rank
        ],
        "groups": [["0", 3, 12345, 4, None], ["0/buckets", 3, 2345, 2, None]],
        "aggregated": [["0/buckets", "10.77.2.1:5400", "10.77.1.1:5400", 81_200_000, 3, 0, None]],
        "coflows_active": 2,
        "coflows": [[1000 + look, 4, 41_943_040], [999 + look, 1, 8192]],
        "complaints": [[1.7e9, "PENSTOCK_CHECK=slow: in the last 20 steps rank 1 was last in 20 of 20"]],
    }


# ------------------------------------------------------------------------------------------------------------- helpers

ABOUT = {"pid": 1, "host": "h", "version": "1", "generation": 0, "up_s": 1.0, "end": ""}


def numbers_of(rank: int, look: int, **numbers: Any) -> bytes:
    return json.dumps(
        {"rank": rank, "look": look, "pid": 100 + rank, "state": "running", "host": "h/1", **numbers}
    ).encode()


def fed(
    count: int, *, looks: int = 1, numbers: Callable[[int], dict[str, Any]], silent: list[int] | None = None
) -> view.Snapshot:
    """What a view makes of some looks of ``count`` ranks, one second apart; a step takes 0.1 s."""
    made = view.View(dict(ABOUT))
    made.expect(range(count), 0.0, anew=True)
    for rank in silent or []:
        made.hear(rank, view.parse(numbers_of(rank, 1)), -100.0)
    for look in range(1, looks + 1):
        for rank in set(range(count)) - set(silent or []):
            made.hear(rank, view.parse(numbers_of(rank, look, **{"median_s": 0.1, **numbers(rank)})), float(look))
        seen = made.snapshot(float(look), 1.0)
    return seen


@contextlib.contextmanager
def job(
    tmp_path: pathlib.Path,
    function: Callable[..., Any],
    *,
    args: tuple[Any, ...],
    count: int | None = None,
    env: Any = None,
) -> Iterator[tuple[ranks.Ranks, str]]:
    """A job that serves a live view, and its URL. Only rank 0 has the setting."""
    count = count or (3 if function is _again else 2)
    env = {"XDG_RUNTIME_DIR": str(tmp_path / "jobs"), **(env or {})}
    with ranks.Ranks(function, count=count, args=args, env=env, env_of_rank={0: {"PENSTOCK_LIVE": "0"}}) as made:
        printed = re.compile(r"live view: (http\S+)")
        wait_for(lambda: printed.search(made.output(0)) is not None, lambda: made.output(0))
        found_url = printed.search(made.output(0))
        assert found_url is not None
        yield made, found_url[1]


def wait_for(condition: Callable[[], Any], otherwise: str | Callable[[], str], deadline_s: float = 60.0) -> None:
    until_s = time.monotonic() + deadline_s
    while not condition():
        said = otherwise if isinstance(otherwise, str) else otherwise()
        assert time.monotonic() < until_s, f"not within {deadline_s} s: {said}"
        time.sleep(0.01)


def follow(url: str) -> Iterator[dict[str, Any]]:
    """The events of a job."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 0, timeout=30)
    connection.request("GET", f"/events?{parts.query}")
    answer = connection.getresponse()
    assert (answer.status, answer.getheader("content-type")) == (200, "text/event-stream")
    while line := answer.readline():
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def until(
    events: Iterator[dict[str, Any]], condition: Callable[[dict[str, Any]], Any], deadline_s: float = 60.0
) -> dict[str, Any]:
    """The first event of that kind."""
    until_s, event = time.monotonic() + deadline_s, None
    for event in events:
        if condition(event):
            return event
        assert time.monotonic() < until_s, event
    raise AssertionError(f"the events have ended with {event}")


def latest(server: Server) -> dict[str, Any]:
    """The last event that it has sent, or would send."""
    return json.loads(server._latest.removeprefix(b"data: "))


def rate(event: dict[str, Any], what: str) -> float:
    """What the event's cards have a second; nothing where there is none."""
    cards = {name: number for number, name, _ in event["cards"]}
    return float(cards.get(f"{what} a second", "nan").replace(",", ""))


def get(url: str, path: str) -> tuple[int, dict[str, str], bytes]:
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 0, timeout=30)
    connection.request("GET", f"{path}?{parts.query}")
    answer = connection.getresponse()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def ask(server: Server, request: str) -> tuple[int, dict[str, str], bytes]:
    """Send this and read all that comes."""
    with connected(server) as end:
        end.sendall(request.encode("utf-8"))
        data = b""
        while part := end.recv(1 << 16):
            data += part
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return (
        int(first.split(" ")[1]),
        {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)},
        body,
    )


def connected(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def wait_readable(ends: list[socket.socket], seconds: float) -> list[socket.socket]:
    import select

    return select.select(ends, [], [], seconds)[0]


def slow_is_closed(end: socket.socket) -> bool:
    try:
        return end.recv(1) == b""
    except ConnectionError:
        return True


def read_until(end: socket.socket, what: bytes) -> bytes:
    data = b""
    while what not in data:
        part = end.recv(1 << 16)
        assert part, data
        data += part
    return data


def top(*words: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(cli.main, ["top", *words], env={"COLUMNS": "200"})


class top_in_background:
    """`penstock top` as a process."""

    def __init__(self, url: str) -> None:
        self._process = forked.Popen(
            [sys.executable, "-m", "penstock", "top", url], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=_collect, args=(self._process.stdout, self.lines))
        self._reader.start()

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def result(self) -> Any:
        code = self._process.wait(60)
        self._reader.join()
        return types.SimpleNamespace(exit_code=code, output=" ".join("".join(self.lines).split()))


def in_page(window: browser.Browser, script: str, condition: Callable[[Any], Any], deadline_s: float = 20.0) -> Any:
    """The value of an expression in the page, once it is as wanted."""
    until_s = time.monotonic() + deadline_s
    while not condition(value := window.evaluate(script)):
        assert time.monotonic() < until_s, value
        time.sleep(0.02)
    return value


SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(\{(?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\[\\"n])*",?)*\})? (\S+)')


def parsed(text: str) -> dict[str, float]:
    """Prometheus' text format, strictly: each family has HELP and TYPE first and stands together, samples differ, names of
    counters end in _total, values are finite, and the last line ends."""
    assert text.endswith("\n")
    values: dict[str, float] = {}
    family, kind, done = "", "", set()
    lines = iter(text[:-1].split("\n"))
    for line in lines:
        if line.startswith("# HELP "):
            family = line.split(" ")[2]
            assert family not in done and len(line.split(" ", 3)[3]) > 3
            done.add(family)
            start, name, kind = next(lines).rsplit(" ", 2)
            assert (start, name) == ("# TYPE", family) and kind in ("gauge", "counter")
            assert family.endswith("_total") == (kind == "counter")
            continue
        sample = SAMPLE.fullmatch(line)
        assert sample is not None, line
        assert sample[1] == family and f"{sample[1]}{sample[2] or ''}" not in values, line
        value = float(sample[3])
        assert value - value == 0, line
        values[f"{sample[1]}{sample[2] or ''}"] = value
    return values
