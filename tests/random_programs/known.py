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
    "wrong root": "a rank that ends an operation before the others ask about it has forgotten its fingerprint "
    "(Event::Probe in runtime.rs compares with running operations only): a wrong root of a small gather, or another order "
    "of an empty broadcast, is a time-out, not a mismatch.",
    "reducer without close": "a GradientReducer that nobody closes is never collected, nor is its model: torch's hooks in C++ "
    "are invisible to Python's collector, and hold it. Each also keeps its engine's event descriptor.",
}

SEEDS = {
    20: "rank 1 leaves out a call, and rank 0's all_to_all of nothing meets another operation of rank 1 that ended at once: a "
    "time-out, not a mismatch, as for 'wrong root'.",
}
"""Of the fixed range, those whose programs show a finding that no switch of the generator leaves out."""
