"""``penstock plan``: which server sums which part of a model, where each worker's gradients are summed on the way, and by which
route."""

from penstock.tools.plan.cli import command

__all__ = ["command"]
