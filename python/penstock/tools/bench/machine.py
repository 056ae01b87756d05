"""The machine's hardware, system and load, read from the kernel."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """Hardware, kernel, versions and date: what a published number must name."""
    cpu = {"model": _cpu_model(), "cores": os.cpu_count(), "usable": len(os.sched_getaffinity(0))}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "hardware": {"cpu": cpu, "memory_bytes": _memory("MemTotal")},
        "system": {
            "kernel": platform.release(),
            "congestion_control": _read("/proc/sys/net/ipv4/tcp_congestion_control"),
            "transparent_hugepages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
            "load_average_at_start": os.getloadavg()[0],
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("penstock", "torch", "numpy")},
            "mpirun": mpirun_version(),
        },
    }


def lines(description: dict[str, Any]) -> list[str]:
    """What `describe` found, for people: the conditions of a report."""
    hardware, system, versions = (description[part] for part in ("hardware", "system", "versions"))
    return [
        f"Date: {description['date']}",
        f"Machine: {hardware['cpu']['model']}, {hardware['cpu']['usable']} cores, {hardware['memory_bytes'] / 2**30:.0f} GiB; "
        f"load average {system['load_average_at_start']:.1f} at the start",
        f"System: Linux {system['kernel']}, TCP congestion control {system['congestion_control']}",
        f"Versions: penstock {versions['penstock'] or '(not installed)'}, torch {versions['torch']}, Python {versions['python']}",
    ]


def version(distribution: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def mpirun_version() -> str | None:
    """The first line that ``mpirun --version`` prints, or None where there is none."""
    if shutil.which("mpirun") is None:
        return None
    shown = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    return (shown.stdout + shown.stderr).strip().partition("\n")[0]


def available_memory() -> int:
    """Bytes that can be allocated without swapping, as the kernel estimates."""
    return _memory("MemAvailable")


def process_memory() -> int:
    """Bytes of this process that are resident and not pages of files: its heap, and the shared memory that it has touched.
    Code and libraries are left out, because they become resident page by page as they are first used."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def processor_ticks() -> tuple[int, int]:
    """(busy, all) ticks of all processors since boot; their difference between two calls gives the share of the box in use.
    A tick is 10 ms, so only spans of a tenth of a second and more say something."""
    with open("/proc/stat") as stat:
        user, nice, system, idle, iowait, irq, softirq, steal = map(int, stat.readline().split()[1:9])
    busy = user + nice + system + irq + softirq + steal
    return busy, busy + idle + iowait


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/meminfo has no {field}")


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
