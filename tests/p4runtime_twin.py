"""The twin of the P4 program behind real P4Runtime: what tests let `p4/control.py` talk to; and, between network interfaces, a
switch for real frames (tests/live_switch.py).

    p4runtime_twin.py P4INFO    # writes the p4info there, prints its port
    p4runtime_twin.py P4INFO 1=h0 2=h1 --listen unix:twin.sock --block-words 64 --drop 0.05 --seed 7

Then a line on stdin is a question, answered by one of JSON: `tables`, `counters`, `packet PORT HEX`; `mute` and `unmute`, between
which the aggregator does not hear; `forget`, after which it is as if switched on anew, but for its address and where hosts are.
It ends with its stdin. A process of its own, because p4runtime's messages need protobuf in its pure Python form, which a process
has from the start or never."""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import pathlib
import random
import selectors
import socket
import sys
from typing import Any

import google.protobuf.text_format
import grpc
from p4.config.v1 import p4info_pb2
from p4.v1 import p4runtime_pb2, p4runtime_pb2_grpc

import twin

parser = argparse.ArgumentParser()
parser.add_argument("p4info", type=pathlib.Path)
parser.add_argument("--listen", default="127.0.0.1:0")
parser.add_argument("--block-words", type=int, default=16)
parser.add_argument(
    "--drop", type=float, default=0.0, help="the share of UDP frames that are lost, coming in and going out"
)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("ports", nargs="*", help="PORT=INTERFACE")
options = parser.parse_args()

switch = twin.Switch(options.block_words)

info = p4info_pb2.P4Info()
for number, (name, (keys, actions)) in enumerate(twin.TABLES.items()):
    table = info.tables.add(size=64)
    table.preamble.id, table.preamble.name = 0x02000001 + number, name
    for i, (field, bits) in enumerate(keys.items()):
        table.match_fields.add(id=i + 1, name=field, bitwidth=bits, match_type=p4info_pb2.MatchField.EXACT)
    for i, (action_name, params) in enumerate(actions.items()):
        action = info.actions.add()
        action.preamble.id, action.preamble.name = 0x01000001 + 16 * number + i, action_name
        for j, (param, bits) in enumerate(params.items()):
            action.params.add(id=j + 1, name=param, bitwidth=bits)
counter = info.counters.add()
counter.preamble.id, counter.preamble.name = 0x12000001, "Aggregator.events"
tables = {table.preamble.id: table for table in info.tables}
actions_by_id = {action.preamble.id: action for action in info.actions}
ids = {one.preamble.name: one.preamble.id for one in (*info.tables, *info.actions)}


class Servicer(p4runtime_pb2_grpc.P4RuntimeServicer):
    """Who writes must be primary, and is so as long as his stream lives."""

    def __init__(self) -> None:
        self.primaries: list[int] = []

    def StreamChannel(self, requests: Any, context: Any) -> Any:
        mine = []
        try:
            for request in requests:
                mine.append(request.arbitration.election_id.low)
                self.primaries.append(mine[-1])
                answer = p4runtime_pb2.StreamMessageResponse()
                answer.arbitration.CopyFrom(request.arbitration)
                yield answer
        finally:
            for number in mine:
                self.primaries.remove(number)

    def check_primary(self, request: Any, context: Any) -> None:
        if request.election_id.low not in self.primaries:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "Not primary")

    def Write(self, request: Any, context: Any) -> Any:
        self.check_primary(request, context)
        for update in request.updates:
            insert = update.type == p4runtime_pb2.Update.INSERT
            if update.entity.HasField("counter_entry"):
                entry = update.entity.counter_entry
                switch.events[entry.index.index] = entry.data.packet_count
            elif update.entity.HasField("table_entry"):
                row = read_row(update.entity.table_entry)
                (switch.insert if insert else switch.delete)(row)
            else:
                group = update.entity.packet_replication_engine_entry.multicast_group_entry
                if insert:
                    copies = [(copy.egress_port, copy.instance) for copy in group.replicas]
                    switch.insert_group(group.multicast_group_id, copies)
                else:
                    switch.delete_group(group.multicast_group_id)
        return p4runtime_pb2.WriteResponse()

    def Read(self, request: Any, context: Any) -> Any:
        answer = p4runtime_pb2.ReadResponse()
        for asked in request.entities:
            if asked.HasField("counter_entry"):
                entity = answer.entities.add()
                entity.CopyFrom(asked)
                entity.counter_entry.data.packet_count = switch.events[asked.counter_entry.index.index]
            else:
                table = tables[asked.table_entry.table_id]
                for row in switch.entries(table.preamble.name):
                    entry = answer.entities.add().table_entry
                    entry.table_id = table.preamble.id
                    for field, value in zip(table.match_fields, row.keys, strict=True):
                        entry.match.add(field_id=field.id).exact.value = canonical(value)
                    entry.action.action.action_id = ids[row.action]
                    for param in actions_by_id[ids[row.action]].params:
                        value = canonical(row.params[param.name])
                        entry.action.action.params.add(param_id=param.id, value=value)
        yield answer

    def SetForwardingPipelineConfig(self, request: Any, context: Any) -> Any:
        self.check_primary(request, context)
        assert request.config.p4_device_config == b"{}" and request.config.p4info == info
        return p4runtime_pb2.SetForwardingPipelineConfigResponse()


