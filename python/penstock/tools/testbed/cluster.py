"""Hosts, wires, counters and faults: what `penstock.testbed` is about."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from penstock.tools.testbed import kept, link, namespace, relay, system
from penstock.tools.testbed.bed import Bed
from penstock.tools.testbed.link import FlowClass, LinkSpec
from penstock.tools.testbed.topology import CORE, LinkTraffic, Topology


class Testbed(Bed):
    """N hosts joined by a switch, or by a tree of switches with places for aggregators and servers, all on this machine.

    Args:
        hosts: 1 to `topology.MOST_NODES`.
        link: what each link of a host or another node is like, and but for the rate those between switches.
        name: what `keep` publishes it as, and what messages call it.
        topology: as for `Topology`, such as ``racks=2, servers=1``; without any, all hosts are on one switch.

    Raises:
        TestbedUnavailable: not root, a tool is missing, or the kernel lacks something (a delay with racks needs netem).
            Nothing is left behind.
        ValueError: arguments that make no sense.

    Cost: about 0.1 s to make and to close two hosts. Every host shares the machine's processors: link rates that
    leave them idle are the ones that mean something. `docs/design/testbed.md` has measurements.
    """

    __test__ = False
    interface = "eth0"

    _attached_to: int | None = None
    """The keeper of the testbed that `attach` found."""

    def __init__(
        self, *, hosts: int = 2, link: LinkSpec | None = None, name: str | None = None, **topology: Any
    ) -> None:
        self.topology = Topology(hosts=hosts, **topology)
        super().__init__(hosts=hosts)
        self.link = link or LinkSpec()
        if self.topology.losses and self.link.offloads is None:
            self.link = dataclasses.replace(self.link, offloads=False)
        self.name = name
        self._prepare()
        system.check_available(self.link, self.topology)
        try:
            self._build()
        except OSError as error:
            self.close()
            raise system.TestbedUnavailable(
                f"the kernel refused: {error}. Is CAP_SYS_ADMIN missing (a container)?"
            ) from error
        except BaseException:
            self.close()
            raise

    @classmethod
    def attach(cls, name: str) -> Testbed:
        """The testbed that `keep` published as ``name``.

        Closing it then ends only the processes that were started through this object.

        Raises: LookupError, when there is none.
        """
        state = kept.read_state(name)
        bed = cls.__new__(cls)
        bed.topology = Topology(**state["topology"])
        Bed.__init__(bed, hosts=bed.topology.hosts)
        bed.link, bed.name = LinkSpec(**state["link"]), name
        bed._attached_to = state["keeper"]
        bed._prepare()
        try:
            for number in state["namespaces"]:
                bed._namespaces.append(os.open(f"/proc/{state['keeper']}/fd/{number}", os.O_RDONLY))
            bed._start_keeper([])
        except BaseException:
            bed.close()
            raise
        return bed

    def is_gone(self) -> bool:
        """Whether a testbed that was attached has been taken down, or begins to."""
        assert self.name is not None
        state = kept.read_states().get(self.name)
        return state is None or state["keeper"] != self._attached_to

    def keep(self) -> None:
        """Let the testbed outlive this process under its name, until ``penstock testbed down``.

        Raises: FileExistsError, when one of that name is up. This object must be closed as always, which then leaves
        the testbed alone.
        """
        assert self.name is not None and self._keeper is not None and self._keeper.stdin is not None
        path = kept.state_path(self.name)
        state = {
            "keeper": self._keeper.pid,
            "started": system.start_time(self._keeper.pid),
            "topology": self.topology.to_dict(),
            "link": self.link.to_dict(),
            "namespaces": self._namespaces,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        kept.read_states()  # drops what a dead keeper left behind
        with open(path, "x") as file:
            json.dump(state, file)
        self._keeper.stdin.write(f"detach {path}\n".encode())
        self._keeper.stdin.flush()
        self._stack.pop_all()
        self._stack.callback(self._release)

    def network(self, host: int | str) -> str:
        return f"/proc/{os.getpid()}/fd/{self._namespaces[self.topology.number(host)]}"

    def address(self, host: int | str, family: int = 4) -> str:
        return self.topology.address(host, family)

    def links(self) -> list[LinkTraffic]:
        """What crossed each link so far, by the counters of its lower end's interface: first the nodes', then the racks'.

        Cost: a run of ``tc`` for each node and switch, 3 ms.
        """
        dropped = {held: self._dropped_by_queues(held) for held in self._namespaces}
        found = []
        for name, upper in self.topology.links.items():
            held, device = self._lower_end(name)
            counted = namespace.inside(held, functools.partial(system.interface_counters, device))
            traffic = LinkTraffic(
                name=name,
                upper=upper,
                up_bytes=counted["tx_bytes"],
                up_packets=counted["tx_packets"],
                down_bytes=counted["rx_bytes"],
                down_packets=counted["rx_packets"],
                dropped=dropped[held].get(device, 0) + dropped[self._held(upper)].get(name, 0),
            )
            found.append(traffic)
        return found

    def flows(self) -> dict[int, list[FlowClass]]:
        """What each host sent so far, by class of flows; empty lists where ``flow_mbit`` is None.

        Cost: one run of ``tc`` a host, 3 ms.
        """
        result = {}
        for host in range(self.hosts):
            seen = [link.flow_class(*ports) for ports in self.connections(host)]
            result[host] = [
                dataclasses.replace(each, flows=seen.count(each.index)) for each in self._sent_by_class(host)
            ]
        return result

    def connections(self, host: int) -> set[tuple[int, int]]:
        return {(here, there) for here, _, there, state in self._sockets(host) if state == system.ESTABLISHED}

    def remembered(self) -> dict[int, set[tuple[int, int]]]:
        hosts = {system.kernel_hex(self.address(host, family)): host for host in range(self.hosts) for family in (4, 6)}
        found: dict[int, set[tuple[int, int]]] = {host: set() for host in hosts.values()}
        for host in found:
            for here, other, there, state in self._sockets(host):
                if state not in system.NOT_CONNECTED and other in hosts:
                    found[host].add((here, there))
                    found[hosts[other]].add((there, here))
        return found

    def _sockets(self, host: int) -> list[tuple[int, str, int, str]]:
        return self.inside(host, lambda: system.sockets(self.address(host), self.address(host, 6)))

    def drop_link(self, link: int | str) -> None:
        """Silently lose every packet from and to a host, as a pulled cable behind a switch would. Twice is once.

        With racks it is any link, by name (`Topology`): ``drop_link("r0")`` cuts a rack off. Nothing on any node hears
        of it: interfaces stay up and neighbours stay known (the entries are permanent), so that only a protocol's own
        timeouts can tell. Packets under way are lost as well.
        """
        self._down.add(self._link_name(link))
        self._apply_rules()

    def restore_link(self, link: int | str) -> None:
        """Undo `drop_link`."""
        self._down.discard(self._link_name(link))
        self._apply_rules()

    def set_loss(self, link: int | str, loss: float) -> None:
        """From now on lose this share of the packets that cross a link, in each direction. Only with racks, and with
        offloads on what is lost is 64 KiB at a time.

        Raises: ValueError, which names the links, or says what a share is.
        """
        losses = {**self.topology.losses, self._link_name(link): loss}
        self.topology = dataclasses.replace(self.topology, losses=losses)
        self._apply_rules()

    def inside(self, host: int | str, function: Callable[[], Any]) -> Any:
        return namespace.inside(self._namespaces[self.topology.number(host)], function)

    # How it is made

    def _prepare(self) -> None:
        self._down: set[str] = set()
        self._namespaces: list[int] = []
        """Descriptors: one for each node, and then for each switch, the core's last."""
        self._stack.callback(self._release)

    def _release(self) -> None:
        while self._namespaces:
            os.close(self._namespaces.pop())

    def _build(self) -> None:
        nodes = self.topology.nodes
        for _ in (*nodes, *self.topology.switches):
            self._namespaces.append(namespace.create())
        self._start_keeper(self._namespaces)
        netem = self.link.delay_ms > 0 and self._kernel_has_netem()
        carrier = None
        if self.link.delay_ms > 0 and not netem:
            if self.topology.racks:
                raise system.TestbedUnavailable(
                    "a delay with racks needs netem, which this kernel lacks: leave the delay away"
                )
            carrier = self._start_relay()
        else:
            self._wire_switches(netem=netem)
        device = self.interface
        for node, held in zip(nodes, self._namespaces, strict=False):
            lines = [
                "link set lo up",
                f"link set {device} address {self.topology.mac(node)} mtu {self.link.mtu}",
                f"addr add {self.address(node)}/{self.topology.prefix} dev {device}",
                f"addr add {self.address(node, 6)}/64 dev {device} nodad",
                f"link set {device} up",
            ]
            if not self.link.uses_offloads:
                # What ethtool's three switches leave alone: UDP that the application hands over to be cut.
                lines.append(f"link set {device} gso_max_segs 1")
            for other in nodes:
                if other != node:
                    neighbour = f"lladdr {self.topology.mac(other)} nud permanent dev {device}"
                    lines += [f"neigh add {self.address(other, family)} {neighbour}" for family in (4, 6)]
            self._ip(held, lines)
            self._tc(held, link.host_commands(self.topology.link(node, self.link), device))
            if not self.link.uses_offloads:
                namespace.inside(held, lambda: system.switch_offloads_off(device))
        if self.link.loss or self.topology.losses:
            self._apply_rules()
        if carrier is None:
            self._await_ports()
        else:
            assert carrier.stdout is not None and carrier.stderr is not None
            with carrier.stdout, carrier.stderr:
                if not carrier.stdout.readline():
                    error_text = carrier.stderr.read().decode().strip()
                    raise system.TestbedUnavailable(f"the relay that makes delays did not start: {error_text}")

    def _wire_switches(self, *, netem: bool) -> None:
        """A bridge for each switch, and a pair of veth devices for each link: the port on the upper switch has the link's
        name, its lower end is `_lower_end`.

        With racks every bridge knows from the start which port leads to which node: one that has to learn it sends the
        first packets to all ports, and the counters of all links would show them.
        """
        topology = self.topology
        for switch in topology.switches:
            held = self._held(switch)
            namespace.inside(held, system.make_quiet)
            self._ip(held, ["link set lo up", "link add switch type bridge", "link set switch up"])
        # With two hosts, what one receives the other's link has limited already.
        limited = topology.racks > 0 or self.hosts > 2
        for name, upper in topology.links.items():
            lower, device = self._lower_end(name)
            spec = topology.link(name, self.link)
            lines = [
                f"link add {name} mtu {spec.mtu} type veth peer name {device} netns /proc/self/fd/{lower}",
                f"link set {name} master switch up",
            ]
            self._ip(self._held(upper), lines)
            between_switches = name not in topology.nodes
            # The delay of a path is that of its last link, of which there is one.
            self._tc(
                self._held(upper), link.port_commands(spec, name, limited=limited, netem=netem and not between_switches)
            )
            if between_switches:
                self._ip(lower, [f"link set {device} mtu {spec.mtu} master switch up"])
                self._tc(lower, link.port_commands(spec, device, limited=True, netem=False))
        if topology.racks:
            for switch in topology.switches:
                self._bridge(
                    self._held(switch),
                    [
                        f"fdb replace {topology.mac(node)} dev {self._port_towards(switch, node)} master static"
                        for node in topology.nodes
                    ],
                )

    def _await_ports(self) -> None:
        """Wait until all switches forward on all ports: they hear of a link that is up a while later, on a busy machine."""
        deadline = time.monotonic() + PORTS_UP_S
        for switch in self.topology.switches:
            held = self._held(switch)
            while "bridge_slave state disabled" in self._tool(held, ["ip", "-d", "link", "show", "master", "switch"]):
                if time.monotonic() > deadline:
                    raise system.TestbedUnavailable(f"the ports of switch {switch} are not up after {PORTS_UP_S:g} s")
                time.sleep(0.001)

    def _port_towards(self, switch: str, node: str) -> str:
        """The device of ``switch`` that leads to ``node``."""
        upper = self.topology.links[node]
        if upper == switch:
            return node
        return upper if switch == CORE else UPLINK

    def _lower_end(self, name: str) -> tuple[int, str]:
        """A link's lower end: the namespace and the device."""
        if name in self.topology.nodes:
            return self._namespaces[self.topology.number(name)], self.interface
        return self._held(name), UPLINK

    def _held(self, switch: str) -> int:
        """A switch's namespace."""
        return self._namespaces[len(self.topology.nodes) + self.topology.switches.index(switch)]

    def _link_name(self, name: int | str) -> str:
        if isinstance(name, int):
            return self.topology.nodes[self.topology.number(name)]
        if name not in self.topology.links:
            raise ValueError(f"there is no link {name}, but {', '.join(self.topology.links)}")
        return name

    def _apply_rules(self) -> None:
        """Loss and dropped links: rules on what reaches a device, before anything behind it sees it.

        A rule on what leaves a host would make its sends fail with EPERM, which is not silent. A namespace's rules are
        replaced as one transaction.
        """
        for held, devices in (self._rules_of_links() if self.topology.racks else self._rules_of_hosts()).items():
            lines = ["add table netdev testbed", "delete table netdev testbed", "add table netdev testbed"]
            for device, rules in devices.items():
                hook = f"type filter hook ingress device {device} priority 0;"
                lines.append(f"add chain netdev testbed {device} {{ {hook} }}")
                lines += [f"add rule netdev testbed {device} {rule}" for rule in rules]
            self._tool(held, ["nft", "-f", "-"], "\n".join(lines) + "\n")

    def _rules_of_hosts(self) -> dict[int, dict[str, list[str]]]:
        """On one switch, where the relay may be in its place, all rules are on the hosts."""
        found = {}
        gone = ", ".join(self.topology.mac(node) for node in sorted(self._down))
        for node, held in zip(self.topology.nodes, self._namespaces, strict=False):
            rules = ["drop"] if node in self._down else [f"ether saddr {{ {gone} }} drop"] if gone else []
            found[held] = {self.interface: rules + _loss_rules(self.link.loss)}
        return found

    def _rules_of_links(self) -> dict[int, dict[str, list[str]]]:
        """With racks, both ends of a link have its rules."""
        found: dict[int, dict[str, list[str]]] = {held: {} for held in self._namespaces}
        for name, upper in self.topology.links.items():
            lower, device = self._lower_end(name)
            rules = ["drop"] if name in self._down else _loss_rules(self.topology.link(name, self.link).loss)
            found[lower][device] = found[self._held(upper)][name] = rules
        return found

    def _kernel_has_netem(self) -> bool:
        """Try it, on the loopback device of the still empty switch."""
        try:
            self._tc(self._namespaces[-1], ["qdisc add dev lo root netem delay 1ms", "qdisc del dev lo root"])
        except system.TestbedUnavailable:
            return False
        return True

    def _start_relay(self) -> subprocess.Popen[bytes]:
        """Give each host a TAP device in place of a wire, and start the process that is their other end.

        It lives in the switch's namespace, so it ends with the testbed like everything else in there.
        """
        taps: list[int] = []
        try:
            for held in self._namespaces[: self.hosts]:
                open_tap = functools.partial(relay.open_tap, self.interface, offloads=self.link.uses_offloads)
                taps.append(namespace.inside(held, open_tap))
            # With two hosts, what one receives the other's link has limited already.
            rate_mbit = self.link.rate_mbit if self.link.rate_mbit and self.hosts > 2 else 0
            arguments = [self.link.delay_ms / 1e3, rate_mbit * 1e6 / 8, link.BUFFER_S, *taps]
            process = namespace.inside(
                self._namespaces[-1],
                lambda: subprocess.Popen(
                    [sys.executable, "-I", "-S", relay.__file__, *map(str, arguments)],
                    pass_fds=taps,
                    env={**os.environ, **relay.ENVIRONMENT},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd="/",
                    start_new_session=True,
                ),
            )
        except FileNotFoundError as error:
            raise system.TestbedUnavailable(
                "this kernel has no netem, so delays need /dev/net/tun, which is missing: load the module `tun`, or "
                "pass the device into the container"
            ) from error
        finally:
            for tap in taps:
                os.close(tap)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def _sent_by_class(self, host: int) -> list[FlowClass]:
        caps = self.link.caps_mbit
        if caps is None:
            return []
        text = self._tool(self._namespaces[host], ["tc", "-s", "class", "show", "dev", self.interface])
        sent = {
            int(minor, 16): (int(sent_bytes), int(packets))
            for minor, sent_bytes, packets in re.findall(r"class htb 1:(\w+) .*\n\s*Sent (\d+) bytes (\d+) pkt", text)
        }
        return [
            FlowClass(index=index, cap_mbit=cap, bytes=total[0], packets=total[1], flows=0)
            for index, cap in enumerate(caps)
            for total in [sent[link.FIRST_MINOR + index]]
        ]

    def _dropped_by_queues(self, held: int) -> dict[str, int]:
        """Packets that a full queue dropped, by device. A queue's root counts those of its leaves."""
        queues = json.loads(self._tool(held, ["tc", "-json", "-s", "qdisc", "show"]) or "[]")
        return {each["dev"]: each["drops"] for each in queues if each.get("root")}

    def _ip(self, held: int, lines: Sequence[str]) -> None:
        self._tool(held, ["ip", "-batch", "-"], "\n".join(lines))

    def _tc(self, held: int, lines: Sequence[str]) -> None:
        if lines:
            self._tool(held, ["tc", "-batch", "-"], "\n".join(lines))

    def _bridge(self, held: int, lines: Sequence[str]) -> None:
        self._tool(held, ["bridge", "-batch", "-"], "\n".join(lines))

    def _tool(self, held: int, command: Sequence[str], text: str = "") -> str:
        """Run one of the system's tools in a namespace and return what it prints."""
        options: dict[str, Any] = {"input": text, "text": True, "capture_output": True, "pass_fds": self._namespaces}
        program = system.find_tool(command[0])
        done = namespace.inside(held, lambda: subprocess.run([program, *command[1:]], check=False, **options))
        if done.returncode != 0:
            raise system.TestbedUnavailable(
                f"`{' '.join(command)}` failed: {done.stderr.strip()}\n"
                f"It was given:\n{text}\nA kernel that lacks one of {system.KERNEL_NEEDS} fails like this."
            )
        return done.stdout


def _loss_rules(loss: float) -> list[str]:
    return [f"numgen random mod 1000000 < {round(loss * 1_000_000)} drop"] if loss else []


PORTS_UP_S = 10.0
"""A guess, far above the milliseconds that it takes."""

UPLINK = "uplink"
"""The device of a rack's switch that leads to the core's."""
