"""``penstock doctor``: does every pair of ranks reach each other, how fast, and what is in the way?

Under torchrun each rank runs it (``torchrun ... -m penstock doctor``) and rank 0 prints; alone it starts two ranks on
this machine.
"""

from penstock.tools.doctor.cli import command

__all__ = ["command"]
