"""Proves that `penstock info`, `penstock doctor` and `penstock.stats()` say what is true."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Mapping

import click.testing
import pytest
import torch
import torch.distributed as dist

import forked
import penstock
import ranks
from backends import ALL
from penstock import cli
from penstock.runtime import config
from penstock.tools import info, testbed
from penstock.tools.doctor import checks, pairs
from penstock.tools.doctor import cli as doctor


def test_info_shows_values_and_where_they_come_from() -> None:
    """Every setting with its value, origin and meaning; that there is a secret, and not what it is."""
    set_here = {"PENSTOCK_STREAMS": "3", "PENSTOCK_SECRET": "a stone in the river"}
    ended = _penstock(["info", "--json"], set_here)
    assert ended.returncode == 0 and "stone" not in ended.stdout + ended.stderr, ended.stderr
    settings = {setting["name"]: setting for setting in json.loads(ended.stdout)["settings"]}
    assert list(settings) == [setting.name for setting in config.VARIABLES]
    for setting in config.VARIABLES:
        shown = settings[setting.name]
        assert shown["origin"] == ("environment" if setting.name in set_here else "default"), shown
        assert shown["value"] == {**set_here, "PENSTOCK_SECRET": "(set, not shown)"}.get(
            setting.name, setting.default
        ), shown
        assert shown["meaning"] == setting.meaning
    table = _penstock(["info", "--all"], set_here)
    assert table.returncode == 0 and "stone" not in table.stdout, table.stderr
    rows = re.findall(r"│ (PENSTOCK_\w+)", table.stdout)
    assert set(rows[:2]) == set(set_here) and set(rows) == {setting.name for setting in config.VARIABLES}, rows
    table = _penstock(["info"], set_here)
    assert set(re.findall(r"│ (PENSTOCK_\w+)", table.stdout)) == set(set_here)
    assert f"{len(config.VARIABLES) - 2} more settings" in table.stdout, table.stdout


@pytest.mark.parametrize(
    "wrong", ["PENSTOCK_STREAMS", "PENSTOCK_INTERFACE", "PENSTOCK_PTRACER", "TORCHELASTIC_RESTART_COUNT"]
)
@pytest.mark.parametrize("form", ["table", "json"])
def test_info_refuses_a_wrong_value(wrong: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table, or the JSON, still comes; then the variable is named, and the exit code says it too."""
    monkeypatch.setenv(wrong, "nosuch0")
    ended = click.testing.CliRunner().invoke(info.command, ["--json"] if form == "json" else ["--all"])
    assert ended.exit_code == 1 and "PENSTOCK_LOG" in ended.output, ended.output
    (told,) = json.loads(ended.stdout)["wrong"] if form == "json" else [ended.stderr]
    assert wrong in told and "nosuch0" in told and "Traceback" not in ended.output, ended.output


