"""The tuner: tunes during the first steps, then keeps watch, and tunes again when the time of a step drifts.

It decides and does nothing else: it opens no socket, reads no clock and changes no engine. Its caller asks for the setting before
a step, applies it while nothing is in flight, and passes the cost of the step, all-reduced, so that every rank passes the same::

    tuner = Tuner(space)
    for batch in batches:
        apply(tuner.begin_step())
        tuner.end_step(all_reduced_seconds(train_step, batch))

States and legal moves:

    TUNING   -> WATCHING   the session has chosen
    WATCHING -> TUNING     the time of a step drifted
    PINNED                 for good: a setting that the user or a record decided
"""

from __future__ import annotations

import enum
import json
import logging
import math
import os
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from penstock.files import write_whole
from penstock.training.tune import session as sessions
from penstock.training.tune.session import Options, Session
from penstock.training.tune.space import Setting, Space, with_new_names

__all__ = ["MOVES", "Applies", "Drift", "State", "Tuner", "load_record", "save_record"]

log = logging.getLogger("penstock.tune")


class Applies(Protocol):
    """Puts a setting in force; the coupling to the engine implements it.

    It is called between steps, on all ranks, with the same setting, and only when that differs from the one before. It must
    return with nothing in flight under the old setting, and before the first gradient of the next step leaves: a buffer
    that is re-cut while a reduction writes to it corrupts gradients.
    """

    def __call__(self, setting: Setting) -> None: ...


class State(enum.Enum):
    TUNING = "tuning"
    WATCHING = "watching"
    PINNED = "pinned"


MOVES = {
    State.TUNING: {State.WATCHING},
    State.WATCHING: {State.TUNING},
    State.PINNED: set(),
}
"""Every move that a tuner makes."""


@dataclass(frozen=True)
class Drift:
    """When a step's time counts as drifted.

    The first `window` steps after a choice give the reference: their median, and their spread as a share of it. From
    then on the median of the last `window` steps is compared. Outside the band, more than `band` or four standard
    errors of a median from the reference, whichever is more, it must stay for `window` further steps. Back inside half
    the band ends the alarm; between half and whole it neither rises nor ends.
    """

    window: int = 20
    """Steps. With noise of 10 % a median of 20 has a standard error of 2.8 %. More answers later, fewer oftener for nothing."""
    band: float = 0.15
    """As a share of the reference. A guess: less is hardly worth the trials that tuning again costs."""


