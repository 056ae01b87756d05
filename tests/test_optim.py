"""The hybrid of Adam and SGD and the linear decay: their formulas, and that they are ordinary classes of torch."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pathlib
import pickle
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, lr_scheduler

import forked
from penstock.optim import AdamSGD, LinearDecay
from penstock.training.optim import mixing_weight

SHAPES = [(7,), (3, 5), (), (2, 3, 4)]

# Adam alone for 4 steps, mixed for 5, SGD from the tenth on: every phase in a test of a dozen steps.
SHORT = {"adam_steps": 4, "mix_steps": 5}


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def give_gradients(held: list[nn.Parameter], step: int) -> None:
    """Gradients that depend on the step and the tensor alone, of sizes that differ a hundredfold between elements."""
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in held:
        noise = torch.randn(parameter.shape, generator=generator)
        size = 10 ** (2 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(7)) - 2)
        parameter.grad = ((noise + 0.5) * size).to(parameter.dtype)


def trajectory(optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    """Run the steps; returns copies of all parameters."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in steps:
        give_gradients(held, step)
        optimizer.step()
    return [parameter.detach().clone() for parameter in held]


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


# ------------------------------------------------------------------------------------------------------ the formulas


@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1}, {"maximize": True}, {"betas": (0.8, 0.95), "eps": 1e-3}]
)
def test_the_first_phase_is_adamw(options: dict[str, Any]) -> None:
    """Before the mixing begins, every step is torch's own AdamW."""
    ours = trajectory(AdamSGD(parameters(), lr=0.01, adam_steps=20, **options), range(20))
    theirs = trajectory(AdamW(parameters(), lr=0.01, **{"weight_decay": 0.0, **options}), range(20))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"maximize": True}])
def test_all_phases_follow_the_documented_formula(options: dict[str, Any]) -> None:
    """Plain Python over single numbers, written from docs/design/optim.md, arrives where the optimizer does."""
    held = parameters(torch.float64)
    expected = [reference(parameter.detach().clone(), index, 14, options) for index, parameter in enumerate(held)]
    ours = trajectory(AdamSGD(held, lr=0.01, **SHORT, **options), range(14))
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def reference(start: Tensor, index: int, steps: int, options: dict[str, Any]) -> Tensor:
    x = start.flatten().tolist()
    m, v, scale = [0.0] * len(x), [0.0] * len(x), 0.0
    for t in range(1, steps + 1):
        held = parameters(torch.float64)
        give_gradients(held, t - 1)
        g = held[index].grad.flatten().tolist()
        if options.get("maximize"):
            g = [-each for each in g]
        m = [0.9 * a + 0.1 * b for a, b in zip(m, g, strict=True)]
        v = [0.999 * a + 0.001 * b * b for a, b in zip(v, g, strict=True)]
        m_hat = [a / (1 - 0.9**t) for a in m]
        adam = [a / (math.sqrt(b / (1 - 0.999**t)) + 1e-8) for a, b in zip(m_hat, v, strict=True)]
        # The scale is measured up to the last step of the mixing, and stays as it is then.
        if t <= 9:
            scale = sum(a * a for a in adam) / sum(a * b for a, b in zip(adam, m_hat, strict=True))
        w = 0.0 if t <= 4 else 1.0 if t > 9 else (1 - math.cos(math.pi * (t - 4) / 6)) / 2
        x = [a * (1 - 0.01 * options.get("weight_decay", 0.0)) for a in x]
        x = [a - 0.01 * ((1 - w) * b + w * scale * c) for a, b, c in zip(x, adam, m_hat, strict=True)]
    return torch.tensor(x, dtype=torch.float64).reshape(start.shape)


