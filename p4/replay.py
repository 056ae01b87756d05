"""Runs a case of `vectors/` on a switch: the driver that lies between datagrams on links and frames on ports.

Link n is a host at port n + 1 with the address 10.0.0.(n + 1); the switch is 10.0.0.254. `TwinNode` drives `twin.py`; the
test that has a compiler drives the compiled program in the same way."""

from __future__ import annotations

from typing import Any

import control
import twin

OWN = twin.Address(0x0200_0000_00FE, 0x0A00_00FE, 7471)


def host(link: int) -> twin.Address:
    """Where the host behind a link lives."""
    return twin.Address(0x0200_0000_0001 + link, 0x0A00_0001 + link, 7471, link + 1)


def job_of(opened: dict[str, Any]) -> control.Job:
    """A step's "open", as the control plane takes it."""
    children = tuple(control.Child(host(child["link"]), int(child["workers"], 16)) for child in opened["children"])
    return control.Job(
        opened["job"],
        opened["epoch"],
        opened["window"],
        opened["block_bytes"],
        host(opened["parent"]),
        children,
        key=opened["key"],
        floats=opened["floats"],
    )


def frame_from(link: int, datagram: bytes) -> tuple[int, bytes]:
    """The port and the frame in which a host's datagram arrives."""
    at = host(link)
    return at.port, twin.frame_of(at, OWN, datagram)


def datagram_to(port: int, frame: bytes, block_words: int) -> tuple[int, bytes]:
    """The link that a frame goes to and the datagram in it. Raises AssertionError where the frame is not what that host
    would take: addresses, lengths, both checksums."""
    hdr = twin.parse(frame, block_words)
    to = host(port - 1)
    assert hdr.ipv4 is not None and hdr.udp is not None, f"no UDP: {frame.hex()}"
    datagram = frame[42 : 34 + hdr.udp["length"]]
    assert frame == twin.frame_of(OWN, to, datagram), "addresses, lengths or checksums"
    return port - 1, datagram


class TwinNode:
    """The twin behind links."""

    def __init__(self, block_words: int) -> None:
        self.block_words = block_words
        self.restart()

    def restart(self) -> None:
        self.switch = twin.Switch(self.block_words)
        for entry in control.setup(OWN, ()):
            self.switch.insert(entry)

    def open(self, opened: dict[str, Any]) -> None:
        """Raises control.Refused."""
        control.open_job(self.switch, job_of(opened), self.block_words)

    def close(self, job: int) -> None:
        control.close_job(self.switch, job)

    def packet(self, link: int, datagram: bytes) -> list[tuple[int, bytes]]:
        out = self.switch.packet(*frame_from(link, datagram))
        return [datagram_to(port, frame, self.block_words) for port, frame in out]

    def counters(self, job: int | None) -> dict[str, int]:
        return self.switch.counters(0 if job is None else self._admitted(job)["place"])

    def state(self, job: int) -> dict[str, Any]:
        """Slots that are not empty and the heart table, in the form of the vectors."""
        admitted, switch = self._admitted(job), self.switch
        slots, heart = [], []
        for index in range(admitted["mask"] + 1):
            at = admitted["base"] + index
            if switch.slot_lease[at] == admitted["lease"]:
                total = b"".join(word[at].to_bytes(4, "big") for word in switch.sum)
                have = children_of(
                    admitted["place"],
                    switch.slot_have_high[at] << 32 | switch.slot_have_low[at],
                    switch.entries("Aggregator.senders"),
                )
                slots.append(slot_of(index, switch.slot_tag[at], have, switch.slot_shape[at], total))
        place = admitted["place"]
        current = switch.heart_lease[place] == admitted["lease"]
        for child in range(admitted["children"].bit_length()):
            heard = current and switch.heart_heard[place] >> child & 1
            heart.append([switch.heart_ack[child][place], switch.heart_credit[child][place]] if heard else None)
        return {"slots": slots, "heart": heart}

    def _admitted(self, job: int) -> dict[str, int]:
        return self.switch.tables["Aggregator.jobs"][(job,)].params


def children_of(place: int, have: int, senders: list[twin.Entry]) -> list[int]:
    """The children of the job at a place whose workers are in a slot's bitmap: all of a child's, or none."""
    workers = {row.params["child"].bit_length() - 1: row.keys[-1] for row in senders if row.keys[0] == place}
    inside = sorted(child for child, mask in workers.items() if mask & have)
    assert have == sum(workers[child] for child in inside), f"slot_have {have:#x}, children {workers}"
    return inside


def slot_of(index: int, tag: int, children: list[int], shape: int, total: bytes | None) -> dict[str, Any]:
    """A slot in the form of the vectors, from what the registers hold."""
    flags = {"flags": shape >> 24} if shape >> 24 else {}
    return {
        "slot": index,
        "seq": tag,
        "children": children,
        "format": shape >> 16 & 0xFF,
        "exponent": (shape & 0xFFFF ^ 0x8000) - 0x8000,
        "sum": None if total is None else total.hex(),
    } | flags


def run(case: dict[str, Any], node: Any) -> None:
    """Every step of a case on a node. Raises AssertionError with the case, the step and what differs."""
    for number, step in enumerate(case["steps"]):
        where = f"{case['name']}, step {number}"
        if "open" in step:
            refused = None
            try:
                node.open(step["open"])
            except control.Refused as error:
                refused = str(error)
            assert (refused is not None) == step["refused"], f"{where}: opened or refused: {refused}"
        elif "close" in step:
            node.close(step["close"])
        elif "restart" in step:
            node.restart()
        else:
            before = tally(node, step["job"])
            out = node.packet(step["from"], bytes.fromhex(step["bytes"]))
            expected = [(link, bytes.fromhex(step["sends"])) for link in step["to"]]
            assert sorted(out) == sorted(expected), f"{where}: {step['what']}: sends {readable(out)}"
            after = tally(node, step["job"])
            counted = sorted(name for name in after for _ in range(after[name] - before[name]))
            assert counted == sorted(step["counts"]), f"{where}: {step['what']}: counts {counted}"
            state = node.state(step["job"])
            assert state["slots"] == step["slots"], f"{where}: {step['what']}: slots {state['slots']}"
            assert state["heart"] == step["heart"], f"{where}: {step['what']}: heart {state['heart']}"


def tally(node: Any, job: int) -> dict[str, int]:
    """The counters of a job and of unauthenticated senders in one."""
    mine, unauthenticated = node.counters(job), node.counters(None)
    return {name: mine[name] + unauthenticated[name] for name in mine}


def readable(out: list[tuple[int, bytes]]) -> list[tuple[int, str]]:
    return [(link, datagram.hex()) for link, datagram in out]
