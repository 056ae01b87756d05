"""The transformers that are characterised: their shapes, and that a pipeline computes what the whole model computes."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import torch.distributed as dist

import forked
import ranks
from penstock.profiling.schedules import Turn, one_forward_one_backward
from penstock.workloads.transformer.__main__ import SCHEDULES
from penstock.workloads.transformer.model import Stage, cut, parameters_of, widths
from penstock.workloads.transformer.pipeline import Pipeline
from penstock.workloads.transformer.shapes import MODELS, Shape, layers_of

SMALL = {
    "decoder": Shape("decoder", 4, 32, 2, 61, 16, "test"),
    "encoder": Shape("encoder", 3, 32, 2, 61, 16, "test"),
    "both": Shape("both", 2, 32, 2, 61, 16, "test"),
}


@pytest.mark.parametrize(
    ("model", "millions"),
    [("gpt2-medium", 355), ("gpt2-large", 774), ("gpt2-large-40", 760), ("bert-large", 335), ("t5-large", 737)],
)
def test_the_papers_models_have_their_size(model: str, millions: float) -> None:
    """Within 8 % of what is published (of gpt2-large-40: of 12 x layers x width^2 and its embeddings)."""
    [parameters] = parameters_of(MODELS[model])
    assert parameters / 1e6 == pytest.approx(millions, rel=0.08)


@pytest.mark.parametrize("stages", [1, 2, 3, 7])
@pytest.mark.parametrize("batches", [1, 2, 5, 8])
def test_the_schedule(stages: int, batches: int) -> None:
    """Every stage runs each micro-batch forward once and then backward once, in order; holds no more of them than stages follow
    it; and no two neighbours wait for each other."""
    plans = [list(one_forward_one_backward(at, stages, batches)) for at in range(stages)]
    for at, plan in enumerate(plans):
        assert [turn.batch for turn in plan if turn.is_forward] == list(range(batches))
        assert [turn.batch for turn in plan if not turn.is_forward] == list(range(batches))
        held = most = 0
        for turn in plan:
            held += 1 if turn.is_forward else -1
            most = max(most, held)
        assert most <= stages - at
    done: set[tuple[int, Turn]] = set()
    at_turn = [0] * stages
    moved = True
    while moved:
        moved = False
        for at, plan in enumerate(plans):
            while at_turn[at] < len(plan):
                turn = plan[at_turn[at]]
                needs = (at - 1, turn) if turn.is_forward else (at + 1, turn)
                if 0 <= needs[0] < stages and needs not in done:
                    break
                done.add((at, turn))
                at_turn[at] += 1
                moved = True
    assert len(done) == 2 * stages * batches


def test_a_model_is_cut_evenly() -> None:
    shape = SMALL["both"]
    assert layers_of(shape) == ["encoder", "encoder", "turn", "decoder", "decoder"]
    assert [len(part) for part in cut(shape, 3)] == [1, 2, 2]
    assert widths(shape, 3) == [1, 2] and widths(shape, 5) == [1, 1, 2, 2]
    with pytest.raises(ValueError, match="6 stages: the model has 5 layers"):
        cut(shape, 6)


def _stages_and_whole(kind: str, stages: int) -> tuple[list[Stage], Stage]:
    """The whole model, and its parts with the same weights."""
    torch.manual_seed(0)
    shape = SMALL[kind]
    whole = Stage(shape)
    parts = [Stage(shape, at, stages) for at in range(stages)]
    for part, layers in zip(parts, cut(shape, stages), strict=True):
        for own, number in zip(part.blocks, layers, strict=True):
            own.load_state_dict(whole.blocks[number].state_dict())
    assert whole.embedding is not None and whole.head is not None
    assert parts[0].embedding is not None and parts[-1].head is not None
    parts[0].embedding.load_state_dict(whole.embedding.state_dict())
    parts[-1].head.load_state_dict(whole.head.state_dict())
    return parts, whole


def _pipelined(backend: str, kind: str, micro: int, schedule: str) -> float:
    """The largest distance of a gradient from that of the whole model, on this rank."""
    dist.init_process_group(backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    order, each = SCHEDULES[schedule]
    stages = each * world
    parts, whole = _stages_and_whole(kind, stages)
    own, shape = parts[rank::world], SMALL[kind]
    drawn = torch.randint(shape.vocabulary, (2 * world, micro, 9), generator=torch.Generator().manual_seed(1))
    tokens, targets = list(drawn[:, :, :-1].unbind()), list(drawn[:, :, 1:].unbind())
    loss = Pipeline(shape, own, (micro, 8, shape.width), order).step(tokens, targets)
    expected = 0.0
    for given, wanted in zip(tokens, targets, strict=True):
        one = whole([given], wanted) / len(tokens)
        one.backward()
        expected += one.item()
    if rank == world - 1:
        assert loss == pytest.approx(expected, rel=1e-5)
    pairs = [
        (mine.grad, whole.blocks[number].get_parameter(name).grad)
        for part, layers in zip(own, cut(shape, stages)[rank::world], strict=True)
        for block, number in zip(part.blocks, layers, strict=True)
        for name, mine in block.named_parameters()
    ]
    ends = {0: own[0], world - 1: own[-1]}
    shared = ends[rank].shared_embedding() if rank in ends else None
    whole_shared = whole.shared_embedding()
    if shared is not None and whole_shared is not None:
        pairs.append((shared.grad, whole_shared.grad))
    dist.destroy_process_group()
    largest = 0.0
    for one, other in pairs:
        assert one is not None and other is not None
        largest = max(largest, (one - other).abs().max().item())
    return largest


@pytest.mark.parametrize("backend", ["penstock", "gloo"])
@pytest.mark.parametrize(
    ("kind", "count", "schedule"),
    [
        ("decoder", 2, "1f1b"),
        ("decoder", 2, "gpipe"),
        ("decoder", 2, "interleaved"),
        ("encoder", 3, "1f1b"),
        ("both", 4, "1f1b"),
        ("both", 2, "interleaved"),
    ],
)
def test_a_pipeline_has_the_gradients_of_the_whole_model(backend: str, kind: str, count: int, schedule: str) -> None:
    """With the embedding that the first and the last stage share."""
    distances = ranks.run(_pipelined, count=count, args=(backend, kind, 2, schedule))
    assert max(distances) < 1e-5


def test_too_little_memory_is_told_and_no_crash() -> None:
    """Under --memory: one line of JSON and a status of its own."""
    command = [sys.executable, "-m", "penstock.workloads.transformer", "gpt2-tiny", "--batch", "4096", "--steps", "1"]
    run = forked.run([*command, "--memory", str(1 << 30)], capture_output=True, text=True)
    assert run.returncode == 3, run.stderr
    assert json.loads(run.stdout) == {"out_of_memory": True, "limit": 1 << 30}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "7", "--micro-batch", "2"], "a batch of 7 is no multiple of 2 sequences"),
        (["--parallel", "pipeline"], "a pipeline needs two ranks"),
        (["--schedule", "gpipe"], "add --parallel pipeline"),
        (
            ["--parallel", "pipeline", "--schedule", "interleaved", "--batch", "4", "--micro-batch", "2"],
            "needs two ranks",
        ),
    ],
)
def test_what_cannot_be_trained_is_said(options: list[str], message: str) -> None:
    command = [sys.executable, "-m", "penstock.workloads.transformer", "gpt2-tiny", *options]
    run = forked.run(command, capture_output=True, text=True)
    assert run.returncode == 1 and message in run.stderr
