"""Proves that random programs of torch.distributed calls do on real ranks what a model says: docs/design/random-programs.md.

A fixed range of seeds and every seed that ever failed; `./dev fuzz` runs new ones at length.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import forked
from collectives import reference
from random_programs import (
    engine_faults,
    faults,
    generate,
    horovod_optimizers,
    judge,
    known,
    mutants,
    plant,
    render,
    run,
    shrink,
)
from random_programs.pool import FAULT_MEDIA, MEDIA, Pool

ROOT = pathlib.Path(__file__).resolve().parents[1]
FAILED = [
    json.loads(line) for line in (pathlib.Path(generate.__file__).parent / "failed.jsonl").read_text().splitlines()
]
FAILED_WITH_A_FAULT = [one for one in FAILED if "fault" in one["program"]]
FAILED = [one for one in FAILED if "fault" not in one["program"]]
# In parts, so that a failure says more, and none comes near the limit of a test.
SEEDS = [range(start, start + 25) for start in range(0, 100, 25)]
# By medium: collectives and an elastic job whose rank is killed, training jobs whose rank is killed, stopped for less or more
# than the others' patience, parted and cut off.
FAULT_SEEDS = {"memory": [8, 16, 27], "tcp": [23, 42], "hosts": [13, 55]}
# What is planted in every run of the tests; the others are looked for with `./dev fuzz --mutant all`.
PLANTED = ["avg-without-division", "descriptor-lost", "error-of-wrong-kind"]


def test_a_seed_is_a_program() -> None:
    """The same seed gives the same program; programs are plain data; each call is known to the model and to the renderer."""
    for seed in range(300):
        program = generate.generate(seed)
        assert json.loads(json.dumps(program)) == program
        assert generate.generate(seed) == program
        compile(render.script(program, ["nothing"]), f"seed {seed}", "exec")


@pytest.mark.parametrize("seed", range(40))
def test_right_programs_cannot_block(seed: int) -> None:
    """Whatever order the ranks run in, a right program comes to its end: the timeline of `generate` holds."""
    program = generate.generate(seed, wrong=False)
    order = random.Random(seed)
    at = [0] * program["ranks"]
    issued: dict[str, set[int]] = {name: set() for name in program["calls"]}

    def is_ready(rank: int) -> bool:
        if at[rank] == len(program["steps"][rank]):
            return False
        step = program["steps"][rank][at[rank]]
        if step[0] in ("call", "wait"):
            issued[step[1]].add(rank)
            return issued[step[1]] == set(generate.members(program, program["calls"][step[1]]))
        return True

    while ready := [rank for rank in range(program["ranks"]) if is_ready(rank)]:
        rank = order.choice(ready)
        step = program["steps"][rank][at[rank]]
        if step[0] == "issue":
            issued[step[1]].add(rank)
        at[rank] += 1
    assert at == [len(steps) for steps in program["steps"]]


@pytest.mark.parametrize("seed", range(20))
def test_shrinking_keeps_programs_whole(seed: int) -> None:
    """A failure that needs one call shrinks to little more than that call, and every candidate on the way is a program."""
    program = generate.generate(seed, wrong=False)
    wanted = next((spec["call"] for spec in program["calls"].values() if spec["call"] != "new_group"), None)
    if wanted is None:
        return

    def fails(candidate: dict[str, Any]) -> bool:
        compile(render.script(candidate, []), "candidate", "exec")
        return any(spec["call"] == wanted for spec in candidate["calls"].values())

    small = shrink.shrink(program, fails, trials=2000)
    assert fails(small)
    assert sum(spec["call"] != "new_group" for spec in small["calls"].values()) == 1
    assert shrink.size(small) <= shrink.size(program)


def test_shrinking_keeps_the_deviation() -> None:
    """Candidates of a wrong program hold the call that is wrong, also where the group that it is made in could go. (Seed 90038
    ended the command instead.)"""
    for seed in range(90_000, 90_060):
        program = generate.generate(seed, wrong=True)
        if program["wrong"] is not None:
            for candidate in shrink._candidates(program):
                assert program["wrong"]["call"] in candidate["calls"], f"seed {seed}"


def test_adasum_of_the_model() -> None:
    """Orthogonal vectors are added and parallel ones averaged; others are as the formula says, to a few roundings."""
    ones = [torch.tensor(one) for one in ([3.0, 0.0, 0.0], [0.0, 5.0, 0.0], [0.0, 0.0, 7.0])]
    assert horovod_optimizers.adasum(ones)[0].tolist() == [3.0, 5.0, 7.0]
    assert horovod_optimizers.adasum([torch.full((2,), 1.0 + at) for at in range(4)])[0].tolist() == [2.5, 2.5]
    assert horovod_optimizers.adasum([torch.zeros(2), torch.ones(2)])[0].tolist() == [1.0, 1.0]
    result, off = horovod_optimizers.adasum([torch.tensor([1.0, 1.0]), torch.tensor([2.0, 0.0])])
    # a.b = 2, |a|^2 = 2, |b|^2 = 4: half of a and three quarters of b.
    assert result.tolist() == [2.0, 0.5] and (off > 0).all() and (off < 1e-4).all()


def test_judge_of_optimizers() -> None:
    """A rank that makes a step too many is the only one that fails; where it makes one fewer, the others do; where its parameters
    differ, all do. Each says so in Horovod's words, and nobody else gets an error."""
    op = {"kind": "optimizer", "set": None, "stage": 0, "how": "sync"}
    call = {"call": "hvd", "group": "world", "sets": [], "ops": [op]}
    program: dict[str, Any] = {"ranks": 2, "calls": {"0": call}}
    for how, words, failing in (
        ("more steps", "Horovod has been shut down", [1]),
        ("fewer steps", "Horovod has been shut down", [0]),
        ("size of a parameter", "Mismatched ALLREDUCE tensor shapes", [0, 1]),
    ):
        program["wrong"] = {"kind": "hvd", "rank": 1, "call": "0", "how": how, "op": 0}

        def said(ranks_that_fail: list[int], words: str = words) -> list[str]:
            end = {"call": "0", "step": "op 0", "seconds": 0.1, "kinds": ["HorovodInternalError"], "text": words}
            reports = {
                rank: {"ends": [end] if rank in ranks_that_fail else [], "complaints": [], "digests": {}}
                for rank in (0, 1)
            }
            return judge.judge(program, reports)

        assert said(failing) == []
        assert any("nobody noticed" in text for text in said([]))
        assert any("not an error that" in text for text in said(failing, "something else"))
        if len(failing) == 1:
            assert any("an error elsewhere" in text for text in said([0, 1]))


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[str, Pool]]:
    """Ranks to run on, by medium."""
    with contextlib.ExitStack() as stack:
        yield {medium: stack.enter_context(Pool(medium)) for medium in MEDIA}


