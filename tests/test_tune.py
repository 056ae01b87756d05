"""The tuner: that it finds good settings through noise, that all ranks decide alike, and that it remembers and explains."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import pathlib
import random
import re
import subprocess
import sys

import click.testing
import numpy as np
import pytest

from landscapes import DEFAULT, MIB, RECORDED, SIMULATED, Job, Landscape, level
from penstock.tools.tune import command
from penstock.training.tune import searchers
from penstock.training.tune import tuner as tuners
from penstock.training.tune.bandit import AucBandit
from penstock.training.tune.graphs import MAX_NODES, distance, edits, least_distance
from penstock.training.tune.memory import MAX_ENTRIES, NEAR, default_path
from penstock.training.tune.searchers import Bayesian, Chance, Hyperband, Population, expected_improvement
from penstock.training.tune.session import BEYOND, faster
from penstock.training.tune.tuner import MOVES, NEIGHBOUR_STEPS
from penstock.tune import (
    SEARCHERS,
    Axis,
    Drift,
    Entry,
    Graph,
    Memory,
    Options,
    Session,
    Setting,
    Space,
    State,
    Tuner,
    load_record,
    model_graph,
    parameter_graph,
    save_record,
    topology_graph,
    verify,
)

LANDSCAPES = {landscape.name: landscape for landscape in (*RECORDED.values(), *SIMULATED.values())}


def tune(landscape: Landscape, seed: int, noise: float, *, bursts: bool = False, **options: object) -> Session:
    """A whole session on a landscape."""
    session = Session(landscape.space, landscape.space.default, Options(seed=seed, **options))
    job = Job(landscape, seed, noise, bursts=bursts)
    while session.chosen is None:
        session.measured(job.step(session.setting))
    return session


# ---------------------------------------------------------------------------------------------------------- the space


def test_the_standard_space_holds_every_combination_and_the_default() -> None:
    """Sizes multiply, points and settings are one to one, and a default off the axes is put in its place."""
    space = Space.standard(DEFAULT, compressions=("bf16", "fp16"))
    assert space.size == 7 * 9 * 3 * 3 == len(set(map(space.setting, space.points())))
    assert all(space.point(space.setting(point)) == point for point in space.points())
    odd = Setting(12, 25 * MIB, "ring")
    space = Space.standard(odd, max_streams=32)
    assert odd in space and space.axes[0].values == (1, 2, 4, 8, 12, 16, 32)


def test_what_is_pinned_or_not_allowed_leaves_the_space() -> None:
    """Without permission there is no compression, and no more streams than are open; a pinned value is the only one."""
    space = Space.standard(DEFAULT, max_streams=16, pinned={"algorithm": "hierarchical"})
    settings = [space.setting(point) for point in space.points()]
    assert {s.compression for s in settings} == {"off"} and max(s.streams for s in settings) == 16
    assert {s.algorithm for s in settings} == {"hierarchical"} == {space.default.algorithm}
    with pytest.raises(ValueError, match="no colour"):
        Space.standard(DEFAULT, pinned={"colour": "red"})
    with pytest.raises(ValueError, match="more than the 8"):
        Space.standard(DEFAULT, max_streams=8)


def test_a_foreign_setting_finds_its_nearest_here() -> None:
    """A remembered setting that this job cannot run becomes the closest one that it can."""
    space = Space.standard(DEFAULT, max_streams=16, algorithms=("ring", "halving-doubling"))
    assert space.nearest(Setting(64, 5 * MIB, "hierarchical", "fp16")) == Setting(16, 4 * MIB, "ring", "off")
    inside = Setting(2, MIB, "halving-doubling")
    assert space.nearest(inside) == inside


@pytest.mark.parametrize(
    "axis",
    [
        Axis("streams", (2, 1), ordered=True),
        Axis("streams", (0, 16), ordered=True),
        Axis("streams", (1, 16, 16), ordered=True),
        Axis("colour", ("red",), ordered=False),
    ],
)
def test_a_space_refuses_axes_that_make_no_sense(axis: Axis) -> None:
    """Values that repeat, descend or are no counts, and a name that settings do not have."""
    with pytest.raises(ValueError):
        Space([axis, *Space.standard(DEFAULT).axes[1:]], DEFAULT)


# --------------------------------------------------------------------------------------------------------- the bandit


def test_the_bandit_is_the_papers_formula() -> None:
    """AUC as a share of the largest area, lg to base 2, H_t the uses in the window: computed by hand for a history."""
    bandit = AucBandit(["a", "b"], c=0.2, window=8)
    for name, improved in (("a", True), ("a", False), ("b", False), ("a", True)):
        bandit.credit(name, improved)
    # a: uses 1 and 3 of 3 improved, so (1 + 3) of 6; four trials in all, three of them a's.
    assert bandit.auc("a") == pytest.approx(4 / 6)
    assert bandit.score("a") == pytest.approx(4 / 6 + 0.2 * math.sqrt(2 * 2 / 3))
    assert bandit.score("b") == pytest.approx(0.2 * math.sqrt(2 * 2 / 1))
    assert bandit.order() == ["a", "b"]


def test_the_bandit_tries_everybody_first_and_forgets_what_left_the_window() -> None:
    """Who is not in the window is asked next, in the order of the names, so that all ranks ask the same."""
    bandit = AucBandit(["a", "b", "c"], window=3)
    assert bandit.order() == ["a", "b", "c"]
    bandit.credit("a", True)
    assert bandit.order()[0] == "b"
    for _ in range(3):
        bandit.credit("b", False)
    assert bandit.auc("a") == 0 and math.isinf(bandit.score("a")) and bandit.order()[0] == "a"


def test_the_bandit_gives_most_turns_to_the_searcher_that_improves() -> None:
    """One arm of four finds something new every second time: it gets more turns than any other, and no other gets none."""
    bandit = AucBandit(["dull", "good", "poor", "idle"], window=50)
    turns = dict.fromkeys(bandit.names, 0)
    for _ in range(60):
        name = bandit.order()[0]
        turns[name] += 1
        bandit.credit(name, name == "good" and turns[name] % 2 == 0)
    assert turns["good"] > 2 * max(turns[name] for name in turns if name != "good") and min(turns.values()) > 2


# ------------------------------------------------------------------------------------------------------- the searchers


@pytest.mark.parametrize("name", SEARCHERS)
def test_a_searcher_proposes_from_the_space_and_beats_the_default(name: str) -> None:
    """Alone and without noise, its 30 proposals on each recorded landscape are settings of the space, and different ones;
    on the one with the poorest default (16 % above the best), one of them is better."""
    for link, landscape in RECORDED.items():
        searcher = SEARCHERS[name](landscape.space, 0, landscape.space.default)
        tried: list[Setting] = []
        while len(tried) < 30 and (setting := searcher.propose()) is not None:
            assert setting in landscape.space
            searcher.observe(setting, landscape.seconds[setting])
            tried.append(setting)
        assert len(set(tried)) >= 8, f"{name} on {link}"
        best = min(map(landscape.regret, tried))
        print(f"{name} on {link}: {best:.1%} above the best")
        assert link != "plain" or best < landscape.regret(landscape.space.default)


@pytest.mark.parametrize("name", SEARCHERS)
def test_every_searcher_wins_on_a_recorded_landscape(name: str) -> None:
    """In the ensemble, on some recorded landscape and seed, what was chosen in the end was its find."""
    for seed in range(12):
        for link, landscape in RECORDED.items():
            session = tune(landscape, seed, 0.05)
            finder = next(trial.by for trial in session.trials if trial.setting == session.chosen)
            if finder == name and landscape.regret(session.chosen) < landscape.regret(landscape.space.default):
                print(f"{name} wins on {link} with seed {seed}")
                return
    pytest.fail(f"{name} won nowhere")


@pytest.mark.parametrize("name", SEARCHERS)
def test_a_searcher_copes_with_the_smallest_spaces(name: str) -> None:
    """With one setting and with two it proposes them, and does not hang when all are known."""
    for algorithms in (("ring",), ("ring", "hierarchical")):
        pinned = {"streams": 4, "bucket_bytes": MIB, "compression": "off"}
        space = Space.standard(Setting(4, MIB, "ring"), algorithms=algorithms, pinned=pinned)
        searcher = SEARCHERS[name](space, 0, space.default)
        for _ in range(10):
            if (setting := searcher.propose()) is not None:
                searcher.observe(setting, 1.0)


def test_grid_search_sees_the_middle_and_the_corners_first() -> None:
    """Coarse before fine: before 40 proposals, every end of every axis was among them."""
    space = Space.standard(DEFAULT)
    grid = SEARCHERS["grid"](space, 0, DEFAULT)
    seen = []
    for _ in range(40):
        setting = grid.propose()
        assert setting is not None
        seen.append(setting)
        grid.observe(setting, 1.0)
    assert seen[0].streams == 8 and seen[0].bucket_bytes == 4 * MIB
    for axis in space.axes:
        assert {axis.values[0], axis.values[-1]} <= {getattr(setting, axis.name) for setting in seen}


def test_hyperband_gives_the_better_half_more_visits() -> None:
    """Of its first bracket of four settings, two are visited twice and one four times, and they are the fastest."""
    landscape = RECORDED["capped"]
    hyperband = Hyperband(landscape.space, 5, DEFAULT)
    visits: dict[Setting, int] = {}
    for _ in range(8):
        setting = hyperband.propose()
        assert setting is not None
        visits[setting] = visits.get(setting, 0) + 1
        hyperband.observe(setting, landscape.seconds[setting])
    assert [visits[s] for s in sorted(visits, key=landscape.seconds.__getitem__)] == [4, 2, 1, 1]


def test_the_population_replaces_its_worst_by_children_of_its_best() -> None:
    """Once all members have a cost, proposals are one or a few places away from a quarter of them, the best."""
    landscape = RECORDED["capped"]
    population = Population(landscape.space, 1, DEFAULT)
    for _ in range(6):
        setting = population.propose()
        assert setting is not None
        population.observe(setting, landscape.seconds[setting])
    best = min(population._costs, key=population._costs.__getitem__)
    child = population.propose()
    assert child is not None
    far = [abs(a - b) for a, b in zip(landscape.space.point(child), best, strict=True)]
    assert sum(far) > 0 and max(far) == 1


def test_bayesian_optimisation_finds_a_smooth_minimum_in_few_trials() -> None:
    """25 proposals among 567 settings come within 5 % of the best of a simulated landscape, for most seeds."""
    landscape = SIMULATED["distant"]
    found = []
    for seed in range(5):
        searcher, tried = Bayesian(landscape.space, seed, DEFAULT), []
        for _ in range(25):
            setting = searcher.propose()
            assert setting is not None and setting not in tried
            searcher.observe(setting, landscape.seconds[setting])
            tried.append(setting)
        found.append(min(map(landscape.regret, tried)))
    assert sorted(found)[3] <= 0.05, found


def test_expected_improvement_is_the_mean_of_what_is_gained() -> None:
    """The formula against the average of many draws; without deviation it is the gain."""
    draws = random.Random(0)
    gain, deviation = np.array([0.0, 0.3, -1.0, -1.0, 2.0]), np.array([1.0, 0.5, 0.7, 0.0, 0.0])
    means = [
        sum(max(0.0, draws.gauss(mean, width)) for _ in range(100_000)) / 100_000
        for mean, width in zip(gain, deviation, strict=True)
    ]
    improvement = expected_improvement(gain, deviation)
    assert improvement == pytest.approx(means, abs=0.01) and improvement[3:].tolist() == [0, 2]


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_the_gaussian_process_is_that_of_scikit_learn(count: int) -> None:
    """On points of a landscape with noise: the same likeliest length and noise, posterior means and deviations."""
    gaussian = pytest.importorskip("sklearn.gaussian_process")
    landscape, draws = SIMULATED["distant"], random.Random(count)
    points = list(landscape.space.points())
    x_PK = searchers._coordinates(landscape.space, points)
    chosen = draws.sample(range(len(points)), count)
    costs = [landscape.seconds[landscape.space.setting(points[place])] for place in chosen]
    y_N = np.log(costs) + np.array([draws.gauss(0, 0.1) for _ in chosen])
    fits = {
        (a, b): gaussian.GaussianProcessRegressor(
            gaussian.kernels.Matern(length, nu=2.5), alpha=noise, optimizer=None, normalize_y=True
        ).fit(x_PK[chosen], y_N)
        for a, length in enumerate(searchers.LENGTHS)
        for b, noise in enumerate(searchers.NOISES)
    }
    likeliest = max(fits, key=lambda at: round(float(fits[at].log_marginal_likelihood_value_), 4))
    distance_PP = np.linalg.norm(x_PK[:, None] - x_PK, axis=2)
    kernel_LPP = searchers.matern(distance_PP / np.array(searchers.LENGTHS)[:, None, None])
    process = searchers.GaussianProcess(kernel_LPP[:, chosen][:, :, chosen], y_N)
    assert (process.length, process.noise) == likeliest
    mean_P, deviation_P = fits[likeliest].predict(x_PK, return_std=True)
    ours = process.predict(kernel_LPP[process.length][chosen])
    np.testing.assert_allclose(ours, (mean_P, deviation_P), rtol=1e-7, atol=1e-9)


def test_chance_is_the_same_everywhere() -> None:
    """The draws of a seed, written down: another Python or machine must not draw others."""
    chance = Chance(7)
    assert [chance.below(1000) for _ in range(4)] == [323, 150, 650, 72]


# ---------------------------------------------------------------------------------------------------------- a session


@pytest.mark.parametrize(("noise", "share", "mean"), [(0.05, 0.85, 0.025), (0.1, 0.75, 0.035)])
@pytest.mark.parametrize("name", LANDSCAPES)
def test_it_comes_within_five_percent_in_a_hundred_steps(name: str, noise: float, share: float, mean: float) -> None:
    """Over 16 seeds, most choices are within 5 % of the exhaustive best, and the mean of all is well within.

    With noise of 5 and 10 % a step, outliers, and a cost of each change. Not every seed can be: in 100 steps no method
    tells two settings apart that differ by less than the noise leaves.
    """
    landscape = LANDSCAPES[name]
    sessions = {seed: tune(landscape, seed, noise) for seed in range(16)}
    assert all(len(session.costs) <= 100 for session in sessions.values())
    regrets = {seed: landscape.regret(session.chosen) for seed, session in sessions.items()}
    late = {seed: f"{regret:.1%}" for seed, regret in regrets.items() if regret > 0.05}
    print(f"{name}, noise {noise:.0%}: mean {sum(regrets.values()) / 16:.1%}; beyond 5 %: {late}")
    if name == "simulated capped":
        # Its good settings are 12 of 567, and a mile from the default (89 % slower): 100 steps find them less surely.
        share, mean = 0.6, 0.045
    assert len(late) <= (1 - share) * 16, late
    assert sum(regrets.values()) / 16 <= mean


@pytest.mark.parametrize("seed", range(4))
def test_two_ranks_that_are_fed_the_same_decide_the_same(seed: int) -> None:
    """Settings, fingerprints and records agree through a tuning, a drift and the tuning after it."""
    landscape = RECORDED["uneven"]
    one, other = (Tuner(landscape.space, options=Options(seed=seed)) for _ in range(2))
    job = Job(landscape, seed, 0.1)
    for step in range(400):
        setting = one.begin_step()
        assert other.begin_step() == setting
        cost = job.step(setting) * (1.5 if step > 250 else 1)
        one.end_step(cost)
        other.end_step(cost)
        assert one.fingerprint() == other.fingerprint()
    assert one.record() == other.record() and len(one.record()["sessions"]) > 1
    third = Tuner(landscape.space, options=Options(seed=seed))
    third.begin_step()
    third.end_step(1.0)
    assert third.fingerprint() != one.fingerprint()


def test_decisions_are_the_same_in_another_process() -> None:
    """Nothing hangs on the order of sets or on the hash of strings, which differ from process to process."""
    program = (
        "from landscapes import *; from penstock.tune import *\n"
        "land = RECORDED['plain']; session = Session(land.space, land.space.default, Options(seed=3)); job = Job(land, 3, .1)\n"
        "while session.chosen is None: session.measured(job.step(session.setting))\n"
        "print([str(trial.setting) for trial in session.trials])"
    )
    here = str([str(trial.setting) for trial in tune(RECORDED["plain"], 3, 0.1).trials])
    folder = pathlib.Path(__file__).parent
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": _path_with(folder)},
        )
        assert done.stdout.strip() == here, done.stderr


def _path_with(folder: pathlib.Path) -> str:
    return ":".join([str(folder), *filter(None, sys.path)])


def test_the_step_after_a_change_does_not_count() -> None:
    """Every trial that changes the setting drops its first step, so a cost of changing never enters a median."""
    landscape = RECORDED["capped"]
    session = Session(landscape.space, landscape.space.default, Options())
    before = None
    while session.chosen is None:
        setting = session.setting
        session.measured(1000.0 if setting != before else landscape.seconds[setting])
        before = setting
    assert max(cost for _, cost, _ in session.ranking()) < 100
    assert all(
        trial.dropped
        for a, trial in zip(session.trials, session.trials[1:], strict=False)
        if a.setting != trial.setting
    )


def test_champions_and_the_default_are_measured_by_turns_until_the_budget_ends() -> None:
    """Each round visits the default and the champions once, and goes back the way that the last one came, so that at its turn
    nothing changes; the choice has the lowest median of all its steps, and beats the default in those of the contest."""
    session = tune(RECORDED["capped"], 0, 0.1)
    contest = [trial for trial in session.trials if trial.by == "champion"]
    rounds = [contest[:3], contest[3:6]]
    for one in rounds:
        assert len({trial.setting for trial in one}) == 3 and DEFAULT in {trial.setting for trial in one}
    assert rounds[0][-1].setting == rounds[1][0].setting and rounds[1][0].dropped == 0
    assert 50 < len(session.costs) <= 100
    samples = {trial.setting: [] for trial in contest}
    for trial in contest:
        samples[trial.setting] += trial.samples
    by_turns = samples.pop(DEFAULT)
    assert session.chosen == min(samples, key=session.medians.__getitem__)
    assert faster(samples[session.chosen], by_turns)[1] >= BEYOND
    assert len(by_turns) >= 4


def test_what_counts_as_faster_goes_by_order_alone() -> None:
    """By hand: of 2 x 3 pairs, and in standard errors; an outlier weighs no more than any step that is slower."""
    share, errors = faster([1.0, 2.0], [1.5, 2.0, 3.0])
    assert share == pytest.approx((3 + 1.5) / 6)
    assert errors == pytest.approx((4.5 - 3) / math.sqrt(6 * 6 / 12))
    assert faster([1.0, 2.0], [1.5, 2.0, 3000.0]) == (share, errors)
    assert faster([1.0] * 5, [1.0] * 5) == (0.5, 0.0)


@pytest.mark.parametrize("slower", [0.02, 0.1, 0.3, 1.0])
def test_nobody_is_left_worse_off_than_with_the_default(slower: float) -> None:
    """Where the default is the best there is, and steps have a noise of 20 % and bursts of slow ones: over 200 seeds a step
    under the choice takes less than 1 % longer in the mean, and in four of five cases the choice is the default or within 2 %."""
    landscape = level(slower)
    regrets = {seed: landscape.regret(tune(landscape, seed, 0.2, bursts=True).chosen) for seed in range(200)}
    worse = {seed: f"{regret:.1%}" for seed, regret in regrets.items() if regret > 0.02}
    print(f"{slower:.0%}: mean {sum(regrets.values()) / 200:.2%}, beyond 2 %: {worse}")
    assert sum(regrets.values()) / 200 <= 0.01
    assert len(worse) <= 40


@pytest.mark.parametrize("link", RECORDED)
def test_on_a_recorded_link_noise_costs_no_more_than_the_default(link: str) -> None:
    """With noise of 20 % and bursts: over 200 seeds the mean step is shorter than under the default, and in one case of twenty
    at most it is more than 5 % longer."""
    landscape = RECORDED[link]
    default = landscape.seconds[landscape.space.default]
    chosen = [tune(landscape, seed, 0.2, bursts=True).chosen for seed in range(200)]
    ratios = {seed: landscape.seconds[setting] / default for seed, setting in enumerate(chosen)}
    worse = {seed: f"{ratio:.2f}" for seed, ratio in ratios.items() if ratio > 1.05}
    print(f"{link}: mean {sum(ratios.values()) / 200:.3f} of the default, beyond 5 %: {worse}")
    assert sum(ratios.values()) / 200 < 1
    assert len(worse) <= 10


@pytest.mark.parametrize("link", RECORDED)
def test_where_noise_is_small_the_proof_costs_nothing(link: str) -> None:
    """With noise of 2 %, 38 of 40 choices are within 5 % of the best, on each recorded link."""
    regrets = {seed: RECORDED[link].regret(tune(RECORDED[link], seed, 0.02).chosen) for seed in range(40)}
    assert sum(regret > 0.05 for regret in regrets.values()) <= 2, regrets


def test_where_it_holds_no_cost_changes_the_setting() -> None:
    """In each step of a tuning of which `holds` is told, another tuner is fed a hundredth and a hundred times the cost: it
    stays where it is. More than a third of all steps are such, and every step of the watch until it drifts."""
    landscape = RECORDED["uneven"]
    tuner, job = Tuner(landscape.space), Job(landscape, 0, 0.1)
    costs: list[float] = []
    held = 0
    while tuner.state is State.TUNING:
        setting = tuner.begin_step()
        cost = job.step(setting)
        if tuner.holds:
            held += 1
            for factor in (0.01, 100.0):
                other = Session(landscape.space, landscape.space.default, Options())
                for each in (*costs, cost * factor):
                    other.measured(each)
                assert other.setting == setting and other.chosen is None
        costs.append(cost)
        tuner.end_step(cost)
    assert held > len(costs) / 3 and tuner.holds


def test_a_clear_loser_costs_two_steps() -> None:
    """A setting that takes three times as long is left after the step that follows the change."""
    landscape = RECORDED["uneven"]
    session = tune(landscape, 0, 0.0)
    losers = [trial for trial in session.trials if landscape.regret(trial.setting) > 2]
    assert losers and all(len(trial.samples) + trial.dropped <= 2 for trial in losers[1:])


@pytest.mark.parametrize("budget", [0, 1, 7, 8, 9, 20, 39, 40, 41, 250])
def test_any_budget_is_kept(budget: int) -> None:
    """A session never takes more steps than it was given, and always ends with a choice from the space."""
    session = tune(RECORDED["plain"], 1, 0.1, budget=budget)
    assert len(session.costs) <= budget and session.chosen in RECORDED["plain"].space and session.why


def test_a_searcher_can_be_plugged_in() -> None:
    """A class of the user's, by name, proposes beside the others or alone; an unknown name is refused with the list."""

    class Stubborn:
        def __init__(self, space: Space, seed: int, start: Setting) -> None:
            self.seen = 0

        def propose(self) -> Setting | None:
            return Setting(4, 4 * MIB, "ring") if self.seen < 3 else None

        def observe(self, setting: Setting, cost: float) -> None:
            self.seen += 1

    landscape = RECORDED["plain"]
    tuner = Tuner(landscape.space, options=Options(searchers=("stubborn",)), searchers={"stubborn": Stubborn})
    job = Job(landscape, 0, 0.05)
    while tuner.state is State.TUNING:
        tuner.end_step(job.step(tuner.begin_step()))
    assert tuner.best == Setting(4, 4 * MIB, "ring")
    with pytest.raises(ValueError, match="no searcher nobody: there are coordinate"):
        Tuner(landscape.space, options=Options(searchers=("nobody",)))


