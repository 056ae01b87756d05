"""``HOST:PORT`` as text, where an IPv6 address stands in brackets. Pure."""

from __future__ import annotations


def split(address: str) -> tuple[str, str]:
    """The host, without brackets, and the port. Without a colon there is no host."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port


def joined(host: str, port: int | str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
