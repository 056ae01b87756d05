"""``penstock bench``: collectives measured beside other backends, and beside what the machine could do at best.

- `collectives`: what each collective is, as pure functions of ranks and bytes.
- `worker`, `collective_rank`, `probe_rank`: the rank processes. `pattern` fills and checks their tensors; `mesh` is the
  raw sockets.
- `session`: the coordinator, which has all backends take turns. `backends` names them.
- `sweep`: the command of a collective. `report`: its rows, table, JSON, chart and page.
- `planted`: trainings with something wrong in them, for `causes`; `breakdown`, `predictions`, `recording`: the profile, measured.
- `training`, `readiness`, `tuner`: subjects of their own, each with its command, its report and its ``_rank``; `program` runs
  those. `aggregated` is a package of three more. `figures`: the runs behind the published figures.
- `options`, `output`: what the commands share. `cli`: all of them under one name.

``docs/design/bench.md`` says how the figures are defined.
"""

from penstock.tools.bench.cli import command

__all__ = ["command"]
