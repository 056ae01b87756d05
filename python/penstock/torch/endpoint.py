"""Endpoints that are found through torch's store, or at an address. `penstock.runtime.endpoints` has the rest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from penstock.errors import Config
from penstock.runtime.door import Address
from penstock.runtime.endpoints import Client, Handler, Incoming, Limits, Server, Work

__all__ = ["Client", "Incoming", "Limits", "Server", "Work", "connect", "serve"]


def serve(
    name: str,
    *,
    requests: Mapping[str, Handler] | None = None,
    pushes: Mapping[str, Handler] | None = None,
    pulls: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
    threads: int = 1,
    store: dist.Store | None = None,
    address: str | None = None,
    secret: str | bytes | None = None,
) -> Server:
    """Serve an endpoint. Returns at once; clients may connect at any time (`connect`).

    Args:
        name: by which clients find it. A later server of the same name takes the place of an earlier one for new clients.
        requests, pushes, pulls: what is served, by name: handlers, and for pulls also buffers; see `Server.on_request`,
            `Server.on_push` and `Server.on_pull`, which add to it later.
        limits: what is taken of each client.
        threads: how many handlers may run at the same time. With one they need no locks.
        store: where clients look for it; by default the store of ``torch.distributed``'s default group, or, without one, that at
            MASTER_ADDR and MASTER_PORT. Whoever can read it can connect, unless the job has a secret (PENSTOCK_SECRET).
        address: instead of a store, "host:port" of this host, at which clients come that know the secret.
        secret: with ``address``; by default the job's.

    Raises:
        penstock.errors.Config: a name, limit or setting is wrong, or the store cannot be reached.
    """
    return Server(
        name,
        _place(store, address, secret, _STORE_S),
        _rank(),
        requests=requests or {},
        pushes=pushes or {},
        pulls=pulls or {},
        limits=limits or Limits(),
        threads=threads,
        secret=_bytes(secret),
    )


def connect(
    name: str,
    *,
    timeout_s: float = 60.0,
    call_timeout_s: float = 1800.0,
    store: dist.Store | None = None,
    address: str | None = None,
    secret: str | bytes | None = None,
) -> Client:
    """Connect to the server of this name. Blocks until it has answered, also if it comes later.

    Args:
        timeout_s: for the whole of it.
        call_timeout_s: the time-out of calls that name none.
        store, address, secret: as for `serve`, with the server's address.

    Raises:
        penstock.errors.Timeout: no process serves the endpoint, or its server does not answer.
        penstock.errors.Config: a name or setting is wrong, the store cannot be reached, or this process is the server.
        penstock.errors.Refused: secrets or versions differ.
        penstock.errors.PeerLost: the server has died meanwhile.
    """
    place = _place(store, address, secret, timeout_s)
    return Client(name, place, _rank(), timeout_s=timeout_s, call_timeout_s=call_timeout_s, secret=_bytes(secret))


def _place(
    store: dist.Store | None, address: str | None, secret: str | bytes | None, timeout_s: float
) -> dist.Store | Address:
    """Where server and client find each other."""
    if address is None:
        if secret is not None:
            raise Config("secret= goes with address=: through a store the job's secret counts (PENSTOCK_SECRET)")
        return _store(store, timeout_s)
    if store is not None:
        raise Config("an endpoint is found through a store, or at an address, and not both")
    return Address.parse(address)


def _bytes(secret: str | bytes | None) -> bytes | None:
    return secret.encode() if isinstance(secret, str) else secret


def _store(given: dist.Store | None, timeout_s: float) -> dist.Store:
    if given is not None:
        return given
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        raise Config(
            "an endpoint is found through a store: call torch.distributed.init_process_group first, set MASTER_ADDR and "
            "MASTER_PORT, or pass store="
        )
    try:
        return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
    except (ValueError, RuntimeError) as error:
        raise Config(f"the store at {host}:{port} cannot be reached: {str(error).splitlines()[0]}") from error


def _rank() -> int:
    """This process's rank in the job, for messages; 0 without a job."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


# How long a server waits for its store, which comes up with the job.
_STORE_S = 60.0
