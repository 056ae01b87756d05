"""The launcher of this process, and the address at which its job meets: read from the environment only."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Place", "meeting_point", "place"]


@dataclass(frozen=True)
class Place:
    """Where this process stands in its job, as far as its launcher says."""

    rank: int
    size: int
    local_rank: int | None
    """Its index on its host, if the launcher says."""
    local_size: int | None
    node: str | None
    """Names its host among the job's, if the launcher does; else the host's name has to."""
    launcher: str


def place(environ: Mapping[str, str]) -> Place:
    """Find this process's place; alone in its job if no launcher has left a trace.

    Raises:
        ValueError: a launcher's variables are no numbers, or contradict each other.
    """
    for launcher, rank, size, local_rank, local_size, node in _LAUNCHERS:
        if rank in environ and size in environ:
            found = Place(
                rank=_number(environ, rank),
                size=_number(environ, size),
                local_rank=_number(environ, local_rank) if local_rank in environ else None,
                local_size=_number(environ, local_size) if local_size in environ else None,
                node=environ.get(node) if node else None,
                launcher=launcher,
            )
            if not 0 <= found.rank < found.size:
                raise ValueError(f"{rank}={found.rank} is not a rank of {size}={found.size} processes ({launcher})")
            return found
    return Place(0, 1, 0, 1, None, "none")


def meeting_point(environ: Mapping[str, str], where: Place, parent: int) -> tuple[str, int]:
    """The address and port at which rank 0 keeps the job's store.

    MASTER_ADDR and MASTER_PORT say so. Where they are missing and all ranks are on this host, ranks can find it by
    themselves: ``parent``, the process that has started them all, numbers the port.

    Raises:
        ValueError: there are ranks on other hosts, and nothing says where rank 0 is.
    """
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return environ["MASTER_ADDR"], _number(environ, "MASTER_PORT")
    if where.local_size == where.size:
        return "127.0.0.1", _FIRST_PORT + zlib.crc32(str(parent).encode()) % _PORTS
    raise ValueError(
        f"{where.launcher} started {where.size} processes on several hosts, and nothing says where rank 0 listens: set "
        "MASTER_ADDR to its host and MASTER_PORT to a free port there, on all ranks (mpirun -x MASTER_ADDR=... -x "
        "MASTER_PORT=...), or start with torchrun, which sets them"
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(f"{name}={environ[name]!r} is not a number") from None


# Launcher, and its variables for rank, size, local rank, local size and host. Horovod's own come first: who sets them by
# hand under another launcher means them.
_LAUNCHERS = (
    ("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK"),
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    (
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        None,
    ),
    ("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", None),
)
# Below the ports that Linux gives to clients (ip_local_port_range starts at 32768), above those of well-known services.
_FIRST_PORT, _PORTS = 20000, 10000
