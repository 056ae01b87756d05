"""``penstock run``: convert a script in memory, and let torchrun start it.

- `lines`: compiles the converted text so that tracebacks speak of the original file and its lines. Pure.
- `worker`: what torchrun starts as each rank.
- `cli`: the command line. There is no launcher here: torchrun starts the ranks.
"""

from penstock.tools.run.cli import command

__all__ = ["command"]
