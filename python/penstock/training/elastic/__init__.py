"""Jobs that outlive their workers: live, without a restart, or from the last checkpoint.

```text
  live     run(train, state)   a worker dies or comes ──> the others agree on the next generation ──> all get the state
                               of the member that committed most ──> train(state) goes on after that step
  restart  torchrun            a worker dies ──> torchrun starts all of them anew ──> Checkpoints.load(state)
```
- `run`: trains through deaths and arrivals; every worker is started by itself (docs/guide/elastic.md has the commands).
- `State`: what must survive: model, optimizer, sampler, step, values. ``commit()`` ends a step.
- `ElasticSampler`: batches whose order stays a partition of the epoch, whoever is there.
- `Checkpoints`: files that a death cannot spoil.

`membership` decides who is in a generation, `state` moves the state, `loop` holds both together, `store` is the small
process that outlives the workers.
"""

from __future__ import annotations

from penstock.training.elastic.checkpoints import Checkpoints
from penstock.training.elastic.loop import run
from penstock.training.elastic.membership import LeftBehind, StateLost, TooFew
from penstock.training.elastic.sampler import ElasticSampler
from penstock.training.elastic.state import MembershipChanged, State

__all__ = ["Checkpoints", "ElasticSampler", "LeftBehind", "MembershipChanged", "State", "StateLost", "TooFew", "run"]
