"""The marks of the training thread, noted as they come. No torch, no clock: whoever calls says when."""

from __future__ import annotations

from typing import Any

from penstock.profiling.record import Step
from penstock.tools.profile.recorder.marks import Marks

__all__ = ["Journal"]

_MANY = 100
"""Notes, of some 20 steps: made into steps together, they find caches that the first of them has filled."""
_PATIENCE_NS = 250_000_000
"""A rank that is killed loses the steps of so long, and what the writer has not written."""
_MOST = 4096
"""Of a step that does not end."""


class Journal:
    """Marks in the order in which they came, of which `Marks` makes spans and steps some steps later.

    *Why not at once?* In a step of 1.5 ms the script's own work takes the caches, so that each line of ours costs several times
    what it does in a row.
    """

    def __init__(self, now_ns: int, thread_ns: int) -> None:
        self.number = 0
        """Of the step that runs."""
        self.start_ns = now_ns
        self._marks = Marks(now_ns, thread_ns)
        self._notes: list[tuple[Any, ...]] = []
        """Each a method of `Marks`, and its arguments."""
        self._ended: list[tuple[Step, int]] = []
        self.open: list[tuple[str, int]] = []
        """What runs now, each with its begin, the innermost last."""
        self._settled_ns = now_ns
        self._unsettled = 0
        """Steps."""

    # As those of `Marks`

    def enter(self, phase: str, at_ns: int) -> None:
        self.open.append((phase, at_ns))
        self._notes.append((Marks.enter, phase, at_ns))

    def leave(self, phase: str, at_ns: int) -> None:
        # Most often it is the innermost.
        if (self.open and self.open[-1][0] == phase) or self.is_in(phase):
            while self.open.pop()[0] != phase:
                pass
            self._notes.append((Marks.leave, phase, at_ns))
            if len(self._notes) >= _MOST:
                self._apply()

    def forget(self, phase: str) -> None:
        self.open = [each for each in self.open if each[0] != phase]
        self._notes.append((Marks.forget, phase))

    def is_in(self, phase: str) -> bool:
        for name, _ in self.open:  # noqa: SIM110  (a generator takes three times as long)
            if name == phase:
                return True
        return False

    def forward(self, start_ns: int, end_ns: int) -> None:
        self._notes.append((Marks.forward, start_ns, end_ns))
        if len(self._notes) >= _MOST:
            self._apply()

    def evaluation(self, start_ns: int, end_ns: int, *, with_gradients: bool, in_training_mode: bool) -> None:
        self._notes.append((_evaluation, start_ns, end_ns, with_gradients, in_training_mode))
        if len(self._notes) >= _MOST:
            self._apply()

    def wait(self, start_ns: int, end_ns: int, operation: str = "", group: str = "") -> None:
        self._notes.append((Marks.wait, start_ns, end_ns, operation, group))
        if len(self._notes) >= _MOST:
            self._apply()

    def loaded(self, examples: int) -> None:
        self._notes.append((Marks.loaded, examples))

    def end_step(self, at_ns: int, thread_ns: int) -> None:
        if self.open:
            self.open = [(phase, at_ns) for phase, start_ns in self.open if start_ns > self.start_ns]
        self._notes.append((Marks.end_step, at_ns, thread_ns))
        self.number += 1
        self._unsettled += 1
        self.start_ns = at_ns

    # What becomes of them

    @property
    def has_ended(self) -> bool:
        """Whether `settle` would have a step."""
        return self._unsettled > 0

    def is_due(self, now_ns: int) -> bool:
        """Whether it is time to `settle`."""
        return len(self._notes) >= _MANY or now_ns - self._settled_ns >= _PATIENCE_NS

    def settle(self, now_ns: int) -> list[tuple[Step, int]]:
        """The steps that have ended since the last call, each with how many marks of it were left out."""
        self._apply()
        self._settled_ns, self._unsettled = now_ns, 0
        ended, self._ended = self._ended, []
        return ended

    def _apply(self) -> None:
        notes, marks, done = self._notes, self._marks, 0
        try:
            for note in notes:
                done += 1
                made = note[0](marks, *note[1:])
                if made is not None:
                    self._ended.append(made)
        finally:  # a handler of a signal may raise here
            del notes[:done]


def _evaluation(marks: Marks, start_ns: int, end_ns: int, with_gradients: bool, in_training_mode: bool) -> None:
    marks.evaluation(start_ns, end_ns, with_gradients=with_gradients, in_training_mode=in_training_mode)
