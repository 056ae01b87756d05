"""Proves the command `penstock profile`: whole runs with its options, what it refuses, exit codes, and a Ctrl-C."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import html
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import click.testing
import pytest

import forked
import profiles
from penstock.cli import main
from penstock.profiling import measures, readers, record
from penstock.profiling.divide import divide
from penstock.profiling.record import Event
from penstock.tools.profile import run
from penstock.tools.testbed import LinkSpec, Testbed

SCRIPT = pathlib.Path(__file__).parent / "profiled" / "train.py"


def profile(folder: pathlib.Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "READINGS": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "penstock", "profile", *arguments]
    done: subprocess.CompletedProcess[str] = forked.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, **options
    )
    return done


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "name a script"),
        (["--read", ".", "train.py"], "give a command or --read, not both"),
        (["absent.py"], "there is no script absent.py"),
        (["--", "no-such-command"], "there is no command no-such-command"),
        (["--read", "absent"], "does not exist"),
        (["-o", "a-file/below", "here.py"], "cannot write to"),
        (["-o", "full", "here.py"], "holds a profile already"),
        (["--period-ms", "9", "here.py"], "10<=x<=1000"),
        (["--read", ".", "--period-ms", "20"], "--period-ms is for a command that runs"),
        (["--html", "a-file/report.html", "here.py"], "cannot write a-file/report.html"),
        (["--csv", "all", "--json", "./all", "here.py"], "two outputs have the same name"),
        (["--kineto", "a-file/below", "here.py"], "cannot write a-file/below"),
    ],
)
def test_what_cannot_run_is_refused_first(
    arguments: list[str], text: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one message, and the script does not start."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").write_text("open('started', 'w')")
    (tmp_path / "a-file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "rank-0.jsonl").touch()
    done = click.testing.CliRunner().invoke(main, ["profile", *arguments])
    assert done.exit_code in (1, 2) and text in done.output, done.output
    assert not (tmp_path / "started").exists()


@pytest.fixture
def unlucky(tmp_path: pathlib.Path) -> pathlib.Path:
    """Records of a run in which rank 0 raised, rank 1 was killed and computes on a GPU, rank 2 left none, and samples are few and
    lack something."""
    first, second, _ = profiles.data_parallel(3, sampled=(4,))
    first.events.insert(0, Event(5, "exception", "ValueError: planted"))
    first.events.insert(0, Event(4, "left out", "some steps are left out"))
    first.samples[0] = dataclasses.replace(first.samples[0], dropped=7)
    second.events.clear()
    second.samples[0] = dataclasses.replace(second.samples[0], device=second.steps[4])
    folder = tmp_path / "unlucky"
    folder.mkdir()
    for one in (first, second):
        lines = [one.header, *one.steps, *one.samples, *one.events]
        (folder / f"rank-{one.header.rank}.jsonl").write_text("".join(map(record.line, lines)))
    return folder


WENT_WRONG = (
    "rank 0 ended with an exception: ValueError: planted",
    "the record of rank 1 ends early",
    "2 of 3 ranks have a record (rank 2 has none)",
    "rank 0: some steps are left out",
    "samples of rank 0 lack 7 operations",
    "rank 1 computes on a GPU",
    "of only 1 of 10 steps of rank 0 all operations are known (torch's profiler sampled 1)",
)


def test_what_went_wrong_is_told_once_and_kept(tmp_path: pathlib.Path, unlucky: pathlib.Path) -> None:
    """After the run, with how the command ended; and by --read, each once: on standard error, on the page and in the JSON."""
    tells = ["--html", "page.html", "--json", "table.json"]
    copies = ["-o", "run", *tells, "--", "sh", "-c", f"cp {unlucky}/* $PENSTOCK_PROFILE && kill -9 $$"]
    for arguments, code in ((copies, 137), (["--read", str(unlucky), *tells], 0), (["--read", "run", *tells], 0)):
        done = profile(tmp_path, *arguments)
        assert done.returncode == code, done.stderr
        said = [line for line in done.stderr.splitlines() if line.startswith(run.SAYS)]
        page = html.unescape((tmp_path / "page.html").read_text()).replace("\xa0", " ")
        problems = json.loads((tmp_path / "table.json").read_text())["problems"]
        ended = ["the command ended with exit code 137, which is 128 + SIGKILL"] if code else []
        for text in [*ended, *WENT_WRONG]:
            assert sum(text in line for line in said) == sum(text in line for line in problems) == 1, (text, said)
            assert page.count(text) == 1, text
        assert len(said) == len(set(said)) == len(problems)
        assert sum("has none" in line or "no record" in line for line in said) == 1
        assert bool(ended) == any("exit code" in line for line in said)


def test_complaints_of_records(tmp_path: pathlib.Path) -> None:
    """Why there are none, is told. Only the recorder's own marks are taken out of the folder."""
    run._marks(tmp_path).mkdir(parents=True)
    (run._marks(tmp_path) / "torch").touch()
    for name in (".keep", ".profile-mine"):
        (tmp_path / name).touch()
    [nothing] = run.complaints(tmp_path, [])
    assert "no Python process of the command looked into PYTHONPATH" in nothing
    assert sorted(path.name for path in tmp_path.iterdir()) == [".keep", ".profile-mine"]


