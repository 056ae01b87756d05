"""``penstock run``."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from penstock.extras import need
from penstock.tools.convert import cli as convert_cli

if TYPE_CHECKING:
    from penstock.tools.convert.base import Options


@click.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("arguments", nargs=-1, required=True, metavar="SCRIPT [ARGS]...", type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Convert a training script in memory, and start it with torchrun.

    A script that is distributed already is started as it is. Options before SCRIPT that are not named here go to
    torchrun: --nnodes, --rdzv-endpoint, --max-restarts, ...

    \b
    --nproc N          ranks on this host  [default: one a GPU; without a GPU 2]
    --batch MEANING    global or per-rank, as in `penstock convert`  [default: global]
    --scale-lr         multiply learning rates by the number of ranks
    --keep             keep the converted script, and say where it is

    The exit code is torchrun's, or that of `penstock convert` when the script cannot be converted.

    Example: penstock run --nproc 2 train.py --epochs 3
    """
    need("penstock run", "libcst")
    wanted = parse(arguments)
    script = Path(wanted.script)
    if not script.is_file():
        convert_cli.fail(f"there is no script {script}", convert_cli.CANNOT, "run")
    source = convert_cli.read(script, "run")
    folder = Path(tempfile.mkdtemp(prefix="penstock-run-"))
    try:
        sys.exit(_start(wanted, source, script, folder))
    finally:
        if wanted.keep:
            click.echo(f"kept: {folder / script.name}", err=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Wanted:
    """The parsed command line of ``penstock run``."""

    nproc: int | None
    options: Options
    keep: bool
    torchrun: list[str]  # torchrun's own options, as they were given
    script: str
    arguments: list[str]


def parse(arguments: Sequence[str]) -> Wanted:
    """Take a command line apart with torchrun's own parser, which knows which of its options have values."""
    from torch.distributed.run import get_args_parser

    from penstock.tools.convert.base import Options

    parser = get_args_parser()
    parser.prog = "penstock run"
    parser.error = _refuse
    _add_own(parser)
    everything = parser.parse_args(list(arguments))
    before = list(arguments[: len(arguments) - len(everything.training_script_args) - 1])
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_own(own)
    mine, theirs = own.parse_known_args(before)
    return Wanted(
        nproc=mine.nproc,
        options=Options(batch=mine.batch, scale_lr=mine.scale_lr),
        keep=mine.keep,
        torchrun=theirs,
        script=everything.training_script,
        arguments=list(everything.training_script_args),
    )


def torchrun_options(wanted: Wanted, gpus: int) -> list[str]:
    """The options of torchrun: those that were given, the number of ranks, and how hosts meet.

    A single host needs no rendezvous. Several that are given an endpoint, and nothing else, meet by torchrun's `c10d`: by its
    default, `static`, each is the first host, unless each is told its own number.
    """
    names = {each.split("=")[0].replace("_", "-") for each in wanted.torchrun if each.startswith("-")}
    options = list(wanted.torchrun)
    if "--nproc-per-node" not in names:
        options = [f"--nproc-per-node={wanted.nproc or gpus or RANKS_WITHOUT_GPU}", *options]
    if not names & ELSEWHERE:
        # A free port for each job, so that two of them on one host do not meet.
        options = ["--standalone", *options]
    elif "--rdzv-endpoint" in names and not names & {"--rdzv-backend", "--node-rank"}:
        options = ["--rdzv-backend=c10d", *options]
    return options


def _add_own(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nproc", type=_ranks, default=None)
    parser.add_argument("--batch", choices=["global", "per-rank"], default="global")
    parser.add_argument("--scale-lr", action="store_true")
    parser.add_argument("--keep", action="store_true")


def _ranks(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of ranks, such as 2")
    return int(text)


def _refuse(message: str) -> NoReturn:
    """In one line: torchrun's usage is long, and says nothing of our options."""
    raise click.UsageError(message)


def _start(wanted: Wanted, source: str, script: Path, folder: Path) -> int:
    import torch

    from penstock.tools.convert.base import Refused
    from penstock.tools.convert.core import convert

    options = torchrun_options(wanted, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    try:
        converted = convert(source, wanted.options, convert_cli.beside(script))
    except Refused as refusal:
        if refusal.reason != "distributed":
            convert_cli.fail(f"{script}: {refusal}", convert_cli.EXIT_CODES[refusal.reason], "run")
        click.echo(f"{script}: {refusal}", err=True)
        target = [str(script)]
    else:
        convert_cli.report(script, converted)
        (folder / script.name).write_text(converted.text, encoding="utf-8")
        target = ["-m", "penstock.tools.run.worker", str(folder / script.name), str(script)]
    ranks = next((each.split("=")[1] for each in options if each.startswith("--nproc-per-node=")), "")
    env = dict(os.environ)
    if ranks.isdigit():
        # torchrun gives each rank one thread unless OMP_NUM_THREADS is set; the ranks should share all cores.
        env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // int(ranks))))
    command = [sys.executable, "-m", "penstock.tools.run.torchrun", *options, *target, *wanted.arguments]
    with subprocess.Popen(command, env=env) as child:
        # A Ctrl-C reaches torchrun too, and torchrun ends its ranks; a SIGTERM is handed on.
        signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue


# As many ranks as it takes for anything to be distributed; more would share the cores of most machines.
RANKS_WITHOUT_GPU = 2

# Options of torchrun that say where ranks meet.
ELSEWHERE = frozenset(
    ["--nnodes", "--node-rank", "--rdzv-endpoint", "--rdzv-backend", "--rdzv-id", "--master-addr", "--master-port",
     "--standalone"]
)  # fmt: skip
