"""What a step would take with something changed, from sampled steps (`replay.py`).

Each prediction names the setting or command that makes the change, and how wrong it may be: how far the model is from the mean
step, how far that may be chance, and how far samples and possible wires differ in what the change does.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.numbers import bit_rate
from penstock.profiling.bounds import REACHED, streams_to_fill
from penstock.profiling.breakdown import SYNC
from penstock.profiling.cause import has_settings
from penstock.profiling.record import Record
from penstock.profiling.replay import Model, Move, Wire, burdened, evened, merged, models, run, wires
from penstock.profiling.schedules import (
    Order,
    gpipe,
    interleaved,
    one_forward_one_backward,
    period,
    pipeline,
    scheduled,
)
from penstock.profiling.sums import aggregated_bytes_s, by_host, sizes
from penstock.runtime.wire import sent_bytes

__all__ = ["Network", "Prediction", "predict"]

_CONVERSION = re.compile(r"(\d+\.\d+) ns a byte before it is sent, (\d+\.\d+) after")
FULL = 0.75
"""A link that carries less of what it can while something is on the wire is not what holds (docs/design/profile-causes.md)."""
ALWAYS = 0.9
"""For this part of the time on the wire a capped flow has something to send: 0.92 to 1.0 in 14 trainings with a cap. The rest is
the end of a collective, where the last bytes are added."""
FLOWS_CARRY = 1.25
"""Times what its flows get, by counters: where a wire carries more, no cap of flows holds. It was 1.09 in 1 of 6 trainings with
a cap, whose flows shared processors with what computes."""
CROSSES_MORE = 1.1
"""Headers and acknowledgements are some percent."""
INSIDE_PASSES = 2
"""Where nothing within hosts was seen, a byte there takes as many passes over memory, each as what converts: one rank writes it,
and another adds it."""
BACKEND_UNSURE = 0.2
"""More of a stated error, where another backend takes gloo's place on hosts with several ranks: what it costs their processors is
unknown. On links of 400 and 800 Mbit/s, which four ranks on two processors do not fill, 19 and 28 % were told too well."""
MOST_CHILDREN = 64
"""Of an aggregator."""
SCHEDULE_FITS = 0.15
"""Where the present schedule, run again from its passes, is further from the step than this, nothing is told of others."""

INTERLEAVED_UNSURE = 0.15
"""More of a stated error, where passes and messages come to lie beside others': after 7 such changes steps took longer than was
told, on hosts without a processor to spare (docs/design/profile-causes.md)."""


@dataclass(frozen=True)
class Network:
    """What is known of the network, besides what the samples show. 0: unknown."""

    link_bytes_s: float = 0
    """Of a rank's link, in one direction."""
    flow_bytes_s: float = 0
    """What one flow carries at most."""
    flow_busy: float = 1.0
    """Where a flow's cap holds: the share of the time on the wire in which the flows had something to send."""
    streams: int = 0
    """Streams between two ranks now."""
    backend: str = ""
    """As given to ``init_process_group``."""
    hosts: Mapping[int, str] = field(default_factory=dict)
    """By rank; a rank that is not there has one of its own."""
    crossing_bytes: float = 0
    """What the busiest host sends or receives in a step."""


@dataclass(frozen=True)
class Prediction:
    """What a change would bring."""

    change: str
    """In words, such as ``twice the link``."""
    how: str
    """The setting or command, or empty if money is needed."""
    before_ns: float
    """The measured step, mean over ranks and steps."""
    after_ns: float
    error: float
    """How wrong `after_ns` may be, as a part of it."""
    because: str
    """The numbers that it follows from."""
    settings: Mapping[str, str | float] = field(default_factory=dict)
    """The same change for `penstock profile --apply`: settings of Penstock, and what `recorder/changes.py` knows. Empty if it
    cannot be made without touching the script."""
    against: str = ""
    """The kind of cause (`cause.KINDS`) that it would take away, if it is one's."""

    @property
    def gain(self) -> float:
        """1.2: the step takes 1.2 times as long without the change."""
        return self.before_ns / self.after_ns if self.after_ns else 1.0


