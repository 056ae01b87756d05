"""Changes to a tree, collected first and applied in one pass, so that rules do not see each other's work.

A rule asks for an expression to become another, for statements before or after one, or for a statement to move into
an ``if`` or ``with``. Where several rules change what stands inside each other, the inner change is made first and
the outer one gets its result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import libcst as cst

Change = Callable[[Any], Any]

# Expressions that need no parentheses anywhere.
ATOMS = (cst.Name, cst.Attribute, cst.Call, cst.Subscript, cst.Integer, cst.Float, cst.SimpleString)


class Edits:
    """The changes to one tree. Nodes are those of the tree, by identity."""

    def __init__(self) -> None:
        self.changes: dict[cst.CSTNode, list[Change]] = defaultdict(list)
        self.before: dict[cst.CSTNode, list[str]] = defaultdict(list)
        self.after: dict[cst.CSTNode, list[str]] = defaultdict(list)
        self.guards: dict[cst.CSTNode, list[str]] = defaultdict(list)
        self.starts: dict[cst.CSTNode, list[str]] = defaultdict(list)
        self.ends: dict[cst.CSTNode, list[str]] = defaultdict(list)

    def change(self, node: cst.CSTNode, change: Change) -> None:
        self.changes[node].append(change)

    def replace(self, node: cst.CSTNode, code: str) -> None:
        """`node`, an expression, becomes `code`."""
        self.change(node, lambda _: cst.parse_expression(code))

    def wrap(self, node: cst.CSTNode, template: str) -> None:
        """`node`, an expression, becomes `template` with what it has become by then in place of ``_``."""
        self.change(node, lambda inner: fill(template, inner))

    def guard(self, statement: cst.CSTNode, header: str) -> None:
        """`statement` moves into a block that `header` opens, such as ``if RANK == 0:``."""
        if header not in self.guards[statement]:
            self.guards[statement].append(header)

    def apply(self, tree: cst.Module) -> cst.Module:
        changed = tree.visit(_Application(self))
        assert isinstance(changed, cst.Module)
        return changed


def fill(template: str, inner: cst.BaseExpression) -> cst.BaseExpression:
    """The expression `template` with `inner` in place of the name ``_``."""
    outer = cst.parse_expression(template)
    holes = _Hole(inner)
    filled = outer.visit(holes)
    assert isinstance(filled, cst.BaseExpression)
    return filled


def statements(code: str) -> list[Any]:
    """The statements of `code`, with the comments and empty lines before each."""
    module = cst.parse_module(code)
    body: list[Any] = list(module.body)
    if body and module.header:
        body[0] = body[0].with_changes(leading_lines=[*module.header, *body[0].leading_lines])
    return body


class _Hole(cst.CSTTransformer):
    def __init__(self, inner: cst.BaseExpression) -> None:
        self.inner = inner

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        if original_node.value != "_":
            return updated_node
        if isinstance(self.inner, ATOMS):
            return self.inner
        # Parentheses around the hole are for what binds less than the operators of the template.
        return self.inner.with_changes(
            lpar=[*original_node.lpar, *self.inner.lpar], rpar=[*self.inner.rpar, *original_node.rpar]
        )


class _Application(cst.CSTTransformer):
    def __init__(self, edits: Edits) -> None:
        self.edits = edits
        self.merged: dict[int, str] = {}  # the blocks that guards made, by identity, with their headers

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        if isinstance(original_node, cst.SimpleStatementSuite):
            return self._leave_suite(original_node, updated_node)
        if isinstance(original_node, cst.SimpleStatementLine) and len(original_node.body) > 1:
            parts = self._leave_parts(original_node.body, updated_node.body)
            if parts is not None:
                parts[0] = parts[0].with_changes(leading_lines=updated_node.leading_lines)
                return cst.FlattenSentinel(self._surround(original_node, parts))
        node = updated_node
        for change in self.edits.changes.get(original_node, ()):
            node = change(node)
        if isinstance(node, cst.RemovalSentinel):
            return node
        if isinstance(original_node, cst.IndentedBlock | cst.Module):
            return self._leave_block(original_node, node)
        if isinstance(original_node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            if isinstance(original_node, cst.SimpleStatementLine) and len(original_node.body) == 1:
                small = original_node.body[0]
                for header in self.edits.guards.get(small, ()):
                    node = guarded(node, header)
                    self.merged[id(node)] = header
            several = self._surround(original_node, [node])
            return several[0] if len(several) == 1 else cst.FlattenSentinel(several)
        return node

    def _surround(self, original: cst.CSTNode, nodes: list[Any]) -> list[Any]:
        for header in self.edits.guards.get(original, ()):
            nodes = [guarded(nodes[0], header, nodes[1:])]
            self.merged[id(nodes[0])] = header
        before = [each for code in self.edits.before.get(original, ()) for each in statements(code)]
        after = [each for code in self.edits.after.get(original, ()) for each in statements(code)]
        if before:
            # An empty line that stood before the statement now stands before what was put there.
            blank = [line for line in nodes[0].leading_lines if line.comment is None]
            if blank and nodes[0].leading_lines[0].comment is None:
                before[0] = before[0].with_changes(leading_lines=[blank[0], *before[0].leading_lines])
                nodes[0] = nodes[0].with_changes(leading_lines=nodes[0].leading_lines[1:])
        return [*before, *nodes, *after]

    def _leave_block(self, original: Any, updated: Any) -> Any:
        updated = updated.with_changes(body=_merge(list(updated.body), self.merged))
        start = [each for code in self.edits.starts.get(original, ()) for each in statements(code)]
        end = [each for code in self.edits.ends.get(original, ()) for each in statements(code)]
        return updated.with_changes(body=[*start, *updated.body, *end]) if start or end else updated

    def _leave_parts(self, original: Sequence[Any], updated: Sequence[Any]) -> list[Any] | None:
        """Small statements that shared a line, each on its own, if one of them is to be guarded."""
        if not any(self.edits.guards.get(each) for each in original):
            return None
        lines = []
        for before, after in zip(original, updated, strict=True):
            line: Any = cst.SimpleStatementLine([after.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)])
            for header in self.edits.guards.get(before, ()):
                line = guarded(line, header)
            lines.append(line)
        return lines

    def _leave_suite(self, original: cst.SimpleStatementSuite, updated: Any) -> Any:
        """``if x: y`` gets a block of its own when `y` is to be guarded."""
        parts = self._leave_parts(original.body, updated.body)
        return updated if parts is None else cst.IndentedBlock(parts)


def guarded(node: Any, header: str, rest: Sequence[Any] = ()) -> Any:
    """`node` in the block that `header` opens; the comments before it stay before the block."""
    outer: Any = cst.parse_statement(f"{header}\n    pass\n")
    inner = node.with_changes(leading_lines=[])
    return outer.with_changes(body=cst.IndentedBlock([inner, *rest]), leading_lines=node.leading_lines)


def _merge(body: list[Any], made: dict[int, str]) -> list[Any]:
    """`body` with guarded statements that follow each other, under the same header, in one block."""
    merged: list[Any] = []
    header = None
    for node in body:
        this = made.get(id(node))
        if this is not None and this == header and not node.leading_lines:
            inner = merged[-1].body
            merged[-1] = merged[-1].with_changes(body=inner.with_changes(body=[*inner.body, *node.body.body]))
        else:
            merged.append(node)
        header = this
    return merged