def read_row(entry: Any) -> twin.Entry:
    action = actions_by_id[entry.action.action.action_id]
    names = {param.id: param.name for param in action.params}
    params = {names[one.param_id]: int.from_bytes(one.value, "big") for one in entry.action.action.params}
    keys = tuple(int.from_bytes(field.exact.value, "big") for field in entry.match)
    return twin.Entry(tables[entry.table_id].preamble.name, keys, action.preamble.name, params)


def canonical(value: int) -> bytes:
    return value.to_bytes(max(1, (value.bit_length() + 7) // 8), "big")


class Wires:
    """The switch's ports: frames of IPv4 that come in on an interface go through the pipeline, and out."""

    def __init__(self) -> None:
        self.sockets: dict[int, socket.socket] = {}
        for number, interface in (port.split("=") for port in options.ports):
            raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
            raw.bind((interface, 0))
            raw.setblocking(False)
            self.sockets[int(number)] = raw
        self.random = random.Random(options.seed)
        self.lost, self.muted = 0, False

    def receive(self, port: int) -> None:
        for _ in range(64):
            try:
                frame = self.sockets[port].recv(1 << 16)
            except BlockingIOError:
                return
            macs = [row.params["mac"].to_bytes(6, "big") for row in switch.entries("Aggregator.here")]
            if self.loses(frame) or (self.muted and frame[:6] in macs):
                continue
            for to, out in switch.packet(port, frame):
                if to in self.sockets and not self.loses(out):
                    try:
                        self.sockets[to].send(out)
                    except OSError:  # the link is full, or down
                        self.lost += 1

    def loses(self, frame: bytes) -> bool:
        lost = frame[23] == socket.IPPROTO_UDP and self.random.random() < options.drop
        self.lost += lost
        return lost


def forget() -> None:
    kept = [row for table in ("Aggregator.here", "Aggregator.forward") for row in switch.entries(table)]
    switch.__init__(options.block_words)  # type: ignore[misc]
    for row in kept:
        switch.insert(row)


def answer(verb: str, words: list[str]) -> Any:
    if verb == "tables":
        rows = {name: [dataclasses.asdict(row) for row in table.values()] for name, table in switch.tables.items()}
        return {"rows": rows, "groups": switch.groups}
    if verb == "packet":
        return [[port, frame.hex()] for port, frame in switch.packet(int(words[0]), bytes.fromhex(words[1]))]
    if verb == "counters":
        return {"places": [switch.counters(place) for place in range(twin.JOBS)], "lost": wires.lost}
    if verb == "forget":
        forget()
    else:
        wires.muted = {"mute": True, "unmute": False}[verb]
    return None


server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
p4runtime_pb2_grpc.add_P4RuntimeServicer_to_server(Servicer(), server)
port = server.add_insecure_port(options.listen)
server.start()
options.p4info.write_text(google.protobuf.text_format.MessageToString(info))
wires = Wires()
selector = selectors.DefaultSelector()
for number, raw in wires.sockets.items():
    selector.register(raw, selectors.EVENT_READ, number)
selector.register(sys.stdin, selectors.EVENT_READ, 0)
print(port, flush=True)
running = True
while running:
    for key, _ in selector.select():
        if key.data:
            wires.receive(key.data)
        elif line := sys.stdin.readline():
            verb, *rest = line.split()
            print(json.dumps(answer(verb, rest)), flush=True)
        else:
            running = False
server.stop(None).wait()