@dataclass
class _Told:
    """What is told of one job."""

    network: Network
    models: list[Model]
    wires: tuple[Wire, ...]
    conversions: tuple[float, float]
    """To float16 and back, in ns a byte of gradient."""
    has_ddp: bool
    """Whether a DistributedDataParallel or a GradientReducer may be there, which `recorder/changes.py` can change."""
    made: list[Prediction] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return 1e9 / self.wires[0].per_byte_ns if self.wires[0].per_byte_ns else 0.0

    @property
    def numbers(self) -> str:
        told = f"{_rate(self.rate)} on the wire, {self.wires[-1].latency_ns / 1e3:.0f} us an operation"
        return told + (" at most" if len(self.wires) > 1 else "")

    def add(
        self,
        change: str,
        how: str,
        changed: Callable[[Model, Wire], float],
        because: str = "",
        settings: Mapping[str, str | float] | None = None,
        *,
        against: str = "",
        now: Callable[[Model, Wire], float] | None = None,
        unsure: float = 0.0,
    ) -> None:
        """A prediction, unless it would be that ranks wait for ever.

        Args:
            changed: how long a step takes with the change.
            now: what that is compared with, instead of the step as it was run again.
            unsure: more of the stated error.
        """
        ratios, errors = [], []
        for model in self.models:
            for wire in self.wires:
                again = run(model, wire.takes)
                base = now(model, wire) if now else again
                if not base or not again or not model.measured_ns:
                    continue
                # What chance explains of the difference between the model and the mean step is in no other run.
                far, chance = model.measured_ns / again - 1, model.unsure_ns / model.measured_ns
                fit = 1 + math.copysign(max(0.0, abs(far) - chance), far)
                ratio = changed(model, wire) / base
                # It counts for no more than the change itself does: what changes nothing gains nothing.
                most = max(ratio, 1 / ratio) if ratio > 0 else math.inf
                ratios.append(ratio * min(max(fit * again / model.measured_ns, 1 / most), most))
                errors.append(abs(far) + chance + abs(base / again - 1))
        ratio = statistics.fmean(ratios) if ratios else math.inf
        if not math.isfinite(ratio):
            return
        before = statistics.fmean(model.measured_ns for model in self.models)
        rare = self.models[0].rare_ns  # no change here makes that shorter
        after = before * ratio + rare
        error = unsure + statistics.fmean(errors) + statistics.pstdev(ratios) / ratio if ratio else 0.0
        error *= before * ratio / after if after else 0.0
        because = because or self.numbers
        self.made.append(Prediction(change, how, before + rare, after, error, because, settings or {}, against))


def predict(records: Sequence[Record], network: Network | None = None) -> list[Prediction]:
    """What changes would bring, the best first. Empty without a sampled step that all ranks have.

    Cost: milliseconds for a thousand operations.
    """
    network = network or Network()
    found = models(records, network.hosts)
    idle = 1.0
    if network.flow_bytes_s:
        # While flows have something to send, bytes take the time; latency can take the rest.
        idle = 0.0 if network.flow_busy >= ALWAYS else 1 - network.flow_busy
    possible = wires(found, network.link_bytes_s, idle)
    found = [model for model in found if all(math.isfinite(run(model, wire.takes)) for wire in possible)]
    if not possible or not found:
        return []
    has_ddp = all(record.has_ddp for record in records)
    told = _Told(network, found, possible, _conversions(records), has_ddp)
    if not all(move.is_inside for model in found for move in model.moves):
        _links(told, is_host_by_host=_host_by_host(told))
        _aggregator(told)
    _float16(told)
    _buckets(told)
    even = "all ranks do what the median one does"
    told.add("no straggler", "", lambda model, wire: run(evened(model), wire.takes), even, against="straggler")
    _schedules(told)
    # What is sure to help comes before what may help more.
    return sorted(told.made, key=lambda each: each.after_ns * (1 + each.error))


def _faster(factor: float) -> Callable[[Model, Wire], float]:
    return lambda model, wire: run(model, wire._replace(per_byte_ns=wire.per_byte_ns / factor).takes)


def _smaller(part: Callable[[Move], float]) -> Callable[[Model, Wire], float]:
    return lambda model, wire: run(model, lambda move: wire.takes(move._replace(bytes=move.bytes * part(move))))


def _links(told: _Told, *, is_host_by_host: bool) -> None:
    """Another link, or more of the one that there is.

    Args:
        is_host_by_host: that is told already; where the backend is gloo, by the same setting.
    """
    network, rate = told.network, told.rate
    link, flow, streams = network.link_bytes_s, network.flow_bytes_s, network.streams

    def doubled(model: Model, wire: Wire) -> float:
        # Where something else holds, such as a flow's cap, the link has its part of the time only.
        of_link = 1e9 / link if link and rate < FULL * link else wire.per_byte_ns
        return run(model, wire._replace(per_byte_ns=wire.per_byte_ns - min(of_link, wire.per_byte_ns) / 2).takes)

    told.add("twice the link", "", doubled)
    if network.backend == "gloo" and 0 < rate < REACHED * link:
        if not is_host_by_host:
            told.add(
                "the penstock backend",
                "init_process_group('penstock')",
                _faster(REACHED * link / rate),
                f"{told.numbers}, of a link of {_rate(link)}, of which penstock uses {REACHED:.0%}",
                {"backend": "penstock"},
                against="flow cap",
            )
    elif has_settings(network.backend) and 0 < flow * streams < link and 0 < rate <= FLOWS_CARRY * flow * streams:
        # The median flow while it had something to send; together they carried this.
        flow = max(flow, rate / streams)
        usable = REACHED * link
        wanted = streams_to_fill(streams, flow * streams / link)
        told.add(
            f"{wanted} streams",
            f"PENSTOCK_STREAMS={wanted}",
            _faster(max(1.0, min(usable, wanted * flow) / (flow * streams))),
            f"{told.numbers}; {streams} flows of {_rate(flow)} on a link of {_rate(link)}",
            {"PENSTOCK_STREAMS": str(wanted)},
            against="flow cap",
        )