def test_the_last_phase_is_sgd_with_momentum() -> None:
    """After the hand-over torch's SGD makes the same steps, given the momentum and each tensor's own step size."""
    hybrid = AdamSGD(parameters(torch.float64), lr=0.01, betas=(0.9, 0.99), **SHORT)
    trajectory(hybrid, range(400))  # By then Adam's bias correction of m, 1 - 0.9^400, is 1.
    held = hybrid.param_groups[0]["params"]
    twins = [nn.Parameter(parameter.detach().clone()) for parameter in held]
    groups = [
        {"params": [twin], "lr": 0.01 * hybrid.state[parameter]["scale"].item()}
        for twin, parameter in zip(twins, held, strict=True)
    ]
    sgd = SGD(groups, momentum=0.9, dampening=0.9)
    for twin, parameter in zip(twins, held, strict=True):
        sgd.state[twin]["momentum_buffer"] = hybrid.state[parameter]["mean"].clone()
    for one, other in zip(trajectory(hybrid, range(400, 420)), trajectory(sgd, range(400, 420)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_the_scale_is_frozen_and_the_second_moment_dropped() -> None:
    """At the hand-over each tensor's step size becomes a constant, and the memory of v is given back."""
    optimizer = AdamSGD(parameters(), **SHORT)
    trajectory(optimizer, range(9))
    assert all("square" in state for state in optimizer.state.values())
    trajectory(optimizer, range(9, 10))
    scales = [state["scale"].item() for state in optimizer.state.values()]
    assert all("square" not in state for state in optimizer.state.values()) and min(scales) > 0
    trajectory(optimizer, range(10, 20))
    assert [state["scale"].item() for state in optimizer.state.values()] == scales


def test_the_weight_rises_from_adam_to_sgd_without_a_jump() -> None:
    """0 up to the last step of Adam, 1 from the first of SGD, never falling, and no step of more than pi / 2 the mean."""
    weights = [mixing_weight(step, 10, 99) for step in range(1, 121)]
    assert weights[:10] == [0.0] * 10 and weights[109:] == [1.0] * 11
    rises = [b - a for a, b in itertools.pairwise(weights)]
    assert min(rises) >= 0 and max(rises) < math.pi / 2 / 99
    assert [mixing_weight(step, 0, 0) for step in (1, 2)] == [1.0, 1.0]


def test_a_tensor_without_gradients_so_far_stays_with_adam() -> None:
    """Gradients of zero give no step size for SGD, so the hand-over waits until there was one that is not."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = AdamSGD([parameter], lr=0.1, **SHORT)
    for _ in range(20):
        parameter.grad = torch.zeros(3)
        optimizer.step()
    assert torch.equal(parameter.detach(), torch.ones(3)) and "square" in optimizer.state[parameter]
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert (parameter < 1).all() and "square" not in optimizer.state[parameter]


@pytest.mark.parametrize("seed", range(3))
def test_it_reaches_the_minimum_of_a_badly_scaled_quadratic(seed: int) -> None:
    """With linear decay the three phases together converge where SGD alone would need a step size for each tensor."""
    torch.manual_seed(seed)
    held = [nn.Parameter(torch.randn(10)), nn.Parameter(torch.randn(10))]
    optimizer = AdamSGD(held, lr=0.05, adam_steps=200, mix_steps=200)
    schedule = LinearDecay(optimizer, 1000)
    for _ in range(1000):
        optimizer.zero_grad()
        (held[0].square().sum() * 1e-3 + held[1].square().sum() * 1e3).backward()
        optimizer.step()
        schedule.step()
    assert max(parameter.abs().max().item() for parameter in held) < 1e-3, f"seed {seed}"


# ------------------------------------------------------------------------------------------- an ordinary optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("cut", [0, 3, 4, 7, 9, 10, 12])
def test_loading_a_state_resumes_with_the_same_bits(cut: int, dtype: torch.dtype) -> None:
    """In every phase, through a file: what a resumed run computes is what the run would have computed."""
    whole = trajectory(AdamSGD(parameters(dtype), lr=0.01, weight_decay=0.1, **SHORT), range(16))

    before = AdamSGD(parameters(dtype), lr=0.01, weight_decay=0.1, **SHORT)
    trajectory(before, range(cut))
    file = io.BytesIO()
    torch.save({"optimizer": before.state_dict(), "parameters": before.param_groups[0]["params"]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    after = AdamSGD(loaded["parameters"], lr=123.0)
    after.load_state_dict(loaded["optimizer"])
    assert same_bits(trajectory(after, range(cut, 16)), whole)


def test_a_state_loads_without_pickled_code() -> None:
    """torch.load's weights_only takes a checkpoint: the state holds tensors and numbers, nothing of ours."""
    optimizer = AdamSGD(parameters(), **SHORT)
    trajectory(optimizer, range(11))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = AdamSGD(parameters())
    again.load_state_dict(torch.load(file, weights_only=True))
    assert again.param_groups[0]["adam_steps"] == 4


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_goes_on_as_the_original_does(copied: Callable[[Any], Any]) -> None:
    """deepcopy and pickle carry parameters, options and state."""
    optimizer = AdamSGD(parameters(), lr=0.01, **SHORT)
    trajectory(optimizer, range(7))
    twin = copied(optimizer)
    assert same_bits(trajectory(twin, range(7, 14)), trajectory(optimizer, range(7, 14)))


def test_groups_have_options_of_their_own() -> None:
    """Two groups move as two optimizers would, and a group that is added later begins with Adam."""
    held = parameters()
    both = AdamSGD([{"params": held[:2], "lr": 0.1, **SHORT}, {"params": held[2:], "maximize": True}], lr=0.01)
    first, second = parameters(), parameters()
    one = AdamSGD(first[:2], lr=0.1, **SHORT)
    two = AdamSGD(second[2:], lr=0.01, maximize=True)
    for step in range(12):
        for some in (held, first, second):
            give_gradients(some, step)
        for optimizer in (both, one, two):
            optimizer.step()
    assert same_bits([p.detach() for p in held], [p.detach() for p in [*first[:2], *second[2:]]])

    late = nn.Parameter(torch.ones(2))
    both.add_param_group({"params": [late], **SHORT})
    late.grad = torch.ones(2)
    both.step()
    assert both.state[late]["step"] == 1 and torch.allclose(late.detach(), torch.tensor(0.99))


def test_parameters_without_a_gradient_do_not_move_or_age() -> None:
    """One that is unfrozen late gets its whole phase of Adam."""
    still, moving = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = AdamSGD([still, moving], weight_decay=0.1)
    moving.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(still.detach(), torch.ones(2)) and still not in optimizer.state


def test_a_tied_weight_that_comes_twice_moves_once() -> None:
    """Listed twice in a group, as two models that share it list it, a parameter takes the steps of one that is listed once."""
    once, twice = parameters(), parameters()
    optimizers = [AdamSGD(once, **SHORT), AdamSGD(itertools.chain(twice, twice[:2]), **SHORT)]
    ends = [trajectory(optimizer, range(12)) for optimizer in optimizers]
    assert same_bits(*ends)


def test_a_closure_is_evaluated_once_with_gradients() -> None:
    """`step(closure)` returns the loss of before the step."""
    parameter = nn.Parameter(torch.tensor([2.0]))
    optimizer = AdamSGD([parameter], lr=0.1)
    calls = []

    def closure() -> Tensor:
        calls.append(parameter.item())
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert calls == [2.0] and parameter.item() == pytest.approx(1.9)


def test_a_gradient_scaler_skips_what_overflowed() -> None:
    """Under GradScaler a step with an infinite gradient leaves parameters and state alone; the next one counts."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = AdamSGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor, moved in ((float("inf"), False), (1.0, True)):
        optimizer.zero_grad()
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (parameter.item() if parameter.dim() == 0 else parameter[0].item()) == pytest.approx(0.9 if moved else 1)
    assert optimizer.state[parameter]["step"] == 1


def test_wrong_options_are_refused_by_name() -> None:
    """A negative or impossible option, a complex parameter and a sparse gradient raise and say what is wrong."""
    for options in ({"lr": -1}, {"betas": (1.0, 0.9)}, {"eps": -1}, {"adam_steps": -1}, {"mix_steps": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            AdamSGD(parameters(), **options)
    optimizer = AdamSGD(parameters())
    for group in (
        {"params": parameters(), "eps": -1},
        {"params": [nn.Parameter(torch.ones(2, dtype=torch.complex64))]},
    ):
        with pytest.raises(ValueError, match=r"eps|complex"):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
    embedding = nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        AdamSGD(embedding.parameters()).step()


def test_a_learning_rate_may_be_a_tensor() -> None:
    """As in torch's optimizers; the steps are the same."""
    as_tensor = trajectory(AdamSGD(parameters(), lr=torch.tensor(0.01), weight_decay=0.1, **SHORT), range(12))
    as_float = trajectory(AdamSGD(parameters(), lr=0.01, weight_decay=0.1, **SHORT), range(12))
    for one, other in zip(as_tensor, as_float, strict=True):
        torch.testing.assert_close(one, other)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda k: 0.9**k),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    # It asks the optimizer for a momentum, and finds Adam's in `betas`.
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.01),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.01, total_steps=20),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [LinearDecay(o, 5, end_factor=0.5), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_of_torch_drives_it(name: str) -> None:
    """Each sets the same learning rates as for AdamW, and the steps shrink and grow with them."""
    rates: list[list[float]] = []
    for make in (AdamSGD, AdamW):
        optimizer = make(parameters(), lr=0.01)
        schedule = SCHEDULES[name](optimizer)
        rates.append([])
        for step in range(12):
            trajectory(optimizer, range(step, step + 1))
            schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates[-1].append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1] and len(set(rates[0])) > 1


