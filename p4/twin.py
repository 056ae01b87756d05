"""`penstock.p4` in Python: the same tables, registers and steps under the same names, so that a reader can hold one against
the other, and a machine without a P4 compiler can run `vectors/`.

Change both or none. Frames of Ethernet in, frames out; no clock, no sockets. It says nothing about speed."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable, Iterator

# What `penstock.p4` is compiled for.
BLOCK_WORDS = 64
SLOTS = 4096
JOBS = 64
CHILDREN = 16

PUSH, RESULT, HEARTBEAT_UP, HEARTBEAT_DOWN, REQUEST, MISSING, ACCEPTED, PULL, PULLED = range(1, 10)
NONE, I32, I16, EXPONENTS, F32, BF16, TEXT = 0, 1, 2, 3, 4, 6, 7
LOST, FULL, LAST = 1, 2, 4
MAX_PAYLOAD_BYTES = 8896

# What is counted for each job, by its number.
EVENTS = {
    0: "malformed",
    1: "job",
    2: "epoch",
    3: "key",
    4: "sender",
    5: "format",
    6: "length",
    7: "stale",
    8: "duplicate",
    11: "kind",
    16: "added",
    17: "completed",
    18: "repeated",
    19: "relayed",
    20: "abandoned",
    21: "named",
}
_NUMBERS = {name: number for number, name in EVENTS.items()}

# Tables: the keys and the parameters of each action, with their bits.
TABLES: dict[str, tuple[dict[str, int], dict[str, dict[str, int]]]] = {
    "Aggregator.here": ({"hdr.ipv4.dst": 32, "hdr.udp.dst": 16}, {"Aggregator.mine": {"mac": 48}}),
    "Aggregator.jobs": (
        {"hdr.penstock.job": 32},
        {
            "Aggregator.job": {
                "place": 32,
                "lease": 64,
                "epoch": 16,
                "base": 32,
                "mask": 32,
                "children": 16,
                "workers": 64,
                "mac": 48,
                "ip": 32,
                "udp": 16,
                "shards": 16,
                "port": 9,
                "group": 16,
            }
        },
    ),
    "Aggregator.senders": (
        {
            "meta.job": 32,
            "standard.ingress_port": 9,
            "hdr.ipv4.src": 32,
            "hdr.udp.src": 16,
            "hdr.penstock.workers": 64,
        },
        {"Aggregator.sender": {"child": 16}},
    ),
    "Aggregator.forward": (
        {"hdr.ethernet.dst": 48},
        {"Aggregator.to_port": {"port": 9}, "Aggregator.flood": {"group": 16}},
    ),
    "Copies.children": (
        {"meta.job": 32, "standard.egress_rid": 16},
        {"Copies.to_child": {"mac": 48, "ip": 32, "udp": 16, "shards": 16}},
    ),
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A row of a table: the values of its keys in the table's order, and what it does."""

    table: str
    keys: tuple[int, ...]
    action: str
    params: dict[str, int] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        keys, actions = TABLES[self.table]
        widths = [*keys.values(), *actions[self.action].values()]
        if len(self.keys) != len(keys) or set(self.params) != set(actions[self.action]):
            raise ValueError(f"{self.table}: an entry needs {list(keys)} and {list(actions[self.action])}")
        for value, bits in zip(
            (*self.keys, *(self.params[name] for name in actions[self.action])), widths, strict=True
        ):
            if not 0 <= value < 1 << bits:
                raise ValueError(f"{self.table}: {value} does not fit {bits} bits")


# ------------------------------------------------------------------------------------------------------------- headers


@dataclasses.dataclass
class Penstock:
    """The header of docs/reference/packets.md."""

    kind: int
    job: int
    epoch: int
    format: int
    flags: int
    seq: int
    ack: int
    credit: int
    exponent: int
    length: int
    workers: int
    magic: int = 0x5041
    version: int = 4
    digest: int = 0
    mac: int = 0

    LAYOUT = struct.Struct(">HBBIHBBIIIHHIQQ")

    @classmethod
    def read(cls, data: bytes) -> Penstock:
        (magic, version, kind, job, epoch, form, flags, seq, ack, credit, exponent, length, digest, workers, mac) = (
            cls.LAYOUT.unpack_from(data)
        )
        return cls(
            kind, job, epoch, form, flags, seq, ack, credit, exponent, length, workers, magic, version, digest, mac
        )

    def bytes(self) -> bytes:
        return self.LAYOUT.pack(
            self.magic,
            self.version,
            self.kind,
            self.job,
            self.epoch,
            self.format,
            self.flags,
            self.seq,
            self.ack,
            self.credit,
            self.exponent,
            self.length,
            self.digest,
            self.workers,
            self.mac,
        )


