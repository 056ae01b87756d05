"""Settings, the axes on which they lie, and the space of all of them. Pure."""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

from penstock import renamed
from penstock.numbers import size

__all__ = ["Axis", "Point", "Setting", "Space"]

log = logging.getLogger("penstock.tune")


@renamed.arguments(unit_bytes="bucket_bytes")
@dataclass(frozen=True, order=True)
class Setting:
    """How gradients travel; one value for each thing that is tuned."""

    streams: int
    """Streams to each peer."""
    bucket_bytes: int
    """Bytes of a bucket: gradients are merged into, or split down to, buckets of one all-reduce each."""
    algorithm: str
    """ring, hierarchical or halving-doubling (docs/design/algorithms.md); auto: by the size of each bucket."""
    compression: str = "off"
    """off, bf16 or fp16: the dtype on the wire."""

    def __str__(self) -> str:
        return f"{self.streams} streams, {size(self.bucket_bytes)} buckets, {self.algorithm}, {self.compression}"

    @property
    def unit_bytes(self) -> int:
        """The old name of `bucket_bytes`."""
        renamed.warn("Setting.unit_bytes", "Setting.bucket_bytes")
        return self.bucket_bytes

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Setting:
        """Raises ValueError where a value is missing or of the wrong kind."""
        kinds = {"streams": int, "bucket_bytes": int, "algorithm": str, "compression": str}
        if not isinstance(document, Mapping) or set(document) != set(kinds):
            raise ValueError(f"a setting has {', '.join(kinds)}, not {document!r}")
        for name, kind in kinds.items():
            if type(document[name]) is not kind:
                raise ValueError(f"{name} must be of type {kind.__name__}, not {document[name]!r}")
        return cls(**document)


Point: TypeAlias = "tuple[int, ...]"
"""A setting as indices into the values of each axis."""


@dataclass(frozen=True)
class Axis:
    """The values that one field of a setting may take."""

    name: str
    values: tuple[Any, ...]
    ordered: bool
    """Whether neighbours in `values` behave alike, so that one can walk along them."""

    def nearest(self, value: Any, fallback: int) -> int:
        """The index of a value, or of the one that is closest by ratio; `fallback` where there is no order."""
        if value in self.values:
            return self.values.index(value)
        if not self.ordered or not isinstance(value, int) or value < 1:
            return fallback
        return min(range(len(self.values)), key=lambda index: abs(math.log(self.values[index] / value)))


