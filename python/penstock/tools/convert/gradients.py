"""Where a script reads gradients itself: an update that is written by hand must see those of all ranks.

A read counts unless it is seen to change no parameter: a comparison, a norm, a figure that is shown, an assignment to the same
gradient. What the gradient belongs to is followed back as values are in `flow`.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import libcst as cst

from penstock.tools.convert.flow import (
    PASSES_FIRST_ARGUMENT,
    RETURNS_ITSELF,
    Definition,
    Module,
    Origin,
    Place,
    constant,
    dotted,
    words,
)
from penstock.tools.convert.neighbours import Neighbours


@dataclass
class Read:
    """A gradient is read at `node`, and may be that of what `text` names."""

    node: cst.CSTNode
    text: str
    models: list[Origin] = field(default_factory=list)  # what makes the modules that it may be a parameter of
    others: list[cst.CSTNode] = field(
        default_factory=list
    )  # what makes it otherwise, but for what is made for each batch
    certain: bool = True  # whether all that it may be was followed back


def parameters_of(node: cst.CSTNode) -> cst.BaseExpression | None:
    """The module of ``module.parameters()`` or ``module.named_parameters()``; None for all else."""
    func = node.func if isinstance(node, cst.Call) else None
    asks = isinstance(func, cst.Attribute) and func.attr.value in ("parameters", "named_parameters")
    return func.value if isinstance(func, cst.Attribute) and asks else None


def subclasses_optimizer(module: Module, owner: cst.ClassDef) -> bool:
    """Whether `owner` is a real optimizer, with groups of parameters and hooks: what serves those serves it."""
    return any(
        name.rsplit(".", 1)[-1] == "Optimizer" or name.startswith("torch.optim.") for name in module.bases(owner)
    )


def find_reads(root: cst.CSTNode) -> list[tuple[cst.CSTNode, cst.BaseExpression]]:
    """The reads below `root` that may go into an update, each with what the gradient is asked of."""
    above = {child: node for node in _walk(root) for child in node.children}
    found: list[tuple[cst.CSTNode, cst.BaseExpression]] = []
    for node in _walk(root):
        tensor: cst.BaseExpression | None = None
        if isinstance(node, cst.Attribute) and node.attr.value in ("grad", "_grad"):
            called = isinstance(above.get(node), cst.Call)  # `torch.autograd.grad(...)`
            if not called and dotted(node.value) not in ("torch.autograd", "autograd", "torch", "jax"):
                tensor = node.value
        elif isinstance(node, cst.Call) and dotted(node.func) == "getattr" and "grad" in _constants(node):
            tensor = node.args[0].value
        if tensor is not None and not _is_harmless(node, tensor, above):
            found.append((node, tensor))
    return found


def _walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    yield node
    for child in node.children:
        yield from _walk(child)


def _constants(call: cst.Call) -> list[object]:
    return [constant(each.value) for each in call.args[1:]]


def _is_harmless(read: cst.CSTNode, tensor: cst.BaseExpression, above: dict[cst.CSTNode, cst.CSTNode]) -> bool:
    """Whether what becomes of `read` is seen to change no parameter."""
    handed = False  # as an argument, or to an operator: before that, what is done is done to the gradient itself
    node = read
    while node in above:
        below, node = node, above[node]
        if isinstance(node, cst.Comparison | cst.FormattedStringExpression | cst.Assert | cst.AssignTarget | cst.Del):
            return True
        if isinstance(node, cst.Attribute):
            if node.attr.value in FIGURES:
                return True
        elif isinstance(node, cst.Call):
            if below is not node.func and dotted(node.func).rsplit(".", 1)[-1] in HARMLESS_FUNCTIONS:
                return True
        elif isinstance(node, cst.If | cst.While):
            return True
        elif isinstance(node, cst.Expr):
            return not handed
        elif isinstance(node, cst.AugAssign):
            return below is node.target or _is_gradient_of(node.target, tensor)
        elif isinstance(node, cst.Assign):
            return all(_is_gradient_of(each.target, tensor) for each in node.targets)
        elif isinstance(node, cst.BaseSmallStatement | cst.BaseCompoundStatement):
            return False
        elif not isinstance(node, cst.Subscript):
            handed = True
    return False


def _is_gradient_of(target: cst.BaseExpression, tensor: cst.BaseExpression) -> bool:
    while isinstance(target, cst.Subscript) or (isinstance(target, cst.Attribute) and target.attr.value == "data"):
        target = target.value
    if not isinstance(target, cst.Attribute) or target.attr.value not in ("grad", "_grad"):
        return False
    return target.value.deep_equals(tensor)


class Reads:
    """Follows the gradients that a script reads back to what they belong to."""

    def __init__(
        self,
        module: Module,
        neighbours: Neighbours,
        optimizers: list[cst.Call],
        ways: Callable[[cst.CSTNode], Sequence[Sequence[cst.CSTNode]]],
        inner: Sequence[cst.CSTNode],
        outer: Sequence[cst.CSTNode],
    ) -> None:
        """`ways` gives the loops around a node, once for each way to it; `inner` are those over batches, `outer` all that
        train."""
        self.module = module
        self.ways, self.inner, self.outer = ways, inner, outer
        self.neighbours = neighbours
        self.optimizers = optimizers
        self.extra: dict[Place, list[Definition]] = defaultdict(list)  # of comprehensions, and what a list gets later
        for node in module.nodes:
            if isinstance(node, cst.CompFor):
                self._bind(node.target, node.iter, ("element",), node)
            elif isinstance(node, cst.AugAssign) and isinstance(node.operator, cst.AddAssign):
                if isinstance(node.value, cst.List | cst.ListComp) or any(map(parameters_of, _walk(node.value))):
                    self._bind(node.target, node.value, (), node)
            elif isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
                grows = node.func.attr.value in ("append", "extend", "insert", "add")
                for argument in node.args if grows else ():
                    self._bind(node.func.value, argument.value, (), node)

    def _bind(
        self, target: cst.BaseExpression, value: cst.BaseExpression, path: tuple[int | str, ...], node: cst.CSTNode
    ) -> None:
        if isinstance(target, cst.Tuple | cst.List):
            for index, element in enumerate(target.elements):
                self._bind(element.value, value, (*path, index), node)
            return
        place = self.module.place(target)
        if place is not None:
            self.extra[place].append(Definition(value, path, node))

    def all(self) -> list[Read]:
        """The reads of the script, and its calls of what reads gradients in a file beside it."""
        found: list[Read] = []
        for node, tensor in find_reads(self.module.tree):
            owner = self.module.class_of(node)
            if (owner is None or not subclasses_optimizer(self.module, owner)) and self._is_in_training(node):
                found.append(self._sorted(self.follow(node, tensor)))
        for call in self.module.calls:
            if call not in self.optimizers and self.reads_beside(call):
                read = Read(call, f"what `{self.module.code(call.func)}` gets")
                for argument in call.args:
                    handed = self._sorted(self.follow(call, argument.value))
                    read.models += handed.models
                    read.others += [each for each in handed.others if _is_trainable(self.module, each)]
                found.append(read)
        return found

    def _sorted(self, read: Read) -> Read:
        """`read`, with the modules among what was found taken for such."""
        modules = [each for each in read.others if isinstance(each, cst.Call) and self._is_module(each)]
        read.models += modules
        read.others = [each for each in read.others if each not in modules]
        return read

    def _is_in_training(self, node: cst.CSTNode) -> bool:
        """Whether a loop that trains may come by `node`; it may if who calls its function is not seen."""
        function = self.module.function_of(node)
        if function is not None and not self.module.call_sites.get(function):
            return True
        return any(loop in self.outer for way in self.ways(node) for loop in way)

    def _is_made_for_a_batch(self, node: cst.CSTNode) -> bool:
        """Whether every batch has its own: its gradient is that of a rank's samples, and is to stay it."""
        return all(any(loop in self.inner for loop in way) for way in self.ways(node))

    def reads_beside(self, call: cst.Call) -> bool:
        """Whether `call` is one of a function or class of a file beside the script that updates by gradients."""
        start = self.neighbours.named(self.module, call.func)
        todo, seen = [start] if start is not None else [], set[ast.AST]()
        while todo:
            home, made = todo.pop()
            if made in seen or (isinstance(made, ast.ClassDef) and self.neighbours.is_optimizer(home, made)):
                continue
            seen.add(made)
            if find_reads(cst.parse_module(ast.unparse(made))):
                return True
            names = {each.id for each in ast.walk(made) if isinstance(each, ast.Name)}
            inner = [self.neighbours.find(home, name) for name in sorted(names)]
            todo += [each for each in inner if each is not None]
        return False

    def _is_module(self, origin: Origin) -> bool:
        made = self.module.callee(origin)
        if isinstance(made, cst.ClassDef):
            return "torch.nn.Module" in self.module.bases(made)
        name = self.module.call_name(origin)
        return name.startswith("torch.nn.") and name.rsplit(".", 1)[-1][:1].isupper() and not name.endswith("Parameter")

    def follow(self, read: cst.CSTNode, tensor: cst.BaseExpression) -> Read:
        """What `tensor`, whose gradient `read` reads, may be."""
        found = Read(read, f"`{self.module.code(tensor)}`")
        todo: list[cst.CSTNode] = [tensor]
        seen = set[cst.CSTNode]()
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += self._step(node, found)
        return found

    def _step(self, node: cst.CSTNode, found: Read) -> list[cst.CSTNode]:
        """What the value of `node` comes from, one step back."""
        module = self.module
        owner = parameters_of(node)
        if owner is not None:
            found.models += self._makers(owner, found)
            return []
        if isinstance(node, cst.Call):
            return self._step_call(node, found)
        if isinstance(node, cst.Attribute) and node.attr.value == "param_groups":
            made = [each for each in module.origins(node.value) if each in self.optimizers]
            found.certain = found.certain and bool(made)
            return [argument.value for each in made if isinstance(each, cst.Call) for argument in each.args]
        if isinstance(node, cst.Name | cst.Attribute | cst.Subscript):
            place = module.place(node)
            if place is not None and place[0] == "attribute":
                made = [call for call in module.calls if module.callee(call) is place[1]]
                if any(self._is_module(each) for each in made):
                    found.models += made
                    return []
            definitions = [*module.definitions.get(place, []), *self.extra.get(place, [])] if place is not None else []
            if definitions:
                return [part for each in definitions if each.node not in self.inner for part in self._parts(each)]
            if isinstance(node, cst.Attribute | cst.Subscript):
                return [node.value]
            if node.value not in ("None", "True", "False"):
                found.certain = False
            return []
        if isinstance(node, cst.BinaryOperation | cst.UnaryOperation):
            if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Add):
                return [node.left, node.right]  # of lists
            if not self._is_made_for_a_batch(node):
                found.others.append(node)
            return []
        if isinstance(node, cst.ListComp | cst.GeneratorExp | cst.SetComp):
            return [node.elt]
        if isinstance(node, cst.DictComp):
            return [node.value]
        return [
            each
            for each in node.children
            if isinstance(each, cst.BaseExpression | cst.BaseElement | cst.BaseDictElement)
        ]

    def _makers(self, owner: cst.BaseExpression, found: Read) -> list[Origin]:
        """What makes the module `owner`."""
        made: list[Origin] = [*self.module.origins(owner)]
        own = self.module.class_of(owner)
        if isinstance(owner, cst.Name) and owner.value == "self" and own is not None:
            made = [call for call in self.module.calls if self.module.callee(call) is own]
        if not made:
            found.text, found.certain = f"`{self.module.code(owner)}`", False
        return made

    def _step_call(self, call: cst.Call, found: Read) -> list[cst.CSTNode]:
        name = self.module.call_name(call)
        made = self.module.callee(call)
        if isinstance(made, cst.FunctionDef):
            return list(self.module.returns.get(made, []))
        if name in PASSES_FIRST_ARGUMENT and call.args:
            return [call.args[0].value]
        if name in CONTAINERS:
            return [each.value for each in call.args]
        if isinstance(call.func, cst.Attribute) and not name and call.func.attr.value in KEEPS:
            return [call.func.value]
        if not self._is_made_for_a_batch(call):
            found.others.append(call)
        return []

    def _parts(self, definition: Definition) -> list[cst.BaseExpression]:
        """The part of a definition's value that a name of ``for a, b in zip(x, y)`` stands for."""
        value, path = definition.value, definition.path
        while isinstance(value, cst.Call) and path[:1] == ("element",) and len(path) > 1:
            name, index = self.module.call_name(value), path[1]
            if name == "builtins.enumerate" and value.args:
                if index == 0:
                    return []
                value, path = value.args[0].value, ("element", *path[2:])
            elif name == "builtins.zip" and isinstance(index, int) and index < len(value.args):
                value, path = value.args[index].value, ("element", *path[2:])
            else:
                break
        return [value]


