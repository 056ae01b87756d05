"""Which line of the original a line of the converted script comes from, and code objects that speak of the original."""

from __future__ import annotations

import ast
import difflib
import types


def compile_as(original: str, converted: str, filename: str) -> types.CodeType:
    """Compile `converted` so that its code says that it stands in `filename`, on the lines of `original`.

    A line that the conversion added counts as the last original line before it.
    """
    lines = original_lines(original, converted)
    tree = ast.parse(converted, filename)
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.stmt | ast.excepthandler | ast.arg | ast.keyword | ast.alias):
            end = node.end_lineno or node.lineno
            node.lineno, node.end_lineno = lines[node.lineno], lines[end]
            if node.lineno == node.end_lineno and (node.end_col_offset or 0) < node.col_offset:
                # Two lines became one, so the columns of both make no range.
                node.col_offset = node.end_col_offset = 0
    return compile(tree, filename, "exec", dont_inherit=True)


def original_lines(original: str, converted: str) -> list[int]:
    """For each line of `converted`, the line of `original`, both from 1; index 0 is not used."""
    before, after = original.splitlines(), converted.splitlines()
    lines = [1] * (len(after) + 2)
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for _, start, end, new_start, new_end in matcher.get_opcodes():
        for offset in range(new_end - new_start):
            # What was replaced maps line by line as far as both sides reach; what was added, to the line before it.
            line = min(start + offset, end - 1) if end > start else start - 1
            lines[new_start + offset + 1] = max(1, line + 1)
    return lines
