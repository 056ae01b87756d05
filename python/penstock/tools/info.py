"""``penstock info``: this installation, this machine, and every setting with its value and where it comes from."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.errors import Config as ConfigError
from penstock.extras import EXTRAS, installed
from penstock.runtime import config

__all__ = ["command", "gather"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables: always with every setting.")
@click.option("--all", "everything", is_flag=True, help="Every setting, not only those that are set.")
def command(as_json: bool, everything: bool) -> None:
    """Show versions, the machine, and the settings: value, origin and meaning. Those that are set come first."""
    facts = gather()
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        sys.exit(1 if facts["wrong"] else 0)
    console = Console()
    about = Table(show_header=False, box=None)
    for name, value in facts["about"].items():
        about.add_row(f"[bold]{name}[/]", escape(str(value)))
    console.print(about)
    here = [setting for setting in facts["settings"] if setting["origin"] != "default"]
    others = [setting for setting in facts["settings"] if setting["origin"] == "default"]
    shown = [*here, *others] if everything else here
    if shown:
        settings = Table(
            "setting", "value", "from", "meaning", title="settings (environment variables)", show_lines=True
        )
        for setting in shown:
            settings.add_row(
                setting["name"], escape(setting["value"]) or "(empty)", setting["origin"], setting["meaning"]
            )
        console.print(settings)
    if len(shown) < len(facts["settings"]):
        console.print(f"{len(others)} more settings have their defaults: penstock info --all", highlight=False)
    if facts["wrong"]:
        raise click.ClickException("\n".join(facts["wrong"]))


def gather() -> dict[str, Any]:
    """What ``penstock info`` shows, as data; ``wrong`` says what would keep a group from being made. Neither a secret's value is
    shown, nor that of a variable that is no setting: it may be a misspelt secret."""
    from penstock import _core

    wrong = []
    for check in (config.read, config.restarts):
        try:
            check()
        except ConfigError as error:
            wrong.append(str(error))
    try:
        interfaces, why = _core.choose_interfaces(
            [(name, os.environ.get(name, "")) for name in _INTERFACE_SETTINGS], _master()
        )
        listening = ", ".join(f"{name} ({address})" for name, address in interfaces) + f": {why}"
    except ConfigError as error:
        listening = str(error)
        wrong.append(listening)
    settings = []
    for setting in config.VARIABLES:
        value = config.given_value(setting.name)
        shown = setting.default if value is None else value
        if setting.name == "PENSTOCK_SECRET" and shown:
            shown = "(set, not shown)"
        origin = "default" if value is None else "environment"
        settings.append({"name": setting.name, "value": shown, "origin": origin, "meaning": setting.meaning})
    for name, told in {**config.unknown_variables(), **config.renamed_variables()}.items():
        # It may be a secret, in a variable whose name is misspelt.
        settings.append({"name": name, "value": "(set, not shown)", "origin": "environment", "meaning": told})
    return {
        "wrong": wrong,
        "about": {
            "penstock": _core.__version__,
            "python": sys.version.split()[0],
            "torch": _version("torch"),
            "extras": _extras(),
            "machine": f"{platform.machine()}, {os.cpu_count()} processors, Linux {platform.release()}",
            "reductions": _core.simd_level(),
            "interfaces": listening,
        },
        "settings": settings,
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _extras() -> str:
    here = [extra for package, extra in EXTRAS.items() if installed(package)]
    missing = sorted(set(EXTRAS.values()) - set(here))
    return ", ".join(here or ["none"]) + (f"; not installed: {', '.join(missing)}" if missing else "")


def _master() -> str | None:
    host = os.environ.get("MASTER_ADDR")
    return f"{host}:{os.environ.get('MASTER_PORT', '1')}" if host else None


_INTERFACE_SETTINGS = ("PENSTOCK_INTERFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
