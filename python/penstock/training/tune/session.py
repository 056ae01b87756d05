"""One tuning: from the first trial to the choice. Pure; the same costs give the same decisions.

A session has a budget of training steps. It spends them in two parts:

1. **Trials.** The setting to start from is measured first, then the default, then what the searchers propose; the bandit
   says who is asked. A trial's first step is dropped when it changed the setting: it contains the change. Then up to
   `MEASURED_STEPS` are measured and their median counts, but a setting that is clearly slower than the best is left
   after the first of them.
2. **Contest.** The best few and the default are measured by turns, so that what else the machine does falls on all of them
   alike. Those that fall behind leave between rounds, the default only once it is surely behind. Of the others the one with
   the lowest median of all its steps is chosen, if the steps of the contest show that it is faster than the default beyond
   their noise; else the default. (Being chosen by a low median makes it look faster than it is; the contest is fresh.)
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock.numbers import milliseconds
from penstock.training.tune.bandit import AucBandit
from penstock.training.tune.searchers import SEARCHERS, Bayesian, Nearby, Searcher
from penstock.training.tune.space import Setting, Space

__all__ = ["Options", "Session", "Trial"]


@dataclass(frozen=True)
class Options:
    """The options of a session; the same on all ranks."""

    seed: int = 0
    budget: int = 100
    """Training steps until the choice; the paper's n. Fewer than 8 leave the start where it is."""
    c: float = 0.2
    """The bandit's weight of exploration; the paper's C."""
    window: int = 50
    """How many trials the bandit looks back at; the paper's |H|. More than a session of 100 steps has, so it matters for longer
    ones only: there, small windows follow what helps now, and forget quickly who is good."""
    searchers: tuple[str, ...] = tuple(SEARCHERS)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "searchers": list(self.searchers)}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Options:
        return cls(**{**document, "searchers": tuple(document["searchers"])})


@dataclass
class Trial:
    """A setting's turn: who proposed it, and its cost."""

    setting: Setting
    by: str
    """Who proposed it: a searcher, ``start``, ``default``, or ``champion`` in the second part."""
    score: float | None = None
    """The searcher's score with the bandit at that moment; None where no bandit was asked, or it had not tried the searcher."""
    samples: list[float] = field(default_factory=list)
    """Seconds of the steps that count."""
    dropped: int = 0
    """Steps before them that do not."""
    improved: bool = False
    """Whether the median was the lowest so far."""

    @property
    def cost(self) -> float:
        return statistics.median(self.samples)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "setting": self.setting.to_json()}