# ------------------------------------------------------------------------------------------------------ the state machine


def test_the_moves_are_these() -> None:
    """The whole table of states, so that a change of it is a decision."""
    moves = {state.value: sorted(to.value for to in targets) for state, targets in MOVES.items()}
    assert moves == {"tuning": ["watching"], "watching": ["tuning"], "pinned": []}


def test_nonsense_is_refused_and_changes_nothing() -> None:
    """A cost that is no time, and an end without a beginning, raise; the tuner goes on as before."""
    tuner = Tuner(RECORDED["plain"].space)
    with pytest.raises(ValueError, match="without a begin_step"):
        tuner.end_step(1.0)
    setting = tuner.begin_step()
    for cost in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="positive number of seconds"):
            tuner.end_step(cost)
    assert tuner.begin_step() == setting and not tuner.session.costs
    tuner.end_step(1.0)
    assert len(tuner.session.costs) == 1


def tuned(landscape: Landscape, seed: int, noise: float, **given: object) -> tuple[Tuner, Job]:
    tuner, job = Tuner(landscape.space, options=Options(seed=seed), **given), Job(landscape, seed, noise)
    while tuner.state is State.TUNING:
        tuner.end_step(job.step(tuner.begin_step()))
    return tuner, job


@pytest.mark.parametrize("factor", [0.7, 1.4])
@pytest.mark.parametrize("seed", range(4))
def test_a_drift_of_the_step_time_tunes_again(seed: int, factor: float) -> None:
    """After 200 quiet steps all take 40 % longer, or 30 % less: within 60 steps the tuner begins anew, from its choice."""
    tuner, job = tuned(RECORDED["plain"], seed, 0.05)
    chosen = tuner.best
    for _ in range(200):
        tuner.end_step(job.step(tuner.begin_step()))
    assert tuner.state is State.WATCHING and tuner.best == chosen
    steps = 0
    while tuner.state is State.WATCHING:
        steps += 1
        assert steps < 60, f"seed {seed}"
        tuner.end_step(factor * job.step(tuner.begin_step()))
    assert tuner.begin_step() == chosen
    while tuner.state is State.TUNING:
        tuner.begin_step()
        tuner.end_step(factor * job.step(tuner.begin_step()))
    assert len(tuner.record()["sessions"]) == 2


