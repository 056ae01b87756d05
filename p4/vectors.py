#!/usr/bin/env python3
"""Writes vectors/aggregator.json and vectors/random.json: what an aggregator must do, packet by packet
(docs/design/p4.md, "Vectors").

    python p4/vectors.py            # writes both files
    python p4/vectors.py --check    # exits 1 where a file is not what this writes

The expectations of aggregator.json are *stated* here, step by step, from the rules of docs/design/aggregation.md; nothing
computes them. random.json holds seeded random packets and what `p4/twin.py` makes of them, for others to contradict."""

from __future__ import annotations

import json
import pathlib
import random
import struct
import sys
from typing import Any

import replay
from case import ABOVE, WORDS, Case, halves, ints, packet
from twin import (
    ACCEPTED,
    EXPONENTS,
    F32,
    FULL,
    HEARTBEAT_DOWN,
    HEARTBEAT_UP,
    I16,
    I32,
    LAST,
    LOST,
    MISSING,
    PULL,
    PULLED,
    PUSH,
    REQUEST,
    RESULT,
    TEXT,
)

VECTORS = pathlib.Path(__file__).resolve().parent.parent / "vectors"
UNAUTHENTICATED = 7
ZERO, NONFINITE = -32768, 32767
ALL = 0xFFFFFFFF
MODES = {
    "software": "the Aggregator of crates/penstock-aggregation",
    "switch": "p4/penstock.p4 and p4/twin.py: the fixed-size integer mode",
}


