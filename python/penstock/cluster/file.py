"""The cluster file: reads it (`parse`, `load`) and writes it (`dump`). docs/reference/cluster-file.md describes it.

`cluster.schema.json`, beside this file, says the same for editors. tests/test_cluster_file.py holds the two against each other:
what the schema refuses is refused here, and what is refused here only is a contradiction that no schema can express.
"""

from __future__ import annotations

import ipaddress
import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from penstock.cluster import places, units
from penstock.cluster.network import (
    LEAST_MTU,
    MOST_MTU,
    Aggregator,
    Cluster,
    End,
    Host,
    Job,
    Link,
    Nic,
    Server,
    Switch,
)
from penstock.cluster.places import Entry
from penstock.cluster.units import Quantity

__all__ = ["SCHEMA", "dump", "load", "parse"]

SCHEMA = Path(__file__).with_name("cluster.schema.json")
"""The JSON schema of the file."""


def load(path: str, asked: str | None = None) -> Cluster:
    """The cluster that a file describes; ``asked`` says in errors where the file was named.

    Raises:
        penstock.errors.Config: it cannot be read, or describes no cluster.
    """
    return parse(places.read_text(path, asked or path), path)


def parse(text: str, name: str) -> Cluster:
    """The cluster that a text describes; ``name`` is the file's name in errors.

    Raises:
        penstock.errors.Config: ``name:line:column: path: what is wrong; what would be right``.
    """
    return Cluster(**read(text, name))


def read(text: str, name: str) -> dict[str, Any]:
    """The arguments of `Cluster` that a text has, each well-formed. `Cluster` then finds whether they contradict each other.

    Raises:
        penstock.errors.Config: as `parse`.
    """
    top = places.compose(text, name, "the cluster")
    if top.is_empty:
        raise top.wrong("there is nothing in it; it begins with `version: 1` and `hosts:`")
    return _Reading().cluster(top)


