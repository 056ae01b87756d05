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

from penstock.cluster import file
from penstock.cluster.network import Cluster
from penstock.tools.testbed import kept, link, namespace, relay, routing, system
from penstock.tools.testbed.bed import Bed
from penstock.tools.testbed.link import FlowClass, LinkSpec
from penstock.tools.testbed.topology import LinkTraffic, Topology
from penstock.tools.testbed.wiring import Wiring


class Testbed(Bed):
    """Hosts joined by a switch, or by a network of switches with places for aggregators and servers, all on this machine.

    Args:
        hosts: 1 to `topology.MOST_NODES`.
        link: what each link of a host or another node is like, and but for the rate those between switches.
        name: what `keep` publishes it as, and what messages call it.
        cluster: the cluster to make, as a value or as a cluster file's path (docs/reference/cluster-file.md), instead of
            ``hosts``, ``link`` and ``topology``, from which such a cluster is made otherwise.
        offloads: with ``cluster``, as for `LinkSpec`.
        topology: as for `Topology`, such as ``racks=2, servers=1``; without any, all hosts are on one switch.

    Raises:
        TestbedUnavailable: not root, a tool is missing, or the kernel lacks something (a delay with several switches needs
            netem). Nothing is left behind.
        ValueError: arguments that make no sense; penstock.errors.Config, which is one: a cluster that cannot be made here.

    Cost: about 0.1 s to make and to close two hosts. Every host shares the machine's processors: link rates that
    leave them idle are the ones that mean something. `docs/design/testbed.md` has measurements.
    """

    __test__ = False
    interface = "eth0"

    _attached_to: int | None = None
    """The keeper of the testbed that `attach` found."""

    def __init__(
        self,
        *,
        hosts: int = 2,
        link: LinkSpec | None = None,
        name: str | None = None,
        cluster: Cluster | str | os.PathLike[str] | None = None,
        offloads: bool | None = None,
        **topology: Any,
    ) -> None:
        if cluster is None:
            link = link or LinkSpec()
            cluster, offloads = Topology(hosts=hosts, **topology).cluster(link), link.offloads
        elif link or topology:
            raise ValueError("a cluster says what its links and switches are: leave `link` and the topology out")
        elif not isinstance(cluster, Cluster):
            cluster = file.load(os.fspath(cluster))
        self.topology = Wiring(cluster, offloads=offloads)
        super().__init__(hosts=self.topology.hosts)
        self.name = name
        self._prepare()
        rules = self._has_losses() or self.topology.is_routed
        system.check_available(losses=rules, switches=len(self.topology.switches))
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
        if "cluster" not in state:
            raise LookupError(f"testbed '{name}' is another release's: `penstock testbed down --name {name}` ends it")
        made = file.parse(state["cluster"], f"testbed {name}")
        bed.topology = Wiring(made, offloads=state["offloads"])
        Bed.__init__(bed, hosts=bed.topology.hosts)
        bed.name = name
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
        state = {
            "keeper": self._keeper.pid,
            "started": system.start_time(self._keeper.pid),
            "cluster": file.dump(self.topology.cluster),
            "offloads": self.topology.offloads_asked,
            "namespaces": self._namespaces,
        }
        path = kept.write_state(self.name, state)
        self._keeper.stdin.write(f"detach {path}\n".encode())
        self._keeper.stdin.flush()
        self._stack.pop_all()
        self._stack.callback(self._release)

    @property
    def link(self) -> LinkSpec:
        """What lies between two hosts on one switch. Raises: ValueError, where the hosts' links differ (`Wiring.spec`)."""
        if self.topology.common is None:
            raise ValueError("the hosts' links differ, so there is no one link: ask `topology.spec` for each")
        return self.topology.common

    def network(self, host: int | str) -> str:
        return f"/proc/{os.getpid()}/fd/{self._namespaces[self.topology.number(host)]}"

    def address(self, host: int | str, family: int = 4) -> str:
        return self.topology.address(host, family)

    def links(self) -> list[LinkTraffic]:
        """What crossed each link so far, by the counters of its lower end's interface, in the order of the cluster's links.

        Cost: a run of ``tc`` for each node and switch, 3 ms.
        """
        dropped = {held: self._dropped_by_queues(held) for held in self._namespaces}
        found = []
        for name, upper in self.topology.links.items():
            held, device = self._lower_end(name)
            counted = namespace.inside(held, functools.partial(system.interface_counters, device))
            traffic = LinkTraffic(
                name=name,
                lower=self.topology.lower[name],
                upper=upper,
                up_bytes=counted["tx_bytes"],
                up_packets=counted["tx_packets"],
                down_bytes=counted["rx_bytes"],
                down_packets=counted["rx_packets"],
                dropped=dropped[held].get(device, 0) + dropped[self._held(upper)].get(self.topology.port(name), 0),
            )
            found.append(traffic)
        return found

    def links_down(self) -> set[str]:
        """The links that carry nothing, since the interface at one of their ends is down."""
        found = set()
        for name in self.topology.links:
            held, device = self._lower_end(name)
            if not namespace.inside(held, functools.partial(system.is_running, device)):
                found.add(name)
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

        It may be any link, by name or by its lower end: ``drop_link("r0")`` cuts a rack off. Nothing on any node hears
        of it: interfaces stay up and neighbours stay known (the entries are permanent), so that only a protocol's own
        timeouts can tell. Packets under way are lost as well.
        """
        self._down.add(self.topology.link_name(link))
        self._apply_rules()

    def restore_link(self, link: int | str) -> None:
        """Undo `drop_link`."""
        self._down.discard(self.topology.link_name(link))
        self._apply_rules()

    def set_loss(self, link: int | str, loss: float) -> None:
        """From now on lose this share of the packets that cross a link, in each direction. With offloads on, what is lost is
        64 KiB at a time.

        Raises: ValueError, which names the links, or says what a share is.
        """
        made = self.topology.cluster.with_link(self.topology.link_name(link), loss=loss)
        self.topology = Wiring(made, offloads=self.topology.offloads)
        self._apply_rules()

    def route(self, flows: Sequence[routing.Flow]) -> None:
        """From now on these flows take these ways, and all others the shortest, of several the first in the cluster's file.
        Packets under way may come out of order; none is lost.

        Raises: ValueError, where there is one way only, as in a tree.
        """
        if not self.topology.is_routed:
            raise ValueError("one way leads from each node of this testbed to another: there is nothing to route")
        for switch in self.topology.switches:
            self._tool(self._held(switch), ["nft", "-f", "-"], routing.flow_rules(self.topology, switch, flows))

    def inside(self, host: int | str, function: Callable[[], Any]) -> Any:
        return namespace.inside(self._namespaces[self.topology.number(host)], function)

    # How it is made

    def _prepare(self) -> None:
        self._down: set[str] = set()
        self._relayed: bool | None = None
        self._namespaces: list[int] = []
        """Descriptors: one for each node, and then for each switch, the core's last."""
        self._stack.callback(self._release)

    def _release(self) -> None:
        while self._namespaces:
            os.close(self._namespaces.pop())

    def _build(self) -> None:
        wiring, device = self.topology, self.interface
        for _ in (*wiring.nodes, *wiring.switches):
            self._namespaces.append(namespace.create())
        self._start_keeper(self._namespaces)
        delayed = any(wiring.spec(name).delay_ms for name in wiring.links)
        self._relayed = delayed and not self._kernel_has_netem()
        carrier = None
        if not self._relayed:
            self._wire_switches()
        elif len(wiring.switches) == 1:
            carrier = self._start_relay()
        else:
            raise system.TestbedUnavailable(
                "a delay with several switches needs netem, which this kernel lacks: leave the delay away"
            )
        for node, held in zip(wiring.nodes, self._namespaces, strict=False):
            spec = wiring.spec(wiring.link_name(node))
            lines = [
                "link set lo up",
                f"link set {device} address {wiring.mac(node)} mtu {spec.mtu}",
                f"addr add {self.address(node)}/{wiring.prefix(4)} dev {device}",
                f"addr add {self.address(node, 6)}/{wiring.prefix(6)} dev {device} nodad",
                f"link set {device} up",
            ]
            if not wiring.offloads:
                # What ethtool's three switches leave alone: UDP that the application hands over to be cut.
                lines.append(f"link set {device} gso_max_segs 1")
            if not wiring.is_routed:
                for other in wiring.nodes:
                    if other != node:
                        neighbour = f"lladdr {wiring.mac(other)} nud permanent dev {device}"
                        lines += [f"neigh add {self.address(other, family)} {neighbour}" for family in (4, 6)]
            self._ip(held, lines)
            if wiring.is_routed:
                for family in (4, 6):
                    self._ip(held, routing.host_lines(wiring, node, device, family), family)
            self._tc(held, link.host_commands(spec, device))
            if not wiring.offloads:
                namespace.inside(held, lambda: system.switch_offloads_off(device))
        if self._has_losses():
            self._apply_rules()
        if carrier is None:
            self._await_ports()
        else:
            assert carrier.stdout is not None and carrier.stderr is not None
            with carrier.stdout, carrier.stderr:
                if not carrier.stdout.readline():
                    error_text = carrier.stderr.read().decode().strip()
                    raise system.TestbedUnavailable(f"the relay that makes delays did not start: {error_text}")

    def _has_losses(self) -> bool:
        return any(self.topology.spec(name).loss for name in self.topology.links)

    def _wire_switches(self) -> None:
        """A bridge for each switch, or a router, and a pair of veth devices for each link: the port on the upper switch is
        `Wiring.port`, its lower end is `_lower_end`.

        With several switches every bridge knows from the start which port leads to which node: one that has to learn it
        sends the first packets to all ports, and the counters of all links would show them.
        """
        wiring = self.topology
        for switch in wiring.switches:
            held = self._held(switch)
            namespace.inside(held, system.make_router if wiring.is_routed else system.make_quiet)
            bridge = [] if wiring.is_routed else ["link add switch type bridge", "link set switch up"]
            self._ip(held, ["link set lo up", *bridge])
        for name, upper in wiring.links.items():
            lower, device = self._lower_end(name)
            spec, port = wiring.spec(name), wiring.port(name)
            joined = {end: f"address {wiring.port_mac(name, end)}" for end in (upper, wiring.lower[name])}
            if not wiring.is_routed:
                joined = dict.fromkeys(joined, "master switch")
            lines = [
                f"link add {port} mtu {spec.mtu} type veth peer name {device} netns /proc/self/fd/{lower}",
                f"link set {port} {joined[upper]} up",
            ]
            self._ip(self._held(upper), lines)
            if wiring.lower[name] in wiring.nodes:
                # Delayed here is what has crossed the sender's link and what is to cross this one: a delay on the sender would
                # count as bytes that its TCP has not sent.
                ports = link.port_commands(
                    spec, port, limited=wiring.is_limited(name), delay_ms=2 * wiring.node_delay_ms
                )
                self._tc(self._held(upper), ports)
            else:
                self._tc(self._held(upper), link.port_commands(spec, port, limited=True, delay_ms=spec.delay_ms))
                self._ip(lower, [f"link set {device} mtu {spec.mtu} {joined[wiring.lower[name]]} up"])
                self._tc(lower, link.port_commands(spec, device, limited=True, delay_ms=spec.delay_ms))
        if wiring.is_routed:
            for switch in wiring.switches:
                for family in (4, 6):
                    self._ip(self._held(switch), routing.family_lines(wiring, switch, family), family)
        elif len(wiring.switches) > 1:
            for switch in wiring.switches:
                self._bridge(
                    self._held(switch),
                    [
                        f"fdb replace {wiring.mac(node)} dev {wiring.port_towards(switch, node)} master static"
                        for node in wiring.nodes
                    ],
                )

    def _await_ports(self) -> None:
        """Wait until all switches forward on all ports: they hear of a link that is up a while later, on a busy machine."""
        deadline = time.monotonic() + PORTS_UP_S
        for switch in self.topology.switches:
            held = self._held(switch)
            while not self._is_forwarding(held):
                if time.monotonic() > deadline:
                    raise system.TestbedUnavailable(f"the ports of switch {switch} are not up after {PORTS_UP_S:g} s")
                time.sleep(0.001)

    def _is_forwarding(self, held: int) -> bool:
        if self.topology.is_routed:
            ports = self._tool(held, ["ip", "-o", "link", "show", "type", "veth"]).splitlines()
            return all(" state UP " in port for port in ports)
        return "bridge_slave state disabled" not in self._tool(held, ["ip", "-d", "link", "show", "master", "switch"])

    def _lower_end(self, name: str) -> tuple[int, str]:
        """A link's lower end: the namespace and the device."""
        lower = self.topology.lower[name]
        if lower in self.topology.nodes:
            return self._namespaces[self.topology.number(lower)], self.interface
        return self._held(lower), self.topology.lower_port(name)

    def _held(self, switch: str) -> int:
        """A switch's namespace."""
        return self._namespaces[len(self.topology.nodes) + self.topology.switches.index(switch)]

    def _apply_rules(self) -> None:
        """Loss and dropped links: rules on what reaches a device, before anything behind it sees it.

        A rule on what leaves a host would make its sends fail with EPERM, which is not silent. A namespace's rules are
        replaced as one transaction.
        """
        for held, devices in (self._rules_of_hosts() if self._is_relayed() else self._rules_of_links()).items():
            lines = ["add table netdev testbed", "delete table netdev testbed", "add table netdev testbed"]
            for number, (device, rules) in enumerate(devices.items()):
                hook = f"type filter hook ingress device {device} priority 0;"
                lines.append(f"add chain netdev testbed d{number} {{ {hook} }}")
                lines += [f"add rule netdev testbed d{number} {rule}" for rule in rules]
            self._tool(held, ["nft", "-f", "-"], "\n".join(lines) + "\n")

    def _rules_of_links(self) -> dict[int, dict[str, list[str]]]:
        """Both ends of a link have its rules."""
        found: dict[int, dict[str, list[str]]] = {held: {} for held in self._namespaces}
        for name, upper in self.topology.links.items():
            lower, device = self._lower_end(name)
            rules = ["drop"] if name in self._down else _loss_rules(self.topology.spec(name).loss)
            found[lower][device] = found[self._held(upper)][self.topology.port(name)] = rules
        return found

    def _rules_of_hosts(self) -> dict[int, dict[str, list[str]]]:
        """Where the relay is in the place of the switch, hosts have the rules of both links that a packet to them crosses."""
        wiring = self.topology
        lost = {
            node: 1.0 if (name := wiring.link_name(node)) in self._down else wiring.spec(name).loss
            for node in wiring.nodes
        }
        found = {}
        for node, held in zip(wiring.nodes, self._namespaces, strict=False):
            rules = [
                f"ether saddr {wiring.mac(other)} {rule}"
                for other in wiring.nodes
                for rule in _loss_rules(1 - (1 - lost[node]) * (1 - lost[other]))
                if other != node
            ]
            found[held] = {self.interface: ["drop"] if lost[node] == 1 else rules}
        return found

    def _is_relayed(self) -> bool:
        """Whether the relay is in the place of the switch, which then has no ports."""
        if self.topology.is_routed:
            self._relayed = False
        if self._relayed is None:
            ports = self._tool(self._namespaces[-1], ["ip", "-o", "link", "show", "type", "bridge"])
            self._relayed = not ports.strip()
        return self._relayed

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
        wiring = self.topology
        taps: list[int] = []
        arguments = [f"{2 * wiring.node_delay_ms / 1e3}"]
        try:
            for node, held in zip(wiring.nodes, self._namespaces, strict=False):
                open_tap = functools.partial(relay.open_tap, self.interface, offloads=wiring.offloads)
                taps.append(namespace.inside(held, open_tap))
                name = wiring.link_name(node)
                spec = wiring.spec(name)
                rate = spec.rate_mbit * 1e6 / 8 if spec.rate_mbit and wiring.is_limited(name) else 0
                arguments.append(f"{taps[-1]}:{rate}:{spec.buffer_bytes / rate if rate else 0}")
            process = namespace.inside(
                self._namespaces[-1],
                lambda: subprocess.Popen(
                    [sys.executable, "-I", "-S", relay.__file__, *arguments],
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
        caps = self.topology.spec(self.topology.link_name(host)).caps_mbit
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

    def _ip(self, held: int, lines: Sequence[str], family: int | None = None) -> None:
        self._tool(held, ["ip", *([] if family is None else [f"-{family}"]), "-batch", "-"], "\n".join(lines))

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
        if done.returncode != 0 and self._attached_to is not None and self.is_gone():
            raise system.TestbedUnavailable(GONE.format(name=self.name))
        if done.returncode != 0:
            raise system.TestbedUnavailable(
                f"`{' '.join(command)}` failed: {done.stderr.strip()}\n"
                f"It was given:\n{text}\nA kernel that lacks one of {system.KERNEL_NEEDS} fails like this."
            )
        return done.stdout


def _loss_rules(loss: float) -> list[str]:
    if loss == 1:
        return ["drop"]
    return [f"numgen random mod 1000000 < {round(loss * 1_000_000)} drop"] if loss else []


GONE = "testbed '{name}' was taken down while the run was on; nothing of the run is left"

PORTS_UP_S = 10.0
"""A guess, far above the milliseconds that it takes."""
