"""Rules for numbers that a script takes from its batches: they become those of all ranks."""

from __future__ import annotations

from typing import Literal

import libcst as cst

from penstock.tools.convert.base import RANDOM, is_named
from penstock.tools.convert.flow import Module, constant, words
from penstock.tools.convert.models import ModelRules
from penstock.tools.convert.training import is_loader, strip_iterable


class MetricRules(ModelRules):
    """Losses, counts and sizes; and whether all ranks come by, for an average needs them all."""

    def average_metrics(self) -> None:
        """Numbers that are taken from a rank's batches become those of the global batch."""
        for call in self.module.calls:
            tensor = self._taken_number(call)
            if tensor is None or not self._in_region(call):
                continue
            kind = self.reduction(tensor)
            if kind is None and self._is_loss(tensor):
                kind = "mean"
            if kind is None:
                continue
            if not self._runs_alike(call):
                why = "whether this line runs depends on a rank's own data, and ranks must take an average together"
                todo = "take it out of the condition, then average it over ranks"
                self.figures.own.add(call)
                self.leave(call, f"`{self.module.code(call)}` is the figure of one rank", why, todo)
                continue
            kind = kind if self._counts_parts(call) else "mean"
            helper = self.name(f"{kind}_over_ranks")
            self.figures.averaged.add(call)
            text = self.module.code(tensor)

            def change(node: cst.Call, helper: str = helper) -> cst.Call:
                value = node.func.value if isinstance(node.func, cst.Attribute) else node.args[0].value
                return cst.Call(cst.Name(helper), [cst.Arg(value.with_changes(lpar=[], rpar=[]))])

            self.edits.change(call, change)
            self.tell(call, "metric", f"`{text}` is {'averaged' if kind == 'mean' else 'summed'} over ranks")
        self._count_samples()

    def _counts_parts(self, node: cst.CSTNode) -> bool:
        """Whether figures of ranks at `node` are about different samples, so that a sum of them is that of one device."""
        function = self.module.function_of(node)
        loops = [loop for chain in self.training.chains if self.is_shared(chain) for loop in chain]
        homes = [self.module.function_of(loop) for loop in loops]
        return self.shares(node) or self.module.within(node, *loops) or (function is not None and function in homes)

    def _taken_number(self, call: cst.Call) -> cst.BaseExpression | None:
        """What ``x.item()`` or ``float(loss)`` reads."""
        if isinstance(call.func, cst.Attribute) and call.func.attr.value == "item" and not call.args:
            return call.func.value
        if (
            self.module.call_name(call) == "builtins.float"
            and len(call.args) == 1
            and self._is_loss(call.args[0].value)
        ):
            return call.args[0].value
        return None

    def _is_loss(self, node: cst.BaseExpression) -> bool:
        """Whether `node` is what a backward pass starts from."""
        place = self.module.place(bare(node))
        if place is None:
            return False
        for call in self.training.backwards:
            for each in self.module.descendants(call):
                if isinstance(each, cst.Name | cst.Attribute) and self.module.place(each) == place:
                    return True
        return False

    def _in_region(self, node: cst.CSTNode) -> bool:
        """Whether `node` is in code that handles training batches, outside of evaluation and of what rank 0 does."""
        if any(self.module.within(node, each) for each in self.rank_zero):
            return False
        function = self.module.function_of(node)
        direct = {self.module.function_of(call) for call in self.training.backwards}
        direct |= {self.module.function_of(loop.node) for loop in self.training.batch_loops}
        loops = [loop for chain in self.training.chains for loop in chain]
        if not (function is not None and function in direct) and not self.module.within(node, *loops):
            return False
        if function is not None and function not in direct:
            return False
        for above in self.module.ancestors(node):
            if isinstance(above, cst.For) and self._evaluates(above):
                return False
            if isinstance(above, cst.With) and self._is_no_grad(above):
                inner = list(self.module.descendants(above))
                if any(isinstance(each, cst.For) for each in inner):
                    return False
                if any(isinstance(each, cst.Call) and self._is_forward(each) for each in inner):
                    return False
        return True

    def _evaluates(self, loop: cst.For) -> bool:
        loaders = [
            origin
            for each in strip_iterable(self.module, loop.iter)
            for origin in self.module.origins(each)
            if isinstance(origin, cst.Call) and is_loader(self.module, origin)
        ]
        return bool(loaders) and all(each in self.training.other_loaders for each in loaders)

    def reduction(self, node: cst.BaseExpression, depth: int = 0) -> Literal["mean", "sum"] | None:
        """Whether `node` is a mean or a sum over the samples of a batch; None where the text does not tell."""
        kind = self._reduction(node, depth)
        if kind == "mean":
            return "mean"
        return "sum" if kind == "sum" else None

    def _reduction(self, node: cst.BaseExpression, depth: int) -> str | None:
        """As `reduction`, or "number" for what does not depend on the batch."""
        if depth > 12:  # a guess: longer chains of variables than scripts have, and an end to those that go in circles
            return None
        if isinstance(node, cst.Integer | cst.Float):
            return "number"
        if isinstance(node, cst.UnaryOperation):
            return self._reduction(node.expression, depth + 1)
        if isinstance(node, cst.BinaryOperation):
            return self._reduction_of_operation(node, depth)
        if isinstance(node, cst.Call):
            return self._reduction_of_call(node, depth)
        place = self.module.place(node)
        if place is not None:
            kinds = set()
            for each in self.module.definitions.get(place, []):
                kinds.add(None if each.path else self._reduction(each.value, depth + 1))
            for augmented in self.module.nodes:
                if (isinstance(augmented, cst.AugAssign) and self.module.place(augmented.target) == place) and (
                    isinstance(augmented.operator, cst.AddAssign | cst.SubtractAssign)
                ):
                    kinds.add(self._reduction(augmented.value, depth + 1))
            return agree(kinds)
        return None

    def _reduction_of_operation(self, node: cst.BinaryOperation, depth: int) -> str | None:
        left, right = self._reduction(node.left, depth + 1), self._reduction(node.right, depth + 1)
        if isinstance(node.operator, cst.Add | cst.Subtract):
            return agree({left, right})
        if isinstance(node.operator, cst.Multiply):
            known = [each for each in (left, right) if each in ("mean", "sum")]
            return known[0] if len(known) == 1 else left if left == right else None
        if isinstance(node.operator, cst.Divide):
            if left == "sum" and is_size(self.module, node.right):
                return "mean"
            return left
        return None

    def _reduction_of_call(self, call: cst.Call, depth: int) -> str | None:
        name = self.module.call_name(call)
        last = name.rsplit(".", 1)[-1]
        if name in ("torch.mean", "torch.sum") and len(call.args) == 1:
            return last
        if name.startswith("torch.nn.functional.") and (last in LOSSES or last.endswith("_loss")):
            return said_reduction(call)
        made = self.module.callee(call)
        if isinstance(made, cst.FunctionDef):
            return agree({self._reduction(value, depth + 1) for value in self.module.returns.get(made, [])})
        if isinstance(call.func, cst.Attribute) and not name:
            method = call.func.attr.value
            if method in ("mean", "sum") and not call.args:
                return method
            if method in VALUE_KEEPING:
                return self._reduction(call.func.value, depth + 1)
            if method == "scale" and call.args:
                return self._reduction(call.args[0].value, depth + 1)
        if isinstance(call.func, cst.Name | cst.Attribute):
            makers = self.module.origins(call.func)
            calls = [each for each in makers if isinstance(each, cst.Call)]
            if calls and all(self.module.call_name(each).endswith("Loss") for each in makers):
                return agree({said_reduction(each) for each in calls})
        return None

    def _count_samples(self) -> None:
        """Where sizes of batches are summed up or shown, the size is that of the global batch."""
        for node in self.module.nodes:
            if not isinstance(node, cst.BaseExpression) or not self._is_batch_size(node):
                continue
            if self._in_region(node) and self._is_shown(node) and self._counts_parts(node):
                above = self.module.parent(node)
                call = self.module.parent(above) if isinstance(above, cst.Arg) else None
                if isinstance(call, cst.Call) and self._own_figure(call) is not None:
                    continue  # a weight of the figure of one rank: see _report_own_figures
                template = f"_ * {self.name('WORLD_SIZE')}"
                loose = isinstance(above, cst.Arg | cst.AugAssign | cst.Assign)
                product = isinstance(above, cst.BinaryOperation) and isinstance(above.operator, cst.Multiply)
                if product and isinstance(above, cst.BinaryOperation) and above.right is node:
                    self.edits.wrap(node, f"{template}")
                else:
                    self.edits.wrap(node, template if loose or product else f"({template})")
                self.tell(node, "metric", f"`{self.module.code(node)}` counts the samples of all ranks")

    def report_own_figures(self) -> None:
        """What is shown or summed up, comes from a rank's part of a batch, and is not averaged, is the figure of one rank."""
        losses = {place for flow in self.wrapping.flows.values() for place in flow.places}
        for node in self.module.nodes:
            own: cst.BaseExpression | None = None
            if isinstance(node, cst.Call) and self._shows(node):
                own = self._own_figure(node)
            elif isinstance(node, cst.AugAssign) and self.module.place(node.target) not in losses:
                own = node.value if self._differs(node.value) else None
            if own is None or not self._in_region(node) or not self._counts_parts(node):
                continue
            if any(isinstance(each, cst.ExceptHandler) for each in self.module.ancestors(node)):
                continue
            if any(isinstance(each, cst.Call) and each in self.figures.own for each in self.module.descendants(own)):
                continue
            why = "it comes from this rank's part of the batch, and what it is of that cannot be seen"
            todo = "average it over ranks, mean_over_ranks(...) for a mean, or take it as a sample"
            self.leave(node, f"`{self.module.code(own)}` is the figure of one rank", why, todo)

    def _own_figure(self, call: cst.Call) -> cst.BaseExpression | None:
        """The first argument of `call` that may have another value on another rank."""
        return next((each.value for each in call.args if self._differs(each.value)), None)

    def _shows(self, call: cst.Call) -> bool:
        name = self.module.call_name(call)
        method = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
        return (
            name in ("builtins.print", "sys.stdout.write")
            or name.startswith(("logging.", "wandb."))
            or method in SHOWING
        )

    def _is_batch_size(self, node: cst.BaseExpression) -> bool:
        """``len(x)``, ``x.size(0)`` or ``x.shape[0]`` of a batch, or a variable that is nothing else."""
        if isinstance(node, cst.Name):
            above = self.module.parent(node)
            place = self.module.place(node)
            if not isinstance(above, cst.AugAssign) or above.value is not node or place is None:
                return False
            definitions = self.module.definitions.get(place, [])
            return len(definitions) == 1 and not definitions[0].path and self._is_batch_size(definitions[0].value)
        sized = measured(self.module, node)
        return sized is not None and self._from_batch(sized)

    def _from_batch(self, node: cst.BaseExpression, depth: int = 0) -> bool:
        """Whether `node` comes from what a batch loop yields."""
        if depth > 6:  # a guess, as in `_reduction`
            return False
        plain = bare(node)
        if isinstance(plain, cst.Subscript):
            return self._from_batch(plain.value, depth + 1)
        place = self.module.place(plain)
        loops = [loop.node for loop in self.training.batch_loops]
        for each in self.module.definitions.get(place, []) if place is not None else []:
            if each.node in loops:
                counted = isinstance(each.value, cst.Call) and self.module.call_name(each.value) == "builtins.enumerate"
                if not (counted and each.path[1:2] == (0,)):
                    return True
            elif (isinstance(each.value, cst.Call | cst.Name | cst.Subscript | cst.Attribute)) and (
                self._from_batch(each.value, depth + 1)
            ):
                return True
        return False

    def _is_shown(self, node: cst.CSTNode) -> bool:
        """Whether `node` is part of a sum over batches, or of what is printed or logged."""
        for above in self.module.ancestors(node):
            if isinstance(above, cst.AugAssign):
                return isinstance(above.operator, cst.AddAssign) and not self.module.within(node, above.target)
            if isinstance(above, cst.Call):
                if self._shows(above):
                    return True
                if isinstance(above.func, cst.Attribute) and above.func.attr.value == "format":
                    continue
                return False
            if isinstance(above, cst.BaseStatement | cst.BaseSmallStatement):
                return False
        return False

    def _runs_alike(self, node: cst.CSTNode) -> bool:
        """Whether every rank reaches `node` equally often: no condition on the way looks at a rank's own data or clock, but for a
        clock that ends a training loop, at which rank 0 looks for all (`agree_on_ends`)."""
        below = node
        loops = [loop for chain in self.training.chains for loop in chain]
        for above in self.module.ancestors(node):
            if (isinstance(above, cst.If | cst.While | cst.IfExp) and below is not above.test) and (
                self._differs(above.test) or (above not in loops and self._reads_clock(above.test))
            ):
                return False
            if isinstance(above, cst.ExceptHandler | cst.Lambda | cst.FunctionDef):
                return not isinstance(above, cst.ExceptHandler | cst.Lambda)
            below = above
        return True

    def _differs(self, node: cst.CSTNode, seen: frozenset[cst.CSTNode] = frozenset()) -> bool:
        """Whether `node` may have another value on another rank."""
        if node in seen:
            return False
        seen = seen | {node}
        if node in self.figures.averaged:
            return False
        if isinstance(node, cst.Call):
            tensor = self._taken_number(node)
            if tensor is not None and (self.reduction(tensor) or self._is_loss(tensor)) and self._in_region(node):
                return False
            if self.module.call_name(node) == "builtins.len" or measured(self.module, node) is not None:
                return False
            if self._is_forward(node) or self.module.call_name(node).startswith(RANDOM):
                return True
        if isinstance(node, cst.Attribute) and node.attr.value in ("shape", "device", "dtype", "training"):
            return False
        if isinstance(node, cst.Name | cst.Attribute) and self.module.place(node) is not None:
            place = self.module.place(node)
            assert place is not None
            loops = [loop.node for loop in self.training.batch_loops]
            for each in self.module.definitions.get(place, []):
                if each.node in loops:
                    if self._from_batch(node):
                        return True
                elif self._differs(each.value, seen):
                    return True
            return False
        return any(self._differs(child, seen) for child in node.children)

    def _reads_clock(self, node: cst.CSTNode, seen: set[cst.CSTNode] | None = None) -> bool:
        """Whether `node` depends on what time it is, which ranks never ask at the same moment."""
        seen = set() if seen is None else seen
        if node in seen:
            return False
        seen.add(node)
        values: list[cst.CSTNode] = []
        if isinstance(node, cst.Call):
            if self.module.call_name(node) in CLOCKS:
                return True
            made = self.module.callee(node)
            values += self.module.returns.get(made, []) if isinstance(made, cst.FunctionDef) else []
        place = self.module.place(node) if isinstance(node, cst.Name | cst.Attribute) else None
        if place is not None:
            values += [each.value for each in self.module.definitions.get(place, [])]
            values += [
                each.value
                for each in self.module.nodes
                if isinstance(each, cst.AugAssign) and self.module.place(each.target) == place
            ]
        else:
            values += node.children
        return any(self._reads_clock(each, seen) for each in values)


