"""Findings that stand: what the generator leaves out until they are mended, each with its reason.

Remove an entry when its cure has landed; programs that have failed stand in ``failed.jsonl`` and run for ever.
"""

from __future__ import annotations

AVOID = {
    "channels_last": "dense tensors whose dimensions are permuted are refused.",
    "refused tensor in a list": "the tensors before it have been sent.",
    "messages both ways": "a probe about a message that is a second late is answered from the state of a message with the same "
    "tag in the other direction.",
    "groups of a failed group": "a GradientReducer made in a group that has failed on other ranks waits in the store for its "
    "groups until the time-out: Membership.sibling in rendezvous.py does not look at the group that it belongs to.",
    "reducer without close": "a GradientReducer that nobody closes is never collected, nor is its model: torch's hooks in C++ "
    "are invisible to Python's collector, and hold it. Each also keeps its engine's event descriptor.",
}

SEEDS: dict[int, str] = {
    20: "rank 0, the root, leaves out a broadcast of one group and waits in another group for rank 1, which waits for the "
    "broadcast: neither issues anything that could be compared, so that it is a time-out, as it must be.",
}
"""Of the fixed range, those whose programs show a finding that no switch of the generator leaves out."""
