"""Proves that the changes of `penstock profile --apply` are made where a script lets them, and break none where it does not."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import click.testing
import pytest

import forked
import profiles
from penstock.profiling.advice import Advice
from penstock.profiling.cause import Cause
from penstock.profiling.divide import divide
from penstock.profiling.predict import Prediction
from penstock.tools.profile import cli, run
from penstock.tools.profile.shown import mean_step_ns

HEAD = """
import datetime, json, os, pathlib, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
torch.set_num_threads(1)

def trained(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

def say(what):
    pathlib.Path(os.environ["SAID"], str(dist.get_rank())).write_text(json.dumps(what))
"""

HOOK = {"comm_hook": "float16"}
BUCKETS = {"bucket_cap_mb": 4}
BACKEND = {"backend": "penstock"}

CASES: list[tuple[str, Mapping[str, str | int], str, str, bool]] = [
    (
        "a plain model",
        HOOK,
        "m = DDP(nn.Linear(4, 4)); trained(m); say(m._comm_hooks[0][0].__name__)",
        '"fp16_compress_hook"',
        True,
    ),
    (
        "a hook of its own",
        HOOK,
        "m = DDP(nn.Linear(4, 4)); m.register_comm_hook(None, default_hooks.allreduce_hook); trained(m);"
        "say([h.__name__ for h, _ in m._comm_hooks])",
        '["allreduce_hook"]',
        False,
    ),
    (
        "a hook that is built in",
        HOOK,
        "m = DDP(nn.Linear(4, 4)); m._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE); trained(m);"
        "say(len(m._comm_hooks))",
        "0",
        False,
    ),
    (
        "a size by position",
        BUCKETS,
        "m = DDP(nn.Linear(4, 4), None, None, 0, True, True, None, 1); trained(m); say(m.bucket_bytes_cap)",
        str(4 << 20),
        True,
    ),
    (
        "a subclass",
        BUCKETS,
        "class Own(DDP):\n    def __init__(self, m):\n        super().__init__(m, bucket_cap_mb=1)\n"
        "m = Own(nn.Linear(4, 4)); trained(m); say(m.bucket_bytes_cap)",
        str(4 << 20),
        True,
    ),
    ("no model", BUCKETS, "dist.barrier()\nsay(0)", "0", False),
]


@pytest.fixture
def changed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, forks: None) -> Any:
    def changed(text: str, settings: Mapping[str, str | int]) -> tuple[list[str], list[str]]:
        """What the ranks said, and what was not made of the change."""
        script, folder = tmp_path / "script.py", tmp_path / "profile"
        script.write_text(HEAD + text)
        folder.mkdir()
        monkeypatch.setenv("SAID", str(tmp_path))
        assert run.run([*forked.TORCHRUN, "--nproc-per-node=2", str(script)], folder, settings) == 0
        return [(tmp_path / str(rank)).read_text() for rank in range(2)], run.not_made(folder, settings)

    return changed


@pytest.mark.parametrize(
    ("settings", "text", "want", "is_made"), [each[1:] for each in CASES], ids=[each[0] for each in CASES]
)
def test_a_change_of_ddp(changed: Any, settings: Mapping[str, str | int], text: str, want: str, is_made: bool) -> None:
    """It is made, or the script's own choice stays; that it was not made is known. The script ends well."""
    said, left = changed(f"dist.init_process_group('gloo')\n{text}\n", settings)
    assert said == [want] * 2 and left == ([] if is_made else list(settings))


@pytest.mark.parametrize(
    ("call", "want"),
    [
        ("dist.init_process_group('gloo')", "penstock"),
        ("dist.init_process_group(backend='GLOO')", "penstock"),
        (
            "from torch.distributed import init_device_mesh; dist.init_process_group('gloo'); init_device_mesh('cpu', (2,))",
            "penstock",
        ),
    ],
)
def test_a_change_of_the_backend(changed: Any, call: str, want: str) -> None:
    """However the script names it, in new groups too."""
    group = "g = dist.new_group([0, 1], datetime.timedelta(seconds=60), 'gloo')"
    said, left = changed(f"{call}\n{group}\nsay([dist.get_backend(), dist.get_backend(g)])\n", BACKEND)
    assert said == [f'["{want}", "penstock"]'] * 2 and not left


@pytest.mark.parametrize(
    ("call", "want"),
    [
        ("dist.init_process_group()", "penstock"),
        ("dist.init_process_group('cpu:gloo')", "penstock"),
        ("dist.init_process_group('cpu:fake')", "fake"),
    ],
)
def test_a_change_of_what_torch_chooses_for_the_cpu(changed: Any, call: str, want: str) -> None:
    """Where no backend is named, or one for each kind of device; another one than gloo stays, and that is known."""
    said, left = changed(
        "from torch.testing._internal.distributed import fake_pg\n"
        f"{call}\ng = dist.new_group([0, 1])\n"
        "of = lambda group: group._get_backend(torch.device('cpu')).name()\nsay([of(dist.group.WORLD), of(g)])\n",
        BACKEND,
    )
    assert said == [f'["{want}", "{want}"]'] * 2 and left == (["backend"] if want == "fake" else [])


@pytest.mark.parametrize(
    ("settings", "arguments", "want", "is_made"),
    [
        (BUCKETS, "", [4 << 20, False], True),
        ({"bucket_cap_mb": 25}, "bucket_bytes=1 << 20", [25 << 20, False], True),
        (HOOK, "", [4 << 20, True], True),
        (HOOK, "wire=torch.float16", [4 << 20, True], False),
    ],
)
def test_a_change_of_a_gradient_reducer(
    changed: Any, settings: Mapping[str, str | int], arguments: str, want: list[Any], is_made: bool
) -> None:
    """Sizes of buckets, and float16, which rounds 1 + 2^-15 to 1. What the script says of float16 holds."""
    said, left = changed(
        "dist.init_process_group('penstock')\n"
        "from penstock.torch import GradientReducer\n"
        f"m = nn.Linear(4, 4)\nr = GradientReducer(m, {arguments})\n"
        "m(torch.full((1, 4), 1 + 2.0**-15)).sum().backward()\n"
        "say([r._setting.bucket_bytes, m.weight.grad[0, 0].item() == 1.0])\nr.close()\n",
        settings,
    )
    assert [json.loads(each) for each in said] == [want] * 2 and left == ([] if is_made else list(settings))


def test_ranks_of_other_hosts_are_not_changed_apart(tmp_path: pathlib.Path) -> None:
    """Each host's command would choose for itself, and the ranks would not fit each other."""
    advice = Advice((), (FOUR_MIB,))
    for records in (profiles.data_parallel(2, hosts=("one-0a", "two-0b")), profiles.data_parallel(2)[:1]):
        with click.testing.CliRunner().isolation() as (_, error, *_rest):
            assert cli._apply(["false"], tmp_path / "profile", records, advice) == 0
            assert b"there were ranks of other hosts" in error.getvalue()
    assert not list(tmp_path.iterdir())


class Applied(NamedTuple):
    """What `--apply` made of some advice."""

    settings: list[Mapping[str, Any]]
    """Of each run that it started."""
    said: list[str]
    problems: str


@pytest.fixture
def applied(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As if the command were run again: a step is then shorter."""

    def applied(advice: Advice) -> Applied:
        before = profiles.data_parallel(2, hosts=("one-0a", "one-0b"))
        after = profiles.data_parallel(2, hosts=("one-0a", "one-0b"), forward_ns=4_000_000, backward_ns=30_000_000)
        runs: list[Mapping[str, Any]] = []
        monkeypatch.setattr(cli.run, "run", lambda command, folder, settings, period_ms: runs.append(settings) or 0)
        monkeypatch.setattr(cli.run, "not_made", lambda folder, settings: [])
        monkeypatch.setattr(cli, "_load", lambda folder: after)
        with click.testing.CliRunner().isolation() as (output, error, *_rest):
            assert cli._apply(["false"], tmp_path / "profile", before, advice) == 0
            return Applied(runs, output.getvalue().decode().splitlines(), error.getvalue().decode())

    return applied


MS = 1e6
TWICE = Prediction("twice the link", "", 100 * MS, 40 * MS, 0.0, "")
EVEN = Prediction("no straggler", "", 100 * MS, 50 * MS, 0.0, "", {}, "straggler")
INTERLEAVED = Prediction("an interleaved schedule", "ScheduleInterleaved1F1B", 100 * MS, 55 * MS, 0.0, "", {}, "bubble")
FOUR_MIB = Prediction("buckets of 4 MiB", "bucket_cap_mb=4", 100 * MS, 60 * MS, 0.05, "", BUCKETS, "small buckets")
SLOW = Cause("straggler", "wait", "the others wait 62 ms", "look at its device", 62 * MS, 60 * MS, 3)
THREADS = {"PENSTOCK_IO_THREADS": "4"}
COPIES = Cause("memory copies", "wire", "1 of 2", "PENSTOCK_IO_THREADS=4 if cores are free", 90 * MS, settings=THREADS)


def test_what_is_skipped_is_said(applied: Any) -> None:
    """What ranks before the change that is made: in one line, each with its place and why; nothing where none does."""
    done = applied(Advice((SLOW, COPIES), (TWICE, EVEN, INTERLEAVED, FOUR_MIB)))
    assert done.settings == [BUCKETS]
    skipped, again, told = done.said
    assert skipped == (
        "better-ranked, and skipped: 1. twice the link (no setting can do that: it takes a faster link between the hosts); "
        "2. no straggler (no setting can do that: look at rank 3); 3. an interleaved schedule (it changes the script or the "
        "cluster); 4. cheaper copies (no gain is predicted)"
    )
    assert again == "again, with buckets of 4 MiB (bucket_cap_mb=4) ..."
    times = re.fullmatch(
        r"a step takes (\S+) ms instead of (\S+); the prediction was (\S+) ms \(±5 %\), (\S+) % too low", told
    )
    assert times is not None, told
    took, before, predicted, miss = map(float, times.groups())
    assert predicted == pytest.approx(0.6 * before, abs=0.1) and miss == pytest.approx(
        100 * (1 - predicted / took), abs=0.2
    )
    assert applied(Advice((), (FOUR_MIB,))).said == [again, told]


def test_times_are_compared_without_what_the_profiler_takes() -> None:
    """It takes more in one run than in another."""
    held_up = {(rank, number): 30_000_000 for rank in range(2) for number in (4, 7)}
    plain, profiled = profiles.data_parallel(2), profiles.data_parallel(2, profiler_ns=held_up)
    assert divide(profiled).shares[0].work["profiler"] > 5e6
    assert mean_step_ns(divide(profiled)) == pytest.approx(mean_step_ns(divide(plain)), rel=0.01)


@pytest.mark.parametrize("gain_ns", [None, 12 * MS])
def test_a_setting_without_a_prediction(applied: Any, gain_ns: float | None) -> None:
    """Is made where nothing that is predicted can be, and no gain is claimed but the rule's."""
    cause = dataclasses.replace(COPIES, gain_ns=gain_ns, cost_ns=24 * MS)
    done = applied(Advice((cause,), (TWICE,)))
    assert done.settings == [THREADS]
    skipped, again, told = done.said
    assert skipped.startswith("better-ranked, and skipped: 1. twice the link (no setting can do that: it takes")
    assert again == "again, cheaper copies (PENSTOCK_IO_THREADS=4) ..."
    rule = " (its rule expected 12.0 ms less, at most)" if gain_ns else ""
    assert re.fullmatch(
        rf"a step takes \S+ ms instead of \S+; its gain had not been predicted{re.escape(rule)}", told
    ), told


def test_a_prediction_that_may_be_a_loss_comes_after_what_ranks_higher(applied: Any) -> None:
    """2 % faster, with a stated error of 7: the copies' setting, of which half is expected, is made."""
    slight = dataclasses.replace(FOUR_MIB, after_ns=98 * MS, error=0.07)
    done = applied(Advice((COPIES,), (slight,)))
    assert done.settings == [THREADS] and "skipped" not in " ".join(done.said)
    assert applied(Advice((), (slight,))).settings == [BUCKETS], "where it is all that there is"


def test_nothing_that_can_be_made(applied: Any) -> None:
    """The command is not run again, and why each change was skipped is said."""
    done = applied(Advice((SLOW,), (TWICE, EVEN)))
    assert not done.settings and "no change that --apply can make" in done.problems
    assert done.said == [
        "skipped: 1. twice the link (no setting can do that: it takes a faster link between the hosts); "
        "2. no straggler (no setting can do that: look at rank 3)"
    ]


def test_a_folder_that_cannot_take_the_second_run_is_refused_first(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before hours of training."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("open('started', 'w')")
    (tmp_path / "profile-applied").mkdir()
    (tmp_path / "profile-applied" / "rank-0.jsonl").touch()
    done = click.testing.CliRunner().invoke(cli.command, ["--apply", "--output", "profile", "script.py"])
    assert done.exit_code == 1 and "profile-applied holds a profile already" in done.output
    assert not (tmp_path / "started").exists()