def _float16(told: _Told) -> None:
    there, back = told.conversions

    def part(move: Move) -> float:
        return 2 / max(2, move.element_bytes or 4) if _is_of_gradients(move) else 1.0

    def gradient(move: Move) -> float:
        """Bytes to convert."""
        return move.bytes / sent_bytes(1, len(move.ranks)) if part(move) < 1 and len(move.ranks) > 1 else 0.0

    def changed(model: Model, wire: Wire) -> float:
        busier = burdened(model, lambda move: there * gradient(move))
        return run(
            busier,
            lambda move: wire.takes(move._replace(bytes=move.bytes * part(move))) + back * gradient(move),
        )

    because = f"{told.numbers}; converting takes {there + back:.2f} ns a byte of gradient" if there or back else ""
    told.add(
        "gradients as float16 on the wire",
        "model.register_comm_hook(None, fp16_compress_hook) of DDP; or GradientReducer(model, wire=torch.float16)",
        changed,
        because,
        {"comm_hook": "float16"} if told.has_ddp else {},
        against="link",
    )


def _conversions(records: Sequence[Record]) -> tuple[float, float]:
    """What the recorder measured on the slowest rank; zeros if it did not."""
    found = [
        (float(known[1]), float(known[2]))
        for record in records
        for event in record.events
        if record.header.about.get("device") != "cuda"
        and event.kind == "float16"
        and (known := _CONVERSION.match(event.text))
    ]
    return max(found, key=sum, default=(0.0, 0.0))


def _buckets(told: _Told) -> None:
    for size in (4 << 20, 25 << 20, 100 << 20):
        # The setting would split what is larger, and what that brings is not known.
        if any(
            _is_of_gradients(move) and move.bytes > size * _factor(model)
            for model in told.models
            for move in model.moves
        ):
            continue

        def bucketed(model: Model, wire: Wire, size: int = size) -> float:
            return run(merged(model, size * _factor(model), _is_of_gradients), wire.takes)

        told.add(
            f"buckets of {size >> 20} MiB and more",
            f"DistributedDataParallel(model, bucket_cap_mb={size >> 20}), or bucket_bytes={size} of ddp_hook and GradientReducer",
            bucketed,
            settings={"bucket_cap_mb": size >> 20} if told.has_ddp else {},
            against="small buckets",
        )


def _aggregator(told: _Told) -> None:
    """Gradients summed by an aggregator."""
    network = told.network
    sums = [move for model in told.models for move in model.moves if _is_of_gradients(move) and not move.is_inside]
    most = max(sums, key=lambda move: len(move.ranks), default=None)
    if most is None:
        return
    each = sizes(network.hosts, most.ranks)
    count = len(most.ranks)
    if 2 < count <= MOST_CHILDREN and told.rate and (max(each) == 1 or network.link_bytes_s):
        # Where ranks share a link, only what is known of it tells its rate.
        link = told.rate if max(each) == 1 else network.link_bytes_s
        # All ranks' gradients come over its link, and the server's sum.
        rate = aggregated_bytes_s(network.hosts, most.ranks, link, wide=count + 1)
        factor = told.rate / rate / sent_bytes(1, count)
        told.add(
            "gradients summed by an aggregator",
            "penstock plan cluster.yaml -o deployment.yaml, then PENSTOCK_DEPLOYMENT=deployment.yaml",
            _smaller(lambda move: factor if _is_of_gradients(move) and len(move.ranks) == count else 1.0),
            f"{told.numbers}; each rank pushes and pulls {_rate(rate)}, by the planner's cost model, through an aggregator whose "
            f"link carries {_rate(link * (count + 1))} (behind one of {_rate(link)} it would be "
            f"{_rate(aggregated_bytes_s(network.hosts, most.ranks, link, wide=1))})",
        )


