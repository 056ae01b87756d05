"""Old names of arguments, methods, options, variables and keys in files: each works for one more release, with a warning."""

from __future__ import annotations

import json
import logging
import pathlib
import warnings
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import penstock
import ranks
from landscapes import RECORDED
from penstock import renamed
from penstock.errors import Config as ConfigError
from penstock.runtime import config
from penstock.tools import info
from penstock.tools.bench import readiness, training
from penstock.torch import GradientReducer, ddp_hook
from penstock.tune import Entry, Graph, Memory, Options, Setting, Space, Tuner, load_record, save_record, verify

MIB = 1 << 20


@renamed.arguments(old="new")
def _called(first: int, *, new: int = 0) -> tuple[int, int]:
    """What was passed."""
    return first, new


def test_an_old_argument_is_passed_under_its_new_name() -> None:
    """The warning points at the caller's line; the new name and none at all warn of nothing; both at once are an error."""
    with pytest.warns(DeprecationWarning, match=f"argument old is now new; .* until release {renamed.UNTIL}") as caught:
        assert _called(1, old=2) == (1, 2)  # type: ignore[call-arg]
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _called(1, new=2) == (1, 2) and _called(1) == (1, 0)
    with pytest.raises(TypeError, match="takes new or its old name old, not both"):
        _called(1, old=2, new=3)  # type: ignore[call-arg]


def test_settings_of_the_tuner() -> None:
    """`unit_bytes` is a Setting's argument and attribute, and `most_unit_bytes` an argument of the space, still."""
    with pytest.warns(DeprecationWarning, match="unit_bytes is now bucket_bytes"):
        setting = Setting(streams=1, unit_bytes=MIB, algorithm="ring")  # type: ignore[call-arg]
    assert setting == Setting(1, MIB, "ring")
    with pytest.warns(DeprecationWarning, match=r"Setting\.unit_bytes is now Setting\.bucket_bytes"):
        assert setting.unit_bytes == MIB
    with pytest.warns(DeprecationWarning, match="most_unit_bytes is now most_bucket_bytes"):
        old: Any = Space.standard(setting, max_streams=1, most_unit_bytes=MIB)  # type: ignore[call-arg]
    assert old.to_json() == Space.standard(setting, max_streams=1, most_bucket_bytes=MIB).to_json()


def _with_old_names(path: pathlib.Path) -> str:
    """The file as the release before wrote it."""
    text = path.read_text().replace('"bucket_bytes"', '"unit_bytes"').replace("B buckets, ", "B units, ")
    path.write_text(text)
    return text