def test_after_a_drift_it_finds_what_is_best_now() -> None:
    """The link changes under a tuned job: the next choice is within 5 % of the best of the new landscape."""
    old, new = RECORDED["uneven"], RECORDED["plain"]
    tuner, job = tuned(old, 0, 0.05)
    for _ in range(50):
        tuner.end_step(job.step(tuner.begin_step()))
    job = Job(new, 1, 0.05)
    for _ in range(200):
        tuner.end_step(job.step(tuner.begin_step()))
    assert tuner.state is State.WATCHING and len(tuner.record()["sessions"]) == 2
    assert new.regret(tuner.best) <= 0.05


@pytest.mark.parametrize("noise", [0.05, 0.1, 0.2])
def test_noise_does_not_tune_again(noise: float) -> None:
    """In 4 x 2000 steps of noise and outliers alone, no tuning begins."""
    for seed in range(4):
        tuner, job = tuned(RECORDED["plain"], seed, noise)
        for step in range(2000):
            tuner.end_step(job.step(tuner.begin_step()))
            assert tuner.state is State.WATCHING, f"seed {seed}, step {step}"


def test_a_slow_spell_shorter_than_the_window_does_not_tune_again() -> None:
    """Hysteresis: a checkpoint or a neighbour's burst of 15 slow steps passes; 40 of them do not."""
    for spell, tunes in ((15, False), (40, True)):
        tuner, job = tuned(RECORDED["plain"], 0, 0.05)
        for step in range(200):
            tuner.end_step(job.step(tuner.begin_step()) * (1.5 if 60 <= step < 60 + spell else 1))
        assert (len(tuner.record()["sessions"]) > 1) is tunes, spell


