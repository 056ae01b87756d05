"""Couples the tuner (`penstock.tune`) to gradients: applies the setting of each step, and measures the step's cost.

```text
  first gradient of a pass   have all decided alike? ──> Tuner.begin_step ──> Reducer.apply     (nothing is in flight yet)
  end of the pass            seconds since the end of the last one ──all-reduce, MAX──> Tuner.end_step
```
A step lasts from the end of one synchronised backward pass to the end of the next, so the optimizer, the data and passes under
``no_sync`` are in it. Where the setting may change, the end of a pass waits for the slowest rank's seconds, decides, and starts
a second exchange: only when it has shown that all ranks have decided alike does the setting change. Else there is
one exchange a step, which runs while the script goes on. Rank 0 alone reads settings, files and memory, and tells the others.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from penstock import _core
from penstock.errors import Config as ConfigError
from penstock.errors import PenstockError
from penstock.extras import need
from penstock.runtime import config, groups
from penstock.runtime.wire import sent_bytes
from penstock.training.tune import (
    Entry,
    Graph,
    Memory,
    Options,
    Setting,
    Space,
    State,
    Tuner,
    load_record,
    model_graph,
    parameter_graph,
    save_record,
    topology_graph,
)

__all__ = ["Tune", "Tuning", "agree", "apply", "space_of"]

log = logging.getLogger("penstock.tune")

Tune: TypeAlias = "bool | Options | Setting | Mapping[str, Any] | str | os.PathLike[str] | None"
"""What ``tune=`` takes: see `penstock.torch.GradientReducer`."""


def agree(tune: Tune, group: Any) -> dict[str, Any]:
    """Rank 0's choices, on all ranks: its ``streams`` and ``algorithm``; and, for tuning, ``options`` (or the ``setting`` to pin)
    and ``record``, the file to write. Blocks until rank 0 has called it.

    Raises:
        penstock.errors.Config: (on all ranks) rank 0 cannot make sense of what it was given, or lacks scipy.
    """
    agreed: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            agreed = [_asked_for(tune)]
        except Exception as error:  # whatever it is, the other ranks wait for an answer
            agreed = [{"error": f"{error}"}]
    dist.broadcast_object_list(agreed, _root(group), group=group)
    found: dict[str, Any] = agreed[0]
    if "error" in found:
        raise ConfigError(f"tune: {found['error']}")
    return found


def apply(core: _core.Reducer, setting: Setting) -> None:
    """Put a setting in force, on all ranks between the same two steps.

    Raises:
        penstock.errors.Bug: something is in flight. Nothing has changed.
        penstock.errors.Config: the gradients or the group do not support the compression or the algorithm.
    """
    if setting.compression not in WIRES:
        raise ConfigError(f"no compression {setting.compression!r}: there are {', '.join(WIRES)}")
    try:
        core.apply(
            bucket_bytes=setting.bucket_bytes,
            wire=WIRES[setting.compression],
            algorithm=None if setting.algorithm == AUTO else setting.algorithm,
            streams=setting.streams,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def space_of(
    default: Setting, hosts: Sequence[int], gradient_bytes: int, pinned: Mapping[str, Any], *, open_streams: int
) -> Space:
    """The settings that are worth trying in a group.

    Args:
        default: what runs without a tuner; its compression is the one that is allowed.
        hosts: of each rank.
        gradient_bytes: of all gradients; larger buckets are all alike.
        pinned: the fields that the user has decided.
        open_streams: to a rank, at the most.
    """
    # Between ranks of one host, memory is read: no stream carries anything, and what `auto` chooses reads least.
    several = len(set(hosts)) > 1
    algorithms = [AUTO]
    if several and len(hosts) > 2:
        # The choice is a ring for all buckets of these sizes, or hierarchical where ranks share hosts.
        algorithms += ["halving-doubling"] if len(set(hosts)) == len(hosts) else ["ring", "halving-doubling"]
    return Space.standard(
        default,
        max_streams=default.streams,
        most_bucket_bytes=gradient_bytes,
        algorithms=algorithms,
        compressions=[default.compression],
        pinned={**({} if several and open_streams > 1 else {"streams": default.streams}), **pinned},
    )


def _open_streams(buckets: groups.Membership) -> int:
    """How many streams this rank has to another one of the group, at the most."""
    peers = buckets.engine.core.stats()["peers"]
    return max((len(peer["streams"]) for peer in peers if peer["rank"] in buckets.job_ranks), default=0)


class Tuning:
    """Runs a tuner on a reducer of gradients. All ranks make it, and call it at the same places.

    Args:
        agreed: what `agree` gave, with ``options`` or a ``setting``.
        core: the reducer. It is idle.
        buckets: its channel of buckets.
        member: a channel of its own, for the exchanges.
        group: the process group of the same ranks.
        default: what is in force now.
        model: a module, or the parameters.
        timeout_s: of an exchange.
    """

    def __init__(
        self,
        agreed: Mapping[str, Any],
        core: _core.Reducer,
        buckets: groups.Membership,
        member: groups.Membership,
        group: Any,
        *,
        default: Setting,
        model: torch.nn.Module | Sequence[torch.nn.Parameter],
        timeout_s: float,
    ) -> None:
        self._core, self._member, self._timeout_s = core, member, timeout_s
        self._default = self.setting = default
        self._record_path = agreed["record"]
        self._report: tuple[torch.Tensor, _core.Ticket] | None = None
        self._ended: float | None = None
        self._graphs: tuple[Graph, Graph] | None = None
        if "setting" in agreed:
            self.tuner = Tuner.pinned(Setting.from_json(agreed["setting"]))
            self._apply(self.tuner.best)
            return
        hosts = buckets.group.hosts()
        if isinstance(model, torch.nn.Module):
            sizes = [one.nbytes for one in model.parameters() if one.requires_grad]
        else:
            sizes = [one.nbytes for one in model]
        bandwidth = _bandwidth(hosts, group)
        # Of rank 0, so that all try the same.
        remembered: list[Any] = [None, _open_streams(buckets)]
        if member.rank == 0:
            self._graphs = _graph_of(model), _topology(hosts, bandwidth)
            match = Memory().nearest(*self._graphs)
            if match is not None:
                remembered[0] = {"setting": match.entry.setting.to_json(), "near": match.near}
                log.info(
                    "begins at what served a job at distance %.2f (model %.2f, topology %.2f): %s",
                    match.distance,
                    match.model_distance,
                    match.topology_distance,
                    match.entry.setting,
                )
        dist.broadcast_object_list(remembered, _root(group), group=group)
        known, open_streams = remembered
        pinned = {"algorithm": agreed["algorithm"]} if agreed["algorithm"] else {}
        self.tuner = Tuner(
            space_of(default, hosts, sum(sizes), pinned, open_streams=open_streams),
            options=Options.from_json(agreed["options"]),
            remembered=Setting.from_json(known["setting"]) if known else None,
            near=bool(known and known["near"]),
        )

    def begin(self) -> None:
        """The first gradient of a pass is there. Waits for an exchange that began at the end of the last pass, and puts the
        setting for this step in force."""
        if self._report is not None:
            self._take()
        setting = self.tuner.begin_step()
        if setting != self.setting:
            self._apply(setting)

    def end(self) -> None:
        """All gradients of the pass are reduced: a step ends."""
        if self.tuner.state is State.PINNED:
            return
        self._exchange(None if self._ended is None else clock() - self._ended)
        if not self.tuner.holds:
            # The ranks have just met in the last bucket: this waits for little more than the way there and back. What it then
            # takes to decide counts for no step.
            self._take()
            self._exchange(None)
        self._ended = clock()

    def exclude_pause(self) -> None:
        """The step that is under way is not timed."""
        self._ended = None

    def close(self) -> None:
        """Put back what others may use: the streams. Write the record."""
        with contextlib.suppress(PenstockError):
            self._apply(self._default)
        self._save()

    def _exchange(self, seconds: float | None) -> None:
        """Start to all-reduce what this step cost (nothing, if `seconds` is None), and what was decided so far."""
        if self.tuner.state is State.PINNED:
            return
        fingerprint = float(self.tuner.fingerprint())
        report = torch.tensor([seconds or 0.0, float(seconds is None), fingerprint, -fingerprint], dtype=torch.float64)
        ticket = self._member.group.start(
            "all_reduce",
            dtype="float64",
            elements=report.numel(),
            bytes=report.nbytes,
            input=0,
            output=report.data_ptr(),
            op="max",
            timeout_s=self._timeout_s,
            keep=report.untyped_storage(),
        )
        self._report, self._member.last = (report, ticket), ticket

    def _take(self) -> None:
        """Wait for the exchange, and let the tuner decide, on all ranks at the same place."""
        assert self._report is not None
        (report, ticket), self._report = self._report, None
        ticket.wait()
        self._member.last = None
        seconds, untimed, most, least = report.tolist()
        if most != -least:
            log.warning(
                "rank %d: the tuners of the ranks have decided differently; all go on with the default (%s) and tune no more. "
                "Please report this, with the processors of the hosts.",
                self._member.rank,
                self.tuner.space.default,
            )
            self.tuner = Tuner.pinned(self.tuner.space.default)
        elif not untimed:
            before = self.tuner.state
            self.tuner.end_step(seconds)
            if before is State.TUNING and self.tuner.state is State.WATCHING:
                self._remember()

    def _apply(self, setting: Setting) -> None:
        apply(self._core, setting)
        self.setting = setting

    def _remember(self) -> None:
        if self._graphs is not None and self.tuner.cost is not None:
            Memory().remember(Entry(*self._graphs, self.tuner.best, self.tuner.cost))
        self._save()

    def _save(self) -> None:
        if self._record_path and self._member.rank == 0:
            try:
                save_record(self._record_path, self.tuner.record())
            except OSError as error:
                log.warning("the tuner's record cannot be written (PENSTOCK_TUNE_RECORD): %s", error)


def _asked_for(tune: Tune) -> dict[str, Any]:
    """What `agree` sends to the other ranks, on rank 0.

    Raises:
        OSError, ValueError: a record that cannot be read, or holds no choice.
        penstock.errors.Config: something else.
    """
    settings = config.read()
    found: dict[str, Any] = {"streams": settings.streams, "algorithm": settings.algorithm}
    if tune is None:
        tune = settings.tune
    if tune is False:
        return found
    found["record"] = str(Path(settings.tune_record).absolute()) if settings.tune_record else ""
    if tune is True:
        tune = Options()
    elif isinstance(tune, (str, os.PathLike)):
        tune = load_record(tune)
    if isinstance(tune, Options):
        need("a tuner", "scipy")
        return {**found, "options": tune.to_json()}
    if isinstance(tune, Setting):
        return {**found, "setting": tune.to_json()}
    if isinstance(tune, Mapping):
        return {**found, "setting": Tuner.from_record(tune).best.to_json()}
    raise ConfigError(f"it takes True, False, Options, a Setting, a record or its file, not {type(tune).__name__}")


def _graph_of(model: torch.nn.Module | Sequence[torch.nn.Parameter]) -> Graph:
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    return model_graph(model) if isinstance(model, torch.nn.Module) else parameter_graph([one.numel() for one in model])


def _topology(hosts: Sequence[int], bandwidth: float) -> Graph:
    count = len(set(hosts))
    pairs = {(a, b): bandwidth for a in range(count) for b in range(a + 1, count)}
    return topology_graph([("cpu", hosts.count(host)) for host in range(count)], pairs)


def _bandwidth(hosts: Sequence[int], group: Any) -> float:
    """Bytes a second that an all-reduce gets over each host's link with the default setting, the same number on all ranks; 0
    where there is one host. Rounded to quarters of an octave: what differs less is the same link."""
    count = len(set(hosts))
    if count < 2:
        return 0.0
    tensor = torch.zeros(PROBE_BYTES // 4)
    seconds = torch.tensor(math.inf, dtype=torch.float64)
    for _ in range(PROBES):
        started = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        seconds.clamp_(max=time.perf_counter() - started)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    carried = sent_bytes(PROBE_BYTES, count) / float(seconds)
    return 2.0 ** (round(4 * math.log2(carried)) / 4)


def _root(group: Any) -> int:
    return 0 if group is None else dist.get_global_rank(group, 0)


clock: Callable[[], float] = time.perf_counter
"""The clock for steps, in seconds."""

WIRES = {"off": None, "fp16": "float16", "bf16": "bfloat16"}
"""The tuner's words for what is on the wire, and torch's."""

AUTO = "auto"
"""The algorithm is chosen by size and hosts."""

# Three times 2 MiB: half a second at 100 Mbit/s. The first one finds out the rates of the streams.
PROBE_BYTES = 2 << 20
PROBES = 3