def test_info_shows_a_misspelt_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a row of its own, with the name that may have been meant, and without its value, which may be a secret; it is no error,
    as nothing reads it."""
    monkeypatch.setenv("PENSTOCK_STREAM", "hush")
    ended = click.testing.CliRunner().invoke(info.command, ["--json"])
    row = json.loads(ended.stdout)["settings"][-1]
    assert ended.exit_code == 0 and (row["name"], row["value"]) == ("PENSTOCK_STREAM", "(set, not shown)")
    assert "did you mean PENSTOCK_STREAMS?" in row["meaning"] and "hush" not in ended.stdout


def _medium() -> str:
    dist.init_process_group("penstock")
    dist.all_reduce(tensor := torch.ones(100_000))
    assert tensor[0] == 2
    (peer,) = penstock.stats()["peers"]
    dist.destroy_process_group()
    # A value that no setting can have: the engine gets what the setting says, and knows the others.
    said = dataclasses.replace(config.read(), ptracer="nobody")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match='unknown ptracer "nobody"'):
        patch.setattr(config, "read", lambda: said)
        dist.init_process_group("penstock", store=dist.HashStore(), rank=0, world_size=1)
    return str(peer["medium"])


@pytest.mark.parametrize("value", ["any", "0", "launcher"])
def test_who_may_read_memory_is_a_setting(value: str) -> None:
    """Its values reach the engine, which knows no other. Where no Yama restricts them, ranks read each other's memory with each;
    what each means to Yama is proved in crates/penstock-net/src/ptrace.rs."""
    scope = pathlib.Path("/proc/sys/kernel/yama/ptrace_scope")
    restricted = scope.exists() and int(scope.read_text()) > (0 if value == "0" else 1)
    media = ranks.run(_medium, count=2, env={"PENSTOCK_PTRACER": value})
    assert media == ["local socket" if restricted else "memory"] * 2


@pytest.mark.timed
def test_doctor_checks_two_ranks_here() -> None:
    """Alone it starts two ranks: both ways are there, with rate, medium and streams; nothing to mend is success."""
    ended = _penstock(["doctor", "--mebibytes=1"], {"PENSTOCK_SHM": "0", "PENSTOCK_STREAMS": "3"})
    rows = [line for line in ended.stdout.splitlines() if "Gbit/s" in line]
    assert len(rows) == 2 and all(" tcp " in row and " 3 " in row for row in rows), ended.stdout + ended.stderr
    assert all(float(row.split(" Gbit/s")[0].split()[-1]) > 0.01 for row in rows), rows
    assert "lo (65536)" in ended.stdout
    assert ended.returncode == (1 if "! rank" in ended.stdout else 0), ended.stdout


def test_doctor_compares_with_raw_sockets() -> None:
    """Two hosts with a link of 200 Mbit/s and 20 ms, and socket buffers that are too small for such a way: raw sockets carry
    several times as much, and the doctor says so, with what to try."""
    link = testbed.LinkSpec(rate_mbit=200, delay_ms=10)
    env = {"PENSTOCK_SOCKET_BUFFER": "4096"}
    with testbed.Testbed(hosts=2, link=link) as bed, ranks.Ranks(_ask, count=2, bed=bed, env=env) as job:
        first, _ = job.outcomes(timeout_s=120)
    rows = [line.split("│")[-3] for line in first.output.splitlines() if "Gbit/s" in line and "│" in line]
    assert len(rows) == 2 and all(0 < float(raw.split()[0]) < 0.2 for raw in rows), first.output
    assert re.search(r"to rank \d Penstock carries \d+% of what \d+ raw TCP sockets carry", first.output), first.output


@pytest.mark.parametrize("wrong", ["--mebibytes=0", "--mebibytes=-1", "--mebibytes=x", "--timeout=0"])
def test_doctor_refuses_wrong_numbers(wrong: str) -> None:
    """Before any rank is started, in a line that names the option."""
    ended = click.testing.CliRunner().invoke(cli.main, ["doctor", wrong])
    assert ended.exit_code == 2 and f"'{wrong.partition('=')[0]}'" in ended.stderr, ended.output


def test_doctor_warns_where_raw_sockets_carry_more() -> None:
    """From a fifth on; not on loopback, nor where the processors are the limit."""
    told = checks.rate_warning(3, "10.0.0.3", 79e6, 100e6, 16)
    assert (
        told is not None and "to rank 3 Penstock carries 79% of what 16 raw" in told and "0.632 against 0.800" in told
    )
    assert checks.rate_warning(3, "10.0.0.3", 81e6, 100e6, 16) is None
    assert checks.rate_warning(3, "127.0.0.1", 10e6, 100e6, 16) is None
    assert checks.rate_warning(3, "fe80::1%eth0", 10e6, 100e6, 16) is not None
    assert checks.rate_warning(3, "10.0.0.3", 0.5e9, 2e9, 16) is None


def test_doctor_names_yama() -> None:
    """Ranks that may not read each other's memory because of Yama are named, with the cure for that scope; others are not."""
    peers = [{"rank": 1, "medium": "memory"}, {"rank": 2, "medium": "local socket"}, {"rank": 3, "medium": "tcp"}]
    told = checks.memory_warning(peers, "1")
    assert told is not None and "rank(s) 2 on" in told and "PENSTOCK_PTRACER=any" in told
    told = checks.memory_warning(peers, "2")
    assert told is not None and "PENSTOCK_PTRACER" not in told and "CAP_SYS_PTRACE" in told
    assert [checks.memory_warning(peers, scope) for scope in ("", "0")] == [None, None]
    assert checks.memory_warning([peers[0], peers[2]], "1") is None