class Tuner:
    """Chooses the setting of each step. Make one on each rank, with the same arguments; see the module.

    Args:
        space: the settings that may be tried; `Space.standard` makes the usual one.
        options: budget, seed, bandit, searchers.
        remembered: the setting that served a like job (`penstock.tune.Memory`); the first session begins there. Where it is
            `near`, that session is short: `NEIGHBOUR_STEPS`, with coordinate descent alone.
        near: see `remembered`.
        drift: when to tune again; None to never do.
        searchers: classes of further searchers by name, for `options.searchers` to name.
    """

    def __init__(
        self,
        space: Space,
        *,
        options: Options | None = None,
        remembered: Setting | None = None,
        near: bool = True,
        drift: Drift | None = Drift(),
        searchers: Mapping[str, Any] | None = None,
    ) -> None:
        self.space = space
        self.options = options or Options()
        self.drift = drift
        self._plugins = dict(searchers or {})
        self._done: list[dict[str, Any]] = []
        self._pinned: Setting | None = None
        self._asked = False
        options_now = self.options
        start = space.default
        if remembered is not None:
            start = space.nearest(remembered)
            if near:
                options_now = replace(
                    options_now, budget=min(NEIGHBOUR_STEPS, options_now.budget), searchers=(sessions.NEARBY,)
                )
        self._session = Session(space, start, options_now, self._plugins)
        self._watch_anew()
        self.state = State.TUNING
        self._settle()

    @classmethod
    def pinned(cls, setting: Setting) -> Tuner:
        """A tuner that always answers with one setting, tries nothing and watches nothing."""
        space = Space.standard(setting, max_streams=setting.streams, pinned=setting.to_json())
        tuner = cls(space, drift=None)
        tuner._pinned = setting
        tuner.state = State.PINNED
        return tuner

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Tuner:
        """A tuner pinned to what a record chose. Raises ValueError where this is no record, or holds no choice."""
        try:
            chosen = [document["chosen"] for document in with_new_names(record)["sessions"] if document["chosen"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is not a tuner's record: {type(error).__name__}: {error}") from error
        if chosen:
            return cls.pinned(Setting.from_json(chosen[-1]))
        raise ValueError("the record ends before its tuner had chosen: there is nothing to pin")

    def begin_step(self) -> Setting:
        """The setting for the next step. Asking twice before a step gives the same answer."""
        self._asked = True
        return self.best if self.state is not State.TUNING else self._session.setting

    @property
    def holds(self) -> bool:
        """Whether the next step runs under the same setting, whatever the one that is under way costs: ranks need not wait for
        each other's times then, and may hand in the cost as late as before the next `begin_step`."""
        return self.state is not State.TUNING or self._session.holds

    def end_step(self, cost: float) -> None:
        """Take what the step under the last `begin_step` cost: seconds, the same number on all ranks.

        Raises:
            ValueError: not a positive, finite number; or no `begin_step` came before. The tuner is as before the call.
        """
        if not math.isfinite(cost) or cost <= 0:
            raise ValueError(f"a step's cost must be a positive number of seconds, not {cost}")
        if not self._asked:
            raise ValueError("end_step without a begin_step before it")
        self._asked = False
        if self.state is State.TUNING:
            self._session.measured(cost)
            self._settle()
        elif self.state is State.WATCHING and self.drift is not None and self._drifted(cost, self.drift):
            self._tune_again()

    @property
    def best(self) -> Setting:
        """The chosen setting; before there is a choice, the fastest so far, or the start."""
        if self._pinned is not None:
            return self._pinned
        if self._session.chosen is not None:
            return self._session.chosen
        ranking = self._session.ranking()
        return ranking[0][0] if ranking else self._session.start

    @property
    def cost(self) -> float | None:
        """Median seconds of a step under `best`, in this session; None where none was measured."""
        return self._session.medians.get(self.best)

    @property
    def session(self) -> Session:
        """The running session, or the last one."""
        return self._session

    def fingerprint(self) -> int:
        """From 0 to 2**32 - 1; ranks that hand in the same costs have the same. Reduce it beside the costs with MIN and MAX:
        where they differ, ranks have decided differently, and all must fall back to one setting (docs/design/tuner.md)."""
        return self._session.fingerprint()

    def record(self) -> dict[str, Any]:
        """All that was tried and decided, for JSON: `from_record` pins its outcome, `verify` repeats it step by step.

        Of tunings before this one the last `KEPT_SESSIONS` are in it.
        """
        if self._pinned is not None:
            chosen = {"start": self._pinned.to_json(), "chosen": self._pinned.to_json(), "why": "it was pinned"}
            return {"format": RECORD_FORMAT, "space": self.space.to_json(), "sessions": [chosen]}
        documents = [*self._done, self._session.to_json()]
        return {"format": RECORD_FORMAT, "space": self.space.to_json(), "sessions": documents}

    def explain(self) -> str:
        """What was tried and why the choice is what it is, as text for people."""
        from penstock.training.tune.explain import explain

        return explain(self.record())

    # ---------------------------------------------------------------------------------------------------- decisions

    def _move(self, to: State) -> None:
        assert to in MOVES[self.state], f"{self.state} does not lead to {to}"
        self.state = to

    def _settle(self) -> None:
        if self._session.chosen is not None:
            self._move(State.WATCHING)
            self._watch_anew()
            log.info("tuned: %s; %s", self._session.chosen, self._session.why)

    def _watch_anew(self) -> None:
        self._reference: tuple[float, float] | None = None
        # The first step after a choice may be one after a change.
        self._ignored = 1
        self._recent: deque[float] = deque(maxlen=self.drift.window if self.drift else 1)
        self._outside = 0

    def _drifted(self, cost: float, drift: Drift) -> bool:
        if self._ignored:
            self._ignored -= 1
            return False
        self._recent.append(cost)
        if len(self._recent) < drift.window:
            return False
        if self._reference is None:
            self._reference = reference_of(self._recent, drift)
            self._recent.clear()
            return False
        median, band = self._reference
        distance = abs(statistics.median(self._recent) / median - 1)
        if distance > band:
            self._outside += 1
        elif distance < band / 2:
            self._outside = 0
        return self._outside > drift.window

    def _tune_again(self) -> None:
        assert self._reference is not None
        now = statistics.median(self._recent)
        log.info("a step took %.1f ms and takes %.1f ms: tuning again", 1e3 * self._reference[0], 1e3 * now)
        start = self.best
        self._done = [*self._done, self._session.to_json()][-KEPT_SESSIONS:]
        seed = self._session.options.seed + SEED_STRIDE
        self._session = Session(self.space, start, replace(self.options, seed=seed), self._plugins)
        self._move(State.TUNING)
        self._settle()


def reference_of(costs: Sequence[float], drift: Drift) -> tuple[float, float]:
    """The median, and the band around it as a share of it: see `Drift`."""
    median = statistics.median(costs)
    # 1.4826 makes the median distance a standard deviation where noise is normal; the standard error of a median of n
    # is 1.2533 / sqrt(n) of that.
    deviation = 1.4826 * statistics.median(abs(cost - median) for cost in costs) / median
    return median, max(drift.band, 4 * 1.2533 * deviation / math.sqrt(drift.window))


def verify(record: Mapping[str, Any]) -> None:
    """Feed a record's costs to new sessions, and compare every decision.

    Raises:
        ValueError: a decision differs.
    """
    record = with_new_names(record)
    space = Space.from_json(record["space"])
    for document in record["sessions"]:
        if "costs" in document:
            sessions.replay(space, document)


def save_record(path: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Write a record as JSON, whole or not at all. Raises OSError; what was there is then unchanged."""
    write_whole(Path(path), json.dumps(record, indent=1) + "\n")


def load_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a record.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a record of a tuner; the text says why.
    """
    try:
        record = with_new_names(json.loads(Path(path).read_text(encoding="utf-8")))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(record, dict) or record.get("format") != RECORD_FORMAT:
        raise ValueError(f"{path} is not a tuner's record ({RECORD_FORMAT})")
    try:
        Space.from_json(record["space"])
        for document in record["sessions"]:
            Setting.from_json(document["start"])
            if document["chosen"]:
                Setting.from_json(document["chosen"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a whole record: {type(error).__name__}: {error}") from error
    return record


RECORD_FORMAT = "penstock-tune/1"

# The project's requirement for a start from a neighbour.
NEIGHBOUR_STEPS = 20

# A job that drifts every hour for a month would otherwise keep hundreds.
KEPT_SESSIONS = 8

# Each session seeds one searcher after the other from its own number; the next session begins beyond them.
SEED_STRIDE = 16