def test_watching_can_be_switched_off() -> None:
    """With drift=None the first choice holds whatever happens."""
    tuner, _ = tuned(RECORDED["plain"], 0, 0.05, drift=None)
    for step in range(200):
        tuner.begin_step()
        tuner.end_step(1.0 + step)
    assert tuner.state is State.WATCHING


# ------------------------------------------------------------------------------------------- from a remembered neighbour


@pytest.mark.parametrize(("noise", "share", "mean"), [(0.05, 0.8, 0.03), (0.1, 0.55, 0.045)])
@pytest.mark.parametrize("name", LANDSCAPES)
def test_from_a_neighbour_it_converges_in_twenty_steps(name: str, noise: float, share: float, mean: float) -> None:
    """Begun one place beside the best along streams or bucket size, it ends within 20 steps, most times within 5 %."""
    landscape = LANDSCAPES[name]
    best = landscape.space.point(landscape.best)
    moved = [landscape.space.moved(best, axis, by) for axis in (0, 1) for by in (-1, 1)]
    starts = [landscape.space.setting(point) for point in moved if point is not None]
    regrets, begun = [], []
    for seed in range(10):
        for start in starts:
            tuner = Tuner(landscape.space, options=Options(seed=seed), remembered=start)
            job, steps = Job(landscape, seed, noise), 0
            while tuner.state is State.TUNING:
                tuner.end_step(job.step(tuner.begin_step()))
                steps += 1
            assert steps <= NEIGHBOUR_STEPS == 20
            regrets.append(landscape.regret(tuner.best))
            begun.append(landscape.regret(start))
    within = sum(regret <= 0.05 for regret in regrets) / len(regrets)
    print(
        f"{name}, noise {noise:.0%}: from {sum(begun) / len(begun):.1%} to {sum(regrets) / len(regrets):.1%}, {within:.0%}"
    )
    if name == "recorded capped":
        # Its default is 8 % slower than the best, as are half of these starts: two measured steps do not tell them apart.
        share, mean = share - 0.25, mean + 0.01
    assert within >= share and sum(regrets) / len(regrets) <= mean


