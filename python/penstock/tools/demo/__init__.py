"""``penstock demo``: one model, trained with gloo, with Penstock, and with its hook.

- `training`: starts the ranks of the example (``examples/char_gpt``) and follows them.
- `link_probe`, `prediction`: what the link carries, and how long a step should therefore take.
- `comparison`: the trainings beside each other, in numbers.
- `division`: where a step goes, as `penstock profile` says it.
- `report`: the same as a page, with pictures.
- `cli`: the command line: what runs in which order.

``docs/guide/demo.md`` says what the numbers mean and what they do not show.
"""

from penstock.tools.demo.cli import command

__all__ = ["command"]