@dataclasses.dataclass
class Headers:
    """A frame, parsed: what a parser state did not extract is None, what lies behind the headers is `payload`."""

    ethernet: list[int]  # dst, src, type
    ipv4: dict[str, int] | None = None
    udp: dict[str, int] | None = None
    penstock: Penstock | None = None
    block: list[int] | None = None
    payload: bytes = b""
    error: bool = False


def _checksum(data: bytes) -> int:
    """The Internet's (RFC 1071)."""
    data += bytes(len(data) % 2)
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


def _ipv4_bytes(ip: dict[str, int], checksum: int) -> bytes:
    return struct.pack(
        ">BBHHHBBHII",
        ip["version"] << 4 | ip["ihl"],
        ip["diffserv"],
        ip["length"],
        ip["identification"],
        ip["flags"] << 13 | ip["fragment"],
        ip["ttl"],
        ip["protocol"],
        checksum,
        ip["src"],
        ip["dst"],
    )


def _udp_checksum(hdr: Headers, behind: bytes) -> int:
    ip, udp = hdr.ipv4, hdr.udp
    assert ip is not None and udp is not None
    pseudo = struct.pack(">IIBBH", ip["src"], ip["dst"], 0, ip["protocol"], udp["length"])
    return _checksum(pseudo + struct.pack(">HHH", udp["src"], udp["dst"], udp["length"]) + behind)


def parse(frame: bytes, block_words: int = BLOCK_WORDS) -> Headers:
    """The parser. Packets that end too early have `error` set, and hold what was extracted before."""
    if len(frame) < 14:
        return Headers([0, 0, 0], payload=frame, error=True)
    dst, src, kind = frame[0:6], frame[6:12], frame[12:14]
    hdr = Headers([int.from_bytes(dst, "big"), int.from_bytes(src, "big"), int.from_bytes(kind, "big")])
    hdr.payload = frame[14:]

    def take(count: int) -> bytes | None:
        if len(hdr.payload) < count:
            hdr.error = True
            return None
        taken, hdr.payload = hdr.payload[:count], hdr.payload[count:]
        return taken

    if hdr.ethernet[2] != 0x0800 or (data := take(20)) is None:
        return hdr
    first, diffserv, length, identification, fragment, ttl, protocol, checksum, source, destination = struct.unpack(
        ">BBHHHBBHII", data
    )
    hdr.ipv4 = {
        "version": first >> 4,
        "ihl": first & 15,
        "diffserv": diffserv,
        "length": length,
        "identification": identification,
        "flags": fragment >> 13,
        "fragment": fragment & 0x1FFF,
        "ttl": ttl,
        "protocol": protocol,
        "checksum": checksum,
        "src": source,
        "dst": destination,
    }
    if (first, fragment & 0x3FFF, protocol) != (0x45, 0, 17) or (data := take(8)) is None:
        return hdr
    hdr.udp = dict(zip(("src", "dst", "length", "checksum"), struct.unpack(">HHHH", data), strict=True))
    if hdr.udp["length"] < 56 or (data := take(48)) is None:
        return hdr
    hdr.penstock = Penstock.read(data)
    size = 4 * block_words
    if (hdr.penstock.kind, hdr.penstock.length, hdr.udp["length"]) == (PUSH, size, size + 56):
        if (data := take(size)) is None:
            return hdr
        hdr.block = list(struct.unpack(f">{block_words}I", data))
    return hdr


def deparse(hdr: Headers) -> bytes:
    """What the headers say, and what lay behind them."""
    out = hdr.ethernet[0].to_bytes(6, "big") + hdr.ethernet[1].to_bytes(6, "big") + hdr.ethernet[2].to_bytes(2, "big")
    if hdr.ipv4 is not None:
        out += _ipv4_bytes(hdr.ipv4, hdr.ipv4["checksum"])
    if hdr.udp is not None:
        out += struct.pack(">HHHH", *(hdr.udp[name] for name in ("src", "dst", "length", "checksum")))
    return out + _behind_udp(hdr)