def _host_by_host(told: _Told) -> bool:
    """Gradients of which each host sends one sum, of its ranks. Returns whether it is told."""
    network, seen = told.network, told.wires[0].inside
    is_gloo = network.backend == "gloo"
    crossing = [move for move in told.models[0].moves if not move.is_inside]
    inside = seen or (0.0, INSIDE_PASSES * told.conversions[1])
    # What a host sends is counted of all operations together, so all must be such sums.
    if not all(map(_is_of_gradients, crossing)) or not any(inside) or not (is_gloo or has_settings(network.backend)):
        return False
    step_bytes = sum(move.bytes for move in crossing)
    least = sum(by_host(move, network.hosts)[0] for move in crossing)
    if not any(1 < max(sizes(network.hosts, move.ranks)) < len(move.ranks) for move in crossing):
        return False
    if network.crossing_bytes <= CROSSES_MORE * least:
        return False
    faster = max(1.0, REACHED * network.link_bytes_s / told.rate) if is_gloo and told.rate else 1.0

    def by_hosts(model: Model, wire: Wire, times: float = 1.0) -> float:
        def takes(move: Move) -> float:
            if move.is_inside or not _is_of_gradients(move):
                return wire.takes(move)
            across, within = by_host(move, network.hosts)
            per_byte_ns = wire.per_byte_ns * step_bytes / network.crossing_bytes / faster
            return wire.latency_ns + across * per_byte_ns + times * (inside[0] + within * inside[1])

        return run(model, takes)

    model, wire = told.models[0], told.wires[0]
    within = f"{_rate(1e9 / inside[1]) if inside[1] else 'all'} within hosts"
    told.add(
        "gradients summed host by host",
        "init_process_group('penstock'), which does so" if is_gloo else "PENSTOCK_ALGORITHM=hierarchical",
        by_hosts,
        f"{told.numbers}; a host sends {least / 1e6:.1f} MB a step instead of {network.crossing_bytes / 1e6:.1f}, and {within}"
        + ("" if seen else ", as fast as memory was converted")
        + (f"; of the link's {_rate(network.link_bytes_s)} penstock uses {REACHED:.0%}" if faster > 1 else ""),
        {"backend": "penstock"} if is_gloo else {"PENSTOCK_ALGORITHM": "hierarchical"},
        against="flow cap" if is_gloo else "",
        # What was not seen may take twice as long.
        unsure=BACKEND_UNSURE * is_gloo + (0.0 if seen else by_hosts(model, wire, 2.0) / by_hosts(model, wire) - 1),
    )
    return True


def _schedules(told: _Told) -> None:
    """Other schedules of a pipeline, from what its passes take."""
    found = pipeline(told.models[0])
    if found is None or any(pipeline(model) != found for model in told.models):
        return
    ranks = len(found.chains[0])

    def again(model: Model, wire: Wire) -> float:
        return period(scheduled(model, found), wire.takes)

    fits = [again(model, wire) / run(model, wire.takes) - 1 for model in told.models for wire in told.wires]
    if max(map(abs, fits)) > SCHEDULE_FITS:
        return

    def add(change: str, how: str, order: Order, *, stages: int = 1, unsure: float = 0.0) -> None:
        def changed(model: Model, wire: Wire) -> float:
            return period(scheduled(model, found, order, stages=stages), wire.takes)

        share = (ranks - 1) / (found.batches * stages + ranks - 1)
        because = (
            f"{told.numbers}; {ranks} stages and {found.batches} micro-batches; equal stages would stand still for "
            f"{share:.0%} of a step instead of {(ranks - 1) / (found.batches + ranks - 1):.0%}"
        )
        told.add(change, how, changed, because, against="bubble", now=again, unsure=unsure)

    if found.order is gpipe:
        how = "Schedule1F1B of torch.distributed.pipelining, which also holds fewer micro-batches"
        add("one forward, one backward", how, one_forward_one_backward)
    if found.batches % ranks == 0:
        how = "ScheduleInterleaved1F1B of torch.distributed.pipelining, with two stages a rank; "
        how += "Megatron: --num-layers-per-virtual-pipeline-stage of half a stage's layers"
        add("an interleaved schedule", how, interleaved(2), stages=2, unsure=INTERLEAVED_UNSURE)


def _is_of_gradients(move: Move) -> bool:
    """What DDP and GradientReducer sum. FSDP gathers parameters and scatters sums, for which it has settings of its own."""
    return move.purpose == SYNC and move.operation.rpartition(":")[2].lower().replace("_", "").startswith("allreduce")


def _factor(model: Model) -> float:
    """Bytes on the wire for one of a bucket."""
    return max((sent_bytes(1, len(move.ranks)) for move in model.moves if _is_of_gradients(move)), default=1.0)


def _rate(bytes_s: float) -> str:
    return bit_rate(8 * bytes_s)
