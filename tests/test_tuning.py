"""Proves that a tuner coupled to training changes how gradients travel on all ranks at once, and never what they are.

The ranks, the streams and the all-reduces are real; the time that steps take is told by a landscape (`_clock`), so that what
must be found is known. The oracle of gradients is arithmetic in this process, as in test_gradients.py.
"""

from __future__ import annotations

import logging
import math
import pathlib
import re
from typing import Any

import click.testing
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import penstock
import ranks
from penstock import cli
from penstock.errors import Bug
from penstock.errors import Config as ConfigError
from penstock.torch import GradientReducer, ddp_hook
from penstock.training import tuning
from penstock.tune import Drift, Options, Setting, State, Tuner, load_record, save_record, verify

# As many streams as between hosts, for which loopback stands here.
TCP = {"PENSTOCK_SHM": "0", "PENSTOCK_STREAMS": "16"}


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_tune_together_and_gradients_stay_right(count: int, tmp_path: pathlib.Path) -> None:
    """A whole tuning: every step's gradients are the averages, all ranks try and choose the same, the slowest rank's time counts,
    the choice is the best of what was tried, and the record explains and repeats it."""
    file = tmp_path / "tuned.json"
    env = {**TCP, "XDG_CACHE_HOME": str(tmp_path), "PENSTOCK_TUNE_RECORD": str(file)}
    values = ranks.run(_tune, count=count, args=(40,), env=env, timeout_s=180)
    assert all(value == values[0] for value in values)
    tried, chosen = values[0]
    assert len(set(tried)) >= 8 and {1, 16} < {setting.streams for setting in tried}
    assert {setting.algorithm for setting in tried} == ({"auto"} if count == 2 else {"auto", "halving-doubling"})
    assert _seconds(chosen) == min(map(_seconds, tried)) < 0.9 * _seconds(tried[0])

    record = load_record(file)
    verify(record)
    # What the ranks were told is what the slowest of them, the last, took.
    costs = record["sessions"][0]["costs"]
    assert 20 < len(costs) <= 40 and costs[0] == pytest.approx(_seconds(tried[0]) * (1 + 0.1 * (count - 1)))
    shown = click.testing.CliRunner().invoke(cli.main, ["tune", "--show", str(file), "--verify"])
    assert shown.exit_code == 0 and f"chosen: {chosen}" in shown.output, shown.output


@pytest.mark.parametrize("how", ["environment", "argument", "setting"])
def test_a_record_is_replayed(how: str, tmp_path: pathlib.Path) -> None:
    """What a record chose is in force from the first step to the last, on all ranks, though rank 0 alone has the file."""
    chosen = Setting(3, 1 << 18, "auto", "bf16")
    file = tmp_path / "record.json"
    save_record(file, Tuner.pinned(chosen).record())
    env: dict[int, dict[str, str | None]] = {0: {"PENSTOCK_TUNE": str(file)}, 1: {"PENSTOCK_TUNE": "1"}}
    argument = {"environment": None, "argument": file, "setting": chosen}[how]
    for settings, exchanges in ranks.run(_pinned, count=2, args=(argument,), env=TCP, env_of_rank=env):
        assert settings == 5 * [chosen]
        assert exchanges == 0, "no time is exchanged"


def test_a_change_with_something_in_flight_is_refused() -> None:
    """In the middle of a pass the setting cannot change, and that is said; between two passes it can."""
    ranks.run(_in_flight, count=2, env=TCP)


def test_a_drift_tunes_again(tmp_path: pathlib.Path) -> None:
    """Steps take longer than they did: all ranks tune again at the same step, and end at what is best now."""
    values = ranks.run(_drift, count=2, env={**TCP, "XDG_CACHE_HOME": str(tmp_path)}, timeout_s=120)
    assert all(value == values[0] for value in values)
    (before, after), sessions = values[0]
    assert sessions == 2
    assert _seconds(before) < 1.05 * _best(), before
    assert _seconds(after, worse=4) < 1.1 * _best(worse=4), after
    assert after.streams < before.streams


