"""``penstock bench aggregated --faults``: all-reduces while aggregators are killed, on links that lose packets.

One run is a group of its own, with jobs of its own at the daemons. It takes some steps, of several all-reduces at once each, as
DDP has it. In one of them a rank kills an aggregator (SIGKILL) as soon as its interface has sent a given share of what a step
sends; the aggregator is started again, and the run ends when traffic goes through it again. All that it computed must have
the bits of a run before, without losses and kills. The run's seed decides which daemon is killed, by which rank and when.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.tools.bench.aggregated.cluster import Cluster

STEPS = 5
"""Of a run, beside those that wait for the aggregator's return."""


@dataclass(frozen=True)
class Fault:
    """What happens in a run."""

    seed: int
    node: str
    """Which aggregator is killed."""
    rank: int
    """The rank that kills it, whose progress therefore counts."""
    step: int
    share: float
    """Of what this rank sends in a step: when to kill."""
    back: int
    """So many more steps are taken before it is started again; 0: at once."""

    @classmethod
    def of_seed(cls, seed: int, aggregators: Sequence[str], workers: int) -> Fault:
        """The same for the same seed and cluster."""
        rng = random.Random(f"fault {seed}")
        return cls(
            seed=seed,
            node=rng.choice(list(aggregators)),
            rank=rng.randrange(workers),
            # A kill that is late for its step happens in the next one.
            step=rng.randrange(STEPS - 1),
            share=rng.uniform(0.02, 0.95),
            back=rng.randrange(3),
        )


@dataclass(frozen=True)
class Run:
    """How one went."""

    fault: Fault
    struck_step: int
    in_flight: int
    """All-reduces of the killing rank's step that had not ended just after the kill."""
    bypasses: int
    """How often a rank began to pass an aggregator by, all ranks together."""
    returned: bool
    """Whether traffic went through all aggregators again in the end."""
    all_reduces: int
    """Of each rank."""
    longest_s: float
    """The longest step, in which a dead aggregator was noticed and bypassed."""
    undisturbed_s: float
    """The longest step of the run without losses and kills."""
    wrong: list[str]
    """What has other bits than undisturbed, went another way than through the server, or did not come back to the aggregator that
    was started again; empty if all is well."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "fault": vars(self.fault)}


@dataclass(frozen=True)
class Outcome:
    """All runs on a cluster."""

    workers: int
    loss: float
    runs: list[Run]

    @property
    def wrong(self) -> list[str]:
        """With the seeds that repeat it."""
        return [f"seed {run.fault.seed}: {what}" for run in self.runs for what in run.wrong]

    def lines(self) -> list[str]:
        """For people."""
        mid = sum(run.in_flight > 0 for run in self.runs)
        passed = sum(run.bypasses > 0 for run in self.runs)
        equal = sum(not run.wrong for run in self.runs)
        killed = sorted({run.fault.node for run in self.runs})
        longest = sorted(run.longest_s for run in self.runs)
        return [
            f"{self.workers} workers, loss {self.loss:g} on every link, {len(self.runs)} runs from seed "
            f"{self.runs[0].fault.seed}: {equal} equal the undisturbed one bit by bit",
            f"  kills of {', '.join(killed)}: {mid} with all-reduces under way, {passed} passed by, "
            f"{sum(run.returned for run in self.runs)} came back into use; "
            f"{sum(run.all_reduces for run in self.runs)} all-reduces a rank",
            f"  the longest step of a run: {statistics.median(longest):.2f} s in the median, {longest[-1]:.2f} s at most; "
            f"undisturbed {self.runs[0].undisturbed_s:.2f} s",
            *(f"  WRONG: {what}" for what in self.wrong),
        ]

    def to_dict(self) -> dict[str, Any]:
        """For JSON, every run too."""
        return {**vars(self), "runs": [run.to_dict() for run in self.runs]}


def measure(
    *,
    workers: int,
    loss: float,
    runs: int,
    seed: int,
    rate_mbit: float,
    nbytes: int,
    window: int,
    timeout_s: float,
) -> Outcome:
    """Make a cluster, start its daemons, and do ``runs`` runs with seeds from ``seed`` on. A step reduces ``nbytes`` in all.

    Raises:
        BenchError: a daemon or a rank failed or hung, with the end of what it said.
        TestbedUnavailable: no emulated cluster here.
    """
    with Cluster(workers, rate_mbit=rate_mbit) as cluster:
        aggregators = [node for node in cluster.topology.nodes if node.startswith("a")]
        faults = [Fault.of_seed(each, aggregators, workers) for each in range(seed, seed + runs)]
        options = {
            "deployment": cluster.deployment("int32", window),
            "nbytes": nbytes,
            "steps": STEPS,
            "loss": loss,
            "faults": [vars(fault) for fault in faults],
        }
        what = f"faults, {workers} workers, seeds {seed} to {seed + runs - 1}"
        records = cluster.run("faults_rank", options, what=what, timeout_s=timeout_s)
    return Outcome(workers, loss, summarise(records, faults))


def summarise(records: Sequence[Sequence[dict[str, Any]]], faults: Sequence[Fault]) -> list[Run]:
    """The ranks' reports of each run, compared with those of the undisturbed one. Pure."""
    before = [next(one for one in each if one.get("run") == -1) for each in records]
    undisturbed = [one["digests"] for one in before]
    wrong = [
        f"rank {rank} differs from rank 0 without any fault"
        for rank, mine in enumerate(undisturbed)
        if mine != undisturbed[0]
    ]
    runs = []
    for number, fault in enumerate(faults):
        mine = [next(one for one in each if one.get("run") == number) for each in records]
        found = list(wrong)
        for rank, one in enumerate(mine):
            expected = undisturbed[0]
            found += [
                f"step {step}, all-reduce {place}, rank {rank}: other bits than undisturbed"
                for step, digests in enumerate(one["digests"])
                for place, digest in enumerate(digests)
                if digest != expected[step % len(expected)][place]
            ]
            if one["fallback"]:
                found.append(f"rank {rank} went on without servers: {one['fallback']}")
        if not mine[0]["returned"]:
            found.append(f"traffic did not go through {fault.node} again")
        struck = mine[fault.rank]["struck"]
        runs.append(
            Run(
                fault=fault,
                struck_step=struck["step"],
                in_flight=struck["in_flight"],
                bypasses=sum(one["bypasses"] for one in mine),
                returned=mine[0]["returned"],
                all_reduces=sum(len(digests) for digests in mine[0]["digests"]),
                longest_s=max(max(one["seconds"]) for one in mine),
                undisturbed_s=max(max(one["seconds"]) for one in before),
                wrong=found,
            )
        )
    return runs
