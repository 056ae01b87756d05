"""Conformance of every collective: grids of ranks, sizes, dtypes, operations and roots.

``reference`` says what must come out, computed with numpy from all ranks' inputs, which every rank can compute itself.
``programs`` runs the collectives on the ranks of a job and compares; wherever gloo can do the same, its result is compared
too, bit by bit where arithmetic leaves no choice. A program goes through its whole grid, so that its error lists every
wrong result, not only the first.
"""
