"""The small network of the paper InArt (WWW '24): figure 1, and the testbed of its section 5.2, which has the same shape."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from penstock.cluster.network import Aggregator, Cluster, End, Host, Job, Link, Server, Switch
from penstock.planning.evaluate import evaluate
from penstock.planning.scheme import Scheme
from penstock.reports import Column, Line, Table

__all__ = ["example", "figure_1", "testbed"]


def figure_1(unit_bit_s: int, workers: int = 6) -> Cluster:
    """Two servers that take in 4 units, ``workers`` in turns on two switches that sum 6, links of 6 (between switches: any)."""
    names = [f"w{i}" for i in (1, 4, 2, 5, 3, 6)[:workers]]
    at = {worker: "v1" if worker < "w4" else "v2" for worker in sorted(names)} | {"s1": "v1", "s2": "v2"}
    return Cluster(
        hosts=tuple(Host(name=name) for name in at),
        switches=(Switch(name="v1"), Switch(name="v2")),
        links=(
            *(Link(name=name, ends=(End(name), End(to)), rate_bit_s=6 * unit_bit_s) for name, to in at.items()),
            Link(name="v1", ends=(End("v1"), End("v2"))),
        ),
        aggregators=tuple(
            Aggregator(name=name.upper(), at=name, capacity_bit_s=6 * unit_bit_s) for name in ("v1", "v2")
        ),
        servers=tuple(Server(name=name, at=name, ingress_bit_s=4 * unit_bit_s) for name in ("s1", "s2")),
        jobs=(Job(name="train", workers=tuple(sorted(names))),),
    )


def example() -> Table:
    """Section 2.1, figure 1."""
    from penstock.planning import baselines
    from penstock.planning.exact import exact
    from penstock.planning.problem import Problem
    from penstock.planning.relax import relax
    from penstock.planning.solve import scheme_of, search

    unit = 1_000_000
    cluster = figure_1(unit)
    (job,) = cluster.jobs
    problem = Problem(cluster, job, levels=1)
    relaxed = relax(problem)
    found = search(problem, seconds=30, relaxed=relaxed)
    best, is_proven = exact(problem)
    paper = Scheme(
        {"s1": 0.6, "s2": 0.4}, {"s1": ("V1",) * 4 + ("V2",) * 2, "s2": (None, None, None, "V2", "V2", "V2")}
    )

    def worth(scheme: Scheme) -> str:
        return f"{evaluate(cluster, job, scheme).rate / unit:.3f}"

    lines = [
        ("LBMM", worth(baselines.lbmm(problem)), "4/3"),
        ("ATP", worth(baselines.atp(problem)), "2"),
        ("the paper's deployment", worth(paper), "5/2, as its best"),
        ("planned", worth(scheme_of(problem, found.rates, found.trees)), ""),
        ("proven best" if is_proven else "best known", f"{best.rate / unit:.3f}", ""),
        ("bound", f"{relaxed.bound / unit:.3f}", ""),
    ]
    return Table(
        "Section 2.1, figure 1: sending rate",
        [Column("way", is_text=True), Column("here"), Column("paper", is_text=True)],
        [Line(list(line)) for line in lines],
    )


def testbed() -> list[Table]:
    """Section 5.2, computed: figure 1 with the unit that the paper's rates have in common, by the number of workers (figures 2
    and 5), and steps of VGG19 with six (figures 3, 4, 6 and 11)."""
    rates = {workers: _rates(figure_1(UNIT_BIT_S, workers)) for workers in range(2, 7)}
    ways = list(rates[6])

    def paper(of: Mapping[str, float], way: str) -> str:
        return f"{of[way]:g}" if way in of else "-"

    columns = [Column("workers", is_text=True), *(Column(way) for way in ways)]
    sent = [Line([str(workers), *(f"{found[way] / 1e9:.1f}" for way in ways)]) for workers, found in rates.items()]
    sent.append(Line(["6, paper", *(paper(PAPER_GBIT_S, way) for way in ways)], kind="aside"))
    steps = []
    for name, of, value in (
        ("gradients on their way, s", PAPER_SENT_S, lambda sent_s: sent_s),
        ("a step, s", PAPER_STEP_S, lambda sent_s: LOCAL_S + sent_s),
        ("images a second", PAPER_IMAGES, lambda sent_s: 6 * BATCH / (LOCAL_S + sent_s)),
        ("2,000 steps, s", PAPER_JOB_S, lambda sent_s: 2000 * (LOCAL_S + sent_s)),
        ("219 steps, s (figure 11)", PAPER_ACCURATE_S, lambda sent_s: STEPS_TO_ACCURACY * (LOCAL_S + sent_s)),
    ):
        cells = [f"{value(8 * VGG19_BYTES / rates[6][way]):.3g} ({paper(of, way)})" for way in ways]
        steps.append(Line([name, *cells]))
    return [
        Table(
            "Section 5.2: sending rate of a worker, Gbit/s",
            columns,
            sent,
            note="The paper names no unit; its rates for LBMM, ATP and R-InArt are as 4 to 5 to 6, so of 11.55 Gbit/s. "
            "InArt and R-InArt: means of ten roundings.",
        ),
        Table(
            "Section 5.2: VGG19, six workers; in brackets the paper's",
            [Column("what", is_text=True), *columns[1:]],
            steps,
            note=f"Computing takes {LOCAL_S} s, as in the paper. Its times are those of twice the gradients at its rates, up and "
            "then down; here the results come down meanwhile. Figure 11 is the time to an accuracy: here that of as many "
            "steps for all ways, and nothing is trained.",
        ),
    ]


def _rates(cluster: Cluster) -> dict[str, float]:
    """Bits a second by way."""
    import numpy as np

    from penstock.planning import baselines
    from penstock.planning.problem import Problem
    from penstock.planning.relax import relax
    from penstock.planning.solve import scheme_of, search

    (job,) = cluster.jobs
    problem = Problem(cluster, job, levels=1)
    relaxed = relax(problem)
    found = search(problem, seconds=0.3, relaxed=relaxed)

    def rounded(make: Callable[[np.random.Generator], Scheme]) -> float:
        return statistics.fmean(
            evaluate(cluster, job, make(np.random.default_rng(seed))).rate for seed in range(_ROUNDINGS)
        )

    return {
        "planned": evaluate(cluster, job, scheme_of(problem, found.rates, found.trees)).rate,
        "InArt": rounded(lambda rng: baselines.inart(problem, rng, relaxed)),
        "R-InArt": rounded(lambda rng: baselines.equal_inart(problem, rng)),
        "ATP": evaluate(cluster, job, baselines.atp(problem)).rate,
        "LBMM": evaluate(cluster, job, baselines.lbmm(problem)).rate,
    }


UNIT_BIT_S = 11_550_000_000
"""15.4, 19.25 and 23.1 Gbit/s, which the paper measured, are 4/3, 5/3 and 2 of it."""
VGG19_BYTES = 548_000_000
LOCAL_S = 0.38
"""What the paper's steps take beside their communication: 0.69 less 0.31 s."""
PAPER_GBIT_S = {"InArt": 26.2, "R-InArt": 23.1, "ATP": 19.25, "LBMM": 15.4}
PAPER_SENT_S = {"InArt": 0.31, "R-InArt": 0.38, "ATP": 0.45, "LBMM": 0.56}
PAPER_STEP_S = {"InArt": 0.69, "R-InArt": 0.78, "ATP": 0.85, "LBMM": 0.97}
PAPER_JOB_S = {"InArt": 1380, "R-InArt": 1541, "ATP": 1775, "LBMM": 2105}
PAPER_IMAGES = {"InArt": 223, "R-InArt": 206, "ATP": 188, "LBMM": 162}
PAPER_ACCURATE_S = {"InArt": 151, "R-InArt": 181, "ATP": 208, "LBMM": 278}
BATCH = 32
STEPS_TO_ACCURACY = 219
"""151 s of steps of 0.69 s: all ways take the same steps."""
_ROUNDINGS = 10
