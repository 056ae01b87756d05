"""Rules for the course of training: where it ends, what a backward pass starts from, when gradients are exchanged."""

from __future__ import annotations

from typing import Any

import libcst as cst

from penstock.tools.convert.base import all_below, places_reached
from penstock.tools.convert.flow import Place
from penstock.tools.convert.metrics import MetricRules
from penstock.tools.convert.training import loops_around


class StepRules(MetricRules):
    """Ends of loops, losses that are sums, gradients that accumulate."""

    def agree_on_ends(self) -> None:
        """No rank may leave a loop that the others stay in: they would wait for it."""
        loops = {id(loop): loop for chain in self.training.chains for loop in chain}
        direct = {self.module.function_of(call) for call in self.training.backwards}
        for node in self.module.nodes:
            if isinstance(node, cst.While) and id(node) in loops:
                self._agree(node, node, f"`while {self.module.code(node.test)}`")
            if not isinstance(node, cst.Break | cst.Continue | cst.Return):
                continue
            loop = next(
                (
                    above
                    for above in self.module.ancestors(node)
                    if isinstance(above, cst.For | cst.While | cst.FunctionDef)
                ),
                None,
            )
            # A function that a loop calls for each step is left in the middle of it by a return.
            if loop is None or (id(loop) not in loops and loop not in direct):
                continue
            for above in self.module.ancestors(node):
                if above is loop:
                    break
                if isinstance(above, cst.If):
                    what = f"`{self.module.code(node)}` under `if {self.module.code(above.test)}`"
                    self._agree(node, above, what, decide=not isinstance(loop, cst.FunctionDef))
        for call in self.module.calls:
            if isinstance(call.func, cst.Attribute) and call.func.attr.value == "step" and call.args:
                names = [self.module.call_name(origin) for origin in self.module.origins(call.func.value)]
                if names and all(name.endswith("ReduceLROnPlateau") for name in names):
                    self.edits.wrap(call.args[0].value, f"{self.name('mean_over_ranks')}(_)")
                    self.tell(call, "schedule", "the figure that it looks at is the same on all ranks")

    def _agree(self, node: cst.CSTNode, condition: cst.If | cst.While, what: str, decide: bool = True) -> None:
        """All ranks must find the same in `condition`, which decides whether they stay together at `node`."""
        test = condition.test
        clock = self._reads_clock(test)
        decide = decide and not self._in_batch_loop(condition) and self._runs_alike(condition)
        if self._differs(test):
            why = "the condition looks at a rank's own data: one rank may leave and the others wait for it"
            self.leave(node, what, why, "let all ranks decide alike, for instance on an all-reduced value")
        elif decide and (clock or self._is_measured(test)):
            if not any(each.rule == "end" and each.line == self.module.line(condition) for each in self.done):
                # A parenthesis that stands right behind the keyword has to stay there.
                decides = f"{self.name('rank_zero_decides')}(_)"
                self.edits.wrap(test, f"({decides})" if test.lpar else decides)
            self.tell(condition, "end", "rank 0 decides for all whether training ends here")
        elif clock:
            why = "ranks read their clocks at different moments: one rank may leave and the others wait for it"
            todo = "let rank 0 look at its clock and broadcast the answer, for instance every hundred steps or once an epoch"
            self.leave(node, what, why, todo)

    def report_caught(self) -> None:
        """A rank that catches an exception in the middle of a step leaves others, which had none, waiting in it."""
        loops = [loop for chain in self.training.chains for loop in chain]
        for node in self.module.nodes:
            if not isinstance(node, cst.Try | cst.TryStar) or not self._is_in_training(node, loops):
                continue
            calls = [each for each in self.module.descendants(node.body) if isinstance(each, cst.Call)]
            steps = any(
                each in self.training.backwards
                or each in self.training.steps
                or self._is_forward(each)
                or self.module.callee(each) in self.training.functions
                for each in calls
            )
            for handler in node.handlers:
                leaves = any(
                    isinstance(each, cst.Break | cst.Continue | cst.Return)
                    for each in self.module.descendants(handler.body, into_functions=False)
                )
                if not (steps or leaves) or self._comes_to_all(handler) or raises(handler):
                    continue
                kind = "" if handler.type is None else f" {self.module.code(handler.type)}"
                what = f"`except{kind}` in code that trains"
                why = "where one rank has the exception and others do not, it leaves the step and they wait for it"
                todo = "let it end the job, or let all ranks agree on a skip before the backward pass"
                self.leave(handler, what, why, todo)

    def _is_in_training(self, node: cst.CSTNode, loops: list[Any]) -> bool:
        """Whether `node` runs in a training loop: written there, or in a function with a backward pass that one calls."""
        if self.module.within(node, *loops):
            return True
        return self.module.function_of(node) in self.training.functions and any(
            each in loops for chain in loops_around(self.module, node) for each in chain
        )

    def _comes_to_all(self, handler: cst.ExceptHandler | cst.ExceptStarHandler) -> bool:
        """Whether all ranks have the exception at the same place: the end of their equally many batches, or of the job."""
        kinds: list[Any] = [handler.type]
        if isinstance(handler.type, cst.Tuple):
            kinds = [each.value for each in handler.type.elements]
        return all(each is not None and self.module.qualified(each) in FOR_ALL for each in kinds)

    def report_conditional(self) -> None:
        """A backward pass is an exchange with all ranks, and a step is to be taken by all of them."""
        for call in [*self.training.backwards, *self.training.steps]:
            below: cst.CSTNode = call
            for above in self.module.ancestors(call):
                if isinstance(above, cst.FunctionDef):
                    break
                if (isinstance(above, cst.If) and below is not above.test) and (
                    self._differs(above.test) or self._reads_clock(above.test)
                ):
                    what = f"`{self.module.code(call)}` under `if {self.module.code(above.test)}`"
                    why = "the condition may differ between ranks: those that come here wait for the others, or part from them"
                    if call in self.training.backwards:
                        todo = "let all ranks call it, with the loss times zero where it is not to count"
                    else:
                        todo = "let all ranks decide alike, for instance on an all-reduced value"
                    self.leave(call, what, why, todo)
                    break
                below = above

    def _is_measured(self, test: cst.BaseExpression) -> bool:
        """Whether `test` looks at a variable that a call made: a loss or accuracy that was measured, not a counter."""
        for node in self.module.descendants(test):
            place = self.module.place(node) if isinstance(node, cst.Name) else None
            for each in self.module.definitions.get(place, []) if place is not None else []:
                call = each.value if isinstance(each.value, cst.Call) else None
                if call is not None and isinstance(self.module.callee(call), cst.FunctionDef):
                    return True
            for augmented in self.module.nodes:
                if (isinstance(augmented, cst.AugAssign) and place is not None) and (
                    self.module.place(augmented.target) == place and not self._counts_alike(augmented)
                ):
                    return True
        return False

    def _counts_alike(self, node: cst.AugAssign) -> bool:
        """Whether a counter is counted outside of every condition, so the same everywhere."""
        for above in self.module.ancestors(node):
            if isinstance(above, cst.If):
                return False
            if isinstance(above, cst.For | cst.While | cst.FunctionDef):
                break
        return True

    def scale_sums(self) -> None:
        """The wrapper averages gradients over ranks: a loss that is a sum over samples must be scaled back."""
        for call in self.training.backwards:
            if not isinstance(call.func, cst.Attribute):
                continue
            loss = call.func.value
            kind = self.reduction(loss)
            if not self.shares(call):
                continue  # the mean over ranks of equal gradients is what one device has, of a sum as of a mean
            if kind == "sum":
                self.edits.wrap(loss, f"(_ * {self.name('WORLD_SIZE')})")
                what = "the loss is a sum over samples: scaled, because gradients are averaged over ranks"
                self.tell(call, "loss", what)
            elif kind is None:
                why = "whether it is a mean or a sum over the batch cannot be seen here; a mean is taken for granted"
                todo = "nothing for a mean; for a sum, multiply it by WORLD_SIZE before backward()"
                self.leave(call, f"the loss `{self.module.code(loss)}`", why, todo)

    def accumulate(self) -> None:
        """Between optimizer steps gradients add up on each rank, and are exchanged once."""
        for call in self.training.backwards:
            for above in self.module.ancestors(call):
                if isinstance(above, cst.FunctionDef | cst.Module):
                    break
                if isinstance(above, cst.For):
                    self._accumulate_in(above, call)
                    break

    def _accumulate_in(self, loop: cst.For, backward: cst.Call) -> None:
        body = list(loop.body.body)
        start = next(
            (
                index
                for index, statement in enumerate(body)
                if any(
                    isinstance(each, cst.Call) and self._is_forward(each) for each in self.module.descendants(statement)
                )
            ),
            None,
        )
        end = next((index for index, each in enumerate(body) if self.module.within(backward, each)), None)
        if start is None or end is None or start > end:
            return
        last: str | None = None
        steps = [each for each in self.training.steps if self.module.within(each, loop)]
        if steps:
            condition = next(
                (each for each in body if isinstance(each, cst.If) and self.module.within(steps[0], each)), None
            )
            if condition is None or any(not self.module.within(each, condition) for each in steps):
                return
            counted = {node.value for node in self.module.descendants(loop.target) if isinstance(node, cst.Name)}
            if not counts_rounds(condition.test, counted):
                return
            if any("grad" in self.module.code(each) for each in body[end + 1 : body.index(condition)]):
                return
            between = body[start : body.index(condition)]
            if body.index(condition) <= end or self._assigns(between, condition.test):
                why = "its condition is known only after the backward pass, so gradients are exchanged every time"
                todo = "nothing, it is right but slower; compute the condition before the forward pass to change it"
                self.leave(condition, "gradients accumulate over several backward passes", why, todo)
                return
            if self._differs(condition.test) or self._reads_clock(condition.test):
                return  # see report_conditional
            last = self.module.code(condition.test)
        else:
            last = self._last_of_range(loop)
        models = [place for place in self.wrapping.places if self._forward_place(body[start : end + 1], place)]
        if last is None or len(models) != 1:
            return
        forward = self._forward_text(body[start : end + 1], models[0])
        if forward is None:
            return
        self.imports.add("import contextlib")
        header = f"with contextlib.nullcontext() if {last} else {forward}.no_sync():"
        first = body[start]
        self.edits.changes[loop.body].append(Grouping(header))
        self.edits.before[first].append(MARK_START)
        self.edits.after[body[end]].append(MARK_END)
        self.tell(first, "accumulation", "gradients are exchanged only in the backward pass before a step")

    def _assigns(self, body: list[Any], test: cst.BaseExpression) -> bool:
        names = {node.value for node in self.module.descendants(test) if isinstance(node, cst.Name)}
        for statement in body:
            for node in self.module.descendants(statement):
                targets: list[cst.BaseExpression] = []
                if isinstance(node, cst.Assign):
                    targets = [each.target for each in node.targets]
                elif isinstance(node, cst.AugAssign | cst.AnnAssign | cst.NamedExpr):
                    targets = [node.target]
                for target in targets:
                    if names & {each.value for each in self.module.descendants(target) if isinstance(each, cst.Name)}:
                        return True
        return False

    def _last_of_range(self, loop: cst.For) -> str | None:
        """What holds in the last round of ``for i in range(n)`` that only accumulates, the step coming after it."""
        if not isinstance(loop.iter, cst.Call) or self.module.call_name(loop.iter) != "builtins.range":
            return None
        if len(loop.iter.args) != 1 or not isinstance(loop.target, cst.Name) or loop.target.value == "_":
            return None
        block = self.module.parent(loop)
        after = list(getattr(block, "body", []))
        after = after[after.index(loop) + 1 :] if loop in after else []
        if not any(self.module.within(step, each) for step in self.training.steps for each in after):
            return None
        return f"{loop.target.value} == {self.module.code(loop.iter.args[0].value)} - 1"

    def _forward_place(self, body: list[Any], place: Place) -> bool:
        return self._forward_text(body, place) is not None

    def _forward_text(self, body: list[Any], place: Place) -> str | None:
        reach = places_reached(self.module, [place])
        for statement in body:
            for node in self.module.descendants(statement):
                if (isinstance(node, cst.Call) and isinstance(node.func, cst.Name | cst.Attribute)) and (
                    self.module.place(node.func) in reach
                ):
                    return self.module.code(node.func)
        return None


