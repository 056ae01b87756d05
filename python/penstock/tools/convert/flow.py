"""The meaning of a module's names: imports, places, and the sources of the value in a place.

A *place* is what a value can be stored in: a name in a scope, an attribute of ``self``, an item of a dict under a
constant key. `Module.origins` walks from an expression back over assignments, arguments, return values and methods
that return their object, to the calls that made the value. It ignores the order of statements and knows one module
only, so it can name an origin too many, but what it names is always written in this file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import libcst as cst
from libcst import metadata

Place: TypeAlias = tuple[object, ...]
Function: TypeAlias = cst.FunctionDef
Path: TypeAlias = tuple[int | str, ...]
Origin: TypeAlias = "cst.Call | cst.Param"


@dataclass(frozen=True)
class Definition:
    """Something is stored in a place: `path` says which part of `value` (an index, or "element" for a loop)."""

    value: cst.BaseExpression
    path: Path
    node: cst.CSTNode


class Module:
    """One source text as a tree, with what its names mean."""

    def __init__(self, source: str) -> None:
        wrapper = metadata.MetadataWrapper(cst.parse_module(source))
        self.tree = wrapper.module
        providers = (
            metadata.ParentNodeProvider,
            metadata.PositionProvider,
            metadata.ScopeProvider,
            metadata.QualifiedNameProvider,
        )
        found: Any = wrapper.resolve_many(providers)
        self._parents: Any = found[metadata.ParentNodeProvider]
        self._positions: Any = found[metadata.PositionProvider]
        self._scopes: Any = found[metadata.ScopeProvider]
        self._qualified: Any = found[metadata.QualifiedNameProvider]
        self.nodes: list[cst.CSTNode] = list(self._walk(self.tree))
        self.functions = [node for node in self.nodes if isinstance(node, cst.FunctionDef)]
        self.classes = [node for node in self.nodes if isinstance(node, cst.ClassDef)]
        self.calls = [node for node in self.nodes if isinstance(node, cst.Call)]
        self.definitions: dict[Place, list[Definition]] = defaultdict(list)
        self.parameters: dict[Place, cst.Param] = {}
        self.returns: dict[Function, list[cst.BaseExpression]] = defaultdict(list)
        self.call_sites: dict[Function, list[cst.CSTNode]] = defaultdict(list)
        self._callees: dict[cst.Call, cst.FunctionDef | cst.ClassDef | None] = {}
        self._collect_definitions()
        # A method is known by the origin of its object, which the first round finds; chains of two such need a second.
        for _ in range(2):
            self._callees.clear()
            self._collect_arguments()
        self._collect_references()

    # ---------------------------------------------------------------------------------------------------- the tree

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        above: cst.CSTNode | None = self._parents.get(node)
        return above

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        above = self.parent(node)
        while above is not None:
            yield above
            above = self.parent(above)

    def line(self, node: cst.CSTNode) -> int:
        """The line, from 1, at which `node` starts, its leading comments not counted."""
        return int(self._positions[node].start.line)

    def code(self, node: cst.CSTNode) -> str:
        return self.tree.code_for_node(node)

    def function_of(self, node: cst.CSTNode) -> Function | None:
        """The innermost function whose body `node` stands in."""
        below = node
        for above in self.ancestors(node):
            if isinstance(above, cst.FunctionDef) and below is above.body:
                return above
            below = above
        return None

    def class_of(self, node: cst.CSTNode) -> cst.ClassDef | None:
        return next((above for above in self.ancestors(node) if isinstance(above, cst.ClassDef)), None)

    def statement_of(self, node: cst.CSTNode) -> cst.CSTNode:
        """The statement that stands in a block: a line of small statements, or a compound statement."""
        for each in (node, *self.ancestors(node)):
            if isinstance(each, cst.SimpleStatementLine | cst.BaseCompoundStatement):
                return each
        raise LookupError(f"no statement holds {self.code(node)!r}")

    def within(self, node: cst.CSTNode, *containers: cst.CSTNode) -> bool:
        """Whether `node` is one of `containers` or stands in one."""
        return node in containers or any(above in containers for above in self.ancestors(node))

    def descendants(self, node: cst.CSTNode, *, into_functions: bool = True) -> Iterator[cst.CSTNode]:
        """`node` and all below it; without the bodies of functions and classes defined there, if so asked."""
        yield from self._walk(node, None if into_functions else (cst.FunctionDef, cst.ClassDef, cst.Lambda))

    def _walk(self, node: cst.CSTNode, stop: tuple[type, ...] | None = None) -> Iterator[cst.CSTNode]:
        yield node
        for child in node.children:
            if stop is not None and isinstance(child, stop):
                continue
            yield from self._walk(child, stop)

    # --------------------------------------------------------------------------------------------------- the names

    def qualified(self, node: cst.CSTNode) -> str | None:
        """The full dotted name of what was imported or is built in: "torch.utils.data.DataLoader", "builtins.print"."""
        if isinstance(node, cst.Name | cst.Attribute) and not dotted(node):
            return None  # an attribute of a value: the provider would answer for what stands before its parenthesis
        names = self._qualified.get(node, ())
        # The provider looks a name up only when it is needed.
        for name in names() if callable(names) else names:
            if name.source in (metadata.QualifiedNameSource.IMPORT, metadata.QualifiedNameSource.BUILTIN):
                return str(name.name)
        return None

    def call_name(self, call: Origin) -> str:
        """The full name of what is called, or "" for what this module or an object defines, and for a parameter."""
        return (self.qualified(call.func) or "") if isinstance(call, cst.Call) else ""

    def imported(self) -> set[str]:
        """The full names that the module imports."""
        names: set[str] = set()
        for node in self.nodes:
            if isinstance(node, cst.Import):
                names |= {dotted(alias.name) for alias in node.names}
            elif isinstance(node, cst.ImportFrom) and not node.relative:
                base = dotted(node.module) if node.module else ""
                names.add(base)
                if not isinstance(node.names, cst.ImportStar):
                    names |= {f"{base}.{dotted(alias.name)}" for alias in node.names}
        return names

    def place(self, node: cst.BaseExpression) -> Place | None:
        """Where the value of a name, ``self.attribute`` or ``things["key"]`` is stored; None for all else."""
        if isinstance(node, cst.Name):
            scope = self._scopes.get(node)
            if scope is None:
                return None
            for assignment in scope[node.value]:
                if isinstance(assignment, metadata.Assignment):
                    return ("name", assignment.scope, node.value)
            return None
        if isinstance(node, cst.Attribute):
            owner = self._owner(node.value)
            return None if owner is None else ("attribute", owner, node.attr.value)
        if isinstance(node, cst.Subscript):
            base, key = self.place(node.value), constant_key(node)
            return ("item", base, key) if base is not None and key is not None else None
        return None

    def _owner(self, base: cst.BaseExpression) -> cst.ClassDef | None:
        """The class of this module that `base` is an instance of."""
        if isinstance(base, cst.Name) and base.value == "self":
            return self.class_of(base)
        if isinstance(base, cst.Name | cst.Attribute) and self.qualified(base) is None:
            for origin in self.origins(base) if self._callees else ():
                made = self.callee(origin)
                if isinstance(made, cst.ClassDef):
                    return made
        return None

    def callee(self, call: Origin) -> cst.FunctionDef | cst.ClassDef | None:
        """The function or class of this module that `call` calls."""
        if not isinstance(call, cst.Call):
            return None
        if call not in self._callees:
            self._callees[call] = None  # ends a recursion: the origin of the object may be this very call
            self._callees[call] = self._find_callee(call)
        return self._callees[call]

    def _find_callee(self, call: cst.Call) -> cst.FunctionDef | cst.ClassDef | None:
        if isinstance(call.func, cst.Name):
            return self._defined(call.func)
        if isinstance(call.func, cst.Attribute):
            owner = self._owner(call.func.value)
            while owner is not None:
                method = self.method(owner, call.func.attr.value)
                if method is not None:
                    return method
                bases = [self._defined(base.value) for base in owner.bases if isinstance(base.value, cst.Name)]
                owner = next((base for base in bases if isinstance(base, cst.ClassDef)), None)
        return None

    def _defined(self, name: cst.Name) -> cst.FunctionDef | cst.ClassDef | None:
        scope = self._scopes.get(name)
        for assignment in scope[name.value] if scope is not None else ():
            node = getattr(assignment, "node", None)
            if isinstance(node, cst.FunctionDef | cst.ClassDef):
                return node
        return None

    def method(self, owner: cst.ClassDef, name: str) -> Function | None:
        for statement in owner.body.body:
            if isinstance(statement, cst.FunctionDef) and statement.name.value == name:
                return statement
        return None

    def bases(self, owner: cst.ClassDef) -> set[str]:
        """The full names of all base classes, also those of base classes in this module."""
        names: set[str] = set()
        for base in owner.bases:
            name = self.qualified(base.value)
            inner = self._defined(base.value) if isinstance(base.value, cst.Name) else None
            if name is not None:
                names.add(name)
            if isinstance(inner, cst.ClassDef) and inner is not owner:
                names |= self.bases(inner)
        return names

    # ---------------------------------------------------------------------------------------------------- the flow

    def origins(self, node: cst.BaseExpression, path: Path = ()) -> list[Origin]:
        """What may have made the value of `node`, in the order of the text.

        Calls, and parameters of functions that this module does not call itself.
        """
        found: dict[Origin, None] = {}
        self._trace(node, path, found, set())
        return sorted(found, key=self.line)

    def _trace(self, node: cst.BaseExpression, path: Path, found: dict[Origin, None], seen: set[object]) -> None:
        if (node, path) in seen or len(path) > MAX_PATH:
            return
        seen.add((node, path))
        place = self.place(node)
        if place is not None:
            for each in self.definitions.get(place, ()):
                self._trace(each.value, each.path + path, found, seen)
            if place in self.parameters and not path and not self.definitions.get(place):
                found[self.parameters[place]] = None
        if isinstance(node, cst.Subscript):
            key = constant_key(node)
            if place is None or not self.definitions.get(place):
                self._trace(node.value, ((key if key is not None else "any"), *path), found, seen)
        elif isinstance(node, cst.Call):
            self._trace_call(node, path, found, seen)
        elif isinstance(node, cst.IfExp):
            self._trace(node.body, path, found, seen)
            self._trace(node.orelse, path, found, seen)
        elif isinstance(node, cst.BooleanOperation):
            self._trace(node.left, path, found, seen)
            self._trace(node.right, path, found, seen)
        elif isinstance(node, cst.Tuple | cst.List) and path:
            for index, element in enumerate(node.elements):
                if path[0] in (index, "any", "element"):
                    self._trace(element.value, path[1:], found, seen)
        elif isinstance(node, cst.Dict) and path:
            for entry in node.elements:
                if isinstance(entry, cst.DictElement) and path[0] in (constant(entry.key), "any"):
                    self._trace(entry.value, path[1:], found, seen)
        elif isinstance(node, cst.DictComp) and path:
            self._trace(node.value, path[1:], found, seen)
        elif isinstance(node, cst.ListComp) and path:
            self._trace(node.elt, path[1:], found, seen)
        elif isinstance(node, cst.NamedExpr):
            self._trace(node.value, path, found, seen)

    def _trace_call(self, call: cst.Call, path: Path, found: dict[Origin, None], seen: set[object]) -> None:
        made = self.callee(call)
        if isinstance(made, cst.FunctionDef):
            for value in self.returns.get(made, ()):
                self._trace(value, path, found, seen)
            return
        name = self.call_name(call)
        if name in PASSES_FIRST_ARGUMENT and call.args:
            self._trace(call.args[0].value, path, found, seen)
        elif isinstance(call.func, cst.Attribute) and call.func.attr.value in RETURNS_ITSELF and not name:
            self._trace(call.func.value, path, found, seen)
        elif not path:
            found[call] = None

    def _collect_definitions(self) -> None:
        for node in self.nodes:
            if isinstance(node, cst.Assign):
                for target in node.targets:
                    self._bind(target.target, node.value, (), node)
            elif isinstance(node, cst.AnnAssign | cst.NamedExpr) and node.value is not None:
                self._bind(node.target, node.value, (), node)
            elif isinstance(node, cst.Param):
                place = self.place(node.name) or self._parameter_place(node)
                if place is not None:
                    self.parameters[place] = node
            elif isinstance(node, cst.For):
                self._bind(node.target, node.iter, ("element",), node)
            elif isinstance(node, cst.WithItem) and node.asname is not None:
                self._bind(node.asname.name, node.item, (), node)
            elif isinstance(node, cst.Return) and node.value is not None:
                function = self.function_of(node)
                if function is not None:
                    self.returns[function].append(node.value)
            elif isinstance(node, cst.Yield):
                # A generator stands for what the loops around its `yield` run over.
                function = self.function_of(node)
                for above in self.ancestors(node):
                    if above is function:
                        break
                    if isinstance(above, cst.For) and function is not None:
                        self.returns[function].append(above.iter)

    def _bind(self, target: cst.BaseExpression, value: cst.BaseExpression, path: Path, node: cst.CSTNode) -> None:
        if isinstance(target, cst.Tuple | cst.List):
            literal = isinstance(value, cst.Tuple | cst.List) and not path
            for index, element in enumerate(target.elements):
                if literal and isinstance(value, cst.Tuple | cst.List) and len(value.elements) == len(target.elements):
                    self._bind(element.value, value.elements[index].value, (), node)
                else:
                    self._bind(element.value, value, (*path, index), node)
            return
        place = self.place(target)
        if place is not None:
            self.definitions[place].append(Definition(value, path, node))

    def _collect_arguments(self) -> None:
        for call in self.calls:
            made = self.callee(call)
            function = self.method(made, "__init__") if isinstance(made, cst.ClassDef) else made
            if not isinstance(function, cst.FunctionDef):
                continue
            for parameter, value in self.arguments(call, function):
                place = self.place(parameter.name) or self._parameter_place(parameter)
                definition = Definition(value, (), call)
                if place is not None and definition not in self.definitions[place]:
                    self.definitions[place].append(definition)

    def _parameter_place(self, parameter: cst.Param) -> Place | None:
        scope = self._scopes.get(parameter)
        return None if scope is None else ("name", scope, parameter.name.value)

    def arguments(self, call: cst.Call, function: Function) -> Iterator[tuple[cst.Param, cst.BaseExpression]]:
        """The parameters of `function` with what `call` passes for each, as far as the text tells."""
        positional = [*function.params.posonly_params, *function.params.params]
        bound = function.name.value == "__init__" or not isinstance(call.func, cst.Name)
        if bound and self._is_method(function):
            positional = positional[1:]
        named = {each.name.value: each for each in (*positional, *function.params.kwonly_params)}
        rest = iter(positional)
        for argument in call.args:
            if argument.star:
                return
            parameter = named.get(argument.keyword.value) if argument.keyword else next(rest, None)
            if parameter is not None:
                yield parameter, argument.value

    def _is_method(self, function: Function) -> bool:
        above = self.parent(function)
        if isinstance(above, cst.IndentedBlock):
            above = self.parent(above)
        static = any(self.code(each.decorator) == "staticmethod" for each in function.decorators)
        return isinstance(above, cst.ClassDef) and not static

    def _collect_references(self) -> None:
        """The places where each function is called, or passed on to be called."""
        for node in self.nodes:
            if isinstance(node, cst.Call):
                made = self.callee(node)
                if isinstance(made, cst.FunctionDef):
                    self.call_sites[made].append(node)
            elif isinstance(node, cst.Arg) and isinstance(node.value, cst.Name):
                handed = self._defined(node.value)
                if isinstance(handed, cst.FunctionDef):
                    self.call_sites[handed].append(node)


def dotted(node: cst.CSTNode) -> str:
    """A chain of names as text; "" where something else stands in it."""
    if isinstance(node, cst.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr.value}" if base else ""
    return node.value if isinstance(node, cst.Name) else ""


def constant(node: cst.CSTNode | None) -> int | str | bool | None:
    """The value of a literal or of True and False; None for all else, and for None."""
    if isinstance(node, cst.SimpleString):
        value = node.evaluated_value
        return value if isinstance(value, str) else None
    if isinstance(node, cst.Integer):
        return int(node.evaluated_value)
    if isinstance(node, cst.Name) and node.value in ("True", "False"):
        return node.value == "True"
    return None


def words(text: str) -> frozenset[str]:
    """A set of names, written as one text."""
    return frozenset(text.split())


def constant_key(node: cst.Subscript) -> int | str | None:
    if len(node.slice) == 1 and isinstance(node.slice[0].slice, cst.Index):
        return constant(node.slice[0].slice.value)
    return None


# Methods of modules and tensors that return the object that they are called on.
RETURNS_ITSELF = words(
    "to cuda cpu xpu double float half bfloat16 type train eval apply requires_grad_ share_memory compile"
)

# Functions that return what their first argument is, or a wrapper that stands for it.
PASSES_FIRST_ARGUMENT = frozenset(
    [
        "torch.compile",
        "torch.nn.DataParallel",
        "torch.nn.parallel.DataParallel",
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
        "builtins.iter",
        "itertools.cycle",
    ]
)

# Parts of parts of parts: deeper nesting than any script needs, and an end to values that contain themselves.
MAX_PATH = 4
