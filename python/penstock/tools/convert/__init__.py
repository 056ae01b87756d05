"""``penstock convert``: a training script for one device becomes one for several ranks.

- `core`: source text in, changed text with edits and findings out. Pure.
- `flow`: what a module's names stand for, and where values come from.
- `training`: what trains in it: backward passes, loops, loaders, models.
- `coverage`: what a loss is made of, and whose parameters an optimizer gets. `neighbours`: files beside the script.
- `rules`: what is changed, and what is left alone and reported; by kind in `base`, `loaders`, `models`, `metrics`,
  `steps` and `output`.
- `edits`: changes to a tree, collected and then applied at once.
- `helpers`: the functions that a converted script gets.
- `cli`: the command line. It imports the modules above only to convert: they need libcst, which is an extra.

``docs/reference/convert.md`` has the table of what is recognised.
"""

from penstock.tools.convert.cli import command

__all__ = ["command"]
