"""``python -m penstock.elastic.store``: the small process that outlives the workers.

It is a TCPStore of torch and nothing else. What workers agree on lies there; tensors never do. It asks nobody for a
password: let it listen where only workers can reach it. When it dies, training goes on until the membership changes.
"""

from __future__ import annotations

import argparse
import signal
import socket

import torch.distributed as dist

__all__ = ["main", "serve"]


def serve(host: str, port: int) -> dist.TCPStore:
    """Start a store that listens on ``host`` alone; port 0 lets the kernel choose. It lives as long as the object."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(socket.SOMAXCONN)
    port = listener.getsockname()[1]
    wildcard = host in ("0.0.0.0", "::")
    own = {"0.0.0.0": "127.0.0.1", "::": "::1"}[host] if wildcard else host
    return dist.TCPStore(own, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m penstock.elastic.store",
        description="Keep what elastic workers agree on. Ends on SIGINT or SIGTERM.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="the address to listen on; workers on other hosts need theirs"
    )
    parser.add_argument("--port", type=int, default=29400, help="0 lets the kernel choose")
    arguments = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        store = serve(arguments.host, arguments.port)
    except (OSError, OverflowError) as error:
        parser.error(f"cannot listen on {arguments.host}, port {arguments.port}: {error}")
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    print(f"PENSTOCK_ELASTIC_STORE={host}:{store.port}", flush=True)
    signal.sigwait(_ENDS)


_ENDS = {signal.SIGINT, signal.SIGTERM}

if __name__ == "__main__":
    main()