def test_records_of_an_older_release(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tuner's record with `unit_bytes` is read, replayed and pinned like a new one, from a file and as a dict."""
    landscape = RECORDED["plain"]
    tuner = Tuner(landscape.space, options=Options(budget=60))
    for step in range(60):
        tuner.begin_step()
        tuner.end_step(1.0 + step % 3)
    path = tmp_path / "tuned.json"
    save_record(path, tuner.record())
    new = json.loads(path.read_text())
    text = _with_old_names(path)
    assert text.count("unit_bytes") > 10 and "bucket" not in text and " units, " in text
    with caplog.at_level(logging.WARNING, logger="penstock.tune"):
        assert load_record(path) == new
        assert caplog.text.count("unit_bytes is now bucket_bytes") == 1
        verify(json.loads(text))
        assert Tuner.from_record(json.loads(text)).best == tuner.best


def test_a_memory_of_an_older_release(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Remembered settings are found again, and the next entry writes the file with the new names."""
    graph = Graph((("a", 1.0),), (), directed=True)
    entry = Entry(graph, graph, Setting(2, MIB, "ring"), 0.1)
    memory = Memory(tmp_path / "tune.json")
    assert memory.remember(entry)
    _with_old_names(memory.path)
    with caplog.at_level(logging.WARNING, logger="penstock.tune"):
        assert memory.entries() == [entry]
    assert "unit_bytes is now bucket_bytes" in caplog.text
    assert memory.remember(entry) and "unit_bytes" not in memory.path.read_text()


def test_an_old_option_of_the_bench(capsys: pytest.CaptureFixture[str]) -> None:
    """`--unit` is `--bucket`, and one line on standard error says so; --help shows the new name only."""
    for command, arguments in ((readiness.command, []), (training.command, ["cnn"])):
        assert command.make_context("x", [*arguments, "--unit", "3M"]).params["bucket"] == "3M"
        assert "--unit is now --bucket" in capsys.readouterr().err
        context = command.make_context("x", arguments)
        assert context.params["bucket"] == "1M" and "--unit" not in command.get_help(context)


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """PENSTOCK_PLAN is read where PENSTOCK_DEPLOYMENT is not set, and `penstock info` lists both, with what to do."""
    assert config.read({"PENSTOCK_PLAN": "old"}).deployment == "old"
    assert config.read({"PENSTOCK_PLAN": "old", "PENSTOCK_DEPLOYMENT": "new"}).deployment == "new"
    assert config.renamed_variables({"PENSTOCK_DEPLOYMENT": "new"}) == {}
    assert config.unknown_variables({"PENSTOCK_PLAN": "old"}) == {}
    monkeypatch.delenv("PENSTOCK_DEPLOYMENT", raising=False)
    monkeypatch.setenv("PENSTOCK_PLAN", "old")
    listed = {setting["name"]: setting for setting in info.gather()["settings"]}
    assert (listed["PENSTOCK_DEPLOYMENT"]["value"], listed["PENSTOCK_DEPLOYMENT"]["origin"]) == ("old", "environment")
    assert "PENSTOCK_PLAN is now PENSTOCK_DEPLOYMENT" in listed["PENSTOCK_PLAN"]["meaning"]


def test_an_old_setting_is_logged_once() -> None:
    """One line on one rank of the host; and the setting counts."""
    with ranks.Ranks(_group, count=2, env={"PENSTOCK_PLAN": "none.yaml"}) as job:
        outcomes = job.outcomes(timeout_s=60)
    lines = [line for outcome in outcomes for line in outcome.output.splitlines() if "PENSTOCK_PLAN is now" in line]
    assert len(lines) == 1, lines
    for outcome in outcomes:
        assert outcome.raised is not None and outcome.raised.is_a("penstock.errors.PenstockError"), str(outcome)
        assert "PENSTOCK_DEPLOYMENT=none.yaml: the file cannot be read" in outcome.raised.text


def _group() -> None:
    dist.init_process_group("penstock")


def test_a_deployment_from_the_script() -> None:
    """`penstock.init(plan=...)` is `penstock.init(deployment=...)`, whose errors have the new name."""
    with pytest.warns(DeprecationWarning, match="argument plan is now deployment"):
        penstock.init(plan=None)  # type: ignore[call-arg]
    with (
        pytest.warns(DeprecationWarning, match="argument plan is now deployment"),
        pytest.raises(ConfigError, match=r"penstock.init\(deployment='none.yaml'\): the file cannot be read"),
    ):
        penstock.init(plan="none.yaml")  # type: ignore[call-arg]


def test_reducers() -> None:
    """`unit_bytes` and `set_unit_bytes` cut buckets of that size."""
    assert ranks.run(_reducers, count=1) == [[100_000, 64, 7]]


def _reducers() -> list[int]:
    dist.init_process_group("penstock")
    with pytest.warns(DeprecationWarning, match="unit_bytes is now bucket_bytes"):
        reducer = GradientReducer(nn.Linear(3, 3), unit_bytes=100_000)  # type: ignore[call-arg]
    sizes = [reducer.setting.bucket_bytes]
    with pytest.warns(DeprecationWarning, match="set_unit_bytes is now set_bucket_bytes"):
        reducer.set_unit_bytes(64)
    sizes.append(reducer.setting.bucket_bytes)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    with pytest.warns(DeprecationWarning, match="unit_bytes is now bucket_bytes"):
        sizes.append(ddp_hook(model, unit_bytes=7).setting.bucket_bytes)  # type: ignore[call-arg]
    dist.destroy_process_group()
    return sizes