class Space:
    """The settings that a tuner may try: every combination of the axes' values.

    A value that is pinned leaves the space by being the only one of its axis. The default setting is always in it.

    Args:
        axes: one a field of Setting, in any order; ordered axes hold ascending positive integers.
        default: what runs where nothing is known. Values of it that an axis lacks are put in their place.
    Raises:
        ValueError: axes that are not those of a setting, are empty, repeat a value or are not ascending.
    """

    def __init__(self, axes: Sequence[Axis], default: Setting) -> None:
        names = [field.name for field in fields(Setting)]
        by_name = {axis.name: axis for axis in axes}
        if sorted(by_name) != sorted(names) or len(axes) != len(names):
            raise ValueError(f"a space has the axes {', '.join(names)}, not {', '.join(axis.name for axis in axes)}")
        self.axes = tuple(_with_value(by_name[name], getattr(default, name)) for name in names)
        self.default = default

    @classmethod
    @renamed.arguments(most_unit_bytes="most_bucket_bytes")
    def standard(
        cls,
        default: Setting,
        *,
        max_streams: int = 64,
        most_bucket_bytes: int | None = None,
        algorithms: Sequence[str] = ("ring", "hierarchical", "halving-doubling"),
        compressions: Sequence[str] = (),
        pinned: Mapping[str, Any] | None = None,
    ) -> Space:
        """The space of the paper's settings.

        Args:
            default: the setting without tuning.
            max_streams: what was opened when the group was made; fewer can be used, more cannot.
            most_bucket_bytes: all there is to reduce; larger buckets than the first that holds it are left out.
            algorithms: those that this group can run.
            compressions: bf16 and fp16 where the user allows that gradients lose digits; off is always there.
            pinned: fields of Setting that the user has decided, with their values.
        Raises:
            ValueError: a pinned field that a setting does not have, or a default of more than `max_streams`.
        """
        if default.streams > max_streams:
            raise ValueError(f"the default of {default.streams} streams is more than the {max_streams} that are open")
        enough = BUCKET_BYTES[-1] if most_bucket_bytes is None else max(BUCKET_BYTES[0], 2 * most_bucket_bytes - 1)
        sizes = tuple(count for count in BUCKET_BYTES if count <= enough)
        axes = [
            Axis("streams", tuple(count for count in STREAMS if count <= max_streams), ordered=True),
            Axis("bucket_bytes", sizes, ordered=True),
            Axis("algorithm", tuple(algorithms), ordered=False),
            Axis("compression", tuple(dict.fromkeys(["off", *compressions])), ordered=False),
        ]
        pinned = dict(pinned or {})
        if unknown := set(pinned) - {axis.name for axis in axes}:
            raise ValueError(f"a setting has no {', '.join(sorted(unknown))} to pin")
        axes = [Axis(axis.name, (pinned[axis.name],), axis.ordered) if axis.name in pinned else axis for axis in axes]
        return cls(axes, Setting(**{**default.to_json(), **pinned}))

    @property
    def size(self) -> int:
        """How many settings there are."""
        return math.prod(len(axis.values) for axis in self.axes)

    def points(self) -> Iterator[Point]:
        """All points, the last axis fastest."""
        return itertools.product(*(range(len(axis.values)) for axis in self.axes))

    def setting(self, point: Point) -> Setting:
        values = {axis.name: axis.values[index] for axis, index in zip(self.axes, point, strict=True)}
        return Setting(**values)

    def point(self, setting: Setting) -> Point:
        """Raises ValueError where the setting is not in the space."""
        if setting not in self:
            raise ValueError(f"{setting} is not in the space")
        return tuple(axis.values.index(getattr(setting, axis.name)) for axis in self.axes)

    def nearest(self, setting: Setting) -> Setting:
        """The setting of this space that is closest to one from another: remembered, or written by hand."""
        default = self.point(self.default)
        return self.setting(
            tuple(
                axis.nearest(getattr(setting, axis.name), fallback)
                for axis, fallback in zip(self.axes, default, strict=True)
            )
        )

    def moved(self, point: Point, axis: int, by: int) -> Point | None:
        """The point so many places further along an axis; None beyond its end."""
        index = point[axis] + by
        return (*point[:axis], index, *point[axis + 1 :]) if 0 <= index < len(self.axes[axis].values) else None

    def __contains__(self, setting: object) -> bool:
        return isinstance(setting, Setting) and all(getattr(setting, axis.name) in axis.values for axis in self.axes)

    def to_json(self) -> dict[str, Any]:
        axes = [{"name": axis.name, "values": list(axis.values), "ordered": axis.ordered} for axis in self.axes]
        return {"axes": axes, "default": self.default.to_json()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Space:
        """Raises ValueError, KeyError or TypeError where the document is not one of `to_json`."""
        axes = [Axis(axis["name"], tuple(axis["values"]), bool(axis["ordered"])) for axis in document["axes"]]
        return cls(axes, Setting.from_json(document["default"]))


def with_new_names(document: Any) -> Any:
    """A record, a memory or a part of one, read from JSON. Old names that an earlier release wrote are replaced, with a warning
    in the log."""
    text = json.dumps(document)
    if '"unit_bytes"' not in text:
        return document
    log.warning("%s (in a tuner's record or memory)", renamed.message("unit_bytes", "bucket_bytes"))
    # In reasons that are written out, a setting is "16 streams, 4 MiB units, ring, off".
    return json.loads(text.replace('"unit_bytes"', '"bucket_bytes"').replace("B units, ", "B buckets, "))


def _with_value(axis: Axis, value: Any) -> Axis:
    values = axis.values
    if len(set(values)) != len(values):
        raise ValueError(f"axis {axis.name} repeats a value: {values}")
    if axis.ordered and (list(values) != sorted(values) or not all(isinstance(v, int) and v > 0 for v in values)):
        raise ValueError(f"axis {axis.name} must ascend through positive integers: {values}")
    if value not in values:
        values = tuple(sorted((*values, value))) if axis.ordered else (*values, value)
    return Axis(axis.name, values, axis.ordered)


# 64 is the most that PENSTOCK_STREAMS takes. Powers of two: measured rates change little in between.
STREAMS = (1, 2, 4, 8, 16, 32, 64)

# From one frame at its largest (256 KiB, ARCHITECTURE.md) to beyond DDP's bucket of 25 MiB and up to Horovod's old fusion
# buffer of 64 MiB.
BUCKET_BYTES = tuple(1 << exponent for exponent in range(18, 27))