@pytest.mark.parametrize("slower", [0.1, 0.3, 1.0])
def test_a_memory_that_misleads_costs_little(slower: float) -> None:
    """Where the default is the best and what is remembered is up to half as slow again, short sessions still look at the
    default: with noise of 10 % and over 60 seeds, a step takes less than 3 % longer than under it in the mean."""
    landscape = level(slower)
    starts = [Setting(8, 2 * MIB, "auto"), Setting(4, MIB, "auto"), Setting(16, MIB, "halving-doubling")]
    regrets = []
    for seed, start in itertools.product(range(60), starts):
        tuner, job = Tuner(landscape.space, options=Options(seed=seed), remembered=start), Job(landscape, seed, 0.1)
        while tuner.state is State.TUNING:
            tuner.end_step(job.step(tuner.begin_step()))
        regrets.append(landscape.regret(tuner.best))
    mean, begun = sum(regrets) / len(regrets), sum(map(landscape.regret, starts)) / 3
    print(f"{slower:.0%}: from {begun:.1%} to {mean:.1%}")
    assert mean <= min(0.03, begun)


def test_a_far_neighbour_is_a_start_for_a_full_tuning() -> None:
    """Where the graphs differ much, the remembered setting is measured first and the whole budget follows."""
    landscape = RECORDED["plain"]
    tuner = Tuner(landscape.space, remembered=Setting(2, 8 * MIB, "ring"), near=False)
    assert tuner.begin_step() == Setting(2, 8 * MIB, "ring") and tuner.session.options.budget == 100


