"""The command: run random programs for a while; shrink and write down what fails."""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from penstock.testbed import Testbed, TestbedUnavailable
from random_programs import faults, generate, judge, known, mutants, render, shrink
from random_programs.pool import FAULT_MEDIA, MEDIA, Pool


def main(arguments: list[str]) -> int:
    """Returns 0 if no program failed (with --mutant: if one did)."""
    options = _parse(arguments)
    if options.virtual:
        return _virtual(options)
    folder = pathlib.Path(options.out or tempfile.mkdtemp(prefix="random-programs-"))
    folder.mkdir(parents=True, exist_ok=True)
    if options.replay:
        program = json.loads(pathlib.Path(options.replay).read_text())
        programs = [program] * options.count
        return _run(programs, options, folder)
    if options.mutant:
        return _hunt(options)
    seeds = range(options.seed, options.seed + options.count)
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
    """The programs of the engine's crate, under virtual time; they are another kind, and generated there."""
    environment = {
        **os.environ,
        "PENSTOCK_VIRTUAL_SEEDS": f"{options.seed}..{options.seed + options.count}",
        "PENSTOCK_VIRTUAL_MINUTES": str(options.minutes),
    }
    test = ["-p", "penstock-engine", "--lib", "virtual_time::programs", "--", "--exact", "--nocapture"]
    return subprocess.run(["cargo", "test", "--quiet", *test], env=environment, check=False).returncode


def _run(programs: Any, options: argparse.Namespace, folder: pathlib.Path) -> int:
    """Run them in turn until the time is over; returns 1 if any failed."""
    until_s = time.monotonic() + 60 * options.minutes
    count, calls, failed = 0, 0, []
    by_kind: collections.Counter[str] = collections.Counter()
    pools: dict[tuple[str, float], Pool] = {}
    started_s = time.monotonic()
    try:
        for program in programs:
            if time.monotonic() > until_s:
                break
            medium, patience_s = program["medium"], faults.patience_s(program)
            if (medium, patience_s) not in pools:
                pools[medium, patience_s] = Pool(medium, patience_s=patience_s)
            pool = pools[medium, patience_s]
            complaints = pool.run(program)
            count += 1
            calls += len(program["calls"])
            by_kind[_kind(program, pool)] += 1
            if (
                not complaints
                and options.gloo
                and program["seed"] % options.gloo == 0
                and _kind(program, pool) == "right"
            ):
                complaints = [f"gloo: {text}" for text in pool.run(generate.for_gloo(program), backend="gloo")]
                by_kind["also on gloo"] += 1
            if complaints:
                failed.append(program["seed"])
                _report(program, complaints, pool, options, folder)
                if len(failed) >= options.most:
                    break
            if count % 100 == 0:
                print(
                    f"{count} programs, {calls} calls, {len(failed)} failed, {time.monotonic() - started_s:.0f} s",
                    flush=True,
                )
    except KeyboardInterrupt:
        print()  # the summary follows
    finally:
        for pool in pools.values():
            pool.__exit__()
    spread = ", ".join(f"{kind} {number}" for kind, number in by_kind.most_common())
    print(
        f"{count} programs ({spread}) with {calls} calls in {time.monotonic() - started_s:.0f} s; "
        f"{len(failed)} failed{': seeds ' + ', '.join(map(str, failed)) if failed else ''}"
    )
    return 1 if failed else 0


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
        print(f"    {text[:3000]}")
    name = f"seed-{program['seed']}-{program['medium']}"
    (folder / f"{name}.json").write_text(json.dumps(program))
    (folder / f"{name}.txt").write_text("\n".join(complaints))
    if options.shrink:
        kinds = judge.kinds(complaints)

        def fails(candidate: dict[str, Any]) -> bool:
            return any(judge.kinds(pool.run(candidate)) & kinds for _ in range(options.tries))

        small = shrink.shrink(program, fails, trials=options.trials)
        (folder / f"{name}-small.json").write_text(json.dumps(small))
        if "fault" not in program:
            (folder / f"{name}.py").write_text(render.script(small, complaints))
        print(
            f"    shrunk from {shrink.size(program)} to {shrink.size(small)} (ranks, calls, steps, elements): "
            f"{folder / name}-small.json"
        )
    sys.stdout.flush()


def _hunt(options: argparse.Namespace) -> int:
    """How many programs it takes to find a planted fault (or each of them, with --mutant all)."""
    names = list(mutants.MUTANTS) if options.mutant == "all" else [options.mutant]
    missed = []
    for name in names:
        medium = options.medium or mutants.MUTANTS[name].medium
        started_s = time.monotonic()
        found = None
        with Pool(medium, mutant=name) as pool:
            for number, seed in enumerate(range(options.seed, options.seed + options.count), 1):
                if time.monotonic() - started_s > 60 * options.minutes:
                    break
                complaints = pool.run(generate.generate(seed, medium=medium, avoid=known.AVOID, wrong=options.wrong))
                if complaints:
                    found = number, seed, complaints[0]
                    break
        if found is None:
            missed.append(name)
            print(f"{name}: NOT FOUND", flush=True)
        else:
            print(f"{name}: found by program {found[0]} (seed {found[1]}, {medium}): {found[2][:160]}", flush=True)
    return 1 if missed else 0


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
    parser.add_argument("--seed", type=int, default=None, help="the first seed (default: from the clock)")
    parser.add_argument("--count", type=int, default=1_000_000, help="how many seeds")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (per mutant with --mutant)")
    parser.add_argument("--medium", choices=list(FAULT_MEDIA), help="one medium (default: each program over all)")
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
        help=f"plant a fault and look how soon it is found: all, {', '.join(mutants.MUTANTS)}",
    )
    parser.add_argument("--out", metavar="DIR", help="where failing programs are written (default: a new folder)")
    options = parser.parse_args(arguments)
    if options.seed is None:
        options.seed = int(time.time()) * 1000
    if options.replay and options.count == 1_000_000:
        options.count = 1
    return options