@pytest.mark.parametrize("medium", list(MEDIA))
@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"from-{seeds.start}")
def test_seeds(seeds: range, medium: str, pools: dict[str, Pool]) -> None:
    """A fixed range of seeds, right and wrong programs, does what the model says; nothing is left behind."""
    for seed in seeds:
        if seed in known.SEEDS:
            print(f"seed {seed} stands: {known.SEEDS[seed]}")
            continue
        complaints = pools[medium].run(generate.generate(seed, medium=medium, avoid=known.AVOID))
        again = f"seed {seed}: ./dev fuzz --seed {seed} --count 1 --medium {medium}"
        assert not complaints, "\n".join([again, *complaints])


@pytest.mark.timed
@pytest.mark.parametrize("medium", list(FAULT_MEDIA))
def test_faults(medium: str) -> None:
    """Programs, training jobs and elastic jobs during which a rank is killed, stopped or cut off, at a random event: the others
    end in time with an error that names it, or go on and are right; nothing is left behind."""
    with Pool(medium, patience_s=faults.PATIENCE_S) as pool:
        for seed in FAULT_SEEDS[medium]:
            complaints = pool.run(faults.generate(seed, medium=medium, avoid=known.AVOID))
            again = f"seed {seed}: ./dev fuzz --faults --seed {seed} --count 1 --medium {medium}"
            assert not complaints, "\n".join([again, *complaints])
            assert pool.struck, f"{again}: the event did not come"


