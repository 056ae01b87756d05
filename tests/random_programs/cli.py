"""The command: run random programs for a while; shrink and write down what fails."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

from penstock.testbed import Testbed, TestbedUnavailable
from random_programs import calls, engine_faults, faults, generate, judge, known, mutants, plant, render, shrink
from random_programs.pool import FAULT_MEDIA, MEDIA, Pool


def main(arguments: list[str]) -> int:
    """Returns 0 if no program failed (with --mutant: if one did)."""
    options = _parse(arguments)
    # torch's warnings of every poll of a store would push stacks out of a rank's output. Read when torch is imported, which the
    # ranks' fork server does. Not in tests: some look for such lines.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if options.virtual and options.mutant:
        names = list(engine_faults.FAULTS) if options.mutant == "all" else [options.mutant]
        count = min(options.count, engine_faults.PROGRAMS)
        return plant.hunt(names[options.share], root=_ROOT, seed=options.given, count=count, minutes=options.minutes)
    if options.virtual:
        return _virtual(options)
    folder = pathlib.Path(options.out or tempfile.mkdtemp(prefix="random-programs-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if options.jobs > 1:
        return _side_by_side(arguments, options, folder)
    seeds = range(options.seed, options.seed + options.count)[options.share]
    if options.replay:
        program = json.loads(pathlib.Path(options.replay).read_text())
        programs = [program] * len(range(options.count)[options.share])
        return (_run_calls if "clients" in program else _run)(programs, options, folder)
    if options.endpoints:
        return _run_calls((calls.generate(seed) for seed in seeds), options, folder)
    if options.mutant:
        return _hunt(options)
    media = [options.medium] if options.medium else _media(options)
    if options.faults:
        return _run(
            (faults.generate(seed, medium=medium, avoid=known.AVOID) for seed in seeds for medium in media),
            options,
            folder,
        )
    return _run(
        (
            generate.generate(seed, medium=medium, avoid=known.AVOID, wrong=options.wrong)
            for seed in seeds
            for medium in media
        ),
        options,
        folder,
    )


def _media(options: argparse.Namespace) -> list[str]:
    if not options.faults:
        return list(MEDIA)
    try:
        Testbed(hosts=2).close()
    except TestbedUnavailable as reason:
        print(f"without emulated hosts: {reason}")
        return list(MEDIA)
    return list(FAULT_MEDIA)


def _virtual(options: argparse.Namespace) -> int:
    """The programs of the engine's crate, under virtual time; they are another kind, and generated there. They run on all cores,
    whatever ``--jobs`` says."""
    test = ["-p", plant.PROGRAMS.package, "--lib", plant.PROGRAMS.name, "--", "--exact", "--nocapture"]
    environment = {
        **os.environ,
        "PENSTOCK_VIRTUAL_SEEDS": f"{options.seed}..{options.seed + options.count}",
        "PENSTOCK_VIRTUAL_MINUTES": str(options.minutes),
    }
    return 1 if subprocess.run(["cargo", "test", "--quiet", *test], env=environment, check=False).returncode else 0


@dataclasses.dataclass
class Tally:
    """What a run has come to."""

    programs: int = 0
    calls: int = 0
    cpu_s: float = 0.0
    by_kind: dict[str, int] = dataclasses.field(default_factory=dict)
    failed: list[int] = dataclasses.field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.programs += other.programs
        self.calls += other.calls
        self.cpu_s += other.cpu_s
        self.failed += other.failed
        for kind, number in other.by_kind.items():
            self.by_kind[kind] = self.by_kind.get(kind, 0) + number

    def summary(self, seconds: float) -> str:
        spread = ", ".join(f"{kind} {number}" for kind, number in sorted(self.by_kind.items(), key=lambda one: -one[1]))
        failed = f": seeds {', '.join(map(str, self.failed))}" if self.failed else ""
        return (
            f"{self.programs} programs ({spread}) with {self.calls} calls in {seconds:.0f} s, "
            f"{1e3 * self.cpu_s / max(1, self.programs):.0f} ms of processor time each; "
            f"{len(self.failed)} failed{failed}"
        )


def _side_by_side(arguments: list[str], options: argparse.Namespace, folder: pathlib.Path) -> int:
    """Run this command ``--jobs`` times, each with its share of the seeds and pools of its own; one summary of all."""
    started_s, tally = time.monotonic(), Tally()
    told = [folder / f"tally-{job}.json" for job in range(options.jobs)]
    replay = ["--replay", os.path.abspath(options.replay)] if options.replay else []
    common = [*arguments, *replay, "--seed", str(options.seed), "--count", str(options.count), "--out", str(folder)]
    running = []
    for job, file in enumerate(told):
        file.unlink(missing_ok=True)
        own = ["--jobs", "1", "--share", f"{job}/{options.jobs}", "--tally", str(file)]
        # In sessions of their own, so that each gets one interrupt, from here.
        command = [sys.executable, "-m", "tests.random_programs", *common, *own]
        running.append(subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.DEVNULL, start_new_session=True))
    try:
        for one in running:
            one.wait()
    except KeyboardInterrupt:
        print()  # the summary follows
        for one in running:
            one.send_signal(signal.SIGINT)
    for one in running:
        try:
            one.wait(_END_S)
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()
    for file in told:
        if file.exists():
            tally.add(Tally(**json.loads(file.read_text())))
            file.unlink()
    if not options.mutant:
        print(f"{options.jobs} jobs: {tally.summary(time.monotonic() - started_s)}")
    return max((1 if one.returncode else 0 for one in running), default=0)


def _run(programs: Any, options: argparse.Namespace, folder: pathlib.Path) -> int:
    """Run them in turn until the time is over; returns 1 if any failed."""
    started_s, parent = time.monotonic(), os.getppid()
    tally, pools = Tally(), dict[tuple[str, float], Pool]()
    try:
        for program in programs:
            if time.monotonic() > started_s + 60 * options.minutes or os.getppid() != parent:
                break
            medium, patience_s = program["medium"], faults.patience_s(program)
            if (medium, patience_s) not in pools:
                pools[medium, patience_s] = Pool(medium, patience_s=patience_s)
            pool = pools[medium, patience_s]
            complaints = pool.run(program)
            kinds = [_kind(program, pool)]
            is_gloos = options.gloo and program["seed"] % options.gloo == 0 and kinds == ["right"]
            if not complaints and is_gloos:
                complaints = [f"gloo: {text}" for text in pool.run(generate.for_gloo(program), backend="gloo")]
                kinds.append("also on gloo")
            tally.add(Tally(1, len(program["calls"]), by_kind=dict.fromkeys(kinds, 1)))
            if complaints:
                tally.failed.append(program["seed"])
                _report(program, complaints, pool, options, folder)
                if len(tally.failed) >= options.most:
                    break
            if tally.programs % 100 == 0:
                seconds = time.monotonic() - started_s
                counts = f"{tally.programs} programs, {tally.calls} calls, {len(tally.failed)} failed"
                print(f"{counts}, {seconds:.0f} s", flush=True)
    except KeyboardInterrupt:
        print()  # the summary follows
    finally:
        for pool in pools.values():
            tally.cpu_s += pool.cpu_s
            pool.__exit__()
        if options.tally:
            pathlib.Path(options.tally).write_text(json.dumps(dataclasses.asdict(tally)))
    if not options.tally:
        print(tally.summary(time.monotonic() - started_s))
    return 1 if tally.failed else 0


def _run_calls(programs: Iterable[calls.Program], options: argparse.Namespace, folder: pathlib.Path) -> int:
    """Run calls to servers in turn, each program over each medium, until the time is over; returns 1 if any failed."""
    started_s, parent, tally = time.monotonic(), os.getppid(), Tally()
    media = [medium for medium in calls.MEDIA if options.medium in (None, medium)]
    try:
        for program in programs:
            if time.monotonic() > started_s + 60 * options.minutes or os.getppid() != parent:
                break
            for medium in media:
                complaints = calls.run(program, medium)
                tally.add(Tally(1, sum(map(len, program["clients"])), by_kind={program["fate"]: 1}))
                if complaints:
                    tally.failed.append(program["seed"])
                    print(f"\nFAILED seed {program['seed']} over {medium}, fate: {program['fate']}")
                    print("\n".join(f"    {text[:3000]}" for text in complaints[:6]), flush=True)
                    small = calls.shrink(program, medium, options.trials) if options.shrink else program
                    path = folder / f"calls-{program['seed']}-{medium}.json"
                    path.write_text(json.dumps(small))
                    print(f"    {sum(map(len, small['clients']))} calls of it: {path}", flush=True)
            if len(tally.failed) >= options.most:
                break
    except KeyboardInterrupt:
        print()  # the summary follows
    if options.tally:
        pathlib.Path(options.tally).write_text(json.dumps(dataclasses.asdict(tally)))
    else:
        print(tally.summary(time.monotonic() - started_s))
    return 1 if tally.failed else 0


def _kind(program: dict[str, Any], pool: Pool) -> str:
    if "fault" in program:
        return program["fault"]["kind"] if pool.struck else "without the event"
    return program["wrong"]["kind"] if program["wrong"] else "right"


def _report(
    program: dict[str, Any], complaints: list[str], pool: Pool, options: argparse.Namespace, folder: pathlib.Path
) -> None:
    """Say what failed, make it small, and write it down."""
    print(
        f"\nFAILED seed {program['seed']} over {program['medium']}, {program['ranks']} ranks, "
        f"wrong: {program['wrong']}, fault: {program.get('fault')}"
    )
    for text in complaints[:6]:
        print(f"    {text[:3000]}", flush=True)  # making it small takes minutes
    name = f"seed-{program['seed']}-{program['medium']}"
    (folder / f"{name}.json").write_text(json.dumps(program))
    (folder / f"{name}.txt").write_text("\n".join(complaints))
    if options.shrink:
        kinds, until_s = judge.kinds(complaints), time.monotonic() + _SHRINK_S

        def fails(candidate: dict[str, Any]) -> bool:
            # What ends at a time-out takes its time, hundreds of times.
            if time.monotonic() > until_s:
                return False
            return any(judge.kinds(pool.run(candidate)) & kinds for _ in range(options.tries))

        small = shrink.shrink(program, fails, trials=options.trials)
        (folder / f"{name}-small.json").write_text(json.dumps(small))
        print(
            f"    shrunk from {shrink.size(program)} to {shrink.size(small)} (ranks, calls, steps, elements): "
            f"{folder / name}-small.json"
        )
        why_none = render.why_none(small)
        if why_none is None:
            (folder / f"{name}.py").write_text(render.script(small, complaints))
        print(f"    as a script: {why_none or folder / f'{name}.py'}")
    sys.stdout.flush()


def _hunt(options: argparse.Namespace) -> int:
    """How many programs it takes to find a planted fault (or each of them, with --mutant all)."""
    names = list(mutants.MUTANTS) if options.mutant == "all" else [options.mutant]
    missed = []
    for name in names[options.share]:
        medium = options.medium or mutants.MUTANTS[name].medium
        started_s = time.monotonic()
        found, defects = None, list[str]()
        with Pool(medium, mutant=name) as pool:
            for number, seed in enumerate(range(options.seed, options.seed + options.count), 1):
                if time.monotonic() - started_s > 60 * options.minutes:
                    break
                complaints = pool.run(generate.generate(seed, medium=medium, avoid=known.AVOID, wrong=options.wrong))
                if complaints:
                    found = number, seed, complaints[0]
                    defects = [text for text in complaints if mutants.DEFECTIVE in text]
                    break
        if found is not None and defects:
            missed.append(name)
            print(f"{name}: ERROR (program {found[0]}, seed {found[1]}, {medium}): {defects[0][:160]}", flush=True)
        elif found is None:
            missed.append(name)
            print(f"{name}: NOT FOUND", flush=True)
        else:
            print(f"{name}: found by program {found[0]} (seed {found[1]}, {medium}): {found[2][:160]}", flush=True)
    return 1 if missed else 0


def _share(text: str) -> slice:
    """ "1/3": the second of every three."""
    first, _, of = text.partition("/")
    return slice(int(first), None, int(of))


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./dev fuzz", description=__doc__)
    parser.add_argument(
        "--virtual",
        action="store_true",
        help="programs on the engine alone, under virtual time (--seed, --count, --minutes)",
    )
    parser.add_argument(
        "--faults",
        action="store_true",
        help="programs and training jobs during which a rank is killed, stopped or cut off",
    )
    parser.add_argument(
        "--endpoints",
        action="store_true",
        help="calls of several clients to the server of an endpoint, with the death of one of them among them",
    )
    parser.add_argument("--seed", type=int, default=None, help="the first seed (default: from the clock)")
    parser.add_argument("--count", type=int, default=1_000_000, help="how many seeds")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (per mutant with --mutant)")
    parser.add_argument("--medium", choices=list(FAULT_MEDIA), help="one medium (default: each program over all)")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="run N commands like this side by side, each with every Nth seed and ranks of its own; programs pause, so "
        "that two or three a core keep a machine busy (default: 1)",
    )
    parser.add_argument("--share", type=_share, default=slice(None), help=argparse.SUPPRESS)
    parser.add_argument("--tally", help=argparse.SUPPRESS)
    parser.add_argument("--wrong", action=argparse.BooleanOptionalAction, help="only (or no) wrong programs")
    parser.add_argument("--gloo", type=int, default=50, metavar="N", help="run every Nth seed on gloo, too (0: none)")
    parser.add_argument(
        "--shrink", action=argparse.BooleanOptionalAction, default=True, help="make failing programs small"
    )
    parser.add_argument("--trials", type=int, default=200, help="runs that a shrinking may take")
    parser.add_argument("--tries", type=int, default=1, help="how often a candidate is run while shrinking")
    parser.add_argument("--most", type=int, default=20, help="stop after so many failures")
    parser.add_argument("--replay", metavar="FILE", help="run a program that was written down, --count times")
    parser.add_argument(
        "--mutant",
        metavar="NAME",
        help=f"plant a fault and look how soon it is found: all, {', '.join(mutants.MUTANTS)}; with --virtual, in the "
        f"crates: all, {', '.join(engine_faults.FAULTS)}",
    )
    parser.add_argument("--out", metavar="DIR", help="where failing programs are written (default: a new folder)")
    options = parser.parse_args(arguments)
    known_names = engine_faults.FAULTS if options.virtual else mutants.MUTANTS
    if options.mutant not in (None, "all", *known_names):
        parser.error(f"there is no fault {options.mutant}: all, {', '.join(known_names)}")
    options.given = options.seed
    if options.seed is None:
        options.seed = int(time.time()) * 1000
    if options.replay and options.count == 1_000_000:
        options.count = 1
    return options


_ROOT = pathlib.Path(__file__).resolve().parents[2]
# How long a job may take to end its ranks and write its tally once it was interrupted.
_END_S = 20.0
# How long a failing program is made smaller. A guess: most are small after a minute.
_SHRINK_S = 300.0
