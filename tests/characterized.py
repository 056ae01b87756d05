"""Runs of a matrix, made up: for tests of what `penstock characterize` makes of them."""

from __future__ import annotations

from dataclasses import replace

from penstock.tools.characterize.matrix import Cell
from penstock.tools.characterize.results import Outcome

CELL = Cell("gpt2-tiny", "data", 2, 8, 0, "tcp-4", 100.0, 0.0, "strong", 0)


def outcome(cell: Cell = CELL, repeat: int = 0, **changes: object) -> Outcome:
    usual = Outcome(
        cell,
        repeat,
        100.0,
        {"forward": 20.0, "backward": 30.0, "optimizer": 10.0},
        {"data-parallel sync": 40.0},
        {"data-parallel sync": 10.0},
        {},
        1e6,
        60.0,
        90.0,
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def as_in_the_paper() -> list[Outcome]:
    """Runs of a matrix with cells for every finding, each of which they show: three runs a cell, which differ by 1 % at most."""
    made: list[Outcome] = []

    def add(
        cell: Cell, step_ms: float, computing: float, still: float, received: float = 60.0, waits: float = 1.0
    ) -> None:
        work = {"forward": computing / 3, "backward": 2 * computing / 3, "optimizer": 1.0}
        purpose = "data-parallel sync" if cell.parallel == "data" else "pipeline forward recv"
        for repeat in range(3):
            by = 1 + (repeat - 1) / 200
            changes = {
                "step_ms": step_ms * by,
                "work": {phase: time * by for phase, time in work.items()},
                "exposed": {purpose: still * by},
                "waits": {purpose: waits},
                "receive_mbit": received * by,
                "sent_mbit": received * by,
                "processors": 8,
            }
            made.append(outcome(cell, repeat, **changes))

    for model, size in (("gpt2-tiny", 1.0), ("gpt2-small", 1.5)):
        for link, speed in ((100.0, 1.0), (1000.0, 8.0)):
            for ranks in (2, 4):
                still = size * ranks * 300 / speed
                for scaling, batch, computing in (("strong", 8, 160 / ranks), ("weak", 4 * ranks, 40.0)):
                    cell = Cell(model, "data", ranks, batch, 0, "tcp", link, 0.0, scaling, 0)
                    add(
                        cell,
                        computing + still,
                        computing,
                        still,
                        link * 0.9 / speed**0.3 * (0.8 if ranks == 2 else 1) * size / 2,
                    )
    paused = Cell("gpt2-tiny", "data", 2, 16, 0, "tcp", 1000.0, 0.0, "strong", 0, evaluate_every=8)
    work = {"forward": 20.0, "backward": 30.0, "evaluation": 30.0}
    made.append(outcome(paused, step_ms=130.0, work=work, steps=24, drops={"evaluation": 2.0}, sent_mbit=60.0))
    add(Cell("gpt2-tiny", "data", 2, 64, 0, "tcp", 100.0, 0.0, "strong", 0), 1240.0, 640.0, 600.0)
    for model, more in (("gpt2-tiny", 0.0), ("t5-tiny", 0.1)):
        for link, longer in ((100.0, 1.2), (1000.0, 1.0)):
            for ranks in (2, 4):
                for batch in (8, 32):
                    share = 0.6 + more + (0.1 if batch == 32 else 0) - (0.05 if ranks == 4 else 0)
                    cell = Cell(model, "pipeline", ranks, batch, 4, "tcp", link, 0.0, "strong", 0)
                    add(cell, 100 * longer, 20.0, 100 * longer * share, waits=90 * longer * share)
                cell = Cell(model, "pipeline", ranks, 4 * ranks, 4, "tcp", link, 0.0, "weak", 0)
                add(cell, 100 * longer, 10.0 * ranks, 60 * longer, waits=50 * longer)
    return made