def _is_trainable(module: Module, origin: cst.CSTNode) -> bool:
    """Whether `origin` makes a tensor that is to be trained."""
    if not isinstance(origin, cst.Call):
        return False
    asked = any(each.keyword is not None and each.keyword.value == "requires_grad" for each in origin.args)
    above = module.parent(origin)
    asked = asked or (isinstance(above, cst.Attribute) and above.attr.value == "requires_grad_")
    return asked or module.call_name(origin).rsplit(".", 1)[-1] == "Parameter"


# Attributes and methods of a gradient that give a figure about it, or how it is stored.
FIGURES = words(
    "norm item shape size dim ndim numel dtype device layout is_sparse is_cuda isnan isinf isfinite any all tolist numpy "
    "requires_grad is_contiguous stride"
)

# Functions that show what they get, ask something about it, or change gradients alone. By their last name.
HARMLESS_FUNCTIONS = words(
    "print len type isinstance id str repr float int bool isnan isinf isfinite norm vector_norm matrix_norm allclose equal "
    "any all is_tensor clip_grad_norm_ clip_grad_value_ get_total_norm unscale_ add_histogram add_scalar add_scalars log "
    "debug info warning write"
)

# Functions whose result holds what they get.
CONTAINERS = frozenset(
    [
        "builtins.list", "builtins.tuple", "builtins.set", "builtins.filter", "builtins.enumerate", "builtins.zip",
        "builtins.reversed", "builtins.sorted", "builtins.dict", "builtins.next", "itertools.chain",
        "itertools.chain.from_iterable",
    ]
)  # fmt: skip

# Methods whose result is, or holds, what they are called on.
KEEPS = RETURNS_ITSELF | words("items values copy retain_grad get data_ptr")