class Grouping:
    """Moves the statements between two marks into one ``with``."""

    def __init__(self, header: str) -> None:
        self.header = header

    def __call__(self, block: cst.IndentedBlock) -> cst.IndentedBlock:
        body: list[Any] = list(block.body)
        texts = [cst.Module([each]).code.strip() for each in body]
        start, end = texts.index(MARK_START.strip()), texts.index(MARK_END.strip())
        inner = body[start + 1 : end]
        outer: Any = cst.parse_statement(f"{self.header}\n    pass\n")
        leading = [*body[start].leading_lines, *inner[0].leading_lines]
        inner[0] = inner[0].with_changes(leading_lines=[])
        outer = outer.with_changes(body=cst.IndentedBlock(inner), leading_lines=leading)
        return block.with_changes(body=[*body[:start], outer, *body[end + 1 :]])


def raises(handler: cst.ExceptHandler | cst.ExceptStarHandler) -> bool:
    """Whether the last statement of `handler` raises."""
    last = handler.body.body[-1] if handler.body.body else None
    small = last.body[-1] if isinstance(last, cst.SimpleStatementLine) else last
    return isinstance(small, cst.Raise)


# Exceptions that all ranks have, or that end a rank.
FOR_ALL = frozenset(["builtins.StopIteration", "builtins.KeyboardInterrupt", "builtins.SystemExit"])


MARK_START = "__penstock_group_starts__\n"


MARK_END = "__penstock_group_ends__\n"


def counts_rounds(test: cst.BaseExpression, names: set[str]) -> bool:
    """Whether `test` is true every so many rounds of a loop with the variables `names`: ``(i + 1) % n == 0``."""
    for node in [test, *all_below(test)]:
        if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Modulo):
            if any(isinstance(each, cst.Name) and each.value in names for each in all_below(node.left)):
                return True
            if isinstance(node.left, cst.Name) and node.left.value in names:
                return True
    return False
