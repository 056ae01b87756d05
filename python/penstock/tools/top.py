"""``penstock top``: a running job in the terminal, as its live view tells it."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import urllib.parse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from penstock.texts import checked, harmless

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["command", "events", "render"]


@click.command("top")
@click.argument("address", default="", metavar="[URL | HOST:PORT]")
@click.option("--once", is_flag=True, help="Print it once and end.")
def command(address: str, once: bool) -> None:
    """Show the running job at URL, as its rank 0 has printed it, or the one of this host; Ctrl-C ends it.

    The job runs with PENSTOCK_LIVE=0, or with a port.
    """
    from rich.console import Console
    from rich.live import Live

    url = _url(address)
    console = Console()
    told = events(url)
    with contextlib.suppress(KeyboardInterrupt):
        first = next(told)
        if once or not console.is_terminal:  # a pipe or a file gets one after the other
            for event in [first] if once else itertools.chain([first], told):
                console.print(render(event))
            return
        with Live(render(first), console=console, auto_refresh=False) as live:
            for event in told:
                live.update(render(event), refresh=True)


def events(url: str) -> Iterator[dict[str, Any]]:
    """The events of a job, from the latest on, to its end.

    Raises:
        click.ClickException: nothing answers, or it does not take the token, or it is no job, or it is gone.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname or "", parts.port or 80
    except ValueError as error:
        raise click.ClickException(harmless(f"{url} is no URL: {error}")) from None
    shown = harmless(f"{host}:{port}")
    connection = http.client.HTTPConnection(host, port, timeout=_PATIENCE_S)
    try:
        connection.request("GET", f"/events?{parts.query}")
        answer = connection.getresponse()
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = harmless(getattr(error, "strerror", None) or str(error))
        raise click.ClickException(
            f"no job answers at {shown}: {why}. Is it running, and on this network? "
            "`penstock top` without an address finds the jobs of this host."
        ) from None
    if answer.status == 401:
        raise click.ClickException(
            f"the job at {shown} does not take this token: use the whole URL that its rank 0 printed"
        )
    if answer.status != 200 or answer.getheader("Content-Type", "") != "text/event-stream":
        said = answer.read(200).decode("utf-8", "replace").strip() or f"status {answer.status}"
        raise click.ClickException(f"what answers at {shown} shows no job: {harmless(said)}")
    with contextlib.closing(connection):
        event: dict[str, Any] = {"state": ""}
        empty = 0
        while event["state"] != "ended":
            try:
                line = answer.readline(_MOST_BYTES)
            except (OSError, http.client.HTTPException, ValueError):
                line = b""
            if not line:
                raise click.ClickException(f"the job at {shown} is gone: its rank 0 has ended without a word")
            empty += 1
            if empty > _MOST_EMPTY:
                raise click.ClickException(
                    f"what answers at {shown} shows no job: it sends lines without end and no event"
                )
            if line.startswith(b"data: "):
                empty = 0
                try:
                    event = _checked(json.loads(line[6:]))
                except (KeyError, TypeError, ValueError, RecursionError):
                    raise click.ClickException(
                        f"what answers at {shown} shows no job: it sends events of another kind"
                    ) from None
                yield event


def render(event: dict[str, Any]) -> RenderableType:
    """An event for the terminal."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = [Text(event["answer"], style="bold"), Text(event["setting"], style="dim")]
    parts += [Text(alarm, style="red") for alarm in event["alarms"]]
    cards = Table(box=None, show_header=False, pad_edge=False)
    for number, what, note in event["cards"]:
        cards.add_row(Text(number, style="bold", justify="right"), Text(what), Text(note, style="dim"))
    parts += [Text(), cards]
    if len(event["history"]) > 1:
        parts.append(Text(f"step time {_sparkline(event['history'])}"))
    for given in event["tables"]:
        table = Table(
            title=given["title"], title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
        )
        texts = (0, len(given["columns"]) - 1)
        count = len(given["columns"])
        rows = [[*row, *[""] * count][:count] for row in given["rows"]]
        # A terminal has no room for columns without anything in them.
        used = [at for at in range(count) if any(row[at] for row in rows)]
        for at in used:
            table.add_column(given["columns"][at], justify="left" if at in texts else "right", overflow="fold")
        for row in rows:
            table.add_row(*(Text(row[at]) for at in used))
        parts.append(table)
    parts += [Text(complaint, style="yellow") for complaint in event["complaints"]]
    return Group(*parts)


def _checked(given: Any) -> dict[str, Any]:
    """What `render` needs of an event, which may come from anywhere.

    Raises: KeyError, TypeError, ValueError: it is none.
    """
    return {
        **{name: checked(given[name]) for name in ("state", "answer", "setting")},
        **{name: [checked(each) for each in given[name]] for name in ("alarms", "complaints")},
        "cards": [(checked(number), checked(what), checked(note)) for number, what, note in given["cards"]],
        "history": [_number(each) for each in given["history"]],
        "tables": [
            {
                "title": checked(each["title"]),
                "columns": [checked(column) for column in each["columns"]],
                "rows": [[checked(cell) for cell in row] for row in each["rows"]],
            }
            for each in given["tables"]
        ],
    }


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e15:
        raise ValueError("no number")
    return value


def _sparkline(values: list[float]) -> str:
    """The last values as bars from the least to the most."""
    values = values[-60:]
    least, most = min(values), max(values)
    step = (most - least) / (len(_BARS) - 1) or 1.0
    return f"{''.join(_BARS[round((value - least) / step)] for value in values)} {least:.3g} to {most:.3g} ms"


def _url(address: str) -> str:
    """The URL of the job that the user means, with its token."""
    from penstock.live import found

    if "/" in address:
        return address if "://" in address else f"http://{address}"
    jobs = found.found()
    if not address:
        if not jobs:
            raise click.ClickException(
                "no job of yours runs on this host with a live view. Start one with PENSTOCK_LIVE=0 torchrun ... (or a port in "
                "place of 0), or name another host's: penstock top URL, as its rank 0 prints it"
            )
        if len(jobs) > 1:
            listed = "\n".join(f"  penstock top {_place(job.url)}   {job.what}" for job in jobs)
            raise click.ClickException(f"{len(jobs)} jobs run here; name one:\n{listed}")
        return jobs[0].url
    place = address if ":" in address else f"127.0.0.1:{address}"
    for job in jobs:
        if _place(job.url) == place.replace("localhost", "127.0.0.1"):
            return job.url
    token = os.environ.get("PENSTOCK_LIVE_TOKEN", "")
    if not token:
        raise click.ClickException(
            f"no job of yours on this host has its live view at {place}: name the whole URL, with the token, as its rank 0 "
            "printed it, or set PENSTOCK_LIVE_TOKEN"
        )
    return f"http://{place}/?{urllib.parse.urlencode({'token': token})}"


def _place(url: str) -> str:
    return urllib.parse.urlsplit(url).netloc


_BARS = "▁▂▃▄▅▆▇█"
# Seconds without an event after which the job counts as gone: longer than the longest pause between two.
_PATIENCE_S = 20.0
_MOST_EMPTY = 1000
"""Lines without an event. A job sends one."""
_MOST_BYTES = 4 << 20