# ------------------------------------------------------------------------------------------------------------ records


def test_a_record_is_pinned_and_replayed_exactly(tmp_path: pathlib.Path) -> None:
    """Through a file: the pinned tuner answers with the choice forever, and the costs lead to the same decisions again."""
    tuner, _ = tuned(RECORDED["capped"], 2, 0.1)
    save_record(tmp_path / "tuned.json", tuner.record())
    record = load_record(tmp_path / "tuned.json")
    verify(record)
    pinned = Tuner.from_record(record)
    for cost in (1.0, 100.0, 0.01):
        assert pinned.begin_step() == tuner.best
        pinned.end_step(cost)
    assert pinned.state is State.PINNED and pinned.best == tuner.best
    again = Tuner.from_record(json.loads(json.dumps(pinned.record())))
    assert again.best == tuner.best and "pinned" in again.explain()

    record["sessions"][0]["costs"][2] *= 3  # The first step that counts.
    with pytest.raises(ValueError, match="other decisions"):
        verify(record)


def test_an_unfinished_record_is_replayed_but_not_pinned() -> None:
    """A job that ended early leaves a record that explains itself, and nothing to pin."""
    tuner = Tuner(RECORDED["plain"].space)
    for _ in range(10):
        tuner.begin_step()
        tuner.end_step(1.0)
    verify(json.loads(json.dumps(tuner.record())))
    assert "not yet chosen" in tuner.explain()
    with pytest.raises(ValueError, match="nothing to pin"):
        Tuner.from_record(tuner.record())


def test_the_explanation_names_trials_searchers_and_the_reason() -> None:
    """Every setting that was tried is in the text, with who proposed it, and the last line says why."""
    tuner, _ = tuned(RECORDED["uneven"], 0, 0.05)
    text = tuner.explain()
    for trial in tuner.session.trials:
        assert (str(trial.setting) in text and trial.by in text) or trial.by == "champion"
    assert "champions" in text and f"chosen: {tuner.best}, because its median of" in text.splitlines()[-1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": "other"}',
        '{"format": "penstock-tune/1"}',
        '{"format": "penstock-tune/1", "space": {"axes": [], "default": {}}, "sessions": []}',
    ],
)
def test_a_file_that_is_no_record_is_refused_with_its_name(text: str, tmp_path: pathlib.Path) -> None:
    """Whatever is in the file, the error is a ValueError."""
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError):
        load_record(tmp_path / "x.json")


# ------------------------------------------------------------------------------------------------------------- graphs