# ------------------------------------------------------------------------------------------------- the linear decay


def rates_of(schedule: LinearDecay, calls: int) -> list[float]:
    """The learning rate now and after each of so many calls."""
    rates = [schedule.optimizer.param_groups[0]["lr"]]
    for _ in range(calls):
        schedule.optimizer.step()
        schedule.step()
        rates.append(schedule.optimizer.param_groups[0]["lr"])
    return rates


def test_linear_decay_is_two_lines() -> None:
    """Up to the base in the warm-up, down to the end factor at the last step, and flat from there on."""
    plain = rates_of(LinearDecay(SGD(parameters(), lr=2.0), 4), 6)
    assert plain == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.0, 0.0, 0.0])
    warm = rates_of(LinearDecay(SGD(parameters(), lr=4.0), 7, warmup_steps=3, end_factor=0.5), 9)
    assert warm == pytest.approx([1.0, 2.0, 3.0, 4.0, 3.5, 3.0, 2.5, 2.0, 2.0, 2.0])


def test_linear_decay_agrees_with_torchs_where_both_can_do_it() -> None:
    """Without a warm-up it is LinearLR from 1 to the end factor."""
    theirs = SGD(parameters(), lr=0.3)
    schedule = lr_scheduler.LinearLR(theirs, 1.0, 0.1, total_iters=20)
    ours = rates_of(LinearDecay(SGD(parameters(), lr=0.3), 20, end_factor=0.1), 25)
    for rate in ours:
        assert rate == pytest.approx(theirs.param_groups[0]["lr"])
        theirs.step()
        schedule.step()


