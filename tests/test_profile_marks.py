"""Proves how marks become spans and steps, which optimizer ends an iteration, what communication is for, and how the profiler's
events become a sample; without torch, in numbers."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from penstock.profiling import purposes
from penstock.profiling.record import Event, Header, Sample, Step, read
from penstock.tools.profile.recorder import journal, kineto, marks
from penstock.tools.profile.recorder.identity import make_room
from penstock.tools.profile.recorder.iterations import Iterations
from penstock.tools.profile.recorder.journal import Journal
from penstock.tools.profile.recorder.kineto import Call, Window
from penstock.tools.profile.recorder.marks import Marks
from penstock.tools.profile.recorder.writer import Writer


def ended(made: Marks, at: int) -> list[tuple[str, int, int]]:
    step, _ = made.end_step(at, 0)
    return [(span.phase, span.start_ns, span.end_ns) for span in step.spans]


def test_the_loss_is_forward() -> None:
    """Two modules, the model and its loss, and what lies between them and the backward pass are one forward span."""
    made = Marks(0, 0)
    made.forward(10, 20)
    made.forward(30, 40)
    made.enter("backward", 50)
    made.leave("backward", 90)
    assert ended(made, 100) == [("forward", 10, 50), ("backward", 50, 90)]


def test_forward_without_a_backward_pass_ends_with_the_module() -> None:
    made = Marks(0, 0)
    made.forward(10, 20)
    made.enter("loading", 50)
    made.leave("loading", 60)
    made.forward(70, 80)
    assert ended(made, 100) == [("forward", 10, 20), ("loading", 50, 60), ("forward", 70, 80)]


def test_forward_without_a_module_is_what_lies_before_the_backward_pass() -> None:
    """Such as a compiled function; but not the microseconds between two backward passes."""
    made = Marks(0, 0)
    made.enter("loading", 0)
    made.leave("loading", 1_000_000)
    for start, end in ((3_000_000, 4_000_000), (4_010_000, 5_000_000)):
        made.enter("backward", start)
        made.leave("backward", end)
    assert [phase for phase, *_ in ended(made, 6_000_000)] == ["loading", "forward", "backward", "backward"]


def test_what_lies_between_backward_passes_is_no_forward_where_modules_are() -> None:
    """As in a pipeline, where gradients of later micro-batches are awaited there. The next step may do without modules."""
    made = Marks(0, 0)
    made.forward(0, 1_000_000)
    for step in (0, 8_000_000):
        for start in (2_000_000, 5_000_000):
            made.enter("backward", step + start)
            made.leave("backward", step + start + 1_000_000)
        phases = [phase for phase, *_ in ended(made, step + 8_000_000)]
        assert phases == (["forward", "backward"] * 2 if step else ["forward", "backward", "backward"])


def test_a_module_in_evaluation_mode_that_is_trained_is_one() -> None:
    """What lies between its backward passes is no forward either."""
    made = Marks(0, 0)
    made.evaluation(0, 1_000_000, with_gradients=True)
    for start in (1_050_000, 5_000_000):
        made.enter("backward", start)
        made.leave("backward", start + 1_000_000)
    spans = ended(made, 8_000_000)
    assert [phase for phase, *_ in spans] == ["forward", "forward", "backward", "backward"]
    assert [spans[0][1:], spans[1][1:]] == [(0, 1_000_000), (1_000_000, 1_050_000)]


def test_evaluation_takes_in_its_loader() -> None:
    """Between two calls; the loader before the first and after the last is loading."""
    made = Marks(0, 0)
    for start in (0, 20, 40):
        made.enter("loading", start)
        made.leave("loading", start + 5)
        made.evaluation(start + 6, start + 15)
    made.enter("loading", 60)
    made.leave("loading", 65)
    assert ended(made, 100) == [("loading", 0, 5), ("evaluation", 6, 55), ("loading", 60, 65)]


def test_a_module_in_evaluation_mode_that_is_trained_is_forward() -> None:
    """With frozen batch norms, say: a backward pass follows. Without one it is evaluation."""
    made = Marks(0, 0)
    made.evaluation(10, 20, with_gradients=True)
    made.enter("backward", 30)
    made.leave("backward", 40)
    assert ended(made, 50)[0] == ("forward", 10, 20)
    made.evaluation(60, 70, with_gradients=True)
    assert ended(made, 80) == [("evaluation", 60, 70)]


def test_a_module_in_training_mode_without_gradients_is_forward_if_it_is_trained_with() -> None:
    """A generator whose output the discriminator is trained with; not an evaluation that has forgotten to switch modes, whose
    batches are loaded, nor one that no backward pass follows."""
    made = Marks(0, 0)
    made.evaluation(10, 20, in_training_mode=True)
    made.forward(22, 30)
    made.enter("backward", 35)
    made.leave("backward", 40)
    assert ended(made, 50) == [("forward", 10, 20), ("forward", 22, 35), ("backward", 35, 40)]
    for start in (60, 80):
        made.enter("loading", start)
        made.leave("loading", start + 5)
        made.evaluation(start + 5, start + 15, in_training_mode=True)
    made.enter("loading", 100)
    made.leave("loading", 105)
    made.forward(105, 110)
    made.enter("backward", 110)
    made.leave("backward", 120)
    assert ended(made, 130) == [
        ("loading", 60, 65),
        ("evaluation", 65, 95),
        ("loading", 100, 105),
        ("forward", 105, 110),
        ("backward", 110, 120),
    ]
    made.evaluation(140, 150, in_training_mode=True)
    assert ended(made, 160) == [("evaluation", 140, 150)]


@pytest.mark.parametrize("between", ["a checkpoint and a batch", "a game"])
def test_calls_in_training_mode_that_are_for_something_else_stay_evaluation(between: str) -> None:
    """What is saved after them, and then a batch is loaded; or what a policy does between them takes most of the time."""
    made = Marks(0, 0)
    made.evaluation(0, 10, in_training_mode=True)
    if between == "a game":
        made.evaluation(50, 60, in_training_mode=True)
    else:
        for phase in ("checkpoint", "loading"):
            made.enter(phase, 60)
            made.leave(phase, 65)
    made.forward(70, 80)
    made.enter("backward", 80)
    made.leave("backward", 90)
    assert [phase for phase, *_ in ended(made, 100) if phase in ("evaluation", "forward")] == ["evaluation", "forward"]


def test_what_is_open_at_the_end_of_a_step_goes_on() -> None:
    """A GradScaler's step holds the optimizer's, which ends the iteration."""
    made = Marks(0, 0)
    made.enter("inf check", 10)
    made.enter("optimizer", 20)
    made.leave("optimizer", 30)
    assert ended(made, 30) == [("optimizer", 20, 30), ("inf check", 10, 30)]
    made.leave("inf check", 35)
    assert ended(made, 50) == [("inf check", 30, 35)]


def test_an_exception_leaves_no_span_open() -> None:
    """The end of an outer span ends the inner ones whose ends were missed; an end without a beginning is nothing."""
    made = Marks(0, 0)
    made.enter("backward", 10)
    made.enter("optimizer", 20)
    made.leave("backward", 30)
    made.leave("optimizer", 40)
    assert ended(made, 50) == [("optimizer", 20, 30), ("backward", 10, 30)]
    assert ended(made, 60) == []


def test_a_step_keeps_so_many_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are left out are counted."""
    monkeypatch.setattr(marks, "MOST_MARKS", 10)
    made = Marks(0, 0)
    for at in range(25):
        made.wait(at, at + 1)
    step, left_out = made.end_step(100, 7)
    assert (len(step.waits), left_out, step.thread_ns) == (10, 15, 7)
    assert made.end_step(200, 8) == (Step(1, 100, 200, (), (), 1, 0), 0)


