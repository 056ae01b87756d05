"""Findings that stand: what the generator leaves out until they are mended, each with its reason.

Remove an entry when its cure has landed; programs that have failed stand in ``failed.jsonl`` and run for ever.
"""

from __future__ import annotations

AVOID: dict[str, str] = {}

SEEDS: dict[int, str] = {}
"""Of the fixed range, those whose programs show a finding that no switch of the generator leaves out."""