@pytest.mark.parametrize("failed", FAILED, ids=lambda failed: failed["name"].replace(" ", "-"))
@pytest.mark.parametrize("medium", list(MEDIA))
def test_programs_that_failed(failed: dict[str, Any], medium: str, pools: dict[str, Pool]) -> None:
    """What random programs once found stays mended."""
    if failed["known"] in known.AVOID:
        pytest.skip(f"stands: {known.AVOID[failed['known']]}")
    program = {**failed["program"], "medium": medium}
    assert not pools[medium].run(program)


@pytest.mark.timed
@pytest.mark.parametrize("failed", FAILED_WITH_A_FAULT, ids=lambda failed: failed["name"].replace(" ", "-"))
def test_programs_with_faults_that_failed(failed: dict[str, Any]) -> None:
    """What faults once found stays mended."""
    with Pool(failed["program"]["medium"], patience_s=faults.PATIENCE_S) as pool:
        assert not pool.run(failed["program"])


def test_model_agrees_with_gloo(pools: dict[str, Pool]) -> None:
    """The model is right where gloo has the calls: gloo passes the programs that penstock passes."""
    for seed in range(0, 40, 2):
        program = generate.for_gloo(generate.generate(seed, wrong=False, avoid=known.AVOID))
        assert not pools["tcp"].run(program, backend="gloo"), f"seed {seed} on gloo"


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_faults_can_be_planted(name: str) -> None:
    """What they replace is there; otherwise the ranks would die, and any program would find that."""
    with mutants.planted(name):
        pass


@pytest.mark.parametrize("name", engine_faults.FAULTS)
def test_faults_of_the_crates_can_be_planted(name: str) -> None:
    """The text that a fault replaces stands in its file exactly once, so that the table does not rot when the crates change."""
    fault = engine_faults.FAULTS[name]
    whole = (ROOT / "crates" / fault.file).read_text()
    assert whole.count(fault.text) == 1, f"{name}: write its text in engine_faults.py as crates/{fault.file} has it now"
    assert fault.replacement != fault.text


@pytest.mark.parametrize("name", [name for name, fault in engine_faults.FAULTS.items() if fault.expected or fault.test])
def test_faults_that_programs_do_not_find_fail_a_test(name: str) -> None:
    """Each has a reason and a test, which is there."""
    fault = engine_faults.FAULTS[name]
    assert fault.expected, f"{name}: say why programs do not find it"
    if fault.expected.startswith("no effect: "):
        return
    assert fault.test is not None, f"{name}: name a test that fails with it"
    package = ROOT / "crates" / fault.test.package
    *_, function = fault.test.name.split("::")
    files = [package / "tests" / f"{fault.test.file}.rs"] if fault.test.file else (package / "src").rglob("*.rs")
    is_there = any(re.search(rf"^ *fn {function}\(", file.read_text(), re.MULTILINE) for file in files)
    assert is_there, f"{name}: there is no test {fault.test}"


def test_what_a_test_of_the_crates_prints_is_understood() -> None:
    """A fault whose test passes, or is not there, is an error."""
    one = engine_faults.Test("penstock-core", "groups::tests::one")
    said = "running 1 test\nthread 'one' (7) panicked at src/one.rs:1:2:\nleft: 1\nright: 2\nnote: run with\n"
    assert plant.failure(said + "test result: FAILED. 0 passed; 1 failed", one) == "left: 1 right: 2"
    for passes in (said + "test result: ok. 1 passed", "running 0 tests\ntest result: ok. 0 passed"):
        with pytest.raises(plant.Defective, match="penstock-core, lib: groups::tests::one"):
            plant.failure(passes, one)