@pytest.mark.parametrize("cut", [0, 2, 5, 11])
def test_linear_decay_resumes_with_the_same_bits(cut: int) -> None:
    """Through a state_dict, which holds numbers only."""
    whole = rates_of(LinearDecay(SGD(parameters(), lr=0.3), 10, warmup_steps=3, end_factor=0.1), 12)
    first = LinearDecay(SGD(parameters(), lr=0.3), 10, warmup_steps=3, end_factor=0.1)
    rates_of(first, cut)
    file = io.BytesIO()
    torch.save((first.state_dict(), first.optimizer.state_dict()), file)
    file.seek(0)
    state, optimizer_state = torch.load(file, weights_only=True)
    optimizer = SGD(parameters(), lr=99.0)
    second = LinearDecay(optimizer, 99)
    optimizer.load_state_dict(optimizer_state)
    second.load_state_dict(state)
    assert rates_of(second, 12 - cut) == whole[cut:]


def test_linear_decay_scales_each_group_and_takes_new_ones() -> None:
    """Every group falls from its own base; one that joins late falls from what it came with."""
    held = parameters()
    optimizer = SGD([{"params": held[:1], "lr": 1.0}, {"params": held[1:2], "lr": 10.0}])
    schedule = LinearDecay(optimizer, 4)
    optimizer.step()
    schedule.step()
    optimizer.add_param_group({"params": held[2:], "lr": 100.0})
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 5.0, 50.0])


def test_linear_decay_moves_a_tensor_in_place() -> None:
    """A learning rate that is a tensor stays that tensor, as compiled optimizers need it."""
    rate = torch.tensor(1.0)
    schedule = LinearDecay(SGD(parameters(), lr=rate), 2)
    schedule.optimizer.step()
    schedule.step()
    assert schedule.optimizer.param_groups[0]["lr"] is rate and rate.item() == 0.5


def test_linear_decay_refuses_what_makes_no_line() -> None:
    """A warm-up that leaves nothing to decay over, and factors outside 0 to 1."""
    for total, options in ((0, {}), (5, {"warmup_steps": 5}), (5, {"end_factor": 1.5}), (5, {"end_factor": -0.1})):
        with pytest.raises(ValueError):
            LinearDecay(SGD(parameters()), total, **options)


def test_no_warning_comes_up() -> None:
    """The usual order of calls is silent."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rates_of(LinearDecay(AdamSGD(parameters()), 3, warmup_steps=1), 4)


# ---------------------------------------------------------------------------------------------------------- examples


def test_the_comparison_runs(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The script behind the table in docs/design/optim.md still trains with every method."""
    command = [sys.executable, root / "examples" / "optimizers.py", "--steps", "2", "--seeds", "1", "--windows", "1"]
    done = forked.run([*command, "--json", tmp_path / "out.json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("mean") == 4 and (tmp_path / "out.json").exists()


def test_the_example_of_the_documentation_runs(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The code at the top of docs/guide/optim.md trains: its loss ends near 0."""
    block = re.search(r"```python\n(.*?)```", (root / "docs" / "guide" / "optim.md").read_text(), re.DOTALL)
    assert block is not None
    program = tmp_path / "program.py"
    program.write_text("import torch; torch.manual_seed(0)\n" + block[1])
    done = forked.run([sys.executable, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.1
