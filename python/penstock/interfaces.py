"""Interfaces of this host."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["is_physical"]


def is_physical(interface: str) -> bool:
    """Whether an interface is a device, or a bond or VLAN of devices. The speed that others say is not what they carry: veth says
    10 Gbit/s."""
    if not os.path.realpath(f"/sys/class/net/{interface}").startswith("/sys/devices/virtual/"):
        return True
    try:
        said = Path("/sys/class/net", interface, "uevent").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return any(kind in said.splitlines() for kind in ("DEVTYPE=bond", "DEVTYPE=vlan"))