class _Reading:
    """One file; notes the place of each path."""

    def __init__(self) -> None:
        self._places: dict[str, str] = {}

    def cluster(self, top: Entry) -> dict[str, Any]:
        # For what is missing, which has no place of its own.
        self._places[""] = top.place
        optional = ("switches", "defaults", "links", "aggregators", "servers", "jobs")
        fields = self._fields(top, ("version", "hosts"), optional)
        fields["version"].number("1: it is the version of the format", lambda value: value == 1)
        hosts = fields["hosts"].named("h0: {address: 10.77.0.1}")
        if not hosts:
            raise fields["hosts"].wrong("must not be empty: give each host a line, such as `h0: {address: 10.77.0.1}`")
        defaults: dict[str, Any] = {}
        if "defaults" in fields:
            inner = self._fields(fields["defaults"], (), ("links",))
            if "links" in inner:
                defaults = self._properties(inner["links"], ())
        links = fields["links"].sequence("- between: [h0, r0]") if "links" in fields else []

        def named(section: str, example: str, make: Any) -> tuple[Any, ...]:
            if section not in fields:
                return ()
            return tuple(make(name, self._note(entry)) for name, entry in fields[section].named(example).items())

        return {
            "hosts": tuple(self._host(name, self._note(entry)) for name, entry in hosts.items()),
            "switches": named("switches", "r0:", self._switch),
            "links": tuple(self._link(self._note(entry), defaults) for entry in links),
            "aggregators": named("aggregators", "a0: {at: h4}", self._aggregator),
            "servers": named("servers", "s0: {at: h5}", self._server),
            "jobs": named("jobs", "train: {workers: [h0, h1]}", self._job),
            "places": self._places,
        }

    def _note(self, entry: Entry) -> Entry:
        self._places[entry.path] = entry.place
        return entry

    def _fields(self, entry: Entry, required: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, Entry]:
        fields = entry.mapping(required, optional)
        for field in fields.values():
            self._note(field)
        return fields

    def _host(self, name: str, entry: Entry) -> Host:
        fields = self._fields(entry, (), ("address", "nics"))
        if "nics" not in fields:
            return Host(name=name, nics=(Nic(addresses=self._addresses(fields)),))
        if "address" in fields:
            raise fields["address"].wrong(
                "give addresses to the host's NICs, below `nics:`, or to the host; not to both"
            )
        nics = fields["nics"].named("eth0: {address: 10.77.0.1}")
        if not nics:
            raise fields["nics"].wrong("must not be empty: give each NIC a line, such as `eth0: {address: 10.77.0.1}`")
        made = []
        for nic, inner in nics.items():
            made.append(Nic(name=nic, addresses=self._addresses(self._fields(self._note(inner), (), ("address",)))))
        return Host(name=name, nics=tuple(made))

    def _addresses(self, fields: dict[str, Entry]) -> tuple[str, ...]:
        if "address" not in fields:
            return ()
        entry = fields["address"]
        return tuple(_address(each) for each in (entry.sequence("- 10.77.0.1") if entry.is_sequence else [entry]))

    def _switch(self, name: str, entry: Entry) -> Switch:
        entry.mapping()
        return Switch(name=name)

    def _link(self, entry: Entry, defaults: dict[str, Any]) -> Link:
        properties = self._properties(entry, ("between",))
        ends = properties.pop("between")
        given = properties.pop("name", None)
        return Link(name=given or "-".join(map(str, ends)), ends=ends, **{**defaults, **properties})

    def _properties(self, entry: Entry, required: tuple[str, ...]) -> dict[str, Any]:
        """A link's, or with no key required those that all links share."""
        optional = ("rate", "delay", "queue", "flow_cap", "loss", "mtu", "background")
        fields = self._fields(entry, required, (("name", *optional) if required else optional))
        found: dict[str, Any] = {}
        for key, field in fields.items():
            if key == "between":
                found["between"] = self._between(field)
            elif key == "name":
                found["name"] = field.name_of()
            elif key == "rate":
                found["rate_bit_s"] = None if field.node.value == "unlimited" else _whole(units.RATE, field)
            elif key == "delay":
                found["delay_ns"] = _whole(units.DELAY, field)
            elif key == "queue":
                found["queue_bytes"] = _whole(units.SIZE, field)
            elif key == "flow_cap":
                caps = field.sequence("- 200 Mbit/s") if field.is_sequence else [field]
                found["flow_caps_bit_s"] = tuple(_whole(units.RATE, cap) for cap in caps)
            elif key == "loss":
                found["loss"] = float(units.SHARE.read(field) / 100)
            elif key == "mtu":
                found["mtu"] = field.integer(f"a number of bytes, {LEAST_MTU} to {MOST_MTU}", LEAST_MTU, MOST_MTU)
            else:
                found["background_bit_s"] = _whole(units.RATE, field)
        return found

    def _between(self, entry: Entry) -> tuple[End, End]:
        ends = entry.sequence() if entry.is_sequence else []
        if len(ends) != 2:
            raise entry.wrong("must be the two ends of the link, such as [h0, r0] or [h0:eth1, r0]")
        return _end(self._note(ends[0])), _end(self._note(ends[1]))

    def _aggregator(self, name: str, entry: Entry) -> Aggregator:
        fields = self._fields(entry, ("at",), ("port", "address", "capacity", "used"))
        return Aggregator(
            name=name,
            at=fields["at"].name_of(),
            **_daemon(fields),
            capacity_bit_s=_whole(units.RATE, fields["capacity"]) if "capacity" in fields else None,
            used_bit_s=_whole(units.RATE, fields["used"]) if "used" in fields else 0,
        )

    def _server(self, name: str, entry: Entry) -> Server:
        fields = self._fields(entry, ("at",), ("port", "address", "ingress"))
        ingress = _whole(units.RATE, fields["ingress"]) if "ingress" in fields else None
        return Server(name=name, at=fields["at"].name_of(), **_daemon(fields), ingress_bit_s=ingress)

    def _job(self, name: str, entry: Entry) -> Job:
        fields = self._fields(entry, ("workers",), ("gradient",))
        workers = tuple(self._note(each).name_of() for each in fields["workers"].sequence("- h0"))
        gradient = _whole(units.SIZE, fields["gradient"]) if "gradient" in fields else None
        return Job(name=name, workers=workers, gradient_bytes=gradient)


