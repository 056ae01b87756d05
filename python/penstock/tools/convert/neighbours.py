"""What a script imports from files of its own folder: read as far as a rule must know what a function does with a model.

These files are not converted. They are read as plain syntax trees, by name: what is called `f` there is the `f` that the
script gets.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TypeAlias

import libcst as cst

from penstock.tools.convert.flow import Module, dotted, words

Reader: TypeAlias = Callable[[str], "str | None"]
Definition: TypeAlias = "ast.FunctionDef | ast.ClassDef"


class Neighbours:
    """The files beside a script.

    Args:
        read: the text of a module by its dotted name, None where the folder has none of that name.
    """

    def __init__(self, read: Reader | None = None) -> None:
        self._read: Reader = read or (lambda name: None)
        self._trees: dict[str, ast.Module | None] = {}

    def tree(self, name: str) -> ast.Module | None:
        """The module `name`; None where it is not in the folder, or is not Python."""
        if name not in self._trees:
            self._trees[name] = None
            text = self._read(name) if name else None
            if text is not None:
                try:
                    self._trees[name] = ast.parse(text)
                except SyntaxError:
                    pass
        return self._trees[name]

    def find(self, module: str, name: str, depth: int = 0) -> tuple[str, Definition] | None:
        """The function or class `name` of `module`, and the module that it is written in: imports are followed."""
        tree = self.tree(module)
        if tree is None or depth > MAX_DEPTH:
            return None
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return module, node
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if alias.name == "*" or (alias.asname or alias.name) == name:
                        wanted = name if alias.name == "*" else alias.name
                        found = self.find(node.module, wanted, depth + 1)
                        if found is not None:
                            return found
        return None

    def named(self, module: Module, func: cst.BaseExpression) -> tuple[str, Definition] | None:
        """The function or class that `func` of the script `module` names, where a file beside it has it, and that file's name."""
        name = module.qualified(func)
        if name is not None:
            home, _, last = name.rpartition(".")
            return self.find(home, last)
        if isinstance(func, cst.Name) and module.place(func) is None:
            for node in module.nodes:
                if (
                    isinstance(node, cst.ImportFrom)
                    and isinstance(node.names, cst.ImportStar)
                    and node.module is not None
                ):
                    found = self.find(dotted(node.module), func.value)
                    if found is not None:
                        return found
        return None

    def is_optimizer(self, module: str, made: ast.ClassDef, depth: int = 0) -> bool:
        """Whether the class `made` of `module` builds on one of torch.optim, by the names of its bases."""
        for base in made.bases:
            name = ast.unparse(base)
            if name.rsplit(".", 1)[-1] == "Optimizer" or name.startswith(("torch.optim.", "optim.")):
                return True
            found = self.find(module, name) if depth < MAX_DEPTH else None
            if (
                found is not None
                and isinstance(found[1], ast.ClassDef)
                and self.is_optimizer(found[0], found[1], depth + 1)
            ):
                return True
        return False

    def only_calls(self, module: str, function: Definition, parameter: int | str, depth: int = 0) -> bool:
        """Whether `function` of `module` does nothing with the model that it gets as `parameter`, an index or a name, but call
        it and ask what a wrapper answers as well: then it may be given the wrapper."""
        if not isinstance(function, ast.FunctionDef) or depth > MAX_DEPTH:
            return False
        arguments = [*function.args.posonlyargs, *function.args.args]
        names = {each.arg for each in (*arguments, *function.args.kwonlyargs)}
        if isinstance(parameter, int):
            if parameter >= len(arguments):
                return False
            parameter = arguments[parameter].arg
        if parameter not in names:
            return False
        above = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and node.id == parameter:
                parent = above[node]
                called = isinstance(parent, ast.Call) and parent.func is node
                asked = isinstance(parent, ast.Attribute) and parent.attr in ANSWERS
                if not called and not asked and not self._hands_on(module, parent, node, depth):
                    return False
        return True

    def _hands_on(self, module: str, parent: ast.AST, node: ast.Name, depth: int) -> bool:
        if isinstance(parent, ast.keyword):
            return False
        if not isinstance(parent, ast.Call) or not isinstance(parent.func, ast.Name) or node not in parent.args:
            return False
        found = self.find(module, parent.func.id)
        return found is not None and self.only_calls(*found, parent.args.index(node), depth + 1)

    def may_leave_out(self, module: str) -> bool:
        """Whether a class of `module` makes a layer that a forward pass may not come by: it stands under a condition or in a
        loop, or nowhere."""
        tree = self.tree(module)
        for made in tree.body if tree is not None else []:
            if not isinstance(made, ast.ClassDef):
                continue
            methods = {each.name: each for each in made.body if isinstance(each, ast.FunctionDef)}
            start = methods.pop("__init__", None)
            if start is None or "forward" not in methods:
                continue
            layers = {
                target.attr
                for node in ast.walk(start)
                if isinstance(node, ast.Assign) and _makes_layer(node.value)
                for target in node.targets
                if isinstance(target, ast.Attribute)
            }
            always = {name for method in methods.values() for name in _always_used(method.body)}
            if layers - always:
                return True
        return False

    def mentions(self, module: str, prefix: str) -> bool:
        """Whether a name or attribute in `module` starts with `prefix`."""
        tree = self.tree(module)
        return tree is not None and any(
            (isinstance(node, ast.Attribute) and node.attr.startswith(prefix))
            or (isinstance(node, ast.Name) and node.id.startswith(prefix))
            for node in ast.walk(tree)
        )


def _makes_layer(value: ast.expr) -> bool:
    """Whether `value` is a call of a class that may have parameters, which most that are called like one have."""
    if not isinstance(value, ast.Call):
        return False
    name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
    return name[:1].isupper() and name not in WITHOUT_PARAMETERS and not name.endswith(("Loss", "Pool2d", "Pad2d"))


def _always_used(body: list[ast.stmt]) -> set[str]:
    """The attributes of ``self`` that `body` comes by whatever its conditions are."""
    found: set[str] = set()
    for statement in body:
        if isinstance(statement, ast.If | ast.While):
            parts: list[ast.AST] = [statement.test]
            if isinstance(statement, ast.If) and statement.orelse:
                found |= _always_used(statement.body) & _always_used(statement.orelse)
        elif isinstance(statement, ast.For):
            parts = [statement.iter]
        elif isinstance(statement, ast.With):
            parts = []
            found |= _always_used(statement.body)
        else:
            parts = [statement]
        for part in parts:
            found |= {
                node.attr
                for node in ast.walk(part)
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
            }
    return found


# Modules of torch.nn without parameters.
WITHOUT_PARAMETERS = words(
    "ReLU LeakyReLU GELU SiLU ELU Tanh Sigmoid Softmax LogSoftmax Dropout Dropout2d Flatten Upsample Identity PixelShuffle"
)

# What DistributedDataParallel answers as the module inside would (it is a Module itself).
ANSWERS = words("parameters train eval zero_grad training requires_grad_ no_sync module forward")

# Imports of imports, and functions that hand a model on: deeper than any project was found to be.
MAX_DEPTH = 4