def agree(kinds: set[str | None]) -> str | None:
    kinds = kinds - {"number"} if kinds != {"number"} else kinds
    return kinds.pop() if len(kinds) == 1 else None


def said_reduction(call: cst.Call) -> str | None:
    for argument in call.args:
        if is_named(argument, "reduction"):
            said = constant(argument.value)
            return str(said) if said in ("mean", "sum") else None
        if is_named(argument, "size_average"):
            return "sum" if constant(argument.value) is False else "mean"
    return "mean"


def bare(node: cst.BaseExpression) -> cst.BaseExpression:
    """`node` without methods and attributes that keep its value: ``loss.detach().data`` is ``loss``."""
    while True:
        if (
            isinstance(node, cst.Call)
            and isinstance(node.func, cst.Attribute)
            and node.func.attr.value in VALUE_KEEPING
        ):
            node = node.func.value
        elif isinstance(node, cst.Attribute) and node.attr.value == "data":
            node = node.value
        else:
            return node


def measured(module: Module, node: cst.CSTNode) -> cst.BaseExpression | None:
    """What ``len(x)``, ``x.size(0)`` or ``x.shape[0]`` measures."""
    if isinstance(node, cst.Call) and module.call_name(node) == "builtins.len" and len(node.args) == 1:
        return node.args[0].value
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value == "size":
        return node.func.value if len(node.args) == 1 and constant(node.args[0].value) == 0 else None
    if isinstance(node, cst.Subscript) and isinstance(node.value, cst.Attribute) and node.value.attr.value == "shape":
        index = node.slice[0].slice
        return node.value.value if isinstance(index, cst.Index) and constant(index.value) == 0 else None
    return None


def is_size(module: Module, node: cst.BaseExpression) -> bool:
    if measured(module, node) is not None:
        return True
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        return node.func.attr.value in ("numel", "nelement", "size")
    return "batch_size" in module.code(node)


# Methods of tensors that keep what a number means.
VALUE_KEEPING = words("item detach cpu float double half clone squeeze to cuda contiguous data numpy tolist abs")


# What tells the time.
CLOCKS = frozenset(
    [
        "time.time", "time.monotonic", "time.perf_counter", "time.process_time", "time.time_ns", "time.monotonic_ns",
        "time.perf_counter_ns", "timeit.default_timer", "datetime.datetime.now", "datetime.datetime.utcnow",
        "datetime.datetime.today",
    ]
)  # fmt: skip


# Loss functions of torch.nn.functional whose names do not end in "_loss".
LOSSES = frozenset(["cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"])


# Methods that show or log what they get.
SHOWING = words(
    "info debug warning log add_scalar add_scalars set_postfix set_description set_postfix_str write update"
)