def _daemon(fields: dict[str, Entry]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "port" in fields:
        found["port"] = fields["port"].integer("a port, 1 to 65535", 1, 65535)
    if "address" in fields:
        found["address"] = _address(fields["address"])
    return found


def _end(entry: Entry) -> End:
    allowed = "the name of a host or a switch, or HOST:NIC"
    node, colon, nic = entry.text(allowed).partition(":")
    for part in (node, nic) if colon else (node,):
        if not places.is_name(part):
            raise entry.wrong(f"must be {allowed}, not {entry.shown}")
    return End(node, nic if colon else None)


def _address(entry: Entry) -> str:
    """In one form, so that equal addresses are equal texts. Whether it is one, `Cluster` says."""
    text = entry.text("an IPv4 or IPv6 address, such as 10.77.0.1 or fd77::1")
    if not set(text) <= set("0123456789abcdefABCDEF:.") or not text:
        raise entry.wrong(f"must be an IPv4 or IPv6 address, such as 10.77.0.1 or fd77::1, not {entry.shown}")
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return text


def _whole(quantity: Quantity, entry: Entry) -> int:
    """To the nearest whole unit, as no real network is finer; what is not 0 does not become 0."""
    value: Fraction = quantity.read(entry)
    return max(round(value), 1) if value else 0


def dump(cluster: Cluster) -> str:
    """The text of a cluster: `parse` makes an equal one of it."""
    lines = ["version: 1"]
    lines += ["hosts:", *(f"  {host.name}: {_flow(_host_fields(host))}" for host in cluster.hosts)]
    if cluster.switches:
        lines += ["switches:", *(f"  {switch.name}:" for switch in cluster.switches)]
    if cluster.links:
        shared = _shared([_link_fields(link) for link in cluster.links])
        if shared:
            lines += ["defaults:", f"  links: {_flow(shared)}"]
        lines.append("links:")
        for link in cluster.links:
            own = {key: value for key, value in _link_fields(link).items() if shared.get(key) != value}
            lines.append(f"  - {_flow(own)}")
    for section, fields in (
        ("aggregators", {each.name: _aggregator_fields(each) for each in cluster.aggregators}),
        ("servers", {each.name: _server_fields(each) for each in cluster.servers}),
        ("jobs", {each.name: _job_fields(each) for each in cluster.jobs}),
    ):
        if fields:
            lines += [f"{section}:", *(f"  {name}: {_flow(each)}" for name, each in fields.items())]
    return "\n".join(lines) + "\n"


def _host_fields(host: Host) -> dict[str, Any]:
    def addressed(nic: Nic) -> dict[str, Any]:
        return (
            {"address": nic.addresses[0] if len(nic.addresses) == 1 else list(nic.addresses)} if nic.addresses else {}
        )

    if len(host.nics) == 1 and host.nics[0].name == Nic().name:
        return addressed(host.nics[0])
    return {"nics": {nic.name: addressed(nic) for nic in host.nics}}


def _link_fields(link: Link) -> dict[str, Any]:
    fields: dict[str, Any] = {"between": [str(end) for end in link.ends]}
    if link.name != "-".join(fields["between"]):
        fields["name"] = link.name
    caps = [units.RATE.show(cap) for cap in link.flow_caps_bit_s]
    # Rate and MTU are always said: what holds without them is no property of a link that readers know.
    fields["rate"] = "unlimited" if link.rate_bit_s is None else units.RATE.show(link.rate_bit_s)
    return {
        **fields,
        **({"delay": units.DELAY.show(link.delay_ns)} if link.delay_ns else {}),
        **({"queue": units.SIZE.show(link.queue_bytes)} if link.queue_bytes is not None else {}),
        **({"flow_cap": caps[0] if len(caps) == 1 else caps} if caps else {}),
        **({"loss": f"{(Decimal(repr(link.loss)) * 100).normalize():f} %"} if link.loss else {}),
        **({"mtu": link.mtu} if link.mtu != DEFAULT_MTU else {}),
        **({"background": units.RATE.show(link.background_bit_s)} if link.background_bit_s else {}),
    }


def _shared(links: list[dict[str, Any]]) -> dict[str, Any]:
    """What all links have, and the rate that most have: a link without a limit says `unlimited`."""
    first = links[0]
    shared = {
        key: value
        for key, value in first.items()
        if key not in ("between", "name") and all(link.get(key) == value for link in links)
    }
    rates = [link["rate"] for link in links]
    common = max(dict.fromkeys(rates), key=rates.count)
    if rates.count(common) > 1:
        shared = {"rate": common, **shared}
    return shared if len(links) > 1 else {}


def _daemon_fields(daemon: Aggregator | Server) -> dict[str, Any]:
    fields: dict[str, Any] = {"at": daemon.at}
    if daemon.port != DEFAULT_PORT:
        fields["port"] = daemon.port
    if daemon.address is not None:
        fields["address"] = daemon.address
    return fields


def _aggregator_fields(aggregator: Aggregator) -> dict[str, Any]:
    fields = _daemon_fields(aggregator)
    if aggregator.capacity_bit_s is not None:
        fields["capacity"] = units.RATE.show(aggregator.capacity_bit_s)
    if aggregator.used_bit_s:
        fields["used"] = units.RATE.show(aggregator.used_bit_s)
    return fields


def _server_fields(server: Server) -> dict[str, Any]:
    fields = _daemon_fields(server)
    if server.ingress_bit_s is not None:
        fields["ingress"] = units.RATE.show(server.ingress_bit_s)
    return fields


def _job_fields(job: Job) -> dict[str, Any]:
    fields: dict[str, Any] = {"workers": list(job.workers)}
    if job.gradient_bytes is not None:
        fields["gradient"] = units.SIZE.show(job.gradient_bytes)
    return fields


def _flow(value: Any) -> str:
    """YAML's form on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    text = str(value)
    return json.dumps(text) if isinstance(value, str) and (":" in text or text[:1] in "%") else text


DEFAULT_MTU, DEFAULT_PORT = 1500, 7471
