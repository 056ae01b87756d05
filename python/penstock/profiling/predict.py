"""What a step would take with something changed, from sampled steps (`replay.py`).

Each prediction names the setting or command that makes the change, and how wrong it may be: how far the model is from the steps
that it was made of, and how far its wire is from their operations.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.profiling.record import Record
from penstock.profiling.replay import Model, Move, Wire, evened, merged, models, run, wires
from penstock.runtime.wire import sent_bytes

__all__ = ["Network", "Prediction", "predict"]

SYNC = "data-parallel sync"
MOST_STREAMS = 64
"""That PENSTOCK_STREAMS takes."""
SHARE = 0.95
"""Of a link's payload that penstock reaches (docs/benchmarks)."""


@dataclass(frozen=True)
class Network:
    """What is known of the network, besides what the samples show. 0: unknown."""

    link_bytes_s: float = 0
    """Of a rank's link, in one direction."""
    flow_bytes_s: float = 0
    """What one flow carries at most."""
    streams: int = 0
    """Streams between two ranks now."""
    backend: str = ""
    """As given to ``init_process_group``."""


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

    @property
    def gain(self) -> float:
        """1.2: the step takes 1.2 times as long without the change."""
        return self.before_ns / self.after_ns if self.after_ns else 1.0


def predict(records: Sequence[Record], network: Network | None = None) -> list[Prediction]:
    """What changes would bring, the best first. Empty without a sampled step that all ranks have.

    Cost: milliseconds for a thousand operations.
    """
    found = models(records)
    network = network or Network()
    possible = wires(found, network.link_bytes_s)
    found = [model for model in found if all(math.isfinite(run(model, wire.takes)) for wire in possible)]
    if not possible or not found:
        return []
    if network.flow_bytes_s:
        # The flows always had something to send, so it was bytes that took the time.
        possible = possible[:1]
    before = statistics.fmean(model.measured_ns for model in found)
    rates = [1e9 / wire.per_byte_ns if wire.per_byte_ns else 0.0 for wire in possible]
    rate = rates[0]
    told = f"{_rate(rate)} on the wire"
    told += f", {possible[-1].latency_ns / 1e3:.0f} us an operation" + (" at most" if len(possible) > 1 else "")
    made: list[Prediction] = []

    def add(
        change: str,
        how: str,
        changed: Callable[[Model, Wire], float],
        because: str = told,
        settings: Mapping[str, str | float] | None = None,
    ) -> None:
        ratios, errors = [], []
        for model in found:
            for wire in possible:
                now = run(model, wire.takes)
                ratios.append(changed(model, wire) / now if now else 1.0)
                errors.append(abs(now / model.measured_ns - 1) if model.measured_ns else 0.0)
        ratio = statistics.fmean(ratios)
        if not math.isfinite(ratio):
            return
        error = statistics.fmean(errors) + statistics.pstdev(ratios) / ratio if ratio else 0.0
        made.append(Prediction(change, how, before, before * ratio, error, because, settings or {}))

    def faster(factor: float) -> Callable[[Model, Wire], float]:
        return lambda model, wire: run(model, lambda move: wire.latency_ns + move.bytes * wire.per_byte_ns / factor)

    def smaller(part: Callable[[Move], float]) -> Callable[[Model, Wire], float]:
        return lambda model, wire: run(model, lambda move: wire.latency_ns + move.bytes * part(move) * wire.per_byte_ns)

    def bucketed(size: int) -> Callable[[Model, Wire], float]:
        return lambda model, wire: run(merged(model, size * _factor(model), _is_of_gradients), wire.takes)

    add("twice the link", "", faster(2))
    add(
        "gradients as float16 on the wire",
        "model.register_comm_hook(None, fp16_compress_hook) of DDP; or GradientReducer(model, wire=torch.float16)",
        smaller(lambda move: 2 / max(2, move.element_bytes or 4) if _is_of_gradients(move) else 1.0),
        settings={"comm_hook": "float16"},
    )
    for size in (4 << 20, 25 << 20, 100 << 20):
        # The setting would split what is larger, and what that brings is not known.
        if any(
            _is_of_gradients(move) and move.bytes > size * _factor(model) for model in found for move in model.moves
        ):
            continue
        add(
            f"buckets of {size >> 20} MiB and more",
            f"DistributedDataParallel(model, bucket_cap_mb={size >> 20}), or bucket_bytes={size} of ddp_hook and GradientReducer",
            bucketed(size),
            settings={"bucket_cap_mb": size >> 20},
        )
    add("no straggler", "", lambda model, wire: run(evened(model), wire.takes), "all ranks do what the median one does")
    sync = [move for model in found for move in model.moves if move.purpose == SYNC]
    among = max((len(move.ranks) for move in sync if _is_of_gradients(move)), default=1)
    if among > 2:
        add(
            "gradients summed in the network",
            "penstock plan cluster.yaml -o deployment.yaml, then PENSTOCK_DEPLOYMENT=deployment.yaml",
            smaller(lambda move: 1 / sent_bytes(1, len(move.ranks)) if _is_of_gradients(move) else 1.0),
            f"{told}; a rank sends each byte once instead of {sent_bytes(1, among):.2f} times",
        )
    link, flow = network.link_bytes_s, network.flow_bytes_s
    if network.backend == "gloo" and 0 < rate < SHARE * link:
        add(
            "the penstock backend",
            "init_process_group('penstock')",
            faster(SHARE * link / rate),
            f"{told}, of a link of {_rate(link)}, of which penstock uses {SHARE:.0%}",
            {"backend": "penstock"},
        )
    elif 0 < flow * network.streams < link and 0 < rate <= 1.1 * flow * network.streams:
        wanted = min(MOST_STREAMS, -(-link // flow))
        add(
            f"{wanted:.0f} streams",
            f"PENSTOCK_STREAMS={wanted:.0f}",
            faster(max(1.0, min(link, wanted * flow) / (flow * network.streams))),
            f"{told}; {network.streams} flows of {_rate(flow)} on a link of {_rate(link)}",
            {"PENSTOCK_STREAMS": f"{wanted:.0f}"},
        )
    # What is sure to help comes before what may help more.
    return sorted(made, key=lambda each: each.after_ns * (1 + each.error))


def _is_of_gradients(move: Move) -> bool:
    """What DDP and GradientReducer sum. FSDP gathers parameters and scatters sums, for which it has settings of its own."""
    return move.purpose == SYNC and move.operation.rpartition(":")[2].lower().replace("_", "").startswith("allreduce")


def _factor(model: Model) -> float:
    """Bytes on the wire for one of a bucket."""
    return max((sent_bytes(1, len(move.ranks)) for move in model.moves if _is_of_gradients(move)), default=1.0)


def _rate(bytes_s: float) -> str:
    return f"{8 * bytes_s / 1e6:.0f} Mbit/s" if bytes_s < 125e6 else f"{8 * bytes_s / 1e9:.2f} Gbit/s"
