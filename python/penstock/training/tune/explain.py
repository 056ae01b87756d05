"""Records as text: the trials, their order and reasons, and the outcome."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from penstock.numbers import size
from penstock.training.tune.space import Axis, Setting, Space

__all__ = ["explain"]


def explain(record: Mapping[str, Any]) -> str:
    """The text of ``penstock tune --show``: a table of trials a session, the contest of champions, the reason."""
    space = Space.from_json(record["space"])
    axes = "; ".join(f"{axis.name} {_values(axis)}" for axis in space.axes if len(axis.values) > 1)
    pinned = ", ".join(f"{axis.name} = {axis.values[0]}" for axis in space.axes if len(axis.values) == 1)
    lines = [f"space: {space.size} settings ({axes or 'nothing to vary'})" + (f"; fixed: {pinned}" if pinned else "")]
    lines.append(f"default: {space.default}")
    for number, session in enumerate(record["sessions"], 1):
        lines += ["", *_session(number, session)]
    return "\n".join(lines)


def _session(number: int, session: Mapping[str, Any]) -> list[str]:
    chosen = session["chosen"] and Setting.from_json(session["chosen"])
    outcome = f"chosen: {chosen}, because {session['why']}" if chosen else "not yet chosen"
    if "trials" not in session:
        return [f"tuning {number}: {outcome}"]
    options = session["options"]
    lines = [
        f"tuning {number}: {len(session['costs'])} of {options['budget']} steps, seed {options['seed']}, "
        f"from {Setting.from_json(session['start'])}",
        f"{'trial':>5}  {'by':<11} {'score':>6}  {'ms':>8} {'steps':>5}  setting",
    ]
    contest: dict[Setting, list[float]] = {}
    for index, trial in enumerate(session["trials"], 1):
        setting = Setting.from_json(trial["setting"])
        if trial["by"] == "champion":
            contest.setdefault(setting, []).extend(trial["samples"])
            continue
        score = "" if trial["score"] is None else f"{trial['score']:.2f}"
        cost = f"{1e3 * statistics.median(trial['samples']):.1f}" if trial["samples"] else "-"
        best = "  new best" if trial["improved"] else ""
        lines.append(f"{index:>5}  {trial['by']:<11} {score:>6}  {cost:>8} {len(trial['samples']):>5}  {setting}{best}")
    if contest:
        lines.append("champions, measured by turns (these steps only):")
        for setting, samples in contest.items():
            cost = f"{1e3 * statistics.median(samples):.1f}" if samples else "-"
            lines.append(f"{'':>26}  {cost:>8} {len(samples):>5}  {setting}")
    wins: dict[str, list[int]] = {}
    for trial in session["trials"]:
        if trial["by"] not in ("start", "default", "champion"):
            tried = wins.setdefault(trial["by"], [0, 0])
            tried[0] += 1
            tried[1] += trial["improved"]
    if wins:
        lines.append("searchers: " + ", ".join(f"{name} {won} of {tried}" for name, (tried, won) in wins.items()))
    return [*lines, outcome]


def _values(axis: Axis) -> str:
    return ", ".join(size(value) if axis.name == "bucket_bytes" else str(value) for value in axis.values)
