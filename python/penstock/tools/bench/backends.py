"""Which backends the bench can run, by the names of ``--backends`` and ``--variant``, and what bounds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import click

from penstock.errors import Config as ConfigError
from penstock.runtime import config
from penstock.tools.bench.session import Series, unavailable


def choose(backends: str | None, variants: Sequence[str], on_testbed: bool) -> tuple[list[Series], dict[str, str]]:
    """The backends to run, and those left out with the reason. One that was asked for by name must be there.

    Raises click.UsageError.
    """
    asked = backends.split(",") if backends else list(BACKENDS)
    unknown = [name for name in asked if name not in KNOWN]
    if unknown:
        raise click.UsageError(f"no backend {', '.join(unknown)}: there are {', '.join(KNOWN)}; --variant makes others")
    chosen, skipped = [], {}
    candidates = [(name, KNOWN[name]) for name in asked]
    candidates += [(_variant_parts(text)[1], parse_variant(text)) for text in variants]
    for base, each in candidates:
        reason = unavailable(each, on_testbed)
        if reason is None and on_testbed and base in NOT_OVER_LINKS:
            reason = "the testbed's hosts share no memory: over links it is penstock-tcp"
        if reason is None:
            chosen.append(each)
        elif backends or each.label not in BACKENDS:
            raise click.UsageError(f"{each.label} cannot run here: {reason}")
        else:
            skipped[each.label] = reason
    if len({each.label for each in chosen}) < len(chosen):
        raise click.UsageError("two backends have the same name")
    return chosen, skipped


def limits(chosen: Sequence[Series], on_testbed: bool, flows: Sequence[int]) -> list[Series]:
    """The probes that bound the chosen backends, and on a testbed the control."""
    bounds = []
    if on_testbed or any(each.limit == "sockets" for each in chosen):
        bounds += [_sockets("sockets", "pull", count) for count in flows]
    if on_testbed:
        bounds += [_sockets("saturated", "saturate", count) for count in flows]
        bounds.append(_sockets("equal split", "equal", flows[0]))
    elif any(each.limit == "copy" for each in chosen):
        bounds.append(Series("copy", "copy", smallest=LIMIT_FROM_BYTES))
    return bounds


def parse_variant(text: str) -> Series:
    """``NAME=BACKEND[,KEY=VALUE...]``: a backend under a name of its own, with environment variables.

    The backend is one of `KNOWN`, whose variables these extend, or one by torch's name for it.

    Raises click.BadParameter.
    """
    name, backend, env = _variant_parts(text)
    if backend in KNOWN:
        base = KNOWN[backend]
    else:
        _check_torch_knows(text, backend)
        base = Series(name, f"torch:{backend}", limit="sockets")
    variant = replace(base, label=name, env={**base.env, **env})
    if variant.role.endswith(":penstock"):
        shared = variant.env.get("PENSTOCK_SHM") != "0"
        variant = replace(variant, limit="copy" if shared else "sockets")
    return variant


def _variant_parts(text: str) -> tuple[str, str, dict[str, str]]:
    """The name, the backend and the environment variables of a variant. Raises click.BadParameter."""
    name, _, rest = text.partition("=")
    backend, *pairs = rest.split(",")
    if not name or not backend or not all("=" in pair for pair in pairs):
        raise click.BadParameter(
            f"{text}: give NAME=BACKEND[,KEY=VALUE...], such as 16-streams=penstock-tcp,PENSTOCK_STREAMS=16"
        )
    env = dict(pair.split("=", 1) for pair in pairs)
    try:
        config.read(env)
    except ConfigError as error:
        raise click.BadParameter(f"{text}: {error}") from None
    if wrong := config.unknown_variables(env):
        raise click.BadParameter(f"{text}: {'; '.join(wrong.values())}")
    return name, backend, env


def _check_torch_knows(text: str, backend: str) -> None:
    """Raises click.BadParameter where the ranks would fail, each with a traceback."""
    import torch.distributed as dist

    names = [name for name in dist.Backend.backend_list if name != "undefined"]
    # torch also takes "cpu:gloo".
    if backend.rpartition(":")[2].lower() not in names:
        raise click.BadParameter(
            f"{text}: no backend {backend}: the bench has {', '.join(KNOWN)}; torch has {', '.join(names)}"
        )


def _sockets(name: str, split: str, flows: int) -> Series:
    return Series(f"{name} x{flows}", "sockets", flows=flows, split=split, smallest=LIMIT_FROM_BYTES)


BACKENDS = {
    each.label: each
    for each in (
        Series("penstock-tcp", "torch:penstock", {"PENSTOCK_SHM": "0"}, limit="sockets"),
        Series("penstock-shm", "torch:penstock", {"PENSTOCK_SHM": "1"}, limit="copy"),
        Series("penstock-empty", "shared:penstock", {"PENSTOCK_SHM": "1"}, limit="copy"),
        Series("gloo", "torch:gloo", limit="sockets"),
        Series("mpi", "mpi", limit="copy"),
    )
}
"""What runs when --backends names none. Each has a limit: over TCP it is raw sockets; in one memory it is copying."""

NOT_OVER_LINKS = ("penstock-shm", "penstock-empty", "engine-shm", "penstock-shm-cuda")
"""The testbed's hosts share no memory."""

ENGINES = {
    each.label: each
    for each in (
        Series("engine-tcp", "engine:penstock", {"PENSTOCK_SHM": "0"}, limit="sockets"),
        Series("engine-shm", "engine:penstock", {"PENSTOCK_SHM": "1"}, limit="copy"),
    )
}
"""What --backends can name as well: the engine without torch, for all-reduce."""

DEVICES = {
    each.label: each
    for each in (
        Series("penstock-tcp-cuda", "cuda:penstock", {"PENSTOCK_SHM": "0"}, limit="sockets"),
        Series("penstock-shm-cuda", "cuda:penstock", {"PENSTOCK_SHM": "1"}, limit="copy"),
        Series("gloo-cuda", "cuda:gloo", limit="sockets"),
    )
}
"""Likewise: tensors of a GPU, which may be one for all ranks (nccl refuses that). Limits do without the copies to and from it."""

KNOWN = {**BACKENDS, **ENGINES, **DEVICES}
"""All that --backends can name, and --variant extend."""

LIMIT_FROM_BYTES = 256 << 10
"""Below this a collective is bound by steps x latency, and the probes would show what Python's calls cost."""
