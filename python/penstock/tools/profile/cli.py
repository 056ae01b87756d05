"""``penstock profile``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.errors import PenstockError
from penstock.extras import need
from penstock.files import check_writable
from penstock.texts import harmless
from penstock.tools.profile import run

if TYPE_CHECKING:
    from penstock.profiling.advice import Advice, Change
    from penstock.profiling.breakdown import Breakdown
    from penstock.profiling.record import Record

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("profile", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), help="Folder of the records.")
@click.option(
    "--read",
    "read",
    type=click.Path(exists=True, path_type=Path),
    help="Run nothing: tell from a folder of records, a trace of torch.profiler (Kineto) or a folder with one for each rank, a "
    "log of Megatron-LM, or files of NCCL's inspector (JSONL).",
)
@click.option("--pipeline-stages", type=click.IntRange(1), help="Of a log of Megatron-LM that does not say.")
@click.option(
    "--link-mbit",
    type=click.FloatRange(0, min_open=True),
    help="What the network card of a host carries each way, in Mbit/s, if its system does not say or says more.",
)
@click.option(
    "--period-ms",
    type=click.IntRange(10, 1000),
    help=f"How often the counters of interfaces and processes are read.  [default: {run.PERIOD_MS}]",
)
@click.option("--html", type=_FILE, help="Write a report.")
@click.option("--perfetto", type=_FILE, help="Write a trace for ui.perfetto.dev.")
@click.option(
    "--kineto",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write a trace a rank into a folder, for HolisticTraceAnalysis.",
)
@click.option("--csv", type=_FILE, help="Write the table, and beside it ...-steps.csv and ...-utilisation.csv.")
@click.option("--json", type=_FILE, help="Write the table, the list of changes, and utilisation over time.")
@click.option("--apply", "applied", is_flag=True, help="Then run it again with the best change, and compare.")
@click.argument("arguments", nargs=-1, metavar="[--] [SCRIPT.py | COMMAND] [ARGS]...", type=click.UNPROCESSED)
def command(
    arguments: tuple[str, ...],
    output: Path | None,
    read: Path | None,
    pipeline_stages: int | None,
    link_mbit: float | None,
    period_ms: int | None,
    html: Path | None,
    perfetto: Path | None,
    kineto: Path | None,
    csv: Path | None,
    json: Path | None,
    applied: bool,
) -> None:
    """Tell where the time of a training step goes, rank by rank.

    Runs a script, or any command that starts scripts, without a change to them, over any backend. It records in the folder
    of --output [default: penstock-profile-1, -2, ...], and tells afterwards; the exit code is the command's. With --read it
    tells from such a folder, or from a file of another tool.

    \b
    Examples: penstock profile train.py --epochs 3
              penstock profile -- torchrun --nproc-per-node 2 train.py
              penstock profile --read penstock-profile-1 --html report.html
    """
    if arguments and read is not None:
        raise click.UsageError("give a command or --read, not both: --read runs nothing")
    if not arguments and read is None:
        raise click.UsageError("name a script, a command behind --, or what to --read")
    if pipeline_stages is not None and read is None:
        raise click.UsageError("--pipeline-stages is for a log that is --read")
    if period_ms is not None and read is not None:
        raise click.UsageError("--period-ms is for a command that runs: what is --read was recorded with its own")
    if applied and read is not None:
        raise click.UsageError("--apply runs a command again: --read has none")
    if html is not None:
        need("penstock profile --html", "matplotlib")
    wanted = {"html": html, "perfetto": perfetto, "kineto": kineto, "csv": csv, "json": json}
    named = [path.absolute() for path in wanted.values() if path is not None]
    if len(set(named)) < len(named):
        raise click.UsageError("two outputs have the same name, and one would take the other's place")
    try:
        if read is not None:
            from penstock.profiling.readers import load

            try:
                _tell(load(read, pipeline_stages=pipeline_stages), wanted, link_mbit)
            except OSError as error:
                raise click.ClickException(harmless(str(error))) from error
            return
        started = run.started(arguments)
        for path in filter(None, (html, perfetto, csv, json, kineto and kineto / "trace")):
            try:
                check_writable(path)
            except OSError as error:
                raise click.ClickException(f"cannot write {path}: {error.strerror}") from error
        folder = run.fresh_folder(output)
        again = run.fresh_folder(folder.with_name(f"{folder.name}-applied")) if applied else None
    except PenstockError as error:
        raise click.ClickException(harmless(str(error))) from error
    try:
        code = run.run(started, folder, period_ms=period_ms or run.PERIOD_MS)
    except PenstockError as error:
        raise click.ClickException(harmless(str(error))) from error
    try:
        records = _load(folder)
        ended, said = _ended(code), run.complaints(folder, records)
        advice = _tell(records, wanted, link_mbit, ended, said) if records else None
        if records:
            click.echo(f"the records are in {folder} (penstock profile --read {folder})")
        else:
            for text in [*ended, *said]:
                _say(text)
            if output is None:
                _remove_empty(folder)
        if again is not None and code == 0 and advice is not None:
            code = _apply(started, again, records, advice, period_ms or run.PERIOD_MS)
        if again is not None:
            _remove_empty(again)
    except (PenstockError, OSError) as error:
        _say(str(error))
    except Exception as error:  # the exit code is the command's, whatever is wrong here
        _say(f"{folder} cannot be told of, which is a bug: {type(error).__name__}: {error}")
    sys.exit(code)


def _say(text: str) -> None:
    """What is not the answer, on standard error. Texts of records and exceptions may hold anything."""
    click.echo(f"{run.SAYS}{harmless(text)}", err=True)


def _ended(code: int) -> list[str]:
    """How the command did, if not well."""
    try:
        by = f", which is 128 + {signal.Signals(code - 128).name}"
    except ValueError:
        by = ""
    return [f"the command ended with exit code {code}{by}"] if code else []


def _remove_empty(folder: Path) -> None:
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()


def _apply(
    command: Sequence[str], again: Path, records: Sequence[Record], advice: Advice, period_ms: int = run.PERIOD_MS
) -> int:
    """Run the command with the best change that needs no change of the script (`Advice.to_apply`). Returns its exit code.

    Args:
        again: the folder of the records.
    """
    from penstock.profiling.divide import divide
    from penstock.tools.profile.shown import mean_step_ns

    best, before_it = advice.to_apply()
    if best is None:
        _say("no change that --apply can make is known to make a step shorter")
    if before_it:
        skipped = "; ".join(
            f"{place}. {each.what} ({each.obstacle or 'no gain is predicted'})" for place, each in before_it
        )
        click.echo(f"{'better-ranked, and skipped' if best else 'skipped'}: {skipped}")
    if best is None:
        return 0
    if not _is_of_one_machine(records):
        text = "--apply changes what this command starts, and there were ranks of other hosts: change all alike by hand"
        _say(f"{text}: {best.what}, by {best.how}")
        return 0
    click.echo(f"again, {'with ' if best.prediction is not None else ''}{best.what} ({_made_by(best)}) ...")
    code = run.run(command, again, best.settings, period_ms=period_ms)
    not_made = run.not_made(again, best.settings)
    found = _load(again)
    breakdown = divide(found)
    for text in [*breakdown.failures, *run.complaints(again, found), *(breakdown.problems if found else ())]:
        _say(text)
    took, before = mean_step_ns(breakdown), mean_step_ns(divide(records))
    if code != 0 or not took:
        _say(f"the command ended with status {code}; the records are in {again}")
        return code
    if not_made:
        why = "it names no such backend, builds no DistributedDataParallel or GradientReducer, or has a hook of its own"
        times = f"a step takes {took / 1e6:.1f} ms and took {before / 1e6:.1f}"
        text = f"the script left no place for the change ({why}), so {times}"
        _say(f"{text}; the records are in {again}")
        return code
    times = f"a step takes {took / 1e6:,.1f} ms instead of {before / 1e6:,.1f}"
    if best.prediction is None:
        rule = f" (its rule expected {best.gain_ns / 1e6:.1f} ms less, at most)" if best.gain_ns is not None else ""
        click.echo(f"{times}; its gain had not been predicted{rule}")
        return code
    # The prediction is of sampled steps, in which torch's profiler ran: its ratio is what counts.
    after = before / best.prediction.gain
    miss = after / took - 1
    click.echo(
        f"{times}; the prediction was {after / 1e6:,.1f} ms (±{100 * best.prediction.error:.0f} %), "
        f"{100 * abs(miss):.1f} % too {'high' if miss > 0 else 'low'}"
    )
    return code


def _made_by(change: Change) -> str:
    """The settings, where all are variables; else how one would make the change."""
    if all(name.isupper() for name in change.settings):
        return ", ".join(f"{name}={value}" for name, value in change.settings.items())
    return change.how


def _is_of_one_machine(records: Sequence[Record]) -> bool:
    """Whether all ranks of the job ran here. Network namespaces of one machine have the same name before the mark."""
    ranks = [record.header for record in records if not record.is_of_host]
    names = {header.host.rpartition("-")[0] for header in ranks}
    return len(names) == 1 and len({header.rank for header in ranks}) == max(header.world for header in ranks)


def _load(folder: Path) -> list[Record]:
    """Nothing, where there is nothing: that is told apart."""
    if not any(folder.glob("rank-*.jsonl")):
        return []
    from penstock.profiling.readers import load

    records = load(folder)
    assert isinstance(records, list), "a folder of ours has records"
    return records


def _tell(
    found: Sequence[Record] | Breakdown,
    wanted: dict[str, Path | None],
    link_mbit: float | None,
    ended: Sequence[str] = (),
    said: Sequence[str] = (),
) -> Advice:
    """
    Args:
        ended, said: how the command ended, if not well, and what else is known of the run that no record holds.
    """
    from penstock.profiling import writers
    from penstock.profiling.advice import advise
    from penstock.profiling.breakdown import Breakdown
    from penstock.profiling.divide import divide, each_step
    from penstock.profiling.usage import MOST_LINES, groups
    from penstock.profiling.utilisation import drops, with_links
    from penstock.tools.profile.report import page, text

    records: list[Record] = [] if isinstance(found, Breakdown) else list(found)
    if link_mbit is not None:
        records = with_links(records, link_mbit * 1e6 / 8)
    breakdown = found if isinstance(found, Breakdown) else divide(records)
    breakdown = replace(breakdown, failures=(*breakdown.failures, *ended), problems=(*said, *breakdown.problems))
    advice = advise(records, breakdown)
    fallen = drops(records, breakdown)
    for failure in breakdown.failures:
        _say(failure)
    click.echo(text(breakdown, records, advice, fallen), nl=False)
    for problem in breakdown.problems:
        _say(problem)
    used = groups(records, breakdown, MOST_LINES) if wanted["csv"] or wanted["json"] else []
    if wanted["csv"]:
        writers.csv(breakdown, wanted["csv"])
        if Path("/dev") not in wanted["csv"].absolute().parents:  # beside /dev/stdout is no place for a file
            if records:
                writers.steps_csv(each_step(records), wanted["csv"].with_name(f"{wanted['csv'].stem}-steps.csv"))
            if used:
                writers.usage_csv(used, wanted["csv"].with_name(f"{wanted['csv'].stem}-utilisation.csv"))
    if wanted["json"]:
        writers.json(breakdown, wanted["json"], advice.changes, used, fallen)
    if (wanted["perfetto"] or wanted["kineto"]) and not records:
        raise click.ClickException("what was read has sums only, and no moments for a trace")
    if wanted["perfetto"]:
        writers.perfetto(records, wanted["perfetto"])
    if wanted["kineto"]:
        writers.kineto(records, wanted["kineto"])
    if wanted["html"]:
        from penstock.reports.page import render

        with writers.whole(wanted["html"]) as file:
            file.write(render(page(breakdown, records, advice, fallen)))
    return advice
