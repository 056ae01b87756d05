"""Which values become part of a loss, and whose parameters an optimizer gets: what covering every parameter rests on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst

from penstock.tools.convert.flow import Definition, Module, Place, constant, words


@dataclass
class Flow:
    """What a loss may be made of, by assignments, arguments and returned values; the order of statements is ignored."""

    calls: set[cst.Call] = field(default_factory=set)
    places: set[Place] = field(default_factory=set)


class Flows:
    """Walks from losses back to what they are made of."""

    def __init__(self, module: Module) -> None:
        self.module = module
        # What is added to a place after it was made: `total += loss`, `losses.append(loss)`, `losses[i] = loss`.
        self.added: dict[Place, list[cst.BaseExpression]] = defaultdict(list)
        for node in module.nodes:
            if isinstance(node, cst.AugAssign):
                self._add(node.target, node.value)
            elif isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and not module.call_name(node):
                if node.func.attr.value in ("append", "extend", "insert", "add", "appendleft"):
                    for argument in node.args:
                        self._add(node.func.value, argument.value)
            elif isinstance(node, cst.Assign):
                for target in node.targets:
                    if isinstance(target.target, cst.Subscript):
                        self._add(target.target.value, node.value)

    def _add(self, target: cst.BaseExpression, value: cst.BaseExpression) -> None:
        place = self.module.place(target)
        if place is not None:
            self.added[place].append(value)

    def _reaching(self, use: cst.CSTNode, place: Place) -> list[Definition]:
        """The definitions of `place` that `use` may see: not those that a later one, which every way to `use` passes, hides."""
        every = self.module.definitions.get(place, [])
        blocks = [each for each in self.module.ancestors(use) if isinstance(each, cst.IndentedBlock | cst.Module)]
        if len(every) < 2:
            return every
        line = self.module.line(use)
        before = [each for each in every if self.module.line(each.node) < line]
        passed = [
            each
            for each in before
            if isinstance(each.node, cst.Assign | cst.AnnAssign)
            and self.module.parent(self.module.statement_of(each.node)) in blocks
        ]
        if not passed:
            return every
        last = max(self.module.line(each.node) for each in passed)
        return [each for each in before if self.module.line(each.node) >= last]

    def into(self, start: cst.BaseExpression) -> Flow:
        """Everything that may become part of the value of `start`."""
        found, seen = Flow(), set[cst.CSTNode]()
        todo: list[cst.CSTNode] = [start]
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            for each in attached(node):
                if isinstance(each, cst.Call):
                    found.calls.add(each)
                    made = self.module.callee(each)
                    if isinstance(made, cst.FunctionDef):
                        todo += self.module.returns.get(made, [])
                place = self.module.place(each) if isinstance(each, cst.Name | cst.Attribute | cst.Subscript) else None
                if place is not None:
                    found.places.add(place)
                    todo += [definition.value for definition in self._reaching(each, place)]
                    todo += self.added.get(place, [])
        return found


def attached(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """`node` and all below it, but for what passes no gradient on: ``x.detach()``, ``x.item()``, ``x.data``."""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value in DETACHING:
        return
    if isinstance(node, cst.Attribute) and node.attr.value == "data":
        return
    yield node
    for child in node.children:
        yield from attached(child)


def parameter_owners(module: Module, optimizer: cst.Call) -> list[cst.BaseExpression] | None:
    """The modules whose ``.parameters()`` are all that `optimizer` gets; None where it may get anything else."""
    given = next((each.value for each in optimizer.args if each.keyword and each.keyword.value == "params"), None)
    if given is None:
        if not optimizer.args or optimizer.args[0].star or optimizer.args[0].keyword is not None:
            return None
        given = optimizer.args[0].value
    return _owners(module, given, frozenset())


def _owners(module: Module, node: cst.BaseExpression, seen: frozenset[cst.CSTNode]) -> list[cst.BaseExpression] | None:
    if node in seen:
        return None
    seen = seen | {node}
    parts: list[cst.BaseExpression] = []
    if isinstance(node, cst.Call):
        if isinstance(node.func, cst.Attribute) and node.func.attr.value in ("parameters", "named_parameters"):
            return [node.func.value]
        name = module.call_name(node)
        if name == "builtins.filter" and len(node.args) == 2:
            parts = [node.args[1].value]
        elif name in ("builtins.list", "builtins.tuple", "builtins.iter", "itertools.chain"):
            parts = [each.value for each in node.args]
        else:
            return None
    elif isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Add):
        parts = [node.left, node.right]
    elif isinstance(node, cst.List | cst.Tuple):
        parts = [each.value for each in node.elements]
    elif isinstance(node, cst.Dict):
        entries = [each for each in node.elements if isinstance(each, cst.DictElement)]
        parts = [each.value for each in entries if constant(each.key) == "params"]
    elif isinstance(node, cst.ListComp | cst.GeneratorExp) and node.for_in.inner_for_in is None:
        parts = [node.for_in.iter]
    elif isinstance(node, cst.Name | cst.Attribute):
        place = module.place(node)
        definitions = module.definitions.get(place, []) if place is not None else []
        if any(each.path for each in definitions) or _is_changed(module, place):
            return None
        parts = [each.value for each in definitions]
    if not parts:
        return None
    found: list[cst.BaseExpression] = []
    for part in parts:
        inner = _owners(module, part, seen)
        if inner is None:
            return None
        found += inner
    return found


def _is_changed(module: Module, place: Place | None) -> bool:
    """Whether what is in `place` is a list that something is put into after it was made."""
    for node in module.nodes:
        if isinstance(node, cst.AugAssign) and module.place(node.target) == place:
            return True
        if (
            isinstance(node, cst.Call)
            and isinstance(node.func, cst.Attribute)
            and module.place(node.func.value) == place
        ):
            return True
    return False


def loss_of(module: Module, backward: cst.Call) -> cst.BaseExpression:
    """What ``loss.backward()``, or ``torch.autograd.backward(loss)``, starts from."""
    if module.call_name(backward) == "torch.autograd.backward" and backward.args:
        return backward.args[0].value
    return backward.func.value if isinstance(backward.func, cst.Attribute) else backward


def stepped(module: Module, step: cst.Call) -> cst.BaseExpression:
    """The optimizer of ``optimizer.step()`` or ``scaler.step(optimizer)``."""
    assert isinstance(step.func, cst.Attribute)
    names = [module.call_name(origin) for origin in module.origins(step.func.value)]
    if step.args and any(name.endswith("GradScaler") for name in names):
        return step.args[0].value
    return step.func.value


def exclusive(module: Module, one: cst.CSTNode, other: cst.CSTNode) -> bool:
    """Whether `one` and `other` stand in different branches of an ``if``, so that a pass takes one of them at most."""
    for above in module.ancestors(one):
        if isinstance(above, cst.If) and above.orelse is not None and module.within(other, above):
            return module.within(one, above.body) != module.within(other, above.body)
    return False


# Methods whose results pass no gradient on to what they are called on.
DETACHING = words("detach item numpy tolist argmax backward size dim")