def random_graph(chance: random.Random, count: int, directed: bool) -> Graph:
    nodes = tuple((chance.choice("abc"), chance.choice([1.0, 64.0, 4096.0])) for _ in range(count))
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count) if chance.random() < 0.5]
    return Graph(nodes, tuple((a, b, chance.choice([1.0, 1.5, 8.0])) for a, b in pairs), directed)


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_the_approximation_is_never_below_the_exact_distance(seed: int, directed: bool) -> None:
    """On graphs of up to five nodes: at least networkx's exact distance with the same costs, at most twice it plus 2, and not
    below our linear bound; and equal graphs are at 0."""
    networkx = pytest.importorskip("networkx")
    chance = random.Random(seed)
    one, other = (random_graph(chance, chance.randint(1, 5), directed) for _ in range(2))

    def as_networkx(graph: Graph) -> object:
        made = (networkx.DiGraph if directed else networkx.Graph)()
        for index, (kind, size) in enumerate(graph.nodes):
            made.add_node(index, kind=kind, size=size)
        for a, b, weight in graph.edges:
            made.add_edge(a, b, weight=weight)
        return made

    def node_cost(a: dict, b: dict) -> float:
        return 1.0 if a["kind"] != b["kind"] else min(1.0, abs(math.log2((1 + a["size"]) / (1 + b["size"]))) / 4)

    def edge_cost(a: dict, b: dict) -> float:
        return min(1.0, abs(math.log2(a["weight"] / b["weight"])))

    exact = networkx.graph_edit_distance(
        as_networkx(one), as_networkx(other), node_subst_cost=node_cost, edge_subst_cost=edge_cost
    )
    ours = edits(one, other)
    print(f"seed {seed}: exact {exact:.2f}, ours {ours:.2f}")
    assert exact - 1e-9 <= ours <= 2 * exact + 2
    assert least_distance(one, other) <= distance(one, other) + 1e-9
    assert edits(one, one) == 0 and distance(one, Graph(one.nodes, one.edges, directed)) == 0


def test_the_distance_grows_with_what_is_changed() -> None:
    """Equal models are at 0, a wider one nearer than a deeper one, and another kind of model far."""
    torch = pytest.importorskip("torch")

    def mlp(width: int, depth: int) -> Graph:
        layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(depth)]
        return model_graph(torch.nn.Sequential(*layers))

    base = mlp(64, 6)
    other = model_graph(torch.nn.LSTM(64, 64))
    distances = [distance(base, graph) for graph in (mlp(64, 6), mlp(80, 6), mlp(64, 8), other)]
    assert distances[0] == 0 and distances == sorted(distances)
    assert distances[1] < NEAR < distances[3]


def test_a_model_graph_is_a_dag_of_modules() -> None:
    """Nodes are modules with their own parameters; edges point forward, to children and along the parameters."""
    torch = pytest.importorskip("torch")
    graph = model_graph(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)))
    assert graph.nodes == (("Sequential", 0.0), ("Linear", 9.0), ("ReLU", 0.0), ("Linear", 4.0))
    assert graph.edges == ((0, 1, 1.0), (0, 2, 1.0), (0, 3, 1.0), (1, 3, 1.0)) and graph.directed


def test_a_large_model_is_folded_and_compared_in_bounded_time() -> None:
    """1300 modules become at most 400 nodes that hold all parameters; equal layers are not matched crosswise."""
    torch = pytest.importorskip("torch")

    def deep(layers: int) -> object:
        block = [torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(12))) for _ in range(layers)]
        return torch.nn.Sequential(*block)

    graph = model_graph(deep(100))
    assert len(graph.nodes) <= MAX_NODES and sum(size for _, size in graph.nodes) == 100 * 12 * 6
    assert edits(graph, model_graph(deep(100))) == 0
    assert distance(graph, model_graph(deep(101))) < 0.02
    flat = model_graph(torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(MAX_NODES + 50))))
    assert len(flat.nodes) <= MAX_NODES
    assert len(parameter_graph([1000] * 3000).nodes) == MAX_NODES


def test_topologies_differ_by_hosts_and_bandwidths() -> None:
    """A tenth less bandwidth is near, half of it far, and another host adds a node and its edges."""

    def cluster(hosts: int, rate: float) -> Graph:
        pairs = {(b, a): rate for a in range(hosts) for b in range(a + 1, hosts)}
        return topology_graph([("h", 4)] * hosts, pairs)

    base = cluster(4, 1e9)
    assert distance(base, cluster(4, 1e9)) == 0
    assert edits(base, cluster(4, 0.5e9)) == pytest.approx(6)
    assert edits(base, cluster(5, 1e9)) == pytest.approx(1 + 4)
    assert distance(base, cluster(4, 0.9e9)) < NEAR / 2 < distance(base, cluster(4, 0.5e9))
    with pytest.raises(ValueError, match="directed"):
        distance(base, parameter_graph([1, 2]))


# ------------------------------------------------------------------------------------------------------------- memory


def entry(size: int = 1000, rate: float = 1e9, setting: Setting = DEFAULT) -> Entry:
    return Entry(parameter_graph([size] * 4), topology_graph([("h", 1)] * 2, {(0, 1): rate}), setting, 0.1)


def test_memory_returns_the_nearest(tmp_path: pathlib.Path) -> None:
    """Of three entries the one whose graphs are nearest; the same graphs are at distance 0 and near."""
    memory = Memory(tmp_path / "deep" / "tune.json")
    assert memory.nearest(entry().model, entry().topology) is None
    settings = [Setting(streams, MIB, "ring") for streams in (1, 2, 4)]
    for size, setting in zip((10, 1000, 100_000), settings, strict=True):
        assert memory.remember(entry(size, setting=setting))
    exact = memory.nearest(entry(1000).model, entry().topology)
    close = memory.nearest(entry(60_000).model, entry(rate=0.9e9).topology)
    assert exact is not None and exact.entry.setting == settings[1] and exact.distance == 0 and exact.near
    assert close is not None and close.entry.setting == settings[2] and close.distance > 0 and close.near
    far = memory.nearest(model_of_another_kind(), entry(rate=1e6).topology)
    assert far is not None and not far.near