class Session:
    """The state of one tuning. `setting` holds during a step, `measured` ends it.

    Args:
        space: what may be tried.
        start: the first setting to measure, and the searchers' place to begin.
        options: budget, seed, bandit.
        searchers: more or other searchers by name; those that `options` names are made.
    """

    def __init__(self, space: Space, start: Setting, options: Options, searchers: dict[str, Any] | None = None) -> None:
        makers = {**SEARCHERS, NEARBY: Nearby, **(searchers or {})}
        if unknown := set(options.searchers) - set(makers):
            raise ValueError(f"no searcher {', '.join(sorted(unknown))}: there are {', '.join(makers)}")
        self.space = space
        self.start = start
        self.options = options
        self.costs: list[float] = []
        """The cost of every step, in order. Together with the arguments it suffices to repeat the session."""
        self.trials: list[Trial] = []
        self.chosen: Setting | None = None
        """The outcome; None until the budget is spent or nothing is left to try."""
        self.why = ""
        self._digest = 0
        self._samples: dict[Setting, list[float]] = {}
        # Some take long to import; a tuner that holds one setting needs none.
        nothing = space.size == 1 or options.budget < LEAST_BUDGET
        self._searchers: dict[str, Searcher] = {
            name: makers[name](space, options.seed + index, start)
            for index, name in enumerate(() if nothing else options.searchers)
        }
        self._bandit = AucBandit(options.searchers, c=options.c, window=options.window)
        self._fixed = [("start", start)]
        if space.default != start and not self._short:
            self._fixed.append(("default", space.default))
        self._champions: list[Setting] = []
        self._visits: list[Setting] = []
        if nothing:
            self._choose(start, "there was nothing to choose from" if space.size == 1 else "the budget is too small")
        else:
            self._begin(*self._next_trial(), drop=1 if self._short else LEAD_IN_STEPS)

    @property
    def setting(self) -> Setting:
        """The setting for the step that is about to run."""
        return self.chosen if self.chosen is not None else self.trials[-1].setting

    @property
    def holds(self) -> bool:
        """Whether the setting stays after the step that is under way, whatever that costs."""
        if self.chosen is not None:
            return True
        trial = self.trials[-1]
        is_first_of_visit = trial.by == "champion" and len(trial.samples) + 1 < VISIT_STEPS
        return self._left > 1 and (self._drop_left > 0 or is_first_of_visit)

    @property
    def medians(self) -> dict[Setting, float]:
        """What each measured setting cost, in seconds: the median of all its steps that count."""
        return {setting: statistics.median(samples) for setting, samples in self._samples.items()}

    def measured(self, cost: float) -> None:
        """Record the cost of the step under `setting`, in seconds, and decide what comes next."""
        if self.chosen is not None:
            return
        self.costs.append(cost)
        if self._drop_left:
            self._drop_left -= 1
            self.trials[-1].dropped += 1
        else:
            self.trials[-1].samples.append(cost)
            self._samples.setdefault(self.setting, []).append(cost)
        if self._left == 0 or (self.trials[-1].samples and self._enough()):
            self._end_trial()

    def fingerprint(self) -> int:
        """A number from 0 to 2**32 - 1 that differs, but for bad luck, where two ranks have decided differently, have taken part
        in different numbers of steps, or differ in `holds`: ranks may act on that before they have compared what follows."""
        return zlib.crc32(f"{self.setting} {len(self.costs)} {self.holds}".encode(), self._digest)

    def ranking(self) -> list[tuple[Setting, float, int]]:
        """(setting, median seconds, steps that it was measured in), the fastest first."""
        medians = self.medians
        ordered = sorted(medians, key=lambda setting: (medians[setting], setting))
        return [(setting, medians[setting], len(self._samples[setting])) for setting in ordered]

    def to_json(self) -> dict[str, Any]:
        return {
            "start": self.start.to_json(),
            "options": self.options.to_json(),
            "costs": self.costs,
            "trials": [trial.to_json() for trial in self.trials],
            "chosen": self.chosen.to_json() if self.chosen else None,
            "why": self.why,
        }

    # ---------------------------------------------------------------------------------------------------- decisions

    @property
    def _left(self) -> int:
        return self.options.budget - len(self.costs)

    @property
    def _short(self) -> bool:
        return self.options.budget < SHORT_BUDGET

    @property
    def _trusts_start(self) -> bool:
        """Whether the start needs not show that it is faster than the default. That a remembered setting is faster was shown
        elsewhere, and a short session has no steps to show it again."""
        return self._short and self.start != self.space.default

    @property
    def _reserve(self) -> int:
        """Steps that belong to the contest."""
        medians = self.medians
        is_far = bool(medians) and min(medians.values()) < FAR * medians.get(self.space.default, math.inf)
        spreads = [max(each.samples) / min(each.samples) for each in self.trials if len(each.samples) == MEASURED_STEPS]
        is_calm = bool(spreads) and statistics.median(spreads) < CALM
        is_easy = self._short or is_far or is_calm
        return math.ceil((EASY_CONTEST_SHARE if is_easy else CONTEST_SHARE) * self.options.budget)

    def _enough(self) -> bool:
        trial = self.trials[-1]
        count = len(trial.samples)
        wanted = VISIT_STEPS if trial.by == "champion" else MEASURED_STEPS - self._short
        if count >= wanted:
            # Of two that disagree one is an outlier, and their median would be half of it: a third decides.
            return count != 2 or max(trial.samples) <= DISAGREE * min(trial.samples)
        if trial.by == "champion":
            return False
        others = [median for setting, median in self.medians.items() if setting != trial.setting]
        return bool(others) and trial.cost > CLEARLY_SLOWER[count - 1] * min(others)

    def _end_trial(self) -> None:
        trial = self.trials[-1]
        if trial.samples and trial.by != "champion":
            medians = self.medians
            others = [median for setting, median in medians.items() if setting != trial.setting]
            trial.improved = not others or medians[trial.setting] < min(others)
            if trial.by in self._searchers:
                # A searcher's second look at the best setting is no new best.
                first = len(self._samples[trial.setting]) == len(trial.samples)
                self._bandit.credit(trial.by, trial.improved and first)
            for searcher in self._searchers.values():
                searcher.observe(trial.setting, medians[trial.setting])
        if self._left == 0:
            self._finish()
            return
        following = self._next_trial() if not self._champions and self._left - 2 >= self._reserve else None
        if following is None:
            following = self._next_visit()
        if following is None:
            self._finish()
        else:
            self._begin(*following, drop=0 if following[0] == trial.setting else 1)

    def _begin(self, setting: Setting, by: str, score: float | None, *, drop: int) -> None:
        self.trials.append(Trial(setting, by, score))
        # Of all trials so far: every step asks for the fingerprint.
        self._digest = zlib.crc32(f"{setting}".encode(), self._digest)
        self._drop_left = drop

    def _next_trial(self) -> Any:
        """(setting, by whom, score) of the next trial; None when no searcher proposes anything."""
        if self._fixed:
            by, setting = self._fixed.pop(0)
            return setting, by, None
        for name in self._bandit.order():
            proposal = self._searchers[name].propose()
            if proposal is not None:
                score = self._bandit.score(name)
                return proposal, name, score if math.isfinite(score) else None
        return None

    def _next_visit(self) -> Any:
        """(champion, "champion", None) of the next visit; None when the contest is over."""
        default = self.space.default
        if not self._champions:
            count = max(1, min(CHAMPIONS, self._left // (2 * (1 + VISIT_STEPS)) - 1))
            challengers = [each for each in self._candidates() if each != default][:count]
            # The one that was measured last is visited first: its turn needs no change.
            first = default if self._trusts_start else self.trials[-1].setting
            self._champions = sorted([*challengers, default], key=lambda setting: setting != first)
            self._visits = list(self._champions)
        if not self._visits:
            medians, contest = self.medians, self._contest()
            best = min(self._champions, key=lambda setting: (medians[setting], setting))
            # A round goes in the reverse order of the last one: its first visit needs no change of the setting.
            self._champions = [
                each
                for each in reversed(self._champions)
                if medians[each] <= BEHIND * medians[best]
                or (each == default and faster(contest[best], contest[each])[1] < DECIDED)
            ]
            if len(self._champions) < 2:
                return None
            self._visits = list(self._champions)
        if self._left < 2:
            return None
        return self._visits.pop(0), "champion", None

    def _contest(self) -> dict[Setting, list[float]]:
        """The steps of the contest."""
        contest: dict[Setting, list[float]] = {}
        for trial in self.trials:
            if trial.by == "champion" and trial.samples:
                contest.setdefault(trial.setting, []).extend(trial.samples)
        return contest

    def _candidates(self) -> list[Setting]:
        """The candidates for the contest, in order: in turn the fastest that were measured, and the fastest by the model of
        Bayesian optimisation, measured or not."""
        measured = [setting for setting, _, _ in self.ranking()]
        expected: list[Setting] = []
        for searcher in self._searchers.values():
            if isinstance(searcher, Bayesian):
                expected = searcher.favourites(CHAMPIONS)
        turns = itertools.chain.from_iterable(itertools.zip_longest(measured[:CHAMPIONS], expected))
        return list(dict.fromkeys(setting for setting in turns if setting is not None))

    def _finish(self) -> None:
        medians, contest, default = self.medians, self._contest(), self.space.default

        def fastest(settings: Iterable[Setting]) -> Setting | None:
            return min(settings, key=lambda setting: (medians[setting], setting), default=None)

        if self._trusts_start:
            best = fastest(each for each in self._champions or medians if each in medians) or self.start
            its = f"; the default's is {milliseconds(medians[default])}" if default in medians else ""
            self._choose(best, self._lowest(best) + its if best in medians else "no step was measured")
            return
        champion = fastest(each for each in contest if each != default)
        if champion is None or default not in contest:
            self._choose(default, "it is the default, and there were too few steps to hold anything against it")
            return
        share, errors = faster(contest[champion], contest[default])
        pairs = f"in {share:.0%} of all pairs of their steps by turns, {errors:+.1f} standard errors from one half"
        its = milliseconds(medians[default])
        if errors >= BEYOND:
            ratio = medians[default] / medians[champion]
            why = f"{self._lowest(champion)} but for the default's, which is {its}, {ratio:.2f} times that"
            self._choose(champion, f"{why}; it was faster than the default {pairs}")
        else:
            why = f"it is the default, {its}, and nothing was faster beyond the noise"
            self._choose(default, f"{why}: {champion}, {milliseconds(medians[champion])}, was {pairs}")

    def _lowest(self, setting: Setting) -> str:
        return (
            f"its median of {len(self._samples[setting])} steps, {milliseconds(self.medians[setting])}, is the lowest"
        )

    def _choose(self, setting: Setting, why: str) -> None:
        self.chosen, self.why = setting, why


def faster(one: list[float], other: list[float]) -> tuple[float, float]:
    """In which share of all pairs of theirs the one is faster than the other, and how many standard errors that lies from one
    half where both are alike: the statistic U of Mann and Whitney (1947). It goes by order alone: outliers do not matter."""
    pairs = len(one) * len(other)
    share = sum((a < b) + (a == b) / 2 for a in one for b in other) / pairs
    return share, (share - 0.5) / math.sqrt((len(one) + len(other) + 1) / (12 * pairs))


def replay(space: Space, document: dict[str, Any]) -> Session:
    """Repeat a session from its `to_json`, and compare every decision.

    Raises:
        ValueError: the decisions differ: another version of Penstock, or a document that was changed.
    """
    session = Session(space, Setting.from_json(document["start"]), Options.from_json(document["options"]))
    for cost in document["costs"]:
        session.measured(float(cost))
    if json.loads(json.dumps(session.to_json())) != document:
        raise ValueError("the recorded costs lead to other decisions than the recorded ones")
    return session


# The first trial's dropped steps: caches are cold, and DDP builds its buckets anew after the first backward pass.
LEAD_IN_STEPS = 2

# Three is the least of which a median leaves out an outlier.
MEASURED_STEPS = 3

# After one and after two steps: what is this much slower than the best median is no contender. With noise of 10 % a step,
# one that is equally fast looks so in 1 of 40 cases after the first step, and in 1 of 25 after the second.
CLEARLY_SLOWER = (1.25, 1.15)

# With noise of 10 % two steps differ by more than this in 1 of 16 cases.
DISAGREE = 1.3

# The contest: at most so many champions beside the default, steps a visit, and its share of all steps; docs/design/tuner.md has
# how the simulations fare.
CHAMPIONS = 2
VISIT_STEPS = 2
CONTEST_SHARE = 0.5

# Its share in a short session, and where few steps show enough: where the fastest takes less than so much of the default's time,
# or where in a trial's three steps the longest takes less than so much of the shortest, as with noise of 3 %.
FAR = 0.7
CALM = 1.05
EASY_CONTEST_SHARE = 0.3

# Standard errors. One champion in six that is no faster passes, and the slower it is the fewer: what is lost by that is 0.03
# standard errors of a step in the mean, wherever it lies. Two would lose less, and miss gains of 8 % where noise is 10 %.
BEYOND = 1.0

# Standard errors from which on the default need not be measured any further. Four steps against four show 2.3 at the most.
DECIDED = 2.0

# A champion whose median is this much above the best leaves. Five per cent is what a choice may miss the optimum by.
BEHIND = 1.1

# Below, a session measures two steps a trial and leaves out the default: at three, 20 steps hold three trials.
SHORT_BUDGET = 40

# The searcher of sessions that begin at a neighbour's setting.
NEARBY = "nearby"

# Below, one trial and one visit do not fit.
LEAST_BUDGET = 8