def test_fault_whose_text_is_gone_is_not_planted(tmp_path: pathlib.Path) -> None:
    """It is an error, and not a fault that no program finds; what was planted is gone afterwards."""
    file = tmp_path / "crates" / "file.rs"
    file.parent.mkdir()
    fault = engine_faults.EngineFault("file.rs", "one", "two", "")
    for text in ("", "one one"):
        file.write_text(text)
        with pytest.raises(plant.Defective, match="must stand there once"), plant.planted(tmp_path, fault):
            pass
    file.write_text("just one")
    with plant.planted(tmp_path, fault):
        assert file.read_text() == "just two"
    assert file.read_text() == "just one"


def test_what_the_virtual_tester_prints_is_understood() -> None:
    """A complaint of the judge is a finding, a summary none, and anything else neither."""
    program = ["running 1 test", "", "seed 17: 2 ranks, 1 streams", "  group 0: [0, 1]", "  rank 0: [Join(0)]", ""]
    assert plant.read(iter([*program, "    wrong: call 1"]), 10) == plant.Found(8, "wrong: call 1")
    assert plant.read(iter(["5000 programs with 80000 calls, 0 failed"]), 0) == plant.Found(5000, None)
    assert plant.read(iter(program), 10) is None


def test_errors_of_a_fault_itself_are_told_apart() -> None:
    """A fault whose own code is wrong makes ranks die, which is no finding. Other errors, and those that faults mean, are."""

    class Membership:
        name = "group"

    def own() -> Exception:
        with pytest.raises(Exception) as caught:
            mutants._wrong_root_of_broadcast("broadcast", {}, Membership())  # without a rank
        return caught.value

    assert mutants.is_own(own())
    with pytest.raises(KeyError) as other:
        raise KeyError("rank")
    assert not mutants.is_own(other.value)
    through = f"AttributeError: 'int' has no 'x'\n\nAt:\n  {mutants.__file__}(12): wait\n"
    assert mutants.is_own(RuntimeError(through))
    assert not mutants.is_own(RuntimeError(through.replace("AttributeError", "penstock.errors.Mismatch")))
    report = {"complaints": [], "ends": [{"call": "0", "step": "call", **run._told(own())}], "digests": {}}
    program = {"wrong": None, "calls": {}}
    assert any(mutants.DEFECTIVE in text for text in judge.judge(program, {0: report}))


def test_the_virtual_programs_are_there() -> None:
    """`./dev fuzz --virtual` names a test of the engine; where there is none of that name, cargo runs nothing and is content."""
    assert plant.PROGRAMS.name == "virtual_time::programs" and plant.PROGRAMS.package == "penstock-engine"
    assert "\nfn programs(" in (ROOT / "crates/penstock-engine/src/virtual_time/mod.rs").read_text()


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name: str) -> None:
    """The tester fails where it must: a fault planted in the ranks is found by one of the first programs."""
    with Pool(mutants.MUTANTS[name].medium, mutant=name) as pool:
        for seed in range(200):
            complaints = pool.run(generate.generate(seed, avoid=known.AVOID))
            if complaints:
                # The fault is to be seen, and not to end the rank that has it.
                assert not [text for text in complaints if mutants.DEFECTIVE in text or "rank died" in text], complaints
                return
    pytest.fail(f"{name}: 200 programs have not found it")


def test_rendered_script_runs(tmp_path: pathlib.Path) -> None:
    """A program's script of plain torch calls runs by itself, and reports nothing wrong."""
    program = generate.generate(3, wrong=False, avoid=known.AVOID)
    script = tmp_path / "program.py"
    script.write_text(render.script(program, ["nothing"]))
    done = forked.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("has ended") == program["ranks"], done.stdout
    assert "WRONG" not in done.stdout, done.stdout