@pytest.mark.parametrize("state", ["tuning", "watching"])
def test_ranks_that_decided_differently_fall_back(state: str, tmp_path: pathlib.Path) -> None:
    """One rank's tuner is fed what the others' are not: all go on with the default at the same step, and say so."""
    with ranks.Ranks(_diverge, count=3, args=(state,), env={**TCP, "XDG_CACHE_HOME": str(tmp_path)}) as job:
        outcomes = job.outcomes(timeout_s=120)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    assert all(outcome.value == outcomes[0].value for outcome in outcomes)
    for outcome in outcomes:
        assert f"rank {outcome.rank}: the tuners of the ranks have decided differently" in outcome.output
    assert not (tmp_path / "penstock").exists() or state == "watching"


def test_memory_starts_the_next_run(tmp_path: pathlib.Path) -> None:
    """What served a model on a topology is remembered by rank 0, and a like model begins there and tunes for 20 steps; rank 1 has
    no memory of its own."""
    caches: dict[int, dict[str, str | None]] = {
        rank: {"XDG_CACHE_HOME": str(tmp_path / str(rank))} for rank in range(2)
    }
    values = ranks.run(_remember, count=2, env=TCP, env_of_rank=caches, timeout_s=120)
    assert all(value == values[0] for value in values)
    assert (tmp_path / "0").exists() and not (tmp_path / "1").exists()
    chosen, start, budget, again = values[0]
    assert (start, budget) == (chosen, 20)
    assert _seconds(again) <= _seconds(chosen)


def test_steps_are_whole_and_pauses_are_not_timed(tmp_path: pathlib.Path) -> None:
    """Passes under no_sync belong to the step that they lead to; the step around a pause that one rank tells of is timed on none;
    and after the tuning a step costs one exchange."""
    ranks.run(_pauses, count=2, env={**TCP, "XDG_CACHE_HOME": str(tmp_path)}, timeout_s=120)


def test_ddp_tunes_and_may_compress(tmp_path: pathlib.Path) -> None:
    """PENSTOCK_TUNE=1 tunes a DDP model without a change to the script; where bfloat16 is allowed, both it and none are tried,
    and the averages are as near as the dtype is. PENSTOCK_ALGORITHM stays as it was said."""
    env = {
        **TCP,
        "XDG_CACHE_HOME": str(tmp_path),
        "PENSTOCK_TUNE": "1",
        "PENSTOCK_STREAMS": "4",
        "PENSTOCK_ALGORITHM": "ring",
    }
    (tried,) = {frozenset(value) for value in ranks.run(_ddp, count=2, env=env, timeout_s=180)}
    assert {setting.compression for setting in tried} == {"off", "bf16"}
    assert {setting.algorithm for setting in tried} == {"ring"} and {s.streams for s in tried} == {1, 2, 4}


def test_what_makes_no_sense_is_refused_on_all_ranks(tmp_path: pathlib.Path) -> None:
    """A file that only rank 0 looks for and does not find, an algorithm that does not exist, a setting beside a tuner."""
    for text in ranks.run(_refused, count=2, args=(str(tmp_path / "none.json"),), env=TCP):
        assert "none.json" in text


def test_only_what_differs_is_tried() -> None:
    """One host varies buckets alone, and one stream is no choice; two ranks have one algorithm; nothing is larger than all
    gradients; pinned fields stay."""
    default = Setting(16, 4 << 20, "auto")

    def values(
        hosts: list[int], nbytes: int = 1 << 30, default: Setting = default, open_streams: int = 16, **pinned: Any
    ) -> list[Any]:
        space = tuning.space_of(default, hosts, nbytes, pinned, open_streams=open_streams)
        return [axis.values for axis in space.axes]

    assert values([0, 0, 0]) == [(16,), tuple(1 << k for k in range(18, 27)), ("auto",), ("off",)]
    assert values([0, 1], open_streams=1)[0] == (16,)
    assert values([0, 1], 1)[:3] == [(1, 2, 4, 8, 16), (1 << 18, 4 << 20), ("auto",)]
    assert values([0, 1], 5_000_000)[1] == tuple(1 << k for k in range(18, 24))
    assert values([0, 1], 8 << 20)[1] == tuple(1 << k for k in range(18, 24))
    assert values([0, 1, 2])[2] == ("auto", "halving-doubling")
    assert values([0, 0, 1])[2] == ("auto", "ring", "halving-doubling")
    assert values([0, 0, 1], algorithm="ring")[2] == ("ring",)
    assert values([0, 1], default=Setting(5, 4 << 20, "auto", "fp16"))[3] == ("off", "fp16")
    assert values([0, 1], default=Setting(5, 4 << 20, "auto"))[0] == (1, 2, 4, 5)


