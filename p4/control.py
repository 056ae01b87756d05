#!/usr/bin/env python3
"""The control plane of `penstock.p4`: opens a job on a switch, closes it, reads its counters.

    control.py --p4info penstock.p4info.txt load penstock.json   # the program onto the switch
    control.py --p4info ... --ports ports.json setup               # the switch's own address, and where hosts are
    control.py --p4info ... --ports ports.json open 5 job.json     # the body of PUT /jobs/5 of `penstock aggregator`; a job that
                                                                   # is open just so stays as it is
    control.py --p4info ... counters [5]
    control.py --p4info ... close 5

It talks P4Runtime (`pip install p4runtime`) to the switch at --switch; `load` and the rest must be told the p4info that the
compiler wrote. What to write into which table is decided by `job_entries`, which needs neither.

ports.json says who is where, for a switch knows ports and hardware addresses only:

    {"address": "10.0.0.254:7471", "mac": "02:00:00:00:00:fe",
     "hosts": {"10.0.0.1": {"mac": "02:00:00:00:00:01", "port": 1}, ...}}
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import ipaddress
import json
import os
import pathlib
import queue
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from twin import BLOCK_WORDS, CHILDREN, EVENTS, JOBS, SLOTS, TABLES, Address, Entry


class Refused(Exception):
    """The switch cannot serve the job, or was not asked rightly; it is as it was. The message says why and what to do."""


# ------------------------------------------------------------------------------------------- what to write into the tables


@dataclasses.dataclass(frozen=True)
class Child:
    """A child of this switch: where it lives, over how many UDP ports (a power of two), and the workers at or below it."""

    address: Address
    workers: int
    shards: int = 1


@dataclasses.dataclass(frozen=True)
class Job:
    """A job as one aggregator sees it; `Job` of crates/penstock-aggregation has the same fields."""

    job: int
    epoch: int
    window: int
    block_bytes: int
    parent: Address
    children: tuple[Child, ...]
    parent_shards: int = 1
    key: str | None = None
    floats: bool = False


@dataclasses.dataclass(frozen=True)
class Place:
    """What of the switch a job has: its number there (1 to 63), its first slot, and the lease that its slots bear."""

    number: int
    base: int
    lease: int


@dataclasses.dataclass(frozen=True)
class JobEntries:
    """What opens a job. `admit` comes last and goes first: without it no packet of the job has an effect."""

    entries: tuple[Entry, ...]
    admit: Entry
    group: int
    copies: tuple[tuple[int, int], ...]


def check(job: Job, block_words: int = BLOCK_WORDS) -> None:
    """Raises Refused for what the fixed-size integer mode has not."""
    if job.key is not None:
        raise Refused(
            "a job with a key: a switch computes no SipHash. Open it with `key: none`, on a network you trust"
        )
    if job.floats:
        raise Refused("a job with floats: a switch adds integers. Use format int32, or a software aggregator")
    if job.block_bytes != 4 * block_words:
        raise Refused(f"blocks of {job.block_bytes} bytes: the program is compiled for {4 * block_words}")
    if job.window < 1 or job.window & (job.window - 1) or job.window > SLOTS:
        raise Refused(f"a window of {job.window}: it must be a power of two, at most {SLOTS}")
    if not 1 <= len(job.children) <= CHILDREN:
        raise Refused(f"{len(job.children)} children: 1 to {CHILDREN} are possible; put aggregators below this one")
    everybody = 0
    for child in job.children:
        if child.workers == 0 or child.workers & everybody:
            raise Refused("a child without workers, or a worker below two children")
        everybody |= child.workers
    for shards in (job.parent_shards, *(child.shards for child in job.children)):
        if shards < 1 or shards & (shards - 1) or shards > 16:
            raise Refused(f"{shards} shards: 1, 2, 4, 8 or 16 are possible")


def job_entries(job: Job, place: Place) -> JobEntries:
    """The entries and the multicast group of a job that `check` lets pass."""
    entries, copies = [], []
    for i, child in enumerate(job.children):
        at = child.address
        for shard in range(child.shards):
            keys = (place.number, at.port, at.ip, at.udp + shard, child.workers)
            entries.append(Entry("Aggregator.senders", keys, "Aggregator.sender", {"child": 1 << i}))
        to = {"mac": at.mac, "ip": at.ip, "udp": at.udp, "shards": child.shards - 1}
        entries.append(Entry("Copies.children", (place.number, i + 1), "Copies.to_child", to))
        copies.append((at.port, i + 1))
    admit = {
        "place": place.number,
        "lease": place.lease,
        "epoch": job.epoch,
        "base": place.base,
        "mask": job.window - 1,
        "children": (1 << len(job.children)) - 1,
        "workers": sum(child.workers for child in job.children),
        "mac": job.parent.mac,
        "ip": job.parent.ip,
        "udp": job.parent.udp,
        "shards": job.parent_shards - 1,
        "port": job.parent.port,
        "group": place.number,
    }
    return JobEntries(
        tuple(entries), Entry("Aggregator.jobs", (job.job,), "Aggregator.job", admit), place.number, tuple(copies)
    )


def find_place(job: Job, open_jobs: Iterable[Entry], lease: int) -> Place:
    """A number, slots and a lease that no open job has. `lease` is the time: no slot bears it already, whoever closed what
    before. Raises Refused when the switch is full or has the job."""
    numbers, taken = set(), []
    for entry in open_jobs:
        params = entry.params
        if entry.keys == (job.job,):
            raise Refused(f"job {job.job} is open here: close it first")
        numbers.add(params["place"])
        taken.append((params["base"], params["base"] + params["mask"] + 1))
        lease = max(lease, params["lease"] + 1)
    number = next((number for number in range(1, JOBS) if number not in numbers), None)
    if number is None:
        raise Refused(f"all {JOBS - 1} places for jobs are taken: close one")
    base = 0
    for start, end in sorted(taken):
        if start - base >= job.window:
            break
        base = max(base, end)
    if base + job.window > SLOTS:
        raise Refused(f"{job.window} slots in a row are not free: use a smaller window, or close a job")
    return Place(number, base, lease)


def setup(own: Address, hosts: Iterable[Address]) -> list[Entry]:
    """What a switch needs before any job: its own address, and where other traffic goes."""
    entries = [Entry("Aggregator.here", (own.ip, own.udp), "Aggregator.mine", {"mac": own.mac})]
    for host in hosts:
        entries.append(Entry("Aggregator.forward", (host.mac,), "Aggregator.to_port", {"port": host.port}))
    return entries


# ------------------------------------------------------------------------------------------------------------ P4Runtime


class Switch:
    """A switch behind P4Runtime, of which this process is the primary controller while the context lasts.

    Every call blocks for a round trip and raises grpc.RpcError where the switch refuses. `p4info` is the text that the
    compiler wrote; names become numbers through it."""

    def __init__(self, address: str, p4info: str, device_id: int = 0, timeout_s: float = 10.0) -> None:
        # p4runtime's messages were generated by a compiler that newer releases of protobuf take only in pure Python.
        os.environ.setdefault("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")
        import google.protobuf.text_format
        import grpc
        from p4.config.v1 import p4info_pb2
        from p4.v1 import p4runtime_pb2, p4runtime_pb2_grpc

        self._pb, self._device, self._timeout = p4runtime_pb2, device_id, timeout_s
        self._p4info = google.protobuf.text_format.Parse(p4info, p4info_pb2.P4Info())
        self._tables = {table.preamble.name: table for table in self._p4info.tables}
        self._actions = {action.preamble.name: action for action in self._p4info.actions}
        self._by_id = {one.preamble.id: one.preamble.name for one in (*self._p4info.tables, *self._p4info.actions)}
        self._events = next(c.preamble.id for c in self._p4info.counters if c.preamble.name == "Aggregator.events")
        self._channel = grpc.insecure_channel(address)
        self._stub = p4runtime_pb2_grpc.P4RuntimeStub(self._channel)
        # The newest controller wins, so that a script that died does not lock others out.
        self._election = p4runtime_pb2.Uint128(high=0, low=time.time_ns())
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def __enter__(self) -> Switch:
        hello = self._pb.StreamMessageRequest()
        hello.arbitration.device_id = self._device
        hello.arbitration.election_id.CopyFrom(self._election)
        self._requests.put(hello)
        # Who is primary is so as long as the stream lives, and it ends with the last reference to it.
        self._answers = self._stub.StreamChannel(iter(self._requests.get, None))
        answer = next(self._answers)
        if answer.arbitration.status.code != 0:
            self.__exit__()
            raise Refused(f"another controller has the switch: {answer.arbitration.status.message}")
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.put(None)
        self._channel.close()

    def load(self, program: bytes) -> None:
        """Puts the compiled program onto the switch; all entries and registers are gone."""
        request = self._pb.SetForwardingPipelineConfigRequest(device_id=self._device, election_id=self._election)
        request.action = request.VERIFY_AND_COMMIT
        request.config.p4info.CopyFrom(self._p4info)
        request.config.p4_device_config = program
        self._stub.SetForwardingPipelineConfig(request, timeout=self._timeout)

    def insert(self, entry: Entry) -> None:
        self._write(self._pb.Update.INSERT, self._entity(entry))

    def delete(self, entry: Entry) -> None:
        self._write(self._pb.Update.DELETE, self._entity(entry))

    def insert_group(self, group: int, copies: Iterable[tuple[int, int]]) -> None:
        self._write(self._pb.Update.INSERT, self._group(group, copies))

    def delete_group(self, group: int) -> None:
        self._write(self._pb.Update.DELETE, self._group(group, ()))

    def entries(self, table: str) -> list[Entry]:
        """All rows of a table."""
        entity = self._pb.Entity()
        entity.table_entry.table_id = self._tables[table].preamble.id
        found = []
        for answer in self._read(entity):
            row = answer.table_entry
            fields = {field.field_id: int.from_bytes(field.exact.value, "big") for field in row.match}
            keys = tuple(fields[field.id] for field in self._tables[table].match_fields)
            action = self._by_id[row.action.action.action_id]
            names = {param.id: param.name for param in self._actions[action].params}
            params = {names[p.param_id]: int.from_bytes(p.value, "big") for p in row.action.action.params}
            found.append(Entry(table, keys, action, params))
        return found

    def counters(self, place: int) -> dict[str, int]:
        """What happened to the packets of the job at a place; of no job at place 0."""
        entity = self._pb.Entity()
        entity.counter_entry.counter_id = self._events
        counts = {}
        for number, name in EVENTS.items():
            entity.counter_entry.index.index = place << 5 | number
            counts[name] = sum(answer.counter_entry.data.packet_count for answer in self._read(entity))
        return counts

    def clear_counters(self, place: int) -> None:
        for number in EVENTS:
            entity = self._pb.Entity()
            entity.counter_entry.counter_id = self._events
            entity.counter_entry.index.index = place << 5 | number
            entity.counter_entry.data.packet_count = 0
            self._write(self._pb.Update.MODIFY, entity)

    def _entity(self, entry: Entry) -> Any:
        table, action = self._tables[entry.table], self._actions[entry.action]
        entity = self._pb.Entity()
        entity.table_entry.table_id = table.preamble.id
        widths, actions = TABLES[entry.table]
        for field, value in zip(table.match_fields, entry.keys, strict=True):
            assert field.name in widths and field.bitwidth == widths[field.name], "the p4info is of another program"
            entity.table_entry.match.add(field_id=field.id).exact.value = _canonical(value)
        entity.table_entry.action.action.action_id = action.preamble.id
        for param in action.params:
            assert param.bitwidth == actions[entry.action][param.name], "the p4info is of another program"
            value = _canonical(entry.params[param.name])
            entity.table_entry.action.action.params.add(param_id=param.id, value=value)
        return entity

    def _group(self, group: int, copies: Iterable[tuple[int, int]]) -> Any:
        entity = self._pb.Entity()
        multicast = entity.packet_replication_engine_entry.multicast_group_entry
        multicast.multicast_group_id = group
        for port, number in copies:
            multicast.replicas.add(egress_port=port, instance=number)
        return entity

    def _write(self, kind: int, entity: Any) -> None:
        request = self._pb.WriteRequest(device_id=self._device, election_id=self._election)
        request.updates.add(type=kind, entity=entity)
        self._stub.Write(request, timeout=self._timeout)

    def _read(self, entity: Any) -> Iterator[Any]:
        request = self._pb.ReadRequest(device_id=self._device, entities=[entity])
        for answer in self._stub.Read(request, timeout=self._timeout):
            yield from answer.entities


class Tables(Protocol):
    """What opening and closing a job needs of a switch: this one's `Switch`, the twin, or bmv2 behind its own CLI."""

    def insert(self, entry: Entry) -> None: ...
    def delete(self, entry: Entry) -> None: ...
    def entries(self, table: str) -> list[Entry]: ...
    def insert_group(self, group: int, copies: Iterable[tuple[int, int]]) -> None: ...
    def delete_group(self, group: int) -> None: ...
    def clear_counters(self, place: int) -> None: ...