def cases() -> list[Case]:
    a, b, c = ints(1000), ints(20000, -7), ints(-5)
    ab = ints(21000, -6)
    story = []

    def case(*arguments: str, **job: Any) -> Case:
        story.append(Case(*arguments, **job))
        return story[-1]

    # ------------------------------------------------------------------------------------------ the rows of the table
    s = case("slot", "The life of a slot: every row of the table of rules.", "R1 R2 R3 R4")
    s.push("the first block takes the empty slot", 0, 0, a, "added", [0], a)
    s.push("a duplicate of an incomplete sum: nothing", 0, 0, a, "duplicate")
    s.push("the last child completes it: the sum goes up", 1, 0, b, "added completed", [0, 1], ab, up=ab)
    s.push("a duplicate of a complete sum: it goes up again", 0, 0, a, "duplicate repeated", up=ab)
    s.push("from the other child too", 1, 0, b, "duplicate repeated", up=ab)
    s.push("a newer SeqNum takes the slot; nothing of the old sum is in it", 1, 4, c, "added", [1], c)
    s.push("the old SeqNum is stale", 0, 0, a, "stale")
    s.push("the newer one completes", 0, 4, c, "added completed", [0, 1], ints(-10, 2), up=ints(-10, 2))
    s.push("the slot beside it is another", 0, 1, b, "added", [0], b)

    s = case("abandoned", "A newer SeqNum takes a slot whose sum is incomplete.", "R1", workers=(1, 2, 4))
    s.push("one", 0, 2, a, "added", [0], a)
    s.push("two of three", 1, 2, b, "added", [0, 1], ab)
    s.push("the next round", 2, 6, c, "abandoned added", [2], c)
    s.push("who was in the round before is not in this one", 0, 6, a, "added", [0, 2], ints(995, 2))
    s.push("the old round", 2, 2, c, "stale")

    s = case("three children", "Any order of arrival, the same sum.", "R3", workers=(1, 2, 4))
    abc = ints(20995, -5)
    s.push("the last child first", 2, 3, c, "added", [2], c)
    s.push("the first", 0, 3, a, "added", [0, 2], ints(995, 2))
    s.push("the middle one", 1, 3, b, "added completed", [0, 1, 2], abc, up=abc)

    s = case("one child", "With a single child every block is complete at once.", "R1", workers=(1,))
    s.push("goes up as it is", 0, 0, a, "added completed", [0], a, up=a)
    s.push("and again", 0, 0, a, "duplicate repeated", up=a)

    s = case(
        "aggregator below", "A child may be an aggregator, and speak for several workers.", "R3", workers=(0xF0, 0x3)
    )
    s.push("a sum of four workers", 0, 0, a, "added", [0], a)
    s.push("a sum of two", 1, 0, b, "added completed", [0, 1], ab, up=ab)

    s = case("wide", "Worker 63 is a worker like others.", workers=(1 << 63, 1))
    s.push("bit 63", 0, 0, a, "added", [0], a)
    s.push("bit 0", 1, 0, b, "added completed", [0, 1], ab, up=ab)

    # ------------------------------------------------------------------------------------------------- what is refused
    s = case("alike", "In one slot all blocks have one format and one exponent.")
    s.push("the first decides", 0, 0, a, "added", [0], a, exponent=-9)
    s.push("another exponent", 1, 0, b, "format", exponent=-8)
    s.push("another format", 1, 0, b, "format", form=EXPONENTS, exponent=-9)
    s.push("as the first", 1, 0, b, "added completed", [0, 1], ab, up=ab, exponent=-9)
    s.push("a duplicate with another exponent", 1, 0, b, "format", exponent=4)
    s.push("a duplicate of another format", 1, 0, b, "format", form=EXPONENTS, exponent=-9)
    s.push("a true duplicate", 1, 0, b, "duplicate repeated", up=ab, exponent=-9)

    s = case(
        "last",
        "In one slot all blocks end their buffer, or none does; the sum says so, also when it goes up again.",
        "R4",
    )
    s.push("the last one of its buffer", 0, 0, a, "added", [0], a, flags=LAST)
    s.push("not the last one", 1, 0, b, "format")
    ends = {"flags": LAST}
    s.push("the last one", 1, 0, b, "added completed", [0, 1], ab, up=ab, flags=LAST, up_header=ends)
    s.push("and again", 0, 0, a, "duplicate repeated", up=ab, flags=LAST, up_header=ends)
    s.ask("it was lost above", 0, 3, "repeated", total=ab, sum_header=ends)
    s.push("one whose sender hears nothing from here", 0, 4, a, "added", [0], a, flags=LAST | LOST)
    s.push("the next round of the slot, which is not the last one", 0, 8, b, "abandoned added", [0], b)

    s = case("for the server alone", "What only the server adds takes no slot; the sender's Ack is heard all the same.")
    s.push("FULL", 0, 0, a, "format", form=F32, flags=FULL)
    s.push("integers that say FULL", 1, 0, a, "format", flags=FULL)
    s.push("floats", 0, 1, a, "format", form=F32, heard=(1, 4))

    s = case(
        "length", "A block longer than the job's takes no slot; one of another length than the slot's has no effect."
    )
    s.push("a word too long", 0, 0, a + b[:4], "length")
    s.push("the first", 0, 0, a, "added", [0], a)
    s.push("its duplicate, cut short", 0, 0, a[:4], "length")
    s.push("the last", 1, 0, b, "added completed", [0, 1], ab, up=ab)
    s.push("a duplicate, cut short, does not bring the sum", 0, 0, a[:4], "length")

    s = case("senders", "A packet must come from the address of the child that it speaks for.")
    good = packet(PUSH, a, format=I32)
    s.send("an unknown address", UNAUTHENTICATED, good, "sender")
    s.send("another child's address", 1, good, "sender")
    s.send("from above", ABOVE, good, "sender")
    s.send("for both children", 0, packet(PUSH, a, format=I32, workers=3), "sender")
    s.send("for a worker that is in no job", 0, packet(PUSH, a, format=I32, workers=1 << 40), "sender")
    s.send("a heartbeat", UNAUTHENTICATED, packet(HEARTBEAT_UP), "sender")
    s.push("the child", 0, 0, a, "added", [0], a)

    s = case("unauthenticated", "Other jobs, other epochs, packets under a key.", "R6")
    s.send("another job", 0, packet(PUSH, a, format=I32, job=6), "job")
    s.send("an older epoch", 0, packet(PUSH, a, format=I32, epoch=2), "epoch")
    s.send("a newer epoch", 0, packet(PUSH, a, format=I32, epoch=4), "epoch")
    s.send("a result of another epoch", ABOVE, packet(RESULT, a, format=I32, epoch=2), "epoch")
    s.send("a MAC, and no key here", 0, packet(PUSH, a, format=I32, mac=1), "key")
    s.send("a digest, and no key here", 0, packet(PUSH, a, format=I32, digest=1 << 31), "key")
    s.send("the key is looked at before the epoch", 0, packet(PUSH, a, format=I32, epoch=2, mac=1 << 63), "key")
    s.send("a request is the server's affair", 0, packet(REQUEST), "kind")

    s = case("malformed", "What is no packet has no effect.")
    s.send("an empty datagram", 0, b"", "malformed")
    s.send("one byte short of a header", 0, good[:47], "malformed")
    s.send("a byte short of its block", 0, good[:-1], "malformed")
    s.send("a byte behind its block", 0, good + b"\0", "malformed")
    s.send("magic", 0, b"\0" + good[1:], "malformed")
    s.send("version", 0, packet(PUSH, a, format=I32, version=1), "malformed")
    for kind in (0, 10, 255):
        s.send(f"kind {kind}", 0, packet(kind, a, format=I32), "malformed")
    for form in (TEXT, 8, 255):
        s.send(f"format {form}", 0, packet(PUSH, a, format=form), "malformed")
    s.send("a block of no format", 0, packet(PUSH, a), "malformed")
    s.send("a push without a block", 0, packet(PUSH, format=I32), "malformed")
    s.send("half an element", 0, packet(PUSH, a + b[:2], format=I32), "malformed")
    s.send("half a float", ABOVE, packet(RESULT, a[:6], format=F32), "malformed")
    s.send("half an exponent", 0, packet(PUSH, a[:3], format=EXPONENTS), "malformed")
    s.send("longer than any block", ABOVE, packet(RESULT, bytes(8900), format=I32), "malformed")
    s.send("a heartbeat with a block", 0, packet(HEARTBEAT_UP, a, format=I32), "malformed")
    s.send("a heartbeat with bytes", 0, packet(HEARTBEAT_UP, a), "malformed")
    s.send("a heartbeat with a format", 0, packet(HEARTBEAT_UP, format=I32), "malformed")
    s.send("a push for nobody", 0, packet(PUSH, a, format=I32, workers=0), "malformed")
    s.send("a heartbeat for nobody", 0, packet(HEARTBEAT_UP, workers=0), "malformed")
    s.send("a push with unknown flags", 0, packet(PUSH, a, format=I32, flags=8), "malformed")
    s.send("a text that is no result of the pull flow", ABOVE, packet(RESULT, a, format=TEXT), "malformed")
    s.send("an empty text", ABOVE, packet(PULLED, format=TEXT), "malformed")
    s.send("a pulled result that says LAST", ABOVE, packet(PULLED, a, format=I32, flags=LAST), "malformed")
    s.send("half an element of a pulled result", ABOVE, packet(PULLED, a[:6], format=I32), "malformed")
    s.send("an accepted with a block", ABOVE, packet(ACCEPTED, a, format=I32), "malformed")
    s.send("an accepted that says LOST", ABOVE, packet(ACCEPTED, flags=LOST), "malformed")
    s.send("a pull for nobody", 0, packet(PULL, workers=0), "malformed")
    s.send("a pull that says FULL", 0, packet(PULL, flags=FULL), "malformed")
    s.send("a result that says LOST", ABOVE, packet(RESULT, a, format=I32, flags=LOST), "malformed")
    s.send("a heartbeat that says FULL", 0, packet(HEARTBEAT_UP, flags=FULL), "malformed")
    s.send("a heartbeat down that says LOST", ABOVE, packet(HEARTBEAT_DOWN, flags=LOST), "malformed")
    s.send("a missing with a block", ABOVE, packet(MISSING, a, format=I32), "malformed")
    s.send("a missing with a format", ABOVE, packet(MISSING, format=I32), "malformed")
    s.send("a missing that says LOST", ABOVE, packet(MISSING, flags=LOST), "malformed")
    s.send("a request for nobody", 0, packet(REQUEST, workers=0), "malformed")
    s.push("a push may say LOST; what goes up does not", 0, 0, a, "added", [0], a, flags=LOST)
    s.push("so", 1, 0, b, "added completed", [0, 1], ab, up=ab, flags=LOST)

    # ----------------------------------------------------------------------------------------------------- arithmetic
    s = case("integers wrap", "Sums are modulo 2^32.")
    top, one, bottom = ints(2**31 - 1, 0), ints(1, 0), ints(-(2**31), 0)
    s.push("the largest", 0, 0, top, "added", [0], top)
    s.push("and one", 1, 0, one, "added completed", [0, 1], bottom, up=bottom)

    s = case("exponents", "Exponents are combined by maximum, with a sign; ZERO gives way, NONFINITE wins.")
    # Seven of them: each comes to lie in both halves of a word.
    x, y = halves(ZERO, -30, 5, NONFINITE, -1, 0, -3), halves(-148, -31, 128, 4, ZERO, ZERO, 9)
    most = halves(-148, -30, 128, NONFINITE, -1, 0, 9)
    s.push("one's", 0, 0, x, "added", [0], x, form=EXPONENTS)
    s.push("the other's", 1, 0, y, "added completed", [0, 1], most, up=most, form=EXPONENTS)
    s.push("again", 1, 0, y, "duplicate repeated", up=most, form=EXPONENTS)

    # ---------------------------------------------------------------------------------------------- numbers on a circle
    s = case("wrap-around", "SeqNums wrap around: 0 is newer than 2^32 - 4.", "R7")
    s.push("the last round of the circle", 0, ALL - 3, a, "added", [0], a, heard=(ALL - 3, ALL))
    s.push("complete", 1, ALL - 3, b, "added completed", [0, 1], ab, up=ab, heard=(ALL - 2, 0), minimum=(ALL - 3, ALL))
    s.push("the first round of the next", 0, 0, c, "added", [0], c, heard=(0, 3))
    s.push("the one before is stale", 1, ALL - 3, b, "stale", heard=None, ack=ALL - 2, credit=0)
    s.push("its neighbour", 1, ALL, b, "added", [1], b, heard=(1, 4))

    s = case("half the circle", "2^31 - 1 ahead is newer; 2^31 ahead is not.", "R7", window=1)
    s.push("0", 0, 0, a, "added", [0], a)
    s.push("2^31 - 1", 0, 2**31 - 1, b, "abandoned added", [0], b)
    s.push("2^31 further on", 0, ALL, c, "stale")
    s.push("2^31 - 1 further on", 0, ALL - 1, c, "abandoned added", [0], c)

    # ------------------------------------------------------------------------------------------------------ heartbeats
    s = case("heartbeats", "Ack and Credit go up as the minimum over all children.", "R5", workers=(1, 2, 4))
    s.beat("one of three: nothing goes up", 0, 7, 10)
    s.beat("two of three", 2, 5, 8)
    s.beat("all three: the minimum", 1, 6, 9, up=(5, 8))
    s.beat("the minimum is as it was: nothing", 1, 8, 11)
    s.beat("the first child's goes up always", 0, 9, 12, up=(5, 8))
    s.beat("the minimum grows", 2, 6, 9, up=(6, 9))
    s.beat("an old one, late: it takes nothing back", 2, 4, 7, newest=(6, 9))
    s.beat("Credit alone may grow", 2, 6, 10, up=(6, 10))
    s.beat("each number by itself: an old Ack with a new Credit", 2, 5, 11, newest=(6, 11), up=(6, 11))
    s.beat("LOST is for the server; it does not go up", 0, 9, 12, up=(6, 11), flags=LOST)
    s.push("a push is heard, too", 2, 0, a, "added", [2], a, heard=(9, 12))
    s.beat("and counts", 0, 9, 12, up=(8, 11))

    s = case(
        "heartbeats wrap around", "The minimum is on the circle: 2^32 - 1 is less than 2.", "R5 R7", workers=(1, 2, 4)
    )
    s.beat("before", 0, ALL, 2)
    s.beat("behind", 1, 2, 5)
    s.beat("behind", 2, 1, 4, up=(ALL, 2))
    s.beat("across", 0, 0, 3, up=(0, 3))
    s.beat("an old one from before", 0, ALL, 2, newest=(0, 3), up=(0, 3))
    s.beat("further", 0, 5, 8, up=(1, 4))

    s = case("minimum in a sum", "A sum carries the minimum of what its children said.", "R5")
    s.push("ahead", 0, 4, a, "added", [0], a, heard=(4, 7))
    s.push("behind", 1, 4, b, "added completed", [0, 1], ab, up=ab, heard=(2, 5), minimum=(2, 5))
    s.push("the one behind has moved", 1, 4, b, "duplicate repeated", up=ab, heard=(3, 6), minimum=(3, 6))
    s.push("stale, yet heard", 1, 0, b, "stale", heard=(4, 7))
    s.push("so that it shows", 0, 4, a, "duplicate repeated", up=ab, heard=(4, 7), minimum=(4, 7))

    # ----------------------------------------------------------------------------------------------------------- relay
    s = case("relay", "What comes from above goes to all children, byte for byte.", workers=(1, 2, 4))
    everyone = [0, 1, 2]
    for what, data in (
        ("a result", packet(RESULT, ab, format=I32, seq=3, workers=0)),
        ("a result of exponents", packet(RESULT, x, format=EXPONENTS, seq=4, workers=0)),
        ("a FULL result", packet(RESULT, a, format=F32, flags=FULL, seq=5, workers=0)),
        ("a FULL result of a 16-bit tensor, half as long", packet(RESULT, a[:32], format=5, flags=FULL, seq=6)),
        ("that a block was accepted", packet(ACCEPTED, seq=3, ack=4, workers=7 << 32 | 1)),
        ("a result of the pull flow", packet(PULLED, ab, format=I32, seq=7, workers=3 << 32)),
        ("why there is none", packet(PULLED, b"no disk", format=TEXT, seq=8, workers=3 << 32)),
        ("a heartbeat, with those who should go straight", packet(HEARTBEAT_DOWN, ack=9, credit=12, workers=6)),
    ):
        s.send(what, ABOVE, data, "relayed", everyone, data)
    s.send("a result from a child", 1, packet(RESULT, ab, format=I32, seq=3), "sender")
    s.send("a result of the pull flow from a child", 1, packet(PULLED, ab, format=I32, seq=3), "sender")
    s.send("that a block was accepted, from a child", 0, packet(ACCEPTED, seq=3), "sender")
    s.send("a heartbeat down from an unauthenticated peer", UNAUTHENTICATED, packet(HEARTBEAT_DOWN), "sender")

    # --------------------------------------------------------------------------------------------------------- missing
    s = case(
        "missing", "What is missing above is sent again if it is here; else the children hear whose is missing here, too.",
        "R1 R2 R4 R7", workers=(0x1, 0x6, 0x8),
    )  # fmt: skip
    s.ask("an empty slot: all that are named", 0, 0xF, "named", named=0xF)
    s.ask("some of them", 0, 0x5, "named", named=0x5)
    s.ask("workers that are not below are not told of", 0, 0x31, "named", named=0x1)
    s.ask("nobody below", 0, 0x30, "")
    s.ask("nobody at all", 0, 0, "")
    s.push("a child with two workers", 1, 0, a, "added", [1], a, heard=(1, 4), exponent=-9)
    s.ask("who is in the slot is not named", 0, 0xF, "named", named=0x9)
    s.ask("all that are named are in, the sum is not complete: nothing", 0, 0x6, "")
    s.ask("the next round of the slot", 4, 0xF, "named", named=0xF)
    s.ask("and that took nothing from the slot", 0, 0xE, "named", named=0x8)
    s.push("another child", 0, 0, b, "added", [0, 1], ab, heard=(2, 5), exponent=-9)
    s.push(
        "the last",
        2,
        0,
        c,
        "added completed",
        [0, 1, 2],
        ints(20995, -5),
        up=ints(20995, -5),
        minimum=(0, 3),
        exponent=-9,
    )
    again = {"exponent": -9}
    s.ask("the sum was lost above: it goes up again", 0, 0xF, "repeated", total=ints(20995, -5), sum_header=again)
    s.ask("also for a single worker of it", 0, 0x2, "repeated", total=ints(20995, -5), sum_header=again)
    s.ask("of nobody below: not even a complete one", 0, 0x30, "")
    s.beat("the child that was behind", 2, 2, 5, up=(1, 4))
    s.ask("with what was heard since", 0, 0x8, "repeated", total=ints(20995, -5), minimum=(1, 4), sum_header=again)
    s.push("exponents in the slot beside it", 0, 1, x, "added", [0], x, heard=None, form=EXPONENTS)
    s.push("of the second", 1, 1, y, "added", [0, 1], most, heard=None, form=EXPONENTS)
    s.push(
        "of the third", 2, 1, x, "added completed", [0, 1, 2], most, up=most, heard=None, form=EXPONENTS, minimum=(1, 4)
    )
    s.ask(
        "they go up again in their format",
        1,
        0xF,
        "repeated",
        total=most,
        minimum=(1, 4),
        sum_header={"format": EXPONENTS},
    )
    s.push("a newer block takes the slot", 2, 4, c, "added", [2], c, heard=None)
    s.ask("what is missing is older than the slot", 0, 0xF, "stale")
    s.ask("the slot's own", 4, 0xF, "named", named=0x7)
    for what, source, data in (
        ("a missing from a child", 0, packet(MISSING, seq=4)),
        ("from an unauthenticated peer", UNAUTHENTICATED, packet(MISSING, seq=4)),
    ):
        s.send(what, source, data, "sender")
    s.send("a missing of another epoch", ABOVE, packet(MISSING, seq=4, epoch=2), "epoch")
    s.send("a missing with a MAC, and no key here", ABOVE, packet(MISSING, seq=4, mac=1), "key")
    s.send("a missing of another job", ABOVE, packet(MISSING, seq=4, job=6), "job")
    s.restart()
    s.ask("after a restart everything is missing", 4, 0xF, "named", named=0xF)
    s.push("and the question has heard nobody", 0, 4, a, "added", [0], a)
    s.beat("so", 1, 7, 10)
    s.beat("all of them", 2, 7, 10, up=(0, 3))

    s = case("missing wraps around", "What is missing is older or newer on the circle, too.", "R7", window=1)
    s.push("the last of the circle", 0, ALL, a, "added", [0], a)
    s.ask("the first of the next", 0, 3, "named", named=3)
    s.ask("itself", ALL, 3, "named", named=2)
    s.ask("2^31 - 1 ahead is newer", 2**31 - 2, 3, "named", named=3)
    s.ask("2^31 ahead is not", 2**31 - 1, 3, "stale")
    s.ask("the one before", ALL - 1, 3, "stale")

    # ------------------------------------------------------------------------------------------------- restarts, epochs
    s = case("restart", "It may lose everything at any time: resends make the sum anew, and hold Ack back.", "R5 R16")
    s.push("one of two", 0, 0, a, "added", [0], a, heard=(1, 4))
    s.restart()
    s.push("the other, after the restart", 1, 0, b, "added", [1], b)
    s.beat("it knows nothing of the first child's Ack", 1, 0, 3)
    s.push("the first again", 0, 0, a, "added completed", [0, 1], ab, up=ab, heard=(1, 4))

    s = case("next epoch", "The next epoch of a job begins with empty slots, whatever its SeqNums.", "R6")
    s.push("epoch 3", 0, 8, a, "added", [0], a)
    s.open(epoch=4)
    s.send("epoch 3 is over", 1, packet(PUSH, b, format=I32, workers=2, seq=8), "epoch")
    s.push("the same SeqNum in epoch 4", 1, 8, b, "added", [1], b)
    s.push("an older one in another slot", 1, 3, b, "added", [1], b)
    s.open(epoch=3, refused=True)
    s.push("complete", 0, 8, a, "added completed", [0, 1], ab, up=ab)
    s.open(epoch=4)
    s.push("the same epoch opened again: empty", 0, 0, a, "added", [0], a)

    s = case("two jobs", "Nothing of one job reaches another.", window=2)
    s.open(job=6, epoch=9, window=8)
    s.push("one's", 0, 0, a, "added", [0], a)
    s.push("the other's", 1, 0, b, "added", [1], b, job=6)
    s.push("no duplicate", 1, 0, b, "added completed", [0, 1], ab, up=ab)
    s.push("its own sum", 0, 0, c, "added completed", [0, 1], ints(19995, -6), up=ints(19995, -6), job=6)
    s.close(6)
    s.jobs.pop(6)
    s.send("closed", 0, packet(PUSH, a, format=I32, job=6, epoch=9), "job")
    s.open(job=7, window=8)
    s.push("in the same slots, empty", 0, 0, a, "added", [0], a, job=7)

    for name, words, asks in (
        ("blocks of 256 bytes", 64, True),
        ("blocks of 1,024 bytes", 256, False),
        ("blocks of 1,024 bytes are missing", 256, True),
    ):
        s = case(name, f"Blocks of {words} words.", block_bytes=4 * words)
        long, other, both = ints(7, 3, words), ints(-9, 1000, words), ints(-2, 1003, words)
        s.push("one's", 0, 1, long, "added", [0], long)
        s.push("the other's", 1, 1, other, "added completed", [0, 1], both, up=both)
        if asks:
            s.ask("the sum was lost above", 1, 3, "repeated", total=both)

    # ------------------------------------------------------------------- where the two modes differ: the same packets twice
    for mode in ("software", "switch"):
        here = mode == "software"
        s = case("short block", "A switch adds blocks of one length; the software also shorter ones.", "", mode)
        short, rest = a[:32], b[:32]
        if here:
            s.push("half a block", 0, 0, short, "added", [0], short)
            s.push("not as long as the other", 1, 0, b, "length")
            s.push("as long", 1, 0, rest, "added completed", [0, 1], ab[:32], up=ab[:32])
            s.push("a duplicate of another length", 0, 0, a, "length")
        else:
            s.push("half a block", 0, 0, short, "length")
            s.push("not as long as the other", 1, 0, b, "added", [1], b)
            s.push("as long", 1, 0, rest, "length")
            s.push("a duplicate of another length", 0, 0, a, "added completed", [0, 1], ab, up=ab)

        s = case(
            "pull", "Where results come apart, the software keeps what comes down; a switch passes it.", "", mode,
            results=True, apart=True,
        )  # fmt: skip
        ends = {"flags": LAST}
        s.push("one's", 0, 0, a, "added", [0], a, flags=LAST)
        s.push("the other's", 1, 0, b, "added completed", [0, 1], ab, up=ab, flags=LAST, up_header=ends)
        accepted = packet(ACCEPTED, seq=0, ack=1, credit=4, workers=7 << 32)
        if here:
            s.slots[5][0]["sum"] = None
            del s.slots[5][0]["flags"]
        s.send("it was accepted", ABOVE, accepted, "relayed", [0, 1], accepted)
        again = packet(PUSH, a, format=I32, seq=0, flags=LAST)
        above = packet(PUSH, ab, format=I32, seq=0, flags=LAST, workers=3)
        if here:
            s.send("who has not heard it, hears it", 0, again, "duplicate", [0], accepted)
            s.send("or asks", 1, packet(REQUEST, seq=0, workers=2), "", [1], accepted)
        else:
            s.send("who has not heard it, hears it", 0, again, "duplicate repeated", [ABOVE], above)
            s.send("or asks", 1, packet(REQUEST, seq=0, workers=2), "kind")
        pull = [packet(PULL, seq=number, workers=2, ack=7, credit=10) for number in (7, 11, 8)]
        asked = packet(PULL, seq=7, workers=3, ack=0, credit=3)
        first, second = (packet(PULLED, ab, format=I32, seq=number, workers=0) for number in (7, 11))
        why = packet(PULLED, b"no disk", format=TEXT, seq=8, workers=1 << 32)
        if here:
            s.send("a result that is not here", 1, pull[0], "", [ABOVE], asked)
        else:
            s.send("a result that is not here", 1, pull[0], "kind")
        s.send("it comes", ABOVE, first, "relayed", [0, 1], first)
        for what, number, result in (
            ("a child lost it", 0, first),
            ("one of the next round", 1, second),
            ("none", 2, why),
        ):
            if number:
                s.send(f"comes: {what}", ABOVE, result, "relayed", [0, 1], result)
            if here:
                s.send(f"lost: {what}", 1, pull[number], "", [1], result)
            else:
                s.send(f"lost: {what}", 1, pull[number], "kind")
        s.send("one of the round before is stale", 1, pull[0], "stale" if here else "kind")
        s.send("and takes no place when it comes late", ABOVE, first, "relayed", [0, 1], first)
        if here:
            s.send("the next round's is still here", 1, pull[1], "", [1], second)
        else:
            s.send("the next round's is still here", 1, pull[1], "kind")
        s.send("of an unauthenticated peer", UNAUTHENTICATED, pull[1], "sender" if here else "kind")
        s.restart()
        unheard = packet(PULL, seq=8, workers=3, ack=0, credit=0)
        if here:
            s.send(
                "after a restart it asks above, and claims no more than is certain", 1, pull[2], "", [ABOVE], unheard
            )
        else:
            s.send("after a restart it asks above, and claims no more than is certain", 1, pull[2], "kind")
        s.send("of a block it knows nothing certain", 1, packet(REQUEST, seq=0, workers=2), "" if here else "kind")

        s = case("i16", "A switch adds 32-bit integers; the software also 16-bit ones.", "", mode)
        low, high, mixed = halves(32767, -1), halves(1, -2), halves(-32768, -3)
        if here:
            s.push("one's", 0, 0, low, "added", [0], low, form=I16)
            s.push("the other's", 1, 0, high, "added completed", [0, 1], mixed, up=mixed, form=I16)
        else:
            s.push("one's", 0, 0, low, "format", form=I16)
            s.push("the other's", 1, 0, high, "format", form=I16)

        three = struct.pack(">16f", *[1.5] * 16), struct.pack(">16f", *[0.25] * 16), struct.pack(">16f", *[1.75] * 16)
        s = case("floats", "A switch opens no job with floats.", "", mode, floats=True, refused=not here)
        if here:
            s.push("one's: kept, not added", 0, 0, three[0], "added", [0], None, form=F32)
            s.push(
                "all are there: added in order",
                1,
                0,
                three[1],
                "added completed",
                [0, 1],
                three[2],
                up=three[2],
                form=F32,
            )

        s = case("key", "A switch opens no job with a key.", "", mode, key="07" * 16, refused=not here)
        if here:
            s.send("no MAC, and a key here", 0, good, "key")

        many = [1 << i for i in range(17)]
        s = case("seventeen children", "A switch has 16 children.", "", mode, workers=many, refused=not here)
        if here:
            s.push("the last one", 16, 0, a, "added", [16], a)
    return story