def test_the_example_of_the_documentation_trains_and_tunes(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The script at the top of docs/guide/tune.md, on two ranks: it ends with an explanation of a choice."""
    text = (root / "docs" / "guide" / "tune.md").read_text()
    block = re.search(r"```python\n(import torch\n.*?)```", text, re.DOTALL)
    assert block is not None
    for output in ranks.run(
        _run_text, count=2, args=(block[1],), env={**TCP, "XDG_CACHE_HOME": str(tmp_path)}, timeout_s=180
    ):
        assert "chosen: " in output


# ------------------------------------------------------------------------------------------------------------ programs


def _seconds(setting: Setting, worse: float = 0.0) -> float:
    """A landscape: each stream adds bandwidth and costs a little, one bucket size is best. `worse` makes streams cost more."""
    size = math.log2(setting.bucket_bytes / (1 << 20))
    return 0.05 + 0.2 / setting.streams + (0.001 + worse / 100) * setting.streams + 0.01 * size * size


def _best(worse: float = 0.0) -> float:
    return min(
        _seconds(Setting(streams, 1 << exponent, "auto"), worse)
        for streams in (1, 2, 4, 8, 16)
        for exponent in range(18, 23)
    )


class _Clock:
    """Stands still but where a test lets it go on; then by what the landscape says of the setting in force."""

    def __init__(self, reducer: GradientReducer, model: nn.Module) -> None:
        self.now, self.worse, self.tried = 0.0, 0.0, [Setting(1, 1, "")]
        self._reducer = reducer
        # The first parameter's gradient is the last of a pass: the setting for the step is in force by then.
        next(iter(model.parameters())).register_post_accumulate_grad_hook(self._pass)
        self.tried.clear()
        tuning.clock = self

    def __call__(self) -> float:
        return self.now

    def _pass(self, _: Any) -> None:
        slower = 1 + 0.1 * dist.get_rank()
        self.tried.append(self._reducer.setting)
        self.now += slower * _seconds(self._reducer.setting, self.worse)


def _model(width: int = 400) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, width), nn.Tanh(), nn.Linear(width, 1200), nn.Tanh(), nn.Linear(1200, 1))


def _data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 20, generator=torch.Generator().manual_seed(1000 * step + rank))


def _step(model: nn.Module, step: int) -> None:
    model.zero_grad()
    model(_data(dist.get_rank(), step)).square().mean().backward()


def _check(model: nn.Module, copy: nn.Module, step: int, **tolerance: float) -> None:
    """Every gradient is the average over the ranks of what `copy`, which has the same parameters, gets."""
    world = dist.get_world_size()
    copy.zero_grad()
    for rank in range(world):
        (copy(_data(rank, step)).square().mean() / world).backward()
    for (name, mine), other in zip(model.named_parameters(), copy.parameters(), strict=True):
        torch.testing.assert_close(
            mine.grad, other.grad, **tolerance, msg=lambda text, name=name: f"step {step}, {name}: {text}"
        )


def _tune(budget: int) -> tuple[list[Setting], Setting]:
    dist.init_process_group("penstock")
    model, copy = _model(), _model()
    reducer = GradientReducer(model, tune=Options(budget=budget))
    clock = _Clock(reducer, model)
    # The first step has no beginning, and is not timed.
    for step in range(budget + 4):
        _step(model, step)
        _check(model, copy, step)
    assert reducer.tuner is not None and reducer.tuner.state is State.WATCHING
    assert reducer.setting == reducer.tuner.best
    peers = penstock.stats()["peers"]
    before = [stream["sent_bytes"] for peer in peers for stream in peer["streams"][reducer.setting.streams :]]
    _step(model, budget + 4)
    peers = penstock.stats()["peers"]
    after = [stream["sent_bytes"] for peer in peers for stream in peer["streams"][reducer.setting.streams :]]
    assert after == before, "streams that are not used carried something"
    dist.barrier()
    reducer.close()
    assert reducer.setting.streams == 16
    dist.destroy_process_group()
    return clock.tried, reducer.tuner.best


def _pinned(argument: Any) -> tuple[list[Setting], int]:
    dist.init_process_group("penstock")
    model, copy = _model(), _model()
    reducer = GradientReducer(model, tune=argument)
    settings = []
    for step in range(5):
        _step(model, step)
        _check(model, copy, step, rtol=0.05, atol=1e-3)
        settings.append(reducer.setting)
    tuned = _channel("tuning")
    dist.destroy_process_group()
    return settings, tuned["issued"]


def _channel(name: str) -> dict[str, Any]:
    """The counters of a channel of the default group."""
    (group,) = penstock.stats()["groups"]
    (channel,) = [channel for channel in group["channels"] if channel["name"] == f"{group['name']}/{name}"]
    return dict(channel)


def _in_flight() -> None:
    dist.init_process_group("penstock")
    model, copy = _model(), _model()
    reducer = GradientReducer(model)
    before = reducer.setting
    assert before == Setting(16, 4 << 20, "auto")
    wanted = Setting(2, 1 << 18, "ring", "bf16")
    refused = []

    def change(_: Any) -> None:
        with pytest.raises(Bug, match=r"between two steps only, and .* gradients pending; .*Nothing has changed"):
            reducer.apply(wanted)
        refused.append(reducer.setting)

    handle = model[2].weight.register_post_accumulate_grad_hook(change)
    _step(model, 0)
    _check(model, copy, 0)
    assert refused == [before]
    handle.remove()
    reducer.apply(wanted)
    buckets = reducer.stats()["buckets"]
    _step(model, 1)
    _check(model, copy, 1, rtol=0.05, atol=1e-3)
    assert reducer.setting == wanted and reducer.stats()["buckets"] - buckets >= 8
    assert "ring" in _channel("buckets")["algorithm"], _channel("buckets")
    dist.destroy_process_group()


def _drift() -> tuple[tuple[Setting, Setting], int]:
    dist.init_process_group("penstock")
    model, copy = _model(), _model()
    reducer = GradientReducer(model, tune=Options(budget=60))
    clock = _Clock(reducer, model)
    assert reducer.tuner is not None and reducer.tuner.drift == Drift()
    step = 0

    def until(state: State, most: int) -> None:
        nonlocal step
        for _ in range(most):
            _step(model, step)
            _check(model, copy, step)
            step += 1
            if reducer.tuner.state is state:
                return
        raise AssertionError(f"after {most} steps the tuner is {reducer.tuner.state}")

    until(State.WATCHING, 70)
    before = reducer.tuner.best
    for _ in range(30):
        _step(model, step)
        step += 1
    assert reducer.tuner.state is State.WATCHING
    clock.worse = 4
    until(State.TUNING, 60)
    until(State.WATCHING, 70)
    dist.destroy_process_group()
    return (before, reducer.tuner.best), len(reducer.tuner.record()["sessions"])


def _diverge(state: str) -> tuple[list[Setting], Setting]:
    logging.basicConfig()
    dist.init_process_group("penstock")
    model, copy = _model(), _model()
    reducer = GradientReducer(model, tune=Options(budget=20))
    clock = _Clock(reducer, model)
    assert reducer.tuner is not None
    at = 7 if state == "tuning" else 27
    for step in range(40):
        if step == at and dist.get_rank() == 1:
            if state == "tuning":
                reducer.tuner.session.measured(1e-3)
            else:
                reducer.tuner._reference, reducer.tuner._outside = (1e-3, 0.1), 1000
                reducer.tuner._recent.extend(20 * [1.0])
        _step(model, step)
        _check(model, copy, step)
        assert reducer.tuner.state is not State.PINNED or step >= at
    assert reducer.tuner.state is State.PINNED
    assert reducer.setting == Setting(16, 4 << 20, "auto")
    dist.barrier()
    dist.destroy_process_group()
    return clock.tried, reducer.setting


def _remember() -> tuple[Setting, Setting, int, Setting]:
    dist.init_process_group("penstock")
    # Nobody measures a bandwidth on a shared machine twice alike.
    tuning._bandwidth = lambda hosts, group: 1e8
    choices = []
    for width in (400, 410):
        model, copy = _model(width), _model(width)
        reducer = GradientReducer(model, tune=Options(budget=60))
        _Clock(reducer, model)
        assert reducer.tuner is not None
        session = reducer.tuner.session
        for step in range(session.options.budget + 4):
            _step(model, step)
            _check(model, copy, step)
        assert reducer.tuner.state is State.WATCHING
        choices.append(reducer.tuner.best)
        reducer.close()
    dist.destroy_process_group()
    return choices[0], session.start, session.options.budget, choices[1]


def _pauses() -> None:
    dist.init_process_group("penstock")
    rank = dist.get_rank()
    model = _model()
    reducer = GradientReducer(model, tune=Options(budget=20))
    clock = _Clock(reducer, model)
    tuner = reducer.tuner
    assert tuner is not None
    for step in range(3):
        _step(model, step)
    slowest = 1.1 * _seconds(reducer.setting)
    assert tuner.session.costs == pytest.approx(2 * [slowest])
    with reducer.no_sync():
        _step(model, 3)
    _step(model, 4)
    assert tuner.session.costs[2:] == pytest.approx([2 * slowest])
    clock.now += 1000  # an evaluation on rank 0, for which the other waits
    if rank == 0:
        reducer.exclude_pause()
    _step(model, 5)
    assert len(tuner.session.costs) == 3
    _step(model, 6)
    assert len(tuner.session.costs) == 4 and tuner.session.costs[3] < 1
    step = 7
    while tuner.state is State.TUNING:
        _step(model, step)
        step += 1
    # One exchange is due at the end of the next pass, whose beginning waits for none that is not done.
    _step(model, step)

    def exchanges() -> int:
        return int(_channel("tuning")["issued"])

    before = exchanges()
    for _ in range(10):
        step += 1
        _step(model, step)
    assert exchanges() == before + 10
    dist.destroy_process_group()


def _ddp() -> list[Setting]:
    dist.init_process_group("penstock")
    model, copy = DistributedDataParallel(_model(), gradient_as_bucket_view=True), _model()
    reducer = ddp_hook(model, wire=torch.bfloat16)
    clock = _Clock(reducer, model.module)
    for step in range(104):
        _step(model, step)
        _check(model.module, copy, step, rtol=0.05, atol=1e-3)
    assert reducer.tuner is not None and reducer.tuner.state is State.WATCHING
    dist.destroy_process_group()
    return clock.tried


def _refused(file: str) -> str:
    dist.init_process_group("penstock")
    model = _model()
    with pytest.raises(ConfigError, match="unknown algorithm"):
        GradientReducer(model, tune=Setting(1, 1 << 20, "rnig"))
    with pytest.raises(ConfigError, match="no compression"):
        GradientReducer(model, tune=Setting(1, 1 << 20, "ring", "zip"))
    with pytest.raises(ConfigError, match="not float"):
        GradientReducer(model, tune=0.5)
    with pytest.raises(ConfigError, match="not a tuner's record: KeyError: 'sessions'"):
        GradientReducer(model, tune={"streams": 2})
    reducer = GradientReducer(model, tune=Setting(1, 1 << 20, "ring"))
    with pytest.raises(ConfigError, match="a tuner is in charge"):
        reducer.set_bucket_bytes(7)
    reducer.close()
    with pytest.raises(ConfigError) as caught:
        GradientReducer(model, tune=file if dist.get_rank() == 0 else False)
    dist.destroy_process_group()
    return str(caught.value)


def _run_text(text: str) -> str:
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(text, "docs/guide/tune.md", "exec"), {"__name__": "__main__"})
    return said.getvalue()