def test_the_help_says_what_can_be_read() -> None:
    """Every kind of file that `readers.load` takes."""
    told = " ".join(click.testing.CliRunner().invoke(main, ["profile", "--help"]).output.split())
    for kind in (
        "a folder of records",
        "a trace of torch.profiler",
        "a log of Megatron-LM",
        "NCCL's inspector (JSONL)",
    ):
        assert kind in told
    assert len(readers.NAMES) == 4


def test_commands_that_begin_together_have_folders(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One each where none is named; else the same one, as commands of several hosts share it."""
    monkeypatch.chdir(tmp_path)
    count = 8
    together = threading.Barrier(count)

    def choose(number: int) -> list[pathlib.Path]:
        found = []
        for at in range(20):
            together.wait(60)
            found += [run.fresh_folder(None), run.fresh_folder(tmp_path / f"shared-{at}")]
        return found

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        folders = [folder for each in pool.map(choose, range(count)) for folder in each]
    assert len({folder for folder in folders if folder.name.startswith("penstock-profile-")}) == 20 * count
    assert len(set(folders)) == 20 * count + 20


def test_each_host_has_a_command_and_all_share_a_folder(tmp_path: pathlib.Path) -> None:
    """As on a cluster: torchrun under `penstock profile` on two hosts. Both commands tell of both ranks at the end, and the
    folder has each host's counters, by which all bytes on the link are the ranks' own."""
    folder = tmp_path / "shared"
    env = {"READINGS": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with Testbed(hosts=2, link=LinkSpec(rate_mbit=200)) as bed, contextlib.ExitStack() as outputs:
        commands = []
        for host in range(2):
            launcher = ["torchrun", "--nnodes", "2", "--node-rank", str(host), "--nproc-per-node", "1"]
            launcher += ["--master-addr", bed.address(0), "--master-port", "29400", str(SCRIPT), "ddp", "penstock"]
            command = [sys.executable, "-m", "penstock", "profile", "--output", str(folder), "--", *launcher]
            out = outputs.enter_context(open(tmp_path / f"out-{host}", "w"))
            commands.append(bed.popen(host, command, env=env, stdout=out, stderr=subprocess.STDOUT, cwd=tmp_path))
        codes = [command.wait(120) for command in commands]
    said = [(tmp_path / f"out-{host}").read_text() for host in range(2)]
    assert codes == [0, 0], said
    records = readers.load(folder)
    assert isinstance(records, list)
    hosts = {each.header.rank: each.header.host for each in records if each.steps}
    assert sorted(hosts) == [0, 1] and len(set(hosts.values())) == 2
    assert {path.stem for path in folder.glob("host-*.jsonl")} == {f"host-{name}" for name in hosts.values()}
    for text in [*said, profile(tmp_path, "--read", str(folder)).stdout]:
        assert "Where a step goes" in text and re.search(r"^rank 1 .* ms, ", text, re.MULTILINE), text
    for link in measures.Measures(records, divide(records)).links:
        assert link.limit is not None and link.foreign_bytes_per_s < 0.05 * link.limit.bytes_per_s, link


def test_an_exit_code_is_the_commands_where_children_are_ignored(tmp_path: pathlib.Path) -> None:
    """Who starts the command may ignore SIGCHLD, which it inherits."""
    start = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    )
    command = ["python", "-m", "penstock", "profile", "--", "sh", "-c", "exit 7"]
    done = subprocess.run([sys.executable, "-c", start, *command], cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == 7, done.stderr


def test_folders_are_numbered(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is a fresh one."""
    monkeypatch.chdir(tmp_path)
    assert [run.fresh_folder(None).name for _ in range(2)] == ["penstock-profile-1", "penstock-profile-2"]


def test_a_script_and_its_record(tmp_path: pathlib.Path) -> None:
    """The table and where the records are; and the same again from the folder, with every output."""
    done = profile(tmp_path, str(SCRIPT), "accumulation")
    assert done.returncode == 0, done.stderr
    for word in ("forward", "backward", "clip", "optimizer", "the records are in"):
        assert word in done.stdout, done.stdout
    first, below = done.stdout.split("Where a step goes", 1)
    lines = first.splitlines()
    assert lines[0].startswith("Rank 0 ") and any(line.startswith("rank 0  ") and " ms, " in line for line in lines)
    assert sum(line.startswith("Next: ") for line in lines) == 1 and "Next: " not in below
    assert "nothing was recorded" not in done.stderr and "ends early" not in done.stderr
    outputs = {"--html": "report.html", "--perfetto": "trace.json", "--csv": "table.csv", "--json": "table.json"}
    outputs["--kineto"] = "traces"
    again = profile(tmp_path, "--read", "penstock-profile-1", *(each for pair in outputs.items() for each in pair))
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[1:] == done.stdout.splitlines()[1:-1]
    assert all((tmp_path / name).stat().st_size > 100 for name in outputs.values())
    json.loads((tmp_path / "trace.json").read_text())
    # Utilisation over time stands in the page, in the JSON, and beside the table where that is a file.
    assert "<h2>Utilisation</h2>" in (tmp_path / "report.html").read_text()
    used = {(each["what"], each["line"]) for each in json.loads((tmp_path / "table.json").read_text())["utilisation"]}
    assert ("processor time", "rank 0") in used
    assert "\nprocessor time,processors,rank 0," in (tmp_path / "table-utilisation.csv").read_text()
    steps = (tmp_path / "table-steps.csv").read_text().splitlines()
    assert steps[0].startswith("rank,step,counted,") and len(steps) == 21
    assert "<h2>Every step</h2>" in (tmp_path / "report.html").read_text()
    assert profile(tmp_path, "--read", "penstock-profile-1", "--csv", os.devnull).returncode == 0
    assert not pathlib.Path(f"{os.devnull}-utilisation.csv").exists()
    assert json.loads((tmp_path / "traces" / "rank-0.json").read_text())["distributedInfo"]["rank"] == 0
    for option, name in outputs.items():
        refused = profile(tmp_path, "--read", "penstock-profile-1", option, f"trace.json/{name}")
        assert refused.returncode == 1 and "cannot write" in refused.stderr and "Traceback" not in refused.stderr


def test_the_period_of_the_counters_can_be_chosen(tmp_path: pathlib.Path) -> None:
    """It reaches the process that reads them; without the option it is 100 ms."""
    for number, (options, period_ms) in enumerate(((["--period-ms", "20"], 20), ([], 100)), 1):
        assert profile(tmp_path, *options, str(SCRIPT), "accumulation").returncode == 0
        (path,) = (tmp_path / f"penstock-profile-{number}").glob("host-*.jsonl")
        assert record.read(path).header.about["period_ms"] == period_ms


def test_the_exit_code_is_the_scripts(tmp_path: pathlib.Path) -> None:
    """And what it trained before is told."""
    script = tmp_path / "ends.py"
    script.write_text(
        "import runpy, sys\n"
        f"sys.argv = [{str(SCRIPT)!r}, 'accumulation']\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "sys.exit(7)"
    )
    done = profile(tmp_path, str(script))
    assert done.returncode == 7
    assert "backward" in done.stdout


def test_a_ctrl_c_ends_the_script_and_is_told(tmp_path: pathlib.Path) -> None:
    """It goes to the script, and what was recorded is read."""
    script = tmp_path / "waits.py"
    script.write_text(
        "import torch, time, pathlib\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for number in range(100_000):\n"
        "    model(torch.ones(1, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "    time.sleep(0.01)\n"
        "    if number == 30:\n"
        "        pathlib.Path('trains').touch()\n"
    )
    with forked.Popen(
        [sys.executable, "-m", "penstock", "profile", str(script)],
        cwd=tmp_path,
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as job:
        deadline = time.monotonic() + 60
        while not (tmp_path / "trains").exists():
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(job.pid, signal.SIGINT)
        stdout, stderr = job.communicate(timeout=60)
    assert job.returncode not in (0, None)
    assert "optimizer" in stdout and "the records are in" in stdout, stdout + stderr


def test_signals_are_handed_on(tmp_path: pathlib.Path) -> None:
    """Those that come to the command alone, in the order in which they come. It ends when the script does, and as the script."""
    script = tmp_path / "waits.py"
    script.write_text(
        "import os, signal, sys, torch\n"
        "def handle(number, _):\n"
        "    print(signal.Signals(number).name, flush=True)\n"
        "    if number == signal.SIGINT:\n"
        "        sys.exit(3)\n"
        "for name in 'HUP USR1 USR2 QUIT TERM INT'.split():\n"
        "    signal.signal(getattr(signal, 'SIG' + name), handle)\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(4):\n"
        "    model(torch.ones(1, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        # A signal that comes just before `signal.pause()` does not end it.
        "came, ends = os.pipe()\n"
        "os.set_blocking(ends, False)\n"
        "signal.set_wakeup_fd(ends)\n"
        "print('trains', flush=True)\n"
        "while True:\n"
        "    os.read(came, 1)\n"
    )
    # What is ignored stays so, and under nohup, or in the background of a shell, some are.
    usual = "import os, signal, sys\n"
    usual += "for name in 'HUP QUIT INT'.split():\n    signal.signal(getattr(signal, 'SIG' + name), signal.SIG_DFL)\n"
    usual += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    with forked.Popen(
        [sys.executable, "-c", usual, "-m", "penstock", "profile", str(script)],
        cwd=tmp_path,
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as job:
        assert job.stdout is not None and job.stdout.readline() == "trains\n"
        for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGTERM", "SIGINT"):
            os.kill(job.pid, getattr(signal, name))
            assert job.stdout.readline() == f"{name}\n"
        stdout = job.stdout.read()
    assert job.returncode == 3
    assert "the records are in" in stdout and not [*tmp_path.glob("penstock-profile-1/.penstock-*")]


@pytest.mark.slow
def test_the_command_of_the_page(tmp_path: pathlib.Path) -> None:
    """In fresh processes: torchrun, two ranks, the script of the page on `penstock convert`, and the host's counters."""
    page = pathlib.Path(__file__).parent.parent / "docs" / "guide" / "convert.md"
    (tmp_path / "train.py").write_text(page.read_text().split("```python\n")[1].split("```")[0])
    command = [sys.executable, "-m", "penstock", "profile", "--", "torchrun", "--nproc-per-node", "2", "train.py"]
    env = {**os.environ, "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "backward" in done.stdout, done.stdout + done.stderr
    names = sorted(path.name.partition("-")[0] for path in (tmp_path / "penstock-profile-1").iterdir())
    assert names == ["host", "rank", "rank"] and "counters of a host were not read" not in done.stderr
    assert "nothing was recorded" not in done.stderr and "ends early" not in done.stderr


@pytest.mark.slow
@pytest.mark.timed
def test_the_case_of_the_page(tmp_path: pathlib.Path, root: pathlib.Path) -> None:
    """gloo's one flow to a peer has a cap: that is named first, and `--apply` runs the script with penstock, whose step is
    shorter. How far off the prediction is says the page, from a machine that did nothing else."""
    with Testbed(hosts=2):  # else this test is skipped
        pass
    python = [sys.executable, "-m", "penstock"]
    hosts = [*python, "testbed", "run", "--hosts", "2", "--rate", "500", "--flow", "100", "--quiet", "--"]
    train = [sys.executable, str(root / "examples" / "char_gpt" / "train.py"), "--backend", "gloo", "--steps", "20"]
    command = [*python, "profile", "--apply", "--html", "report.html", "--", *hosts, *train]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    said = " ".join(done.stdout.split())
    assert done.returncode == 0, said + done.stderr
    assert "Next: With the penstock backend a step should take" in said, said
    assert "- eth0 of" in said and "a flow gets" in said[: said.index(" Numbers: ")], said
    assert "again, with the penstock backend" in said
    told = re.search(r"a step takes ([\d.,]+) ms instead of ([\d.,]+); the prediction was ([\d.,]+) ms", said)
    assert told is not None, said
    took, before, predicted = (float(each.replace(",", "")) for each in told.groups())
    assert took < 0.8 * before and predicted < before / 2, said
    assert (tmp_path / "report.html").exists() and any((tmp_path / "penstock-profile-1-applied").glob("rank-*.jsonl"))


def test_signals_that_another_thread_takes_are_handed_on(tmp_path: pathlib.Path) -> None:
    """The kernel gives a signal to any thread that does not block it, such as those that numpy starts."""
    program = (
        "import pathlib, signal, sys, threading\n"
        "from penstock.tools.profile import run\n"
        "for number in (signal.SIGTERM, signal.SIGINT):\n"
        "    signal.signal(number, signal.SIG_DFL)\n"
        "for _ in range(8):\n"
        "    threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "script = 'import os, signal; signal.signal(signal.SIGTERM, lambda *_: exit(7)); came, ends = os.pipe(); '\n"
        "script += 'os.set_blocking(ends, False); signal.set_wakeup_fd(ends); print(1, flush=True); os.read(came, 1)'\n"
        "sys.exit(run.run([sys.executable, '-c', script], pathlib.Path(sys.argv[1])))\n"
    )
    for turn in range(4):
        folder = tmp_path / str(turn)
        folder.mkdir()
        with forked.Popen(
            [sys.executable, "-c", program, str(folder)], env=dict(os.environ), stdout=subprocess.PIPE, text=True
        ) as job:
            assert job.stdout is not None and job.stdout.readline() == "1\n"
            job.send_signal(signal.SIGTERM)
            assert job.wait(timeout=60) == 7
