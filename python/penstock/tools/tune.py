"""``penstock tune``: what the tuner tried and chose, and what it remembers."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.numbers import milliseconds
from penstock.training.tune.explain import explain
from penstock.training.tune.memory import Memory
from penstock.training.tune.tuner import load_record, verify


@click.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--show", is_flag=True, help="Explain FILE, a tuner's record, or without one the memory. The default.")
@click.option("--verify", "check", is_flag=True, help="Repeat the record's decisions from its costs, and compare.")
@click.option("--clear", is_flag=True, help="Forget all remembered settings.")
def command(file: Path | None, show: bool, check: bool, clear: bool) -> None:
    """Explain what was tuned: the trials of a record, or the remembered settings.

    \b
    penstock tune --show tuned.json
    penstock tune --show
    penstock tune --clear
    """
    if clear and (file or show or check):
        raise click.UsageError("--clear goes alone")
    if check and file is None:
        raise click.UsageError("--verify needs a record")
    memory = Memory()
    try:
        if clear:
            click.echo(f"forgot {memory.clear()} settings of {memory.path}")
        elif file is None:
            _show_memory(memory)
        else:
            record = load_record(file)
            click.echo(explain(record))
            if check:
                verify(record)
                click.echo("\nthe recorded costs lead to the recorded decisions")
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None


def _show_memory(memory: Memory) -> None:
    entries = memory.entries()
    click.echo(f"{memory.path}: {len(entries)} remembered" + (", the last used first" if len(entries) > 1 else ""))
    for entry in reversed(entries):
        parameters = sum(size for _, size in entry.model.nodes)
        hosts, ranks = len(entry.topology.nodes), sum(size for _, size in entry.topology.nodes)
        kind = entry.model.nodes[0][0] if entry.model.nodes else "nothing"
        click.echo(
            f"  {kind}, {parameters:,.0f} parameters in {len(entry.model.nodes)} nodes, {ranks:.0f} ranks on {hosts} hosts: "
            f"{entry.setting}, {milliseconds(entry.seconds)} a step"
        )