def test_doctor_cuts_nothing() -> None:
    """On a terminal that is too narrow for its tables cells are folded; a log file has whole lines."""
    for env, width in (({"COLUMNS": "60"}, 60), ({"COLUMNS": None}, 200)):
        ended = _penstock(["doctor", "--mebibytes=1"], {"PENSTOCK_SHM": "0", **env})
        assert "…" not in ended.stdout and ended.stdout.count("127.0.0.1") >= (0 if width == 60 else 2), ended.stdout
        assert max(map(len, ended.stdout.splitlines()[1:])) <= width, ended.stdout
        # Of every address all characters are there, one cell below the other.
        letters = "".join(
            re.sub(r"[^0-9.:]", "", line.split("│")[2]) for line in ended.stdout.splitlines() if line.count("│") == 8
        )
        assert re.search(r"127\.0\.0\.1:\d+", letters), ended.stdout


def test_doctor_is_warm_before_it_times() -> None:
    """A rate is the median of exchanges after some that do not count: one slow exchange, the first above all, is not in it."""
    (rates,) = {tuple(each) for each in ranks.run(_with_a_slow_exchange, count=2)}
    assert rates == (1000.0,)


@pytest.mark.parametrize("verb", ["doctor", "run"])
def test_interrupted_verbs_end_without_a_traceback(verb: str, tmp_path: pathlib.Path) -> None:
    """Ctrl-C at a terminal, which goes to all processes of the job, while ranks run."""
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    arguments = ["run", "--nproc=2", str(script)] if verb == "run" else ["doctor", "--mebibytes=4096"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    process = forked.Popen(
        [sys.executable, "-m", "penstock", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**inherited, "PENSTOCK_LOG": "info"},
    )
    with process:
        try:
            assert process.stdout is not None
            said = ""
            while ("epoch" if verb == "run" else "2 ranks") not in said and (line := process.stdout.readline()):
                said += line
            os.killpg(process.pid, signal.SIGINT)
            rest, _ = process.communicate(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert "Traceback" not in rest and process.returncode == 130, said + rest


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--nproc", "abc", "train.py"], "argument --nproc: abc is not a number of ranks, such as 2"),
        (["bench", "foo"], "The commands are aggregated, all-gather, all-reduce"),
        (["testbed", "dwn"], "Did you mean 'down'?"),
    ],
)
def test_errors_on_the_command_line_are_short(arguments: list[str], words: str) -> None:
    """What is wrong and what there is, in three lines, without a usage of a page."""
    ended = click.testing.CliRunner().invoke(cli.main, arguments)
    assert ended.exit_code == 2 and words in ended.stderr, ended.output
    assert len(ended.stderr.strip().splitlines()) <= 4, ended.stderr


def test_doctor_warns() -> None:
    """A limit that is too low is named with what to do, and is a failure to the shell."""
    with ranks.Ranks(_with_few_files, count=2, args=(2048,), env={"COLUMNS": "300"}) as job:
        first, second = job.outcomes(timeout_s=60)
    for outcome in (first, second):
        assert outcome.raised is not None and outcome.raised.is_a("SystemExit") and outcome.raised.text == "1", str(
            outcome
        )
    for rank in (0, 1):
        assert f"! rank {rank}: at most 2048 open files are allowed (hard limit)" in first.output


