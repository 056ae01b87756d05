"""Marks of the training thread, made into spans, waits and steps. No torch, no clock: whoever calls says when."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.profiling.record import Interval, Span, Step, Wait

__all__ = ["MOST_MARKS", "Marks"]

MOST_MARKS = 50_000
"""Spans and waits that are kept of a step."""

_LEAST_FORWARD_NS = 100_000
"""Between a mark and a backward pass, in a step without modules. Two backward passes in a row have some us between them."""


@dataclass
class _Evaluation:
    """Calls of modules between which there is nothing but the loader."""

    start_ns: int
    end_ns: int
    with_gradients: bool
    in_training_mode: bool
    called_ns: int = 0
    """In the calls themselves."""
    has_loaded: bool = False
    """A batch, between two calls."""


class Marks:
    """The step that runs, as far as it has come.

    Spans that lie within others end before them. Three are not known when they begin:

    - *forward* goes on after the module has returned, up to the next backward pass, for the loss is in it; in a step
      without modules it is what lies between the last span and the backward pass;
    - *evaluation* joins calls between which there is nothing but the loader;
    - a module in evaluation mode with gradients is forward if a backward pass follows in the same step; so is one in training
      mode without gradients, as a GAN's generator for the discriminator's step, unless a batch is loaded after it before that.
    """

    def __init__(self, now_ns: int, thread_ns: int) -> None:
        self.number = 0
        self.start_ns = now_ns
        self._thread_ns = thread_ns
        self._spans: list[Span] = []
        self._waits: list[Wait] = []
        self._examples = self._left_out = 0
        self._open: list[tuple[str, int]] = []
        self._forward: Interval | None = None
        self._has_modules = False
        """Whether one was called in this step, with gradients."""
        self._evaluation: _Evaluation | None = None
        self._between: list[Span] = []
        """Of the loader since the last evaluation."""
        self._maybe_forward: dict[int, bool] = {}
        """Where in the spans there are evaluations that may yet turn out to be forward, and whether a batch that is loaded before
        the backward pass tells that they are not."""
        self._last_ns = now_ns
        """When the last span of the step ended, or the step began."""

    # ------------------------------------------------------------------------------------------------------- spans

    def enter(self, phase: str, at_ns: int) -> None:
        if phase == "backward":
            if self._evaluation is not None and self._may_be_forward(self._evaluation):
                self._forward = (self._evaluation.end_ns, at_ns)
                self._settle_evaluation()
            self._has_modules |= bool(self._maybe_forward)
            if self._forward is not None:
                self._forward = (self._forward[0], at_ns)
            elif not self._has_modules and at_ns - self._last_ns > _LEAST_FORWARD_NS:
                self._forward = (self._last_ns, at_ns)  # such as a compiled function
        if self._forward is not None:
            self._settle_forward()
        if phase != "loading" and self._evaluation is not None:
            self._settle_evaluation()
        if phase == "loading" and self._maybe_forward:
            self._maybe_forward = {index: False for index, is_over in self._maybe_forward.items() if not is_over}
        if phase == "backward" and self._maybe_forward:
            for index in self._maybe_forward:
                old = self._spans[index]
                self._spans[index] = Span("forward", old.start_ns, old.end_ns)
            self._maybe_forward.clear()
        self._open.append((phase, at_ns))

    def leave(self, phase: str, at_ns: int) -> None:
        """End the innermost span of that phase, and those within it whose ends were missed (an exception passed)."""
        if not self.is_in(phase):
            return
        while True:
            name, start_ns = self._open.pop()
            if name == "loading" and self._evaluation is not None and len(self._between) < MOST_MARKS:
                self._between.append(Span(name, start_ns, at_ns))
            else:
                self._span(name, start_ns, at_ns)
            if name == phase:
                return

    def forget(self, phase: str) -> None:
        """What of that phase is open has ended, and nobody knows when."""
        self._open = [each for each in self._open if each[0] != phase]

    def is_in(self, phase: str) -> bool:
        for name, _ in self._open:  # noqa: SIM110  (a generator takes three times as long)
            if name == phase:
                return True
        return False

    def forward(self, start_ns: int, end_ns: int) -> None:
        """The outermost call of a module, with gradients."""
        if self._evaluation is not None:
            self._settle_evaluation()
        self._has_modules = True
        self._forward = (start_ns if self._forward is None else self._forward[0], end_ns)

    def evaluation(
        self, start_ns: int, end_ns: int, *, with_gradients: bool = False, in_training_mode: bool = False
    ) -> None:
        """The outermost call of a module without gradients, or in evaluation mode."""
        self._settle_forward()
        here = self._evaluation
        if here is not None and (with_gradients, in_training_mode) != (here.with_gradients, here.in_training_mode):
            self._settle_evaluation()
        if self._evaluation is None:
            self._evaluation = _Evaluation(start_ns, end_ns, with_gradients, in_training_mode)
        self._evaluation.end_ns = end_ns
        self._evaluation.called_ns += end_ns - start_ns
        self._evaluation.has_loaded |= bool(self._between)
        self._between.clear()

    def wait(self, start_ns: int, end_ns: int, operation: str = "", group: str = "") -> None:
        if self._has_room():
            self._waits.append(Wait(start_ns, end_ns, operation, group))

    def loaded(self, examples: int) -> None:
        self._examples += examples

    # ------------------------------------------------------------------------------------------------------- steps

    def end_step(self, at_ns: int, thread_ns: int) -> tuple[Step, int]:
        """The step that has ended, and how many marks of it were left out. What is open goes on in the next.

        Args:
            thread_ns: what the thread has used of processors so far.
        """
        self._settle()
        self._maybe_forward.clear()
        for phase, start_ns in self._open:
            self._span(phase, start_ns, at_ns)
        # What was open when this step began, too, has ended without a word: a signal's handler raised within its mark.
        self._open = [(phase, at_ns) for phase, start_ns in self._open if start_ns > self.start_ns]
        step = Step(
            self.number,
            self.start_ns,
            at_ns,
            tuple(self._spans),
            tuple(self._waits),
            max(0, thread_ns - self._thread_ns),
            self._examples,
        )
        left_out = self._left_out
        self._spans, self._waits = [], []
        self._examples = self._left_out = 0
        self._has_modules = False
        self.number += 1
        self.start_ns = self._last_ns = at_ns
        self._thread_ns = thread_ns
        return step, left_out

    # ----------------------------------------------------------------------------------------------------- helpers

    def _settle(self) -> None:
        self._settle_forward()
        self._settle_evaluation()

    def _settle_forward(self) -> None:
        if self._forward is not None:
            self._span("forward", *self._forward)
            self._forward = None

    def _settle_evaluation(self) -> None:
        here, self._evaluation = self._evaluation, None
        if here is None:
            return
        index = len(self._spans)
        self._span("evaluation", here.start_ns, here.end_ns)
        if self._may_be_forward(here) and index < len(self._spans):  # there was room
            self._maybe_forward[index] = here.in_training_mode
        for each in self._between:
            self._span(each.phase, each.start_ns, each.end_ns)
        self._between = []

    def _may_be_forward(self, here: _Evaluation) -> bool:
        """If a backward pass follows in the step. What interrupts calls in training mode is what they are of use for, as a game
        that a policy plays; and a batch that is loaded after them tells that they were not for this pass."""
        if not here.in_training_mode:
            return here.with_gradients
        is_mostly_calls = 2 * here.called_ns >= here.end_ns - here.start_ns
        return is_mostly_calls and not here.has_loaded and not self._between

    def _span(self, phase: str, start_ns: int, end_ns: int) -> None:
        if self._has_room():
            least = self.start_ns
            if start_ns < least:  # its first part is in the step before
                start_ns, end_ns = least, max(end_ns, least)
            self._spans.append(Span(phase, start_ns, end_ns))
            if end_ns > self._last_ns:
                self._last_ns = end_ns

    def _has_room(self) -> bool:
        if len(self._spans) + len(self._waits) < MOST_MARKS:
            return True
        self._left_out += 1
        return False
