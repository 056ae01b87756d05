"""What a testbed asks of the system: rights, tools, and what the kernel says of the calling thread's network."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import os
import shutil
import socket
import struct
import sys
from pathlib import Path

from penstock.tools.testbed.link import LinkSpec


class TestbedUnavailable(RuntimeError):
    """No testbed can be made here: a right or a tool is missing. The message says which, and what to do."""

    __test__ = False  # pytest takes classes named Test... for tests


def check_available(*, losses: bool = False, switches: int = 1) -> None:
    """Raise TestbedUnavailable when the rights or the tools for such a testbed are missing. Makes nothing."""
    if not sys.platform.startswith("linux"):
        raise TestbedUnavailable("emulated clusters need Linux: they are made of network namespaces")
    if os.geteuid() != 0:
        raise TestbedUnavailable("making network namespaces needs root: run the same command with sudo")
    for tool in ("ip", "tc", *(["nft"] if losses else []), *(["bridge"] if switches > 1 else [])):
        find_tool(tool)


def find_tool(tool: str) -> str:
    """The path of ``ip``, ``tc``, ``bridge`` or ``nft``. Raises: TestbedUnavailable, which says what to install."""
    path = shutil.which(tool, path=os.pathsep.join([os.environ.get("PATH", os.defpath), *SYSTEM_DIRECTORIES]))
    if path is None:
        raise TestbedUnavailable(f"the command `{tool}` is missing: install {PACKAGES[tool]}")
    return path


def unavailable(spec: LinkSpec | None = None) -> str | None:
    """Why there can be no testbed here, or None when there is no known reason."""
    try:
        check_available(losses=spec is not None and spec.loss > 0)
    except TestbedUnavailable as error:
        return str(error)
    return None


def sockets(*addresses: str) -> list[tuple[int, str, int, str]]:
    """The calling thread's TCP sockets between ``addresses`` and others: port here, address and port there, state."""
    own = {kernel_hex(address) for address in addresses}
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/thread-self/net/{table}") as file:
            next(file)
            for line in file:
                _, here, there, state, *_ = line.split()
                (address, port), (other, other_port) = here.split(":"), there.split(":")
                # A socket that speaks both families lists IPv4 addresses in IPv6's clothes.
                address, other = (each.removeprefix(_V4_IN_V6) for each in (address, other))
                if address in own and other not in own:
                    found.append((int(port, 16), other, int(other_port, 16), state))
    return found


ESTABLISHED = "01"
NOT_CONNECTED = ("02", "03", "07", "0A", "0C")
"""SYN_SENT, SYN_RECV, CLOSE, LISTEN, NEW_SYN_RECV (include/net/tcp_states.h). The others have been connected."""


def kernel_hex(address: str) -> str:
    """An address as ``/proc/net/tcp`` shows it: 32-bit words in the machine's byte order."""
    packed = ipaddress.ip_address(address).packed
    words = (int.from_bytes(packed[start : start + 4], sys.byteorder) for start in range(0, len(packed), 4))
    return "".join(f"{word:08X}" for word in words)


def is_running(interface: str) -> bool:
    """Whether the calling thread's interface is up and has a carrier, which it has not where the other end is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFFLAGS, struct.pack("16sh14x", interface.encode(), 0))
    return bool(struct.unpack("16sh14x", answer)[1] & _IFF_RUNNING)


def interface_counters(interface: str) -> dict[str, int]:
    """The calling thread's interface, from the one file that shows them without a process."""
    with open("/proc/thread-self/net/dev") as file:
        for line in file:
            name, _, numbers = line.partition(":")
            if name.strip() == interface:
                fields = [int(each) for each in numbers.split()]
                return {
                    "rx_bytes": fields[0],
                    "rx_packets": fields[1],
                    "rx_dropped": fields[3],
                    "tx_bytes": fields[8],
                    "tx_packets": fields[9],
                    "tx_dropped": fields[11],
                }
    raise LookupError(f"there is no interface {interface} here")


def make_quiet() -> None:
    """What a switch's namespace would do besides switching: its ports would look for IPv6 routers, on all links; and where
    br_netfilter is loaded, every frame that crosses a bridge visits iptables first, where there is nothing."""
    with contextlib.suppress(FileNotFoundError):
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
    for family in ("iptables", "ip6tables", "arptables"):
        try:
            Path(f"/proc/sys/net/bridge/bridge-nf-call-{family}").write_text("0")
        except FileNotFoundError:
            pass


def make_router() -> None:
    """Makes the calling thread's namespace forward packets, whatever their source, and say nothing by itself: ports that come
    have no addresses, not even IPv6's own ones."""
    settings = {"ipv4/ip_forward": "1"}
    for scope in ("all", "default"):
        settings |= {f"ipv4/conf/{scope}/{name}": "0" for name in ("rp_filter", "send_redirects", "accept_redirects")}
        settings |= {f"ipv6/conf/{scope}/forwarding": "1", f"ipv6/conf/{scope}/addr_gen_mode": "1"}
    for name, value in settings.items():
        with contextlib.suppress(FileNotFoundError):
            Path(f"/proc/sys/net/{name}").write_text(value)


def switch_offloads_off(interface: str) -> None:
    """Make every packet of the calling thread's interface one that fits the MTU, as ``ethtool -K`` would."""
    with socket.socket() as handle:
        for command in (ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_SGRO):
            value = ctypes.create_string_buffer(struct.pack("=II", command, 0))
            fcntl.ioctl(handle, SIOCETHTOOL, struct.pack("@16sP16x", interface.encode(), ctypes.addressof(value)))


def start_time(process: int) -> str:
    """When a process started, in the kernel's ticks: with its number, who it is.

    Raises: OSError, when it is gone; that includes one that is dead and that nobody has waited for.
    """
    with open(f"/proc/{process}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    if fields[0] in "ZX":
        raise ProcessLookupError(f"process {process} is dead")
    return fields[19]


SYSTEM_DIRECTORIES = ["/usr/sbin", "/sbin"]
"""Where the tools are when PATH, as after a plain ``su``, does not say so."""

PACKAGES = {
    "ip": "iproute2 (Debian, Ubuntu, Alpine, Arch) or iproute (Fedora)",
    "bridge": "iproute2 (it has this name everywhere but on Fedora: iproute)",
    "tc": "iproute2 (Debian, Ubuntu, Alpine, Arch) or iproute-tc (Fedora)",
    "nft": "nftables (it has this name everywhere)",
}

KERNEL_NEEDS = "NET_NS, VETH, BRIDGE, NET_SCH_HTB, NET_CLS_BPF, NF_TABLES_NETDEV"

# linux/sockios.h and linux/ethtool.h. By hand, so that no further tool is needed.
SIOCETHTOOL = 0x8946
_SIOCGIFFLAGS, _IFF_RUNNING = 0x8913, 0x40
ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_SGRO = 0x1F, 0x24, 0x2C

_V4_IN_V6 = "0000000000000000FFFF0000" if sys.byteorder == "little" else "00000000000000000000FFFF"