def test_rendered_script_says_what_is_wrong(tmp_path: pathlib.Path) -> None:
    """With a planted fault the script prints WRONG where the fault is, and nowhere else: not for the other reductions, nor for a
    reducer. Calls that must fail are made, and their errors printed."""

    def call(name: str, **spec: Any) -> dict[str, Any]:
        return {"call": name, "group": "world", "key": name, "exact": True, "layouts": ["flat"], **spec}

    reductions = ["AVG", *(one for one in reference.OPERATIONS if one != "AVG")]
    calls = {
        f"{number}": call("all_reduce", reduce=one, counts=[7], dtype="int32" if one.startswith("B") else "float32")
        for number, one in enumerate(reductions)
    }
    reducer: dict[str, Any] = {"dtype": "float32", "reduce": "AVG", "counts": [7], "steps": 2, "bucket_bytes": 64}
    reducer |= {"closed": True, "unused_percent": 0, "wire": "float16", "feedback": True, "sparse": [[7, 2]]}
    reducer |= {"buffers": [[3, "bool"]], "settings": [None, {"bucket_bytes": 4096, "compression": "bf16"}]}
    calls |= {"20": call("reducer", **reducer), "21": {"call": "new_group", "group": "g21"}}
    calls |= {"22": {"call": "destroy_group", "group": "g21"}}
    steps = [["refused", "3"], *(["call", name] for name in calls), ["destroyed", "22"]]
    program = {
        "seed": 0,
        "ranks": 2,
        "timeout_s": 40,
        "medium": "memory",
        "groups": {"world": [0, 1], "g21": [0, 1]},
        "calls": calls,
        "steps": [steps, steps],
        "wrong": None,
    }
    text = render.script(program, [])
    script = tmp_path / "program.py"
    planted = (
        "    import random_programs.mutants\n    fault = random_programs.mutants.planted('avg-without-division')\n"
    )
    text = text.replace("    torch.set_num_threads(1)\n", f"{planted}    fault.__enter__()\n")
    # Not fresh interpreters, which the script above has.
    script.write_text(
        text.replace(".spawn(", ".start_processes(").replace("nprocs=RANKS", "nprocs=RANKS, start_method='fork'")
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])}
    done = forked.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200, env=env)
    assert done.stdout.count("has ended") == 2, done.stdout + done.stderr
    # Lines of two ranks may run together.
    assert done.stdout.count("WRONG") == done.stdout.count("WRONG: call 0, tensor 0") == 2, done.stdout
    assert done.stdout.count("call 3 with a tensor that has holes is refused: all_reduce") == 2, done.stdout
    assert done.stdout.count("the use of the group that call 22 destroyed is refused") == 2, done.stdout


def test_faults_at_a_step_are_rendered() -> None:
    """A kill or a stop between two calls becomes a script; other programs with faults have none, and say why."""
    drawn = [faults.generate(seed, medium=medium) for seed in range(100) for medium in FAULT_MEDIA]
    rendered = [program for program in drawn if render.why_none(program) is None]
    assert {program["fault"]["kind"] for program in rendered} >= {"kill", "stop", "short stop"}
    for program in rendered:
        text = render.script(program, [])
        compile(text, f"seed {program['seed']}", "exec")
        assert ("SIGKILL" if program["fault"]["kind"] == "kill" else "SIGSTOP") in text


def test_judge_sees_what_is_missing() -> None:
    """A deviation that nobody notices, or not all ranks, an error of another kind, and one that does not name the operation
    or the rank are complaints."""
    program: dict[str, Any] = {
        "ranks": 3,
        "groups": {"world": [0, 1, 2]},
        "calls": {"0": {"call": "all_reduce", "group": "world", "counts": [7]}},
        "steps": [[["call", "0"]], [["call", "0", {"dtype": "int32"}]], [["call", "0"]]],
        "wrong": {"kind": "dtype", "rank": 1, "call": "0"},
    }
    differs = (
        "all_reduce #3 of group 0 on rank {} failed: operation #{} of group 0 is {}(7) on rank {} but {}(7) on rank {}"
    )

    def said(kind: str, *texts: str) -> list[str]:
        reports = {}
        for rank, text in enumerate(texts):
            end = {"call": "0", "step": "wait", "seconds": 0.1, "kinds": [kind], "text": text}
            reports[rank] = {"ends": [end] if text else [], "complaints": [], "digests": {}}
        return judge.judge(program, reports)

    def told(*by: tuple[int, int], number: int = 3, operation: str = "all_reduce") -> list[str]:
        return [
            differs.format(rank, number if rank == 2 else 3, operation, *pair[:1], operation, *pair[1:])
            for rank, pair in enumerate(by)
        ]

    assert said("Mismatch", *told((0, 1), (1, 0), (2, 1))) == []
    assert any("nobody noticed" in text for text in judge.judge(program, {}))
    assert any("nobody noticed on rank 2" in text for text in said("Mismatch", *told((0, 1), (1, 0)), ""))
    assert any("not an error that" in text for text in said("PeerLost", *told((0, 1), (1, 0), (2, 1))))
    assert any("does not name rank 1" in text for text in said("Mismatch", *told((0, 2), (1, 0), (2, 1))))
    assert any("does not name rank 0 or 2" in text for text in said("Mismatch", *told((0, 1), (1, 1), (2, 1))))
    other = told((0, 1), (1, 0), (2, 1), operation="broadcast")
    assert any("does not name the operation all_reduce" in text for text in said("Mismatch", *other))
    assert any(
        "not name one operation, but #3, #4" in text
        for text in said("Mismatch", *told((0, 1), (1, 0), (2, 1), number=4))
    )