def open_job(switch: Tables, job: Job, block_words: int = BLOCK_WORDS) -> Place:
    """Opens a job with empty slots; an epoch of it that is not newer gives way. What was written is taken back if the switch
    refuses in the midst. Raises Refused."""
    check(job, block_words)
    opened = switch.entries("Aggregator.jobs")
    before = next((entry for entry in opened if entry.keys == (job.job,)), None)
    if before is not None and (job.epoch - before.params["epoch"]) & 0x8000:
        raise Refused(f"epoch {before.params['epoch']} of job {job.job} is newer and already here")
    others = [entry for entry in opened if entry is not before]
    lease = time.time_ns() if before is None else max(time.time_ns(), before.params["lease"] + 1)
    place = find_place(job, others, lease)
    what = job_entries(job, place)
    if before is not None:
        close_job(switch, job.job)
    switch.clear_counters(place.number)
    undo: list[Callable[[], None]] = []
    try:
        switch.insert_group(what.group, what.copies)
        undo.append(functools.partial(switch.delete_group, what.group))
        for entry in (*what.entries, what.admit):
            switch.insert(entry)
            undo.append(functools.partial(switch.delete, entry))
    except BaseException:
        for step in reversed(undo):
            step()
        raise
    return place


def find_open(switch: Tables, job: Job) -> Place | None:
    """Where the job is open with the very same rows; None where it is not."""
    admit = next((entry for entry in switch.entries("Aggregator.jobs") if entry.keys == (job.job,)), None)
    if admit is None:
        return None
    place = Place(admit.params["place"], admit.params["base"], admit.params["lease"])
    what = job_entries(job, place)
    tables = ("Aggregator.senders", "Copies.children")
    rows = [row for table in tables for row in switch.entries(table) if row.keys[0] == place.number]
    same = {(row.table, row.keys): row for row in rows} == {(row.table, row.keys): row for row in what.entries}
    return place if same and admit == what.admit else None


