"""``penstock characterize``: what steps of known models spend their time on, over a matrix of ranks, batches and networks.

`matrix.py` reads the file, `running.py` runs a cell under `penstock profile`, `memory.py` finds the largest batch, `results.py`
keeps what came out, and `means.py` puts cells beside each other. `tables.py` and `figures.py` show them as the paper does,
`findings.py` judges its findings, and `report.py` is the page.
"""

from penstock.tools.characterize.cli import command

__all__ = ["command"]