def test_judge_of_groups_that_live() -> None:
    """Where all ranks are told before anything is sent, each error says that the group lives and names the rank, and nothing else
    fails; the text and ``group_lives`` agree."""

    def drawn(kind: str, call: str) -> dict[str, Any]:
        for seed in range(3000):
            program = generate.generate(seed, wrong=True)
            if program["ranks"] == 2 and kind in (program["wrong"] or {}).values():
                spec = program["calls"][program["wrong"]["call"]]
                if spec["call"] == call and spec["group"] == "world":
                    return program
        raise AssertionError(f"no wrong {kind} of {call} is drawn")

    sparse, reducer = drawn("sparse", "sparse all_reduce"), drawn("counts", "reducer")
    for program in (sparse, reducer):
        wrong = program["wrong"]
        rank, name = wrong["rank"], wrong["call"]
        given = [f"rank {one} sum of ({7 + (one == rank)},) with 1 sparse dimension(s)" for one in (0, 1)]
        text = (
            "number 1 is another on rank(s) 1 of the group than on rank 0" if program is reducer else "; ".join(given)
        )

        def said(
            program: dict[str, Any],
            text: str,
            lives: bool = True,
            ranks: tuple[int, ...] = (0, 1),
            at: str | None = None,
        ) -> list[str]:
            kinds = ["Mismatch", "PenstockError"]
            end = {
                "call": at or program["wrong"]["call"],
                "step": "wait",
                "seconds": 0.1,
                "kinds": kinds,
                "lives": lives,
            }
            end["text"] = text + ". The group is still usable."
            return judge.judge(
                program,
                {one: {"ends": [end] if one in ranks else [], "complaints": [], "digests": {}} for one in (0, 1)},
            )

        assert said(program, text) == []
        assert any("does not name" in one for one in said(program, "something differs"))
        assert any("group_lives is False" in one for one in said(program, text, lives=False))
        assert any("nobody noticed on rank 1" in one for one in said(program, text, ranks=(0,)))
        later = next(reversed(program["calls"]))
        assert later != name, "something is called afterwards"
        assert any("an error elsewhere" in one for one in said(program, text, at=later))


@pytest.mark.parametrize(
    ("call", "rank", "last", "may"),
    [("gather", 1, True, True), ("gather", 0, True, False), ("gather", 1, False, False), ("broadcast", 0, True, True)],
)
def test_judge_knows_what_comes_too_late(call: str, rank: int, last: bool, may: bool) -> None:
    """What a rank sends to ranks that expect nothing is not seen where it is the last call of its group: they have left."""
    calls = {
        "0": {"call": call, "group": "world", "root": 0, "counts": [0]},
        "1": {"call": "barrier", "group": "world"},
    }
    steps = [["call", "0"], *([] if last else [["call", "1"]])]
    program = {"ranks": 2, "groups": {"world": [0, 1]}, "calls": calls, "steps": [steps, steps]}
    program["wrong"] = {"kind": "count", "rank": rank, "call": "0"}
    assert any("nobody noticed" in text for text in judge.judge(program, {})) != may


