"""``penstock profile``: where an iteration goes (docs/design/profile.md).

- `cli`: the command line; `run`: the script under the recorder.
- `recorder`: what runs in the script's processes.
"""

from penstock.tools.profile.cli import command

__all__ = ["command"]
