"""``penstock characterize``: what steps of known models spend their time on, over a matrix of ranks, batches and networks.

`matrix.py` reads the file, `running.py` runs a cell under `penstock profile`, `results.py` keeps what came out, `tables.py` shows
it as the paper does, `findings.py` judges its statements.
"""

from penstock.tools.characterize.cli import command

__all__ = ["command"]