@pytest.mark.parametrize(
    ("steps", "may"), [(["call", "1"], True), (["call", "2"], False), (["issue", "1"], False), (["call", "3"], True)]
)
def test_judge_knows_what_cannot_be_compared(steps: list[str], may: bool) -> None:
    """A rank that leaves out a collective and waits for a message of a rank that waits for that collective is seen at the
    time-out alone (seed 90055); so is one that waits in Horovod's rounds, which are a group of their own (seed 1310412). One that
    makes another collective of the group is seen at once."""
    program = {
        "timeout_s": 40,
        "ranks": 2,
        "groups": {"world": [0, 1]},
        "calls": {
            "0": {"call": "all_reduce", "group": "world"},
            "1": {"call": "exchange", "group": "world"},
            "2": {"call": "barrier", "group": "world"},
            "3": {"call": "hvd allreduce", "group": "world"},
        },
        "steps": [[["call", "0"], ["call", "1"], ["call", "2"]], [steps, ["call", "2"]]],
        "wrong": {"kind": "missing", "rank": 1, "call": "0"},
    }
    end = {"call": "0", "step": "wait", "seconds": 40.1, "kinds": ["Timeout"], "text": "waiting for rank 1"}
    report = {"ends": [end], "complaints": [], "digests": {}}
    assert bool(judge.judge(program, {0: report})) != may


@pytest.mark.parametrize(("left_out", "may"), [(None, False), ("0", True), ("2", False)])
def test_judge_knows_which_barrier_a_rank_is_in(left_out: str | None, may: bool) -> None:
    """Nobody leaves a barrier early; but one that has left out the barrier before is in that one with the others (100004636)."""
    calls = {name: {"call": "barrier", "group": "world"} for name in ("0", "1", "2")}
    program = {"ranks": 2, "groups": {"world": [0, 1]}, "calls": calls}
    program["steps"] = [[["call", name] for name in calls if not rank or name != left_out] for rank in (0, 1)]
    program["wrong"] = left_out and {"kind": "missing", "rank": 1, "call": left_out}

    def report(from_s: float, to_s: float) -> judge.Report:
        passed = {"call": "1", "seconds": 0.1, "from_s": from_s, "to_s": to_s}
        return {"ends": [passed | {"step": step} for step in ("issue", "wait")], "complaints": [], "digests": {}}

    found = judge.judge(program, {0: report(5.0, 6.0), 1: report(1.0, 2.0)})
    assert any("rank 1 left the barrier before rank 0 came" in text for text in found) != may


@pytest.mark.parametrize(("first", "blocks"), [("0", True), ("2", False)])
def test_judge_knows_what_blocks_unseen(first: str, blocks: bool) -> None:
    """Rank 1 leaves a broadcast out and sends: rank 0 receives that after the broadcast, in which it waits for rank 1, and only
    their time-outs end it (108004904). A later collective would be compared."""
    program = {
        "ranks": 2,
        "groups": {"world": [0, 1]},
        "calls": {
            "0": {"call": "message", "group": "world", "src": 1, "dst": 0},
            "1": {"call": "broadcast", "group": "world", "root": 0},
            "2": {"call": "all_gather", "group": "world"},
        },
        "steps": [
            [["call", "1"], ["issue", "0"], ["call", "2"], ["wait", "0"]],
            [["call", first], ["call", "2" if first == "0" else "0"]],
        ],
    }
    assert judge._blocks_unseen(program, {"kind": "missing", "rank": 1, "call": "1"}) == blocks


@pytest.mark.parametrize(("first", "waits"), [("1", True), ("0", False), ("2", False)])
def test_judge_knows_who_waits_unseen(first: str, waits: bool) -> None:
    """Rank 0 makes the last operation first, and waits in it for rank 1, which waits for a message of rank 0's (118000115). What
    rank 1 makes before it waits is compared, or is what rank 0 waits for."""
    calls = {
        "0": {"call": "all_reduce", "group": "world"},
        "1": {"call": "message", "group": "world"},
        "2": {"call": "reduce", "group": "world"},
    }
    others = [["issue", first], ["call", "1"], *(["call", name] for name in ("0", "2") if name != first)]
    steps = [[["call", "2"], ["pause", 1], ["call", "1"], ["call", "0"]], others]
    program = {"ranks": 2, "groups": {"world": [0, 1]}, "calls": calls, "steps": steps}
    wrong = {"kind": "order", "rank": 0, "call": "0", "other": "2"}
    assert judge._wait_unseen(program, wrong) == waits