@pytest.mark.parametrize(("lost", "warns"), [(0, False), (1, False), (2, True), (100, True)])
def test_doctor_finds_slow_name_servers(monkeypatch: pytest.MonkeyPatch, lost: int, warns: bool) -> None:
    """Names that take long each time are reported with what to do, soon; one question that was lost is not. Names are those that
    torch's store looks up."""
    asked, answered = [], threading.Event()

    def look_up(address: tuple[str, int], flags: int) -> None:
        asked.append(address[0])
        if len(asked) <= lost:
            answered.wait(120 if lost > 2 else 0.6)
        raise OSError("no name server answers")

    monkeypatch.setattr(checks, "socket", types.SimpleNamespace(getnameinfo=look_up, NI_NUMERICSERV=2))
    warning = checks.names_warning({"10.0.0.7", "[fe80::1]"})
    answered.set()
    assert set(asked[:2]) == {"::ffff:10.0.0.7"}
    assert (warning is not None) == warns, warning
    if warning is None:
        assert asked == ["::ffff:10.0.0.7"] * 2 + ["fe80::1"] * 2
    else:
        assert "RES_OPTIONS" in warning and "/etc/hosts" in warning


def test_doctor_leaves_the_group_when_a_check_fails() -> None:
    """The error comes out; the other rank says in a line that it failed, naming this rank; neither has a process group left."""
    (first, _, first_left), (second, said, second_left) = ranks.run(_check_that_fails, count=2)
    assert first == "ZeroDivisionError" and second == "unhealthy", (first, second)
    assert re.match(r"rank 1: (PeerLost|Closed): .*rank 0", said), said
    assert not first_left and not second_left


@pytest.mark.parametrize("medium", ["penstock-tcp", "penstock"])
def test_memory_is_bounded(medium: str) -> None:
    """With 4 peers and default settings the engine stays below the 64 MiB that are promised, whatever is in flight."""
    most = ranks.run(_flood, count=5, env=ALL[medium].env)
    assert all(0 < each <= 64 << 20 for each in most), most


# ------------------------------------------------------------------------------------------------------------ programs


def _check_that_fails() -> tuple[str, str, bool]:
    """Rank 0 cannot exchange anything; what the doctor raised or said here, and whether there is still a process group."""
    if os.environ["RANK"] == "0":
        pairs.exchange = lambda *_: 1 / 0
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            ended = "healthy" if doctor.run(lambda: checks.check(1000), 60.0) else "unhealthy"
    except ZeroDivisionError as error:
        ended = type(error).__name__
    return ended, said.getvalue(), dist.is_initialized()


def _with_a_slow_exchange() -> list[float]:
    """The rate that is shown, where the first exchange and one other take long."""
    times = iter([9.0, 1.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 1.0])
    pairs.exchange = lambda *_: next(times)
    shown: list[float] = []
    checks._print = lambda everyone: shown.extend(one["rates"][1 - rank] for rank, one in enumerate(everyone))
    dist.init_process_group("penstock")
    checks.check(1000)
    gathered: list[list[float]] = [[], []]
    dist.all_gather_object(gathered, shown)
    dist.destroy_process_group()
    return sorted(set(gathered[0]))


TRAINS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
for epoch in range(10**9):
    for a, b in loader:
        loss = ((model(a) - b) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, flush=True)
"""


def _ask() -> None:
    os.environ["COLUMNS"] = "300"
    doctor.command(["--mebibytes=1"], prog_name="penstock doctor")


def _with_few_files(allowed: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))
    doctor.command(["--mebibytes=1"], prog_name="penstock doctor")


def _flood() -> int:
    """Many operations at once, large and small; the most that the engine says it holds meanwhile, in bytes."""
    dist.init_process_group("penstock")
    tensors = [torch.ones(elements) for elements in 6 * (4 << 20, 1 << 18, 1000, 10)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    most = penstock.stats()["memory_bytes"]
    for work in works:
        while not work.get_future().done():
            most = max(most, penstock.stats()["memory_bytes"])
        work.wait()
    assert all(tensor.eq(5).all() for tensor in tensors)
    dist.destroy_process_group()
    return int(most)


def _penstock(arguments: list[str], env: Mapping[str, str | None]) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    wanted = {**inherited, "COLUMNS": "300", **env}
    return forked.run(
        [sys.executable, "-m", "penstock", *arguments],
        env={name: value for name, value in wanted.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=120,
    )