@pytest.mark.parametrize("seed", range(200))
def test_a_journal_makes_the_same_steps_later(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks of any order, with ends that were missed, settled at any time: steps are those of marks that are made at once, and
    what is open is answered at once."""
    draw = random.Random(f"journal {seed}")
    monkeypatch.setattr(journal, "_MOST", draw.choice([1, 7, 4096]))
    at_once, later = Marks(0, 0), Journal(0, 0)
    wanted, found = [], []
    phases = ["backward", "optimizer", "loading", "clip"]
    for now in range(10, 4000, 10):
        what = draw.choice(
            ["enter", "enter", "leave", "leave", "forget", "forward", "evaluation", "wait", "loaded", "step"]
        )
        arguments: tuple[Any, ...] = ()
        if what in ("enter", "leave"):
            arguments = (draw.choice(phases), now)
        elif what == "forget":
            arguments = (draw.choice(phases),)
        elif what in ("forward", "evaluation", "wait"):
            arguments = (now - draw.randrange(1, 9), now)
        elif what == "loaded":
            arguments = (draw.randrange(5),)
        if what == "step":
            wanted.append(at_once.end_step(now, now // 2))
            later.end_step(now, now // 2)
            assert (later.number, later.start_ns) == (at_once.number, at_once.start_ns)
        else:
            how = ("with_gradients", "in_training_mode")
            more = {each: draw.random() < 0.5 for each in how} if what == "evaluation" else {}
            getattr(at_once, what)(*arguments, **more)
            getattr(later, what)(*arguments, **more)
        assert [later.is_in(phase) for phase in phases] == [at_once.is_in(phase) for phase in phases]
        if draw.random() < 0.05:
            found += later.settle(now)
            assert found == wanted and not later.has_ended
    found += later.settle(4000)
    assert found == wanted and len(wanted) > 10


def test_a_journal_is_due_with_many_notes_or_after_some_time() -> None:
    """Steps of 100 us wait for others, one of a second does not; what a signal's handler raises costs no other note."""
    made = Journal(0, 0)
    for step in range(30):
        for at in range(4):
            made.wait(step * 100_000 + at, step * 100_000 + at + 1)
        made.end_step((step + 1) * 100_000, 0)
        if made.is_due((step + 1) * 100_000):
            break
    assert step == 19 and [each.number for each, _ in made.settle(2_000_000)] == list(range(20))
    made.end_step(3_000_000, 0)
    assert not made.is_due(3_000_000) and made.is_due(1_002_000_000)

    class Stop(BaseException):
        pass

    def raises(_: Marks) -> None:
        raise Stop

    made._notes += [(raises,)]
    made.end_step(4_000_000, 0)
    with pytest.raises(Stop):
        made.settle(5_000_000)
    assert [each.number for each, _ in made.settle(5_000_000)] == [20, 21]


@dataclasses.dataclass(eq=False)
class Optimizer:
    name: str


def test_the_first_optimizer_ends_the_iteration() -> None:
    """Of two that take turns, and of one that steps more often than the other."""
    first, second = Optimizer("first"), Optimizer("second")
    iterations = Iterations()
    assert [iterations.stepped(each) for each in (first, second, first, second)] == [True, False, True, False]
    assert [iterations.stepped(each) for each in (second, second, second, first)] == [False, False, False, True]


def test_another_optimizer_takes_over() -> None:
    """When the first one is no longer used, whether it still exists or not."""
    for is_kept in (True, False):
        first, second = Optimizer("first"), Optimizer("second")
        iterations = Iterations()
        assert iterations.stepped(first)
        if not is_kept:
            del first
        told = [iterations.stepped(second) for _ in range(20)]
        assert told == [False] * 15 + [True] * 5


def test_purposes_by_name() -> None:
    """Names of a DeviceMesh's dimensions and of Megatron's groups."""
    assert {name: purposes.of_group(name) for name in NAMES} == NAMES


NAMES = {
    "mesh_tp": "tensor",
    "mesh_dp_replicate": "data-parallel sync",
    "mesh_fsdp": "data-parallel sync",
    "mesh_ep": "expert",
    "TENSOR_MODEL_PARALLEL_GROUP": "tensor",
    "DATA_PARALLEL_GROUP": "data-parallel sync",
    "EXPERT_MODEL_PARALLEL_GROUP": "expert",
    "EXPERT_DATA_PARALLEL_GROUP": "data-parallel sync",
    "EMBEDDING_GROUP": "embedding sync",
    "POSITION_EMBEDDING_GROUP": "embedding sync",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "data-parallel sync",
    "DATA_PARALLEL_GROUP_WITH_CP": "data-parallel sync",
    "mesh_sp": "tensor",
    "PIPELINE_MODEL_PARALLEL_GROUP": "",
    "7": "",
    "stepper": "",
}


# ---------------------------------------------------------------------------------------------------- the profiler


class Seen:
    """An event of Kineto."""

    def __init__(self, name: str, start: int, end: int, **more: Any) -> None:
        self._name, self._start, self._end, self._more = name, start, end, more

    def __getattr__(self, name: str) -> Any:
        defaults = {
            "start_thread_id": 1,
            "is_async": False,
            "scope": 0,
            "shapes": [],
            "dtypes": [],
            "device_type": None,
        }
        defaults |= {"correlation_id": 0, "linked_correlation_id": 0, "activity_type": "cpu_op"}
        value = self._more.get(name, defaults.get(name))
        return lambda: value

    def name(self) -> str:
        return self._name

    def start_ns(self) -> int:
        return self._start + 1000

    def duration_ns(self) -> int:
        return self._end - self._start


def sampled(events: list[Seen], **window: Any) -> Sample:
    return kineto.sample(events, Window(3, 0, 1_000_000, **window), lambda at: at - 1000, 1)


def test_an_operation_begins_with_its_launch() -> None:
    """gloo's course begins when a thread of gloo's takes it from the queue. Two of one name are matched in their order, and the
    bytes are those of the input."""
    found = sampled(
        [
            Seen("c10d::allreduce_", 100_000, 110_000),
            Seen("c10d::allreduce_", 200_000, 210_000),
            Seen("gloo:all_reduce", 300_000, 400_000, is_async=True, shapes=[[8, 4]], dtypes=["float"]),
            Seen("gloo:all_reduce", 390_000, 500_000, is_async=True, shapes=[[3]], dtypes=["c10::BFloat16"]),
        ],
        backward=[(150_000, 250_000)],
        reducers=Call("", "default", 0, ranks=2, purpose="data-parallel sync"),
    )
    assert [(one.issued_ns, one.ended_ns, one.bytes, one.purpose) for one in found.operations] == [
        (100_000, 400_000, 128, ""),
        (200_000, 500_000, 6, "data-parallel sync"),
    ]


def test_what_a_backend_makes_of_others_is_one_operation() -> None:
    """gloo's reduce_scatter of a tensor, and of a list, which has an all_reduce for each rank, beside one of the script's own;
    and its monitored_barrier, which sends and receives, beside a send of the script's."""

    def course(name: str, start: int, end: int, length: int) -> Seen:
        return Seen(f"gloo:{name}", start, end, is_async=True, shapes=[[length]], dtypes=["float"])

    calls = [
        Call("reduce_scatter", "a", 100_000, 110_000, 2, bytes=64),
        Call("reduce_scatter", "b", 120_000, 130_000, 2, bytes=64, parts=2),
        Call("all_reduce", "b", 140_000, 150_000, 2, bytes=64),
        Call("reduce_scatter", "a", 500_000, 510_000, 2, bytes=64, waited_ns=590_000),
        Call("barrier", "b", 700_000, 760_000, 2, waited_ns=760_000),
        Call("send", "b", 800_000, 810_000, 2, 1),
    ]
    events = [
        Seen("c10d::_reduce_scatter_base_", 102_000, 108_000),
        Seen("c10d::reduce_scatter_", 122_000, 128_000),
        Seen("c10d::allreduce_", 142_000, 148_000),
        course("all_reduce", 160_000, 200_000, 16),
        course("all_reduce", 170_000, 240_000, 8),
        course("all_reduce", 175_000, 230_000, 8),
        course("all_reduce", 250_000, 300_000, 16),
        Seen("c10d::_reduce_scatter_base_", 502_000, 508_000),
        course("all_reduce", 520_000, 600_000, 16),
        Seen("c10d::monitored_barrier_", 702_000, 758_000),
        course("recv", 710_000, 730_000, 1),
        course("send", 740_000, 745_000, 1),
        Seen("c10d::send", 802_000, 808_000),
        course("send", 805_000, 850_000, 16),
    ]
    found = sampled(events, calls=calls).operations
    assert [(one.name, one.group, one.number, one.issued_ns, one.ended_ns, one.bytes) for one in found] == [
        ("reduce_scatter", "a", 0, 102_000, 200_000, 64),
        ("reduce_scatter", "b", 0, 122_000, 240_000, 64),
        ("all_reduce", "b", 0, 142_000, 300_000, 64),
        ("reduce_scatter", "a", 1, 502_000, 590_000, 64),
        ("barrier", "b", 0, 700_000, 760_000, 0),
        ("send", "b", 0, 802_000, 850_000, 64),
    ]
    seen = Seen("penstock:reduce_scatter", 105_000, 190_000, is_async=True)
    own = sampled([*events[:1], seen, course("all_reduce", 150_000, 160_000, 1)], calls=calls[:1]).operations
    assert [(one.name, one.ended_ns) for one in own] == [("reduce_scatter", 190_000), ("all_reduce", 160_000)]
    several = [Call("reduce_scatter", "a", 100_000, 110_000, 2, parts=2, bytes=64)]
    batch = [Seen("c10d::reduce_scatter_tensor_coalesced_", 102_000, 108_000)]
    batch += [course("all_reduce", 120_000, 150_000, 8), course("all_reduce", 130_000, 170_000, 8)]
    [one] = sampled(batch, calls=several).operations
    assert (one.name, one.issued_ns, one.ended_ns, one.bytes) == ("reduce_scatter", 102_000, 170_000, 64)


def test_launches_of_a_batch_have_no_course() -> None:
    """All of a batch have one, of another name. A later send is issued when it was launched itself, not when the batch was."""
    calls = [
        Call("send", "a", 100_000, 110_000, 2, 1, is_batched=True),
        Call("send", "a", 300_000, 310_000, 2, 1),
    ]
    found = sampled(
        [
            Seen("c10d::send", 101_000, 109_000),
            Seen("penstock:coalesced", 120_000, 200_000, is_async=True),
            Seen("c10d::send", 301_000, 309_000),
            Seen("penstock:send", 305_000, 400_000, is_async=True),
        ],
        calls=calls,
    )
    assert [(one.name, one.issued_ns, one.ended_ns) for one in found.operations] == [
        ("send", 120_000, 200_000),
        ("send", 301_000, 400_000),
    ]


def test_busy_is_operators_alone() -> None:
    """Of the training thread and of autograd's, joined where little lies between; not what waits or holds others."""
    found = sampled(
        [
            Seen("aten::mm", 0, 100_000),
            Seen("aten::add", 105_000, 120_000),
            Seen("Optimizer.step#SGD.step", 0, 900_000, scope=7),
            Seen("_c10d_functional::wait_tensor", 200_000, 300_000),
            Seen("c10d::barrier", 300_000, 310_000),
            Seen("aten::elsewhere", 400_000, 500_000, start_thread_id=2),
            Seen("MulBackward0", 600_000, 650_000, scope=1, start_thread_id=3),
            Seen("aten::mul", 640_000, 660_000, start_thread_id=3),
            Seen("aten::late", 990_000, 1_200_000),
        ]
    )
    assert found.busy == ((0, 120_000), (600_000, 660_000), (990_000, 1_000_000))


def test_a_sample_keeps_so_many_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """And counts the rest."""
    monkeypatch.setattr(kineto, "MOST_EVENTS", 5)
    found = sampled([Seen("gloo:all_reduce", 200 + at, 300, is_async=True) for at in range(9)])
    assert (found.dropped, [one.issued_ns for one in found.operations]) == (4, [200, 201, 202, 203, 204])


@pytest.mark.parametrize("order", ["as they came", "reversed"])
def test_many_operators_are_joined_and_none_is_left_out(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """Of 2,000 operators in two threads, where a sample may keep 16 intervals: those that follow each other are one, whatever
    their order, and the long pauses between them stay."""
    monkeypatch.setattr(kineto, "MOST_EVENTS", 16)
    events = []
    for block in range(5):
        for at in range(200):
            start = block * 200_000 + at * 500
            events.append(Seen("aten::mm", start, start + 400))
            events.append(Seen("MulBackward0", start + 100_000, start + 100_400, scope=1, start_thread_id=3))
    found = sampled(events if order == "as they came" else events[::-1])
    # In each block one thread runs for 100 us, and then the other.
    assert found.busy[0][0] == 0 and found.busy[-1][1] == 999_900
    assert sum(end - start for start, end in found.busy) >= 990_000 and found.dropped == 0
    alone = sampled([event for event in events if event.scope() != 1])
    assert alone.busy == tuple((block * 200_000, block * 200_000 + 99_900) for block in range(5))


def test_a_backend_without_courses() -> None:
    """What Python waited for is an operation, from its call to the end of the wait. What nobody waited for is not known."""
    known = Call("all_reduce", "a", 100, 110, 2, None, "", 40, waited_ns=500)
    found = sampled([Seen("c10d::allreduce_", 101, 109)], calls=[known, Call("all_reduce", "a", 200, 210)])
    assert [(one.issued_ns, one.ended_ns, one.group, one.bytes) for one in found.operations] == [(100, 500, "a", 40)]


def test_a_wait_ends_an_operation() -> None:
    """A backend's thread may write the end of a course after whoever waited went on."""
    known = Call("all_reduce", "a", 100, 110, 2, waited_ns=500)
    found = sampled([Seen("c10d::allreduce_", 101, 109), Seen("gloo:all_reduce", 105, 700)], calls=[known])
    assert [(one.issued_ns, one.ended_ns) for one in found.operations] == [(101, 500)]


# -------------------------------------------------------------------------------------------------------- the file


def test_the_file_of_an_earlier_life_is_moved(tmp_path: Any) -> None:
    """After each restart, so that the folder itself holds the last life."""
    path = tmp_path / "rank-0.jsonl"
    for life in range(3):
        make_room(path).write_text(str(life))
    found = {str(each.relative_to(tmp_path)): each.read_text() for each in tmp_path.rglob("*.jsonl")}
    assert found == {"rank-0.jsonl": "2", "before-1/rank-0.jsonl": "0", "before-2/rank-0.jsonl": "1"}


def test_a_rank_that_learns_its_number_late(tmp_path: Any) -> None:
    """What was written before is in another file, and what comes after in that of its new number."""
    rank = 0
    writer = Writer(
        lambda: Header(rank, 2, "here", 1, 0, 0), lambda header: tmp_path / f"rank-{header.rank}.jsonl", lambda: None
    )
    writer.put(Event(1, "fork"))
    first = tmp_path / "rank-0.jsonl"
    while not first.exists() or first.read_text().count("\n") < 2:  # the header and the event
        pass
    rank = 1
    writer.put(Event(2, "end"))
    writer.close()
    found = [read(tmp_path / f"rank-{number}.jsonl") for number in (0, 1)]
    assert [[event.kind for event in record.events] for record in found] == [["fork"], ["end"]]


def test_a_step_with_too_many_marks_goes_on() -> None:
    """Attacks on a model in evaluation mode, say, without an optimizer: what finds no room is left out and counted."""
    made = Marks(0, 0)
    for at in range(0, 20 * marks.MOST_MARKS, 20):
        made.evaluation(at, at + 5, with_gradients=True)
        made.enter("backward", at + 10)
        made.leave("backward", at + 15)
    step, left_out = made.end_step(20 * marks.MOST_MARKS, 0)
    assert len(step.spans) == marks.MOST_MARKS and left_out > 0
    assert {span.phase for span in step.spans} == {"forward", "backward"}


def test_an_optimizer_of_an_inner_loop_ends_no_iteration() -> None:
    """A new one in each iteration steps five times, and the outer one once: after some, iterations are the outer one's."""

    class Optimizer:
        pass

    ends, outer = Iterations(), Optimizer()
    ended_by: list[str] = []
    for _ in range(60):
        inner = Optimizer()
        ended_by += ["inner" for _ in range(5) if ends.stepped(inner)]
        ended_by += ["outer"] * ends.stepped(outer)
    assert ended_by == ["inner"] * 5 + ["outer"] * (60 - 15)


def test_one_optimizer_a_layer_leaves_nothing_out() -> None:
    """Twenty of them: the last iteration ends with the others' steps, as each does. Of optimizers that are new each round the
    steps since the first one's count."""

    class Optimizer:
        pass

    layers, ends = [Optimizer() for _ in range(20)], Iterations()
    assert sum(ends.stepped(each) for _ in range(5) for each in layers) == 5 and ends.left == 0
    rounds = Iterations()
    kept = [Optimizer() for _ in range(6)]
    assert sum(rounds.stepped(each) for each in kept for _ in range(10)) == 10 and rounds.left == 50


def test_a_wrapper_with_slots_is_an_optimizer() -> None:
    """To which there is no weak reference."""

    class Wrapper:
        __slots__ = ()

    ends, wrapper = Iterations(), Wrapper()
    assert [ends.stepped(wrapper) for _ in range(3)] == [True] * 3