# ------------------------------------------------------------------------------------------------------ random packets


def random_case(seed: int, packets: int) -> dict[str, Any]:
    """Seeded packets, sensible and not, and what the twin makes of them. Workers send the same block under one SeqNum."""
    draw = random.Random(seed)
    workers = [1, 2, 0xC][: draw.randint(1, 3)]
    window = draw.choice([1, 2, 4])
    case = Case(f"random {seed}", "Seeded packets; what the twin makes of them.", workers=workers, window=window)
    opened = case.steps[0]["open"]
    node = replay.TwinNode(WORDS)
    node.open(opened)
    base = draw.choice([0, ALL - 5, 2**31 - 3])
    steps = case.json()["steps"]
    for _ in range(packets):
        child = draw.randrange(len(workers))
        seq = (base + draw.randrange(3 * window)) & ALL
        ack, credit = ((base + draw.randrange(6)) & ALL for _ in range(2))
        fields = {"seq": seq, "ack": ack, "credit": credit, "workers": workers[child]}
        source, what = child, draw.randrange(16)
        form = EXPONENTS if seq % 3 == 0 else I32
        block = ints((child + 1) * 1_000_003 * (seq % 64) - 17, 0x0101_0101 * (child + 1) >> 4)
        if what < 9:
            data = packet(PUSH, block, format=form, exponent=seq % 5 - 2, **fields)
        elif what < 11:
            data = packet(HEARTBEAT_UP, **(fields | {"seq": 0}))
        elif what < 13:
            source, kind = (
                draw.choice([ABOVE, ABOVE, ABOVE, child]),
                draw.choice([RESULT, PULLED, ACCEPTED, HEARTBEAT_DOWN, MISSING, MISSING]),
            )
            if kind == MISSING:
                fields["workers"] = draw.randrange(1, 32)
            data = packet(kind, block, format=I32, **fields) if kind in (RESULT, PULLED) else packet(kind, **fields)
        elif what == 13:
            form, flags = draw.choice([I32, EXPONENTS, F32]), draw.choice([0, LAST])
            data = packet(PUSH, block, format=form, exponent=draw.randrange(3), flags=flags, **fields)
        elif what == 14:
            data = packet(
                PUSH, block, format=form, **(fields | {"epoch": draw.choice([2, 4]), "job": draw.choice([5, 6])})
            )
        else:
            # Damage anywhere but where it would be a worker's other block, or another number.
            data = bytearray(packet(PUSH, block, format=form, **fields))
            data[draw.choice([0, 1, 2, 3, 8, 10, 11, 26, 27, 28, 35, 39, 47])] ^= 1 << draw.randrange(8)
            data = bytes(data)
        before = replay.tally(node, 5)
        out = node.packet(source, data)
        after = replay.tally(node, 5)
        steps.append(
            {
                "what": f"draw {what}",
                "job": 5,
                "from": source,
                "bytes": data.hex(),
                "to": [link for link, _ in out],
                "sends": out[0][1].hex() if out else "",
                "counts": [name for name in after for _ in range(after[name] - before[name])],
                **node.state(5),
            }
        )
    return case.json() | {"seed": seed}


# ------------------------------------------------------------------------------------------------------------- writing


def files() -> dict[str, str]:
    stated = [case.json() for case in cases()]
    drawn = [random_case(seed, 40) for seed in range(6)]
    return {
        "aggregator.json": text({"modes": MODES, "cases": stated}),
        "random.json": text({"modes": MODES, "cases": drawn}),
    }


def text(content: dict[str, Any]) -> str:
    """One line a step."""
    cases = []
    for case in content["cases"]:
        head = {name: value for name, value in case.items() if name != "steps"}
        steps = ",\n   ".join(json.dumps(step) for step in case["steps"])
        cases.append(json.dumps(head)[:-1] + f', "steps": [\n   {steps}]}}')
    return '{"modes": ' + json.dumps(content["modes"]) + ',\n "cases": [\n  ' + ",\n  ".join(cases) + "]}\n"


def main() -> int:
    wrong = 0
    for name, content in files().items():
        path = VECTORS / name
        if "--check" not in sys.argv[1:]:
            path.write_text(content)
        elif not path.exists() or path.read_text() != content:
            print(f"{path.name} is not what p4/vectors.py writes: run it and look at the difference", file=sys.stderr)
            wrong = 1
    return wrong


if __name__ == "__main__":
    sys.exit(main())