def _behind_udp(hdr: Headers) -> bytes:
    out = hdr.penstock.bytes() if hdr.penstock is not None else b""
    if hdr.block is not None:
        out += struct.pack(f">{len(hdr.block)}I", *hdr.block)
    return out + hdr.payload


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a node lives: hardware and IPv4 address, UDP port, and the switch's port that leads there."""

    mac: int
    ip: int
    udp: int
    port: int = 0


def frame_of(source: Address, destination: Address, datagram: bytes) -> bytes:
    """A datagram as it arrives on the wire, with both checksums."""
    ip = {"version": 4, "ihl": 5, "diffserv": 0, "length": 28 + len(datagram), "identification": 0, "flags": 2}
    ip |= {"fragment": 0, "ttl": 64, "protocol": 17, "checksum": 0, "src": source.ip, "dst": destination.ip}
    udp = {"src": source.udp, "dst": destination.udp, "length": 8 + len(datagram), "checksum": 0}
    hdr = Headers([destination.mac, source.mac, 0x0800], ip, udp, payload=datagram)
    ip["checksum"] = _checksum(_ipv4_bytes(ip, 0))
    udp["checksum"] = _udp_checksum(hdr, datagram)
    return deparse(hdr)


# ------------------------------------------------------------------------------------------------------------ the switch


def newer(a: int, b: int) -> bool:
    """R7: numbers are compared on a circle."""
    return (a - b - 1) & 0xFFFFFFFF < 0x7FFFFFFF


@dataclasses.dataclass
class Metadata:
    """What the P4 program calls metadata_t, and what it needs of standard_metadata_t.

    More than 16 fields: it has those of metadata_t.
    """

    ingress_port: int
    egress_spec: int | None = None
    mcast_grp: int = 0
    own_mac: int = 0
    own_ip: int = 0
    own_udp: int = 0
    job: int = 0
    lease: int = 0
    epoch: int = 0
    base: int = 0
    mask: int = 0
    children: int = 0
    workers: int = 0
    parent_mac: int = 0
    parent_ip: int = 0
    parent_udp: int = 0
    parent_shards: int = 0
    parent_port: int = 0
    group: int = 0
    child: int = 0
    heard_before: int = 0
    heard: int = 0
    ack_before: int = 0
    credit_before: int = 0
    ack: int = 0
    credit: int = 0
    slot: int = 0


