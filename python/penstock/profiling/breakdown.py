"""Where the time of a step goes, rank by rank: the types; `divide.py` computes them from records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["EMBEDDING", "MEASURING", "OTHER", "PHASES", "PURPOSES", "SYNC", "Breakdown", "Moving", "OneStep", "Share"]

OTHER = "other"
MEASURING = "profiler"
"""The phase that is what measuring itself costs."""

PHASES = (
    "loading",
    "forward",
    "backward",
    "unscale",
    "inf check",
    "clip",
    "optimizer",
    "evaluation",
    "checkpoint",
    MEASURING,
    OTHER,
)
"""What the training thread does when it does not wait for communication."""

SYNC, EMBEDDING = "data-parallel sync", "embedding sync"
PURPOSES = (
    SYNC,
    "tensor",
    "pipeline forward recv",
    "pipeline backward recv",
    "pipeline send",
    "expert",
    EMBEDDING,
    OTHER,
)
"""What communication is for: the categories of the characterisation paper (its figures 3 and 5), and what Megatron adds."""


@dataclass(frozen=True)
class Moving:
    """Communication for one purpose, in ns per step (mean).

    *Wire*: all ranks of the operation have issued it. *Wait*: one has not yet. *Exposed*: the training thread stood still for
    it; *hidden*: it did something else meanwhile. At any moment a rank has at most one of the four: exposed before hidden, what
    the thread waits for before other operations, wire before wait.
    """

    exposed_wire_ns: float = 0
    exposed_wait_ns: float = 0
    hidden_wire_ns: float = 0
    hidden_wait_ns: float = 0
    bytes: float = 0
    """Per step."""
    operations: float = 0
    """Per step."""
    waited_for: Mapping[int, float] = field(default_factory=dict)
    """Exposed and hidden wait by the rank that came last, in ns per step."""

    @property
    def exposed_ns(self) -> float:
        return self.exposed_wire_ns + self.exposed_wait_ns


@dataclass(frozen=True)
class Share:
    """One rank's mean step. ``sum(work.values()) + sum of exposed = step_ns``."""

    rank: int
    steps: int
    """Over which the mean is; the first of a run are left out (`divide.py`)."""
    sampled: int
    """Of which torch's profiler saw."""
    step_ns: float
    work: Mapping[str, float]
    """By phase, in ns per step."""
    communication: Mapping[str, Moving]
    """By purpose."""
    known: int = 0
    """Steps whose operations are all known: sampled, or told by Penstock's engine or by watches of gloo. What wire, wait and
    hidden communication were in the others is estimated from these (`between.py`)."""
    examples: float = 0.0
    """That the rank's loader gave it for a step; 0: unknown."""

    @property
    def unprofiled_ns(self) -> float:
        """The step without what measuring costs: what shares and gains are of."""
        return max(0.0, self.step_ns - self.work.get(MEASURING, 0.0))

    @property
    def bubbles(self) -> list[Moving]:
        """Of purposes whose waits are a pipeline's bubble: what stages receive and send, and the embeddings' sum, for which the
        first and the last stage wait until both have passed their micro-batches."""
        return [moving for name, moving in self.communication.items() if self._is_bubble(name)]

    @property
    def without_bubbles(self) -> dict[str, Moving]:
        """Of purposes whose waits are for somebody who is late, by purpose."""
        return {name: moving for name, moving in self.communication.items() if not self._is_bubble(name)}

    def _is_bubble(self, purpose: str) -> bool:
        is_pipeline = any(name.startswith("pipeline") for name in self.communication)
        return purpose.startswith("pipeline") or (purpose == EMBEDDING and is_pipeline)


@dataclass(frozen=True)
class OneStep:
    """One step of a rank, in ns. ``sum(work.values()) + exposed_ns = step_ns``."""

    rank: int
    number: int
    is_counted: bool
    """In the means: the first of a run are not."""
    is_sampled: bool
    start_ns: int
    """On the first host's clock."""
    step_ns: int
    work: Mapping[str, float]
    """By phase. Where `moving` is None, what DDP waits for in a backward pass is part of that."""
    exposed_ns: float
    """What the training thread stood still for: where `moving` is None, marked waits alone."""
    moving: Moving | None
    """For all purposes, without bytes and operations. None: not all operations of the step are known."""
    examples: int
    """As `record.Step` has them."""


@dataclass(frozen=True)
class Breakdown:
    """Of a whole job."""

    shares: tuple[Share, ...]
    """By rank."""
    offsets_ns: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By host: what to add to its clock to get the first host's, and how wrong that may be (`clocks.py`)."""
    problems: tuple[str, ...] = ()
    """What is missing or does not fit, and what to do."""
    notes: tuple[str, ...] = ()
    """What stands behind the numbers, in sentences, where a reader of another tool's file knows it."""
    failures: tuple[str, ...] = ()
    """How the job ended, if not well: the first rank's reason first."""

    @property
    def examples_per_s(self) -> float | None:
        """Of all ranks, without what measuring costs. None: some rank's are unknown, or ranks may have the same ones, as those of
        a tensor-parallel group or of a pipeline, which operations tell."""
        shares = [share for share in self.shares if share.steps]
        purposes = {purpose for share in shares for purpose in share.communication}
        has_groups = any(purpose == "tensor" or purpose.startswith("pipeline") for purpose in purposes)
        is_known = len(shares) == 1 or all(share.known for share in shares)
        if (
            has_groups
            or not is_known
            or not shares
            or not all(share.examples and share.unprofiled_ns for share in shares)
        ):
            return None
        return sum(1e9 * share.examples / share.unprofiled_ns for share in shares)