def test_a_seed_is_a_program_with_a_fault() -> None:
    """The same seed gives the same program; each medium has each of its faults in each kind of job, and each kind of event."""
    for medium, kinds in faults.FAULTS.items():
        drawn = [faults.generate(seed, medium=medium) for seed in range(400)]
        assert json.loads(json.dumps(drawn)) == drawn == [faults.generate(seed, medium=medium) for seed in range(400)]
        assert {program["fault"]["kind"] for program in drawn} == set(kinds)
        assert {program["fault"]["at"][0] for program in drawn} == {"step", "phase", "frames", "finished", "begin"}
        jobs = {next(iter(program["calls"].values()), {}).get("call") for program in drawn}
        assert {"train", "elastic"} < jobs and len(jobs) > 10


def test_judge_of_faults() -> None:
    """A fault allows errors that say that a rank was lost, name it, and come in time; one that is short allows none, and one that
    did not come to pass neither. Whoever is told nothing must be right."""
    program: dict[str, Any] = {
        "timeout_s": 20,
        "groups": {"world": [0, 1, 2], "some": [0, 1], "others": [0, 2]},
        "calls": {"0": {"call": "all_reduce", "group": "world"}, "1": {"call": "all_reduce", "group": "others"}},
        "fault": {"kind": "stop", "rank": 1, "at": ["step"], "lasts_s": 3.2},
        "wrong": None,
    }
    struck = {"at_s": 100.0, "until_s": 103.2}

    def said(error: str, text: str, at_s: float, *, rank: int = 0, call: str = "0", **fault: Any) -> list[str]:
        end = {"call": call, "step": "wait", "seconds": 0.1, "kinds": [error], "text": text, "at_s": at_s}
        report = {"ends": [end], "complaints": [], "digests": {}}
        changed = {**program, "fault": {**program["fault"], **fault}}
        return judge.judge(changed, {rank: report}, None if fault.get("at") == ["never"] else struck)

    assert said("PeerLost", "rank 1 (here) is silent", 102.5) == []
    assert any("does not name" in text for text in said("PeerLost", "rank 2 (here) is silent", 102.5))
    left = "rank 2 destroyed the group while operations were running"
    assert any("does not name" in text for text in said("Closed", left, 102.5))
    assert said("Closed", left, 102.5, call="1") == [], "rank 2 has lost rank 1 in another group"
    assert any("s after the fault" in text for text in said("PeerLost", "rank 1 (here) is silent", 107.0))
    assert said("PeerLost", "rank 0 (here) is silent", 107.0, rank=1) == [], "it went on later"
    assert any("not an error that" in text for text in said("Mismatch", "rank 1 differs", 102.5))
    assert any("PeerLost" in text for text in said("PeerLost", "rank 1 is silent", 102.5, kind="short stop"))
    assert any("PeerLost" in text for text in said("PeerLost", "rank 1 is silent", 102.5, at=["never"]))
    assert judge.judge(program, {0: None}, struck) == ["rank 0 died"]
    assert judge.judge({**program, "fault": {**program["fault"], "kind": "kill"}}, {1: None}, struck) == []


def test_only_who_is_needed_comes_too_late() -> None:
    """Nobody waits for a rank that only receives, nor where nothing is sent (seeds 90052 and 90038)."""
    program = {"groups": {"world": [0, 1, 2]}}

    def needed(call: str, **spec: Any) -> list[int]:
        return generate._needed(program, {"call": call, "group": "world", "counts": [5], **spec})

    assert needed("scatter", root=2) == [2]
    assert needed("gather", root=2) == [0, 1]
    assert needed("message", src=1, dst=0) == [1]
    assert needed("all_reduce") == needed("barrier") == [0, 1, 2]
    assert needed("broadcast", root=1, counts=[0]) == []