class Switch:
    """One switch that runs the program, as it is after it was started: no entries, all registers 0."""

    def __init__(self, block_words: int = BLOCK_WORDS) -> None:
        self.block_words = block_words
        self.tables: dict[str, dict[tuple[int, ...], Entry]] = {name: {} for name in TABLES}
        self.groups: dict[int, list[tuple[int, int]]] = {}  # (port, copy's number)
        self.events = [0] * (JOBS * 32)
        self.slot_lease = [0] * SLOTS
        self.slot_tag = [0] * SLOTS
        self.slot_have_high = [0] * SLOTS
        self.slot_have_low = [0] * SLOTS
        self.slot_shape = [0] * SLOTS
        self.sum = [[0] * SLOTS for _ in range(block_words)]
        self.heart_lease = [0] * JOBS
        self.heart_heard = [0] * JOBS
        self.heart_ack = [[0] * JOBS for _ in range(CHILDREN)]
        self.heart_credit = [[0] * JOBS for _ in range(CHILDREN)]

    # ------------------------------------------- for the control plane: what `Switch` of control.py also offers

    def insert(self, entry: Entry) -> None:
        if entry.keys in self.tables[entry.table]:
            raise ValueError(f"{entry.table} already has {entry.keys}")
        self.tables[entry.table][entry.keys] = entry

    def delete(self, entry: Entry) -> None:
        del self.tables[entry.table][entry.keys]

    def entries(self, table: str) -> list[Entry]:
        return list(self.tables[table].values())

    def insert_group(self, group: int, copies: Iterable[tuple[int, int]]) -> None:
        if group in self.groups:
            raise ValueError(f"there already is a multicast group {group}")
        self.groups[group] = list(copies)

    def delete_group(self, group: int) -> None:
        del self.groups[group]

    def counters(self, place: int) -> dict[str, int]:
        return {name: self.events[place << 5 | number] for number, name in EVENTS.items()}

    def clear_counters(self, place: int) -> None:
        self.events[place << 5 : (place + 1) << 5] = [0] * 32

    # --------------------------------------------------------------------------------------------- the pipeline

    def packet(self, port: int, frame: bytes) -> list[tuple[int, bytes]]:
        """What leaves, and through which port, when a frame comes in."""
        hdr, meta = parse(frame, self.block_words), Metadata(port)
        self._ingress(hdr, meta, checksum_error=not self._verify(hdr))
        return list(self._egress(hdr, meta))

    @staticmethod
    def _verify(hdr: Headers) -> bool:
        if hdr.udp is None or hdr.ipv4 is None:
            return True
        good = _checksum(_ipv4_bytes(hdr.ipv4, 0)) == hdr.ipv4["checksum"]
        if hdr.penstock is not None and hdr.udp["checksum"] != 0:
            good = good and _udp_checksum(hdr, _behind_udp(hdr)) == hdr.udp["checksum"]
        return good

    def _count(self, meta: Metadata, event: str) -> None:
        self.events[(meta.job << 5) + _NUMBERS[event]] += 1

    def _apply(self, table: str, *keys: int) -> Entry | None:
        return self.tables[table].get(keys)

    def _ingress(self, hdr: Headers, meta: Metadata, checksum_error: bool) -> None:
        ip, udp = hdr.ipv4, hdr.udp
        here = self._apply("Aggregator.here", ip["dst"], udp["dst"]) if ip is not None and udp is not None else None
        if here is None or ip is None or udp is None:
            if not hdr.error and (entry := self._apply("Aggregator.forward", hdr.ethernet[0])) is not None:
                if entry.action == "Aggregator.to_port":
                    meta.egress_spec = entry.params["port"]
                else:
                    meta.mcast_grp = entry.params["group"]
            return
        meta.own_mac, meta.own_ip, meta.own_udp = here.params["mac"], ip["dst"], udp["dst"]

        p = hdr.penstock
        if hdr.error or checksum_error or p is None or self._is_malformed(p, ip, udp):
            return self._count(meta, "malformed")
        if (job := self._apply("Aggregator.jobs", p.job)) is None:
            return self._count(meta, "job")
        meta.job = job.params["place"]
        for name in ("lease", "epoch", "base", "mask", "children", "workers", "group"):
            setattr(meta, name, job.params[name])
        for name in ("mac", "ip", "udp", "shards", "port"):
            setattr(meta, f"parent_{name}", job.params[name])
        if p.mac != 0 or p.digest != 0:
            return self._count(meta, "key")
        if p.epoch != meta.epoch:
            return self._count(meta, "epoch")  # R6
        if p.kind in (RESULT, PULLED, ACCEPTED, HEARTBEAT_DOWN, MISSING):
            if (ip["src"], meta.ingress_port) != (meta.parent_ip, meta.parent_port):
                return self._count(meta, "sender")
            if (udp["src"] - meta.parent_udp) & 0xFFFF > meta.parent_shards:
                return self._count(meta, "sender")
            if p.kind != MISSING:
                meta.mcast_grp = meta.group
                return self._count(meta, "relayed")
        elif p.kind in (REQUEST, PULL):
            return self._count(meta, "kind")
        else:
            keys = (meta.job, meta.ingress_port, ip["src"], udp["src"], p.workers)
            if (sender := self._apply("Aggregator.senders", *keys)) is None:
                return self._count(meta, "sender")
            meta.child = sender.params["child"]

        self._hear(p, meta)
        if p.kind == HEARTBEAT_UP:
            moved = (meta.ack, meta.credit) != (meta.ack_before, meta.credit_before)
            if meta.heard == meta.children and (meta.child == 1 or meta.heard_before != meta.children or moved):
                self._send_up(hdr, meta, HEARTBEAT_UP, 0, 0, NONE, 0)
        elif p.kind == PUSH and (p.flags & FULL or p.format not in (I32, EXPONENTS)):
            self._count(meta, "format")
        elif p.kind == PUSH and hdr.block is None:
            self._count(meta, "length")
        else:
            self._slot(hdr, p, meta)

    @staticmethod
    def _is_malformed(p: Penstock, ip: dict[str, int], udp: dict[str, int]) -> bool:
        if (p.magic, p.version) != (0x5041, 4):
            return True
        if not PUSH <= p.kind <= PULLED or p.format > TEXT:
            return True
        if udp["length"] != p.length + 56 or ip["length"] != udp["length"] + 20 or p.length > MAX_PAYLOAD_BYTES:
            return True
        if p.format == TEXT and p.kind != PULLED:
            return True
        if p.kind in (PUSH, RESULT, PULLED):
            if p.format == NONE or p.length == 0:
                return True
            if (p.format != TEXT and p.length % 2) or (p.format in (I32, F32) and p.length % 4):
                return True
            if p.kind == PUSH:
                return p.flags > LOST | FULL | LAST or p.workers == 0
            return p.flags & (FULL ^ 0xFF) != 0
        is_down = p.kind in (HEARTBEAT_DOWN, MISSING, ACCEPTED)
        if p.format != NONE or p.length != 0 or (not is_down and p.workers == 0):
            return True
        return p.flags != 0 if is_down else p.flags > LOST

    def _hear(self, p: Penstock, meta: Metadata) -> None:
        """R5: the newest of each child, and the minimum over all of them, before and after."""
        meta.heard_before = self.heart_heard[meta.job]
        if self.heart_lease[meta.job] != meta.lease:
            meta.heard_before = 0
            self.heart_lease[meta.job] = meta.lease
        meta.heard = meta.heard_before | meta.child
        self.heart_heard[meta.job] = meta.heard
        known = meta.heard_before & meta.child != 0
        for i in range(CHILDREN):

            def is_least(value: int, least: int, i: int = i) -> bool:
                return i == 0 or (meta.children & 1 << i != 0 and not newer(value, least))

            ack, credit = self.heart_ack[i][meta.job], self.heart_credit[i][meta.job]
            if is_least(ack, meta.ack_before):
                meta.ack_before = ack
            if is_least(credit, meta.credit_before):
                meta.credit_before = credit
            if meta.child == 1 << i:
                if not known or newer(p.ack, ack):
                    ack = self.heart_ack[i][meta.job] = p.ack
                if not known or newer(p.credit, credit):
                    credit = self.heart_credit[i][meta.job] = p.credit
            if is_least(ack, meta.ack):
                meta.ack = ack
            if is_least(credit, meta.credit):
                meta.credit = credit

    def _slot(self, hdr: Headers, p: Penstock, meta: Metadata) -> None:
        slot = meta.slot = meta.base + (p.seq & meta.mask)
        seq, alike = self.slot_tag[slot], self.slot_shape[slot]
        bitmap = self.slot_have_high[slot] << 32 | self.slot_have_low[slot]
        empty = self.slot_lease[slot] != meta.lease
        is_newer = empty or newer(p.seq, seq)
        shape = (p.flags & LAST) << 24 | p.format << 16 | p.exponent
        kept = (alike >> 24, alike >> 16 & 0xFF, alike & 0xFFFF)
        is_added = False
        if not is_newer and p.seq != seq:
            self._count(meta, "stale")  # R2
        elif p.kind == MISSING:
            if is_newer:
                bitmap = 0
            p.workers &= meta.workers
            if p.workers and bitmap == meta.workers:
                # The sum was lost above: the packet that asks becomes the kept sum.
                assert hdr.udp is not None and hdr.ipv4 is not None
                p.length = 4 * self.block_words
                hdr.udp["length"], hdr.ipv4["length"] = p.length + 56, p.length + 76
                self._load(hdr, slot)
                self._count(meta, "repeated")
                self._send_up(hdr, meta, PUSH, p.seq, *kept)
            elif p.workers & ~bitmap:
                p.workers &= ~bitmap
                self._count(meta, "named")
                meta.mcast_grp = meta.group
        elif is_newer:  # R1
            if not empty and bitmap != meta.workers:
                self._count(meta, "abandoned")
            self.slot_lease[slot] = meta.lease
            self.slot_tag[slot] = p.seq
            bitmap = 0
            self.slot_shape[slot] = shape
            assert hdr.block is not None
            for word, value in zip(self.sum, hdr.block, strict=True):
                word[slot] = value
            is_added = True
        elif alike != shape:
            self._count(meta, "format")
        elif bitmap & p.workers:
            self._count(meta, "duplicate")  # R3
            if bitmap == meta.workers:  # R4
                self._load(hdr, slot)
                self._count(meta, "repeated")
                self._send_up(hdr, meta, PUSH, p.seq, *kept)
        else:
            assert hdr.block is not None
            combine = _add if p.format == I32 else _maximum
            for i, word in enumerate(self.sum):
                word[slot] = hdr.block[i] = combine(word[slot], hdr.block[i])
            is_added = True
        if is_added:
            self._count(meta, "added")
            bitmap |= p.workers
            self.slot_have_high[slot], self.slot_have_low[slot] = bitmap >> 32, bitmap & 0xFFFFFFFF
            if bitmap == meta.workers:
                self._count(meta, "completed")
                self._send_up(hdr, meta, PUSH, p.seq, p.flags & LAST, p.format, p.exponent)

    def _load(self, hdr: Headers, slot: int) -> None:
        hdr.block = [word[slot] for word in self.sum]

    @staticmethod
    def _send_up(hdr: Headers, meta: Metadata, kind: int, seq: int, flags: int, form: int, exponent: int) -> None:
        p, ip, udp = hdr.penstock, hdr.ipv4, hdr.udp
        assert p is not None and ip is not None and udp is not None
        hdr.ethernet[0:2] = meta.parent_mac, meta.own_mac
        ip["src"], ip["dst"], ip["ttl"] = meta.own_ip, meta.parent_ip, 64
        udp["src"], udp["dst"] = meta.own_udp, (meta.parent_udp + (seq & meta.parent_shards)) & 0xFFFF
        p.kind, p.format, p.flags, p.seq = kind, form, flags, seq
        p.ack, p.credit, p.exponent, p.workers = meta.ack, meta.credit, exponent, meta.workers
        meta.egress_spec = meta.parent_port

    def _egress(self, hdr: Headers, meta: Metadata) -> Iterator[tuple[int, bytes]]:
        if meta.mcast_grp == 0:
            if meta.egress_spec is not None:
                yield meta.egress_spec, self._updated(hdr, meta)
            return
        for port, rid in self.groups.get(meta.mcast_grp, ()):
            copy = dataclasses.replace(hdr, ethernet=list(hdr.ethernet))
            copy.ipv4, copy.udp = dict(hdr.ipv4 or {}) or None, dict(hdr.udp or {}) or None
            if meta.job != 0 and rid != 0:
                entry = self._apply("Copies.children", meta.job, rid)
                if entry is None:
                    continue
                assert copy.ipv4 is not None and copy.udp is not None and copy.penstock is not None
                copy.ethernet[0:2] = entry.params["mac"], meta.own_mac
                copy.ipv4 |= {"src": meta.own_ip, "dst": entry.params["ip"], "ttl": 64}
                shard = copy.penstock.seq & entry.params["shards"]
                copy.udp |= {"src": meta.own_udp, "dst": (entry.params["udp"] + shard) & 0xFFFF}
            yield port, self._updated(copy, meta)

    @staticmethod
    def _updated(hdr: Headers, meta: Metadata) -> bytes:
        if meta.job != 0 and hdr.ipv4 is not None and hdr.udp is not None:
            hdr.ipv4["checksum"] = _checksum(_ipv4_bytes(hdr.ipv4, 0))
            hdr.udp["checksum"] = _udp_checksum(hdr, _behind_udp(hdr))
        return deparse(hdr)


def _add(a: int, b: int) -> int:
    return (a + b) & 0xFFFFFFFF


def _maximum(a: int, b: int) -> int:
    """Of the two exponents in a word. With the sign bits flipped, numbers with a sign are in the order of those without."""
    high = max(a >> 16, b >> 16, key=lambda half: half ^ 0x8000)
    low = max(a & 0xFFFF, b & 0xFFFF, key=lambda half: half ^ 0x8000)
    return high << 16 | low