def model_of_another_kind() -> Graph:
    return Graph(tuple((kind, 7.0) for kind in "xyz"), (), directed=True)


def test_memory_is_bounded_and_keeps_one_entry_for_the_same_graphs(tmp_path: pathlib.Path) -> None:
    """A second tuning of a job replaces the first; beyond the bound the one that is longest unused goes."""
    memory = Memory(tmp_path / "tune.json")
    memory.remember(entry(7, setting=Setting(1, MIB, "ring")))
    memory.remember(entry(7, setting=Setting(2, MIB, "ring")))
    assert [each.setting.streams for each in memory.entries()] == [2]
    for size in range(1000, 1000 + MAX_ENTRIES):
        memory.remember(entry(size))
    sizes = [each.model.nodes[0][1] for each in memory.entries()]
    assert len(sizes) == MAX_ENTRIES and sizes[0] == 1000 and 7 not in sizes
    assert [path.name for path in tmp_path.iterdir()] == ["tune.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[1]",
        b"{}",
        b'{"format": "penstock-tune-memory/9"}',
        b"[" * 100_000,
        b'{"format": "penstock-tune-memory/1", "entries": [{"model": {"nodes": 3}}]}',
    ],
)
def test_a_damaged_memory_is_a_warning(
    content: bytes, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is in the file counts as nothing, is said once in the log, and is replaced by the next entry."""
    path = tmp_path / "tune.json"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING, logger="penstock.tune"):
        assert Memory(path).nearest(entry().model, entry().topology) is None
    assert str(path) in caplog.text and caplog.text.count("cannot be read") == 1
    assert Memory(path).remember(entry()) and len(Memory(path).entries()) == 1


def test_a_memory_that_cannot_be_written_is_a_warning(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where the cache's folder is a file, remembering fails softly, and what was there stays."""
    (tmp_path / "file").write_text("x")
    with caplog.at_level(logging.WARNING, logger="penstock.tune"):
        assert not Memory(tmp_path / "file" / "tune.json").remember(entry())
    assert "cannot be written" in caplog.text and (tmp_path / "file").read_text() == "x"


def test_a_failed_write_leaves_the_old_content(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Atomic: when the disk fails before the file takes its place, readers find what was there, and no rest lies about."""
    path = tmp_path / "tune.json"
    Memory(path).remember(entry())
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(tuners.os, "replace", fail)
    assert not Memory(path).remember(entry(5))
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_the_memory_lies_where_xdg_says() -> None:
    """An absolute XDG_CACHE_HOME counts; a relative or missing one does not."""
    absolute = pathlib.Path("/").joinpath("somewhere")
    assert default_path({"XDG_CACHE_HOME": str(absolute)}) == absolute / "penstock" / "tune.json"
    for environ in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert default_path(environ) == pathlib.Path.home() / ".cache" / "penstock" / "tune.json"


# --------------------------------------------------------------------------------------------------- the command line


def test_the_command_explains_a_record_and_the_memory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`penstock tune` shows and verifies a record, lists what is remembered, and forgets it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runner = click.testing.CliRunner()
    tuner, _ = tuned(RECORDED["capped"], 1, 0.05)
    save_record(tmp_path / "tuned.json", tuner.record())
    shown = runner.invoke(command, ["--show", str(tmp_path / "tuned.json"), "--verify"])
    assert shown.exit_code == 0 and "chosen:" in shown.output and "lead to the recorded decisions" in shown.output
    Memory().remember(entry())
    listed = runner.invoke(command, ["--show"])
    assert "1 remembered" in listed.output and str(DEFAULT) in listed.output
    assert "forgot 1 settings" in runner.invoke(command, ["--clear"]).output and Memory().entries() == []
    for wrong in (["--clear", "--show"], ["--verify"], [str(tmp_path / "none.json")]):
        assert runner.invoke(command, wrong).exit_code != 0


def test_the_core_needs_no_torch() -> None:
    """Tuning runs without torch, and importing the package brings neither it nor scikit-learn in."""
    program = (
        "import sys, penstock.tune as t\n"
        "assert not {'torch', 'sklearn', 'scipy'} & set(sys.modules)\n"
        "tuner = t.Tuner(t.Space.standard(t.Setting(16, 1 << 24, 'ring')))\n"
        "for k in range(30): tuner.begin_step(); tuner.end_step(1.0 + k % 3)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_example_of_the_documentation_runs(root: pathlib.Path) -> None:
    """The code in docs/guide/tune.md, "Tune something else", does what it says: it ends with an explanation of a choice."""
    done = subprocess.run(
        [sys.executable, "-c", example(root / "docs" / "guide" / "tune.md")], capture_output=True, text=True
    )
    assert done.returncode == 0 and "chosen: 16 streams, 4 MiB buckets" in done.stdout, done.stdout + done.stderr


def example(page: pathlib.Path) -> str:
    """The block of a page that begins by importing the tuner."""
    block = re.search(r"```python\n(from penstock\.tune .*?)```", page.read_text(), re.DOTALL)
    assert block is not None
    return block[1]


def test_a_drift_is_described_by_two_numbers() -> None:
    """The band is never less than asked, and four standard errors where noise asks for more."""
    calm = tuners.reference_of([1.0, 1.01, 0.99, 1.0] * 5, Drift())
    wild = tuners.reference_of([1.0, 2.0, 0.5, 1.5] * 5, Drift())
    assert calm == (1.0, 0.15) and wild[1] > 0.15