def close_job(switch: Tables, job: int) -> None:
    """Takes a job's entries away, the one that admits its packets first. Its slots are then anybody's."""
    admit = next((entry for entry in switch.entries("Aggregator.jobs") if entry.keys == (job,)), None)
    if admit is None:
        raise Refused(f"job {job} is not open here")
    switch.delete(admit)
    place = admit.params["place"]
    for table in ("Aggregator.senders", "Copies.children"):
        for entry in switch.entries(table):
            if entry.keys[0] == place:
                switch.delete(entry)
    switch.delete_group(admit.params["group"])


def _canonical(value: int) -> bytes:
    """P4Runtime's form of a number: no leading zeros, but one byte at least."""
    return value.to_bytes(max(1, (value.bit_length() + 7) // 8), "big")


# ---------------------------------------------------------------------------------------------------------- command line


def read_ports(text: str) -> tuple[Address, dict[int, Address]]:
    """ports.json: the switch's own address, and its hosts by IPv4 address (their UDP port is the job's affair)."""
    ports = json.loads(text)
    ip, udp = _endpoint(ports["address"])
    hosts = {
        int(ipaddress.IPv4Address(name)): Address(_mac(host["mac"]), int(ipaddress.IPv4Address(name)), 0, host["port"])
        for name, host in ports["hosts"].items()
    }
    return Address(_mac(ports["mac"]), ip, udp), hosts


def read_job(number: int, text: str, hosts: dict[int, Address]) -> Job:
    """The body of PUT /jobs/{number} of `penstock aggregator`."""
    body = json.loads(text)

    def address(endpoint: str) -> Address:
        ip, udp = _endpoint(endpoint)
        if ip not in hosts:
            raise Refused(f"{endpoint} is no host in ports.json")
        return dataclasses.replace(hosts[ip], udp=udp)

    children = tuple(
        Child(address(child["address"]), int(str(child["workers"]), 0), child.get("shards", 1))
        for child in body["children"]
    )
    parent = body["parent"]
    return Job(
        number,
        body["epoch"],
        body["window"],
        body["block_bytes"],
        address(parent["address"]),
        children,
        parent.get("shards", 1),
        body.get("key"),
        body.get("floats", False),
    )


def _endpoint(text: str) -> tuple[int, int]:
    host, _, port = text.rpartition(":")
    return int(ipaddress.IPv4Address(host)), int(port)


def _mac(text: str) -> int:
    return int(text.replace(":", ""), 16)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--switch", default="127.0.0.1:9559", help="where it listens for P4Runtime")
    parser.add_argument("--device", type=int, default=0, help="its number there")
    parser.add_argument("--p4info", type=pathlib.Path, required=True, help="what the compiler wrote")
    parser.add_argument("--ports", type=pathlib.Path, help="who is where")
    parser.add_argument("--block-words", type=int, default=BLOCK_WORDS, help="BLOCK_WORDS that it was compiled with")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("load").add_argument("program", type=pathlib.Path)
    verbs.add_parser("setup")
    opening = verbs.add_parser("open")
    opening.add_argument("job", type=int)
    opening.add_argument("body", type=pathlib.Path)
    verbs.add_parser("close").add_argument("job", type=int)
    verbs.add_parser("counters").add_argument("job", type=int, nargs="?")
    given = parser.parse_args(arguments)
    if given.verb in ("setup", "open") and given.ports is None:
        parser.error(f"{given.verb} needs --ports")
    try:
        with Switch(given.switch, given.p4info.read_text(), given.device) as switch:
            if given.verb == "load":
                switch.load(given.program.read_bytes())
            elif given.verb == "setup":
                own, hosts = read_ports(given.ports.read_text())
                for entry in setup(own, hosts.values()):
                    switch.insert(entry)
            elif given.verb == "open":
                _, hosts = read_ports(given.ports.read_text())
                job = read_job(given.job, given.body.read_text(), hosts)
                before = find_open(switch, job)
                place = before or open_job(switch, job, given.block_words)
                already = "already " if before else ""
                print(f"job {given.job} is {already}open at place {place.number}, slots from {place.base}")
            elif given.verb == "close":
                close_job(switch, given.job)
            else:
                places = {entry.keys[0]: entry.params["place"] for entry in switch.entries("Aggregator.jobs")}
                if given.job is not None and given.job not in places:
                    raise Refused(f"job {given.job} is not open here")
                shown = places if given.job is None else {given.job: places[given.job]}
                counts = {str(job): switch.counters(place) for job, place in shown.items()}
                print(json.dumps(counts | {"of no job": switch.counters(0)}, indent=2))
    except Refused as refused:
        print(f"control.py: {refused}", file=sys.stderr)
        return 1
    except _rpc_error() as error:
        print(f"control.py: switch {given.switch}: {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    return 0


def _rpc_error() -> Any:
    """What a call that the switch refuses, or does not answer, raises."""
    import grpc

    return grpc.RpcError


if __name__ == "__main__":
    sys.exit(main())
