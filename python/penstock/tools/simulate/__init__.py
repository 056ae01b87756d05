"""``penstock simulate``: the shipped protocol in virtual time, with seeded faults.

What runs is the code of ranks and daemons itself: `penstock-aggregation`, a rank's all-reduces included, and for collectives
`penstock-core`. Only time, the network, and those who call collectives are simulated (docs/design/aggregation.md,
docs/design/algorithms.md).
"""

from penstock.tools.simulate.cli import command

__all__ = ["command"]
