"""``penstock bench aggregated``: all-reduces through aggregators.

- `times`: how long they take, beside our ring, gloo, and a server without aggregators. `unauthenticated` sends packets
  without a key meanwhile.
- `faults`: whether results keep their bits while aggregators are killed. `training`: whether a model learns the same then.
  `quantised` says how far sums of integers may be from exact ones.
- `cluster`: the emulated racks that all three run on, with their daemons and deployments. `rank`, `striker`: what rank processes
  (`times_rank`, `faults_rank`, `training_rank`) share.
"""
