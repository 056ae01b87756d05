"""Landscapes for the tuner's tests: what a training step costs under each setting.

*Recorded* ones rest on all-reduces that were measured on emulated links (recordings/landscapes.json says how). *Simulated* ones
rest on a formula. In both, a step is a forward pass and a backward pass that readies the gradients' bytes evenly; a bucket
leaves when its last byte is ready and the bucket before it is through; the step ends when the backward pass and the last
bucket do. Noise, outliers and the cost of changing a setting are drawn from a seed.
"""

from __future__ import annotations

import json
import math
import pathlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from penstock.training.tune.space import Setting, Space

MIB = 1 << 20
DEFAULT = Setting(streams=16, bucket_bytes=16 * MIB, algorithm="ring")
"""Where tuning starts on these landscapes, but for `level`. The product's default is 16 streams, 4 MiB, auto (on these links a
ring); docs/design/tuner.md says so beside the figures that rest on this one."""


@dataclass(frozen=True)
class Landscape:
    """The noiseless seconds of a step under each setting of a space."""

    name: str
    space: Space
    seconds: dict[Setting, float]

    @property
    def best(self) -> Setting:
        return min(self.seconds, key=self.seconds.__getitem__)

    def regret(self, setting: Setting) -> float:
        """How much longer than under the best setting a step takes: 0.05 for 5 %."""
        return self.seconds[setting] / self.seconds[self.best] - 1


class Job:
    """A training job on a landscape: gives each step its noisy cost."""

    def __init__(self, landscape: Landscape, seed: int, noise: float, *, bursts: bool = False) -> None:
        self.landscape = landscape
        self.noise = noise
        self._random = random.Random(seed)
        self._setting: Setting | None = None
        self._bursts = bursts
        self._burst_left, self._burst = 0, 1.0

    def step(self, setting: Setting) -> float:
        """Seconds of a step. Noise is log-normal; one step in 50 takes 1.5 to 3 times as long, and so, up to twice, does
        one after a change. With ``bursts``, one step in 40 begins 3 to 10 that take 1.3 to 3 times as long, all alike."""
        cost = self.landscape.seconds[setting] * math.exp(self._random.gauss(0, self.noise))
        if self._random.random() < 0.02:
            cost *= self._random.uniform(1.5, 3)
        if setting != self._setting:
            cost *= self._random.uniform(1, 2)
        self._setting = setting
        if self._bursts and not self._burst_left and self._random.random() < 1 / 40:
            self._burst_left, self._burst = self._random.randint(3, 10), self._random.uniform(1.3, 3)
        if self._burst_left:
            self._burst_left -= 1
            cost *= self._burst
        return cost


def recorded(link: str) -> Landscape:
    """A step on a link of recordings/landscapes.json; bucket sizes between the recorded ones are interpolated by ratio."""
    document = json.loads((pathlib.Path(__file__).parent / "recordings" / "landscapes.json").read_text())
    times: dict[tuple[int, str], dict[int, float]] = {}
    for streams, nbytes, algorithm, median, *_ in document["links"][link]["rows"]:
        times.setdefault((streams, algorithm), {})[nbytes] = median
    space = Space.standard(DEFAULT, max_streams=32, algorithms=("ring", "halving-doubling"))

    def bucket_seconds(setting: Setting) -> float:
        known = times[setting.streams, setting.algorithm]
        below = max(size for size in known if size <= setting.bucket_bytes)
        above = min(size for size in known if size >= setting.bucket_bytes)
        share = 0.0 if below == above else math.log(setting.bucket_bytes / below) / math.log(above / below)
        return known[below] ** (1 - share) * known[above] ** share

    return _landscape(f"recorded {link}", space, bucket_seconds)


def simulated(
    name: str,
    *,
    link: float,
    flow: float,
    latency: float,
    shared: float = 1.0,
    cost_of_streams: float = 2e-4,
    cost_of_conversion: float = 1e-10,
    max_streams: int = 64,
    gradient_bytes: int = 64 * MIB,
    compute: tuple[float, float] = (0.2, 0.4),
) -> Landscape:
    """A step on a link that a formula describes: 16 ranks on 4 hosts.

    Args:
        link: bytes a second between hosts. flow: the most that one stream gets of them.
        latency: seconds of a hop, and of a bucket's start.
        shared: how many rings of ranks cross a link where ranks are not ordered by host; hierarchical crosses it once.
        cost_of_streams: seconds a bucket and stream. cost_of_conversion: seconds a byte of compression.
    """
    space = Space.standard(DEFAULT, max_streams=max_streams, compressions=("bf16", "fp16"))

    def bucket_seconds(setting: Setting) -> float:
        wire = setting.bucket_bytes / (1 if setting.compression == "off" else 2)
        # fp16 is converted with a check for overflow, which bf16 does not need.
        conversion = {"off": 0.0, "bf16": 1.0, "fp16": 1.5}[setting.compression] * cost_of_conversion
        hops, factor, sharing = {
            "ring": (30, 1.9, shared),
            "hierarchical": (10, 1.5 * 1.1, 1.0),
            "halving-doubling": (8, 1.9 * 1.15, shared),
        }[setting.algorithm]
        rate = min(link, setting.streams * flow)
        return (
            hops * latency
            + factor * sharing * wire / rate
            + cost_of_streams * setting.streams
            + conversion * setting.bucket_bytes
        )

    return _landscape(f"simulated {name}", space, bucket_seconds, gradient_bytes, compute)


def level(slower: float) -> Landscape:
    """A step where the default is the best: other settings take longer in proportion to how far they are from it, the furthest
    by this share. The space is that of two hosts with 11 MB of gradients."""
    default = Setting(streams=16, bucket_bytes=4 * MIB, algorithm="auto")
    space = Space.standard(
        default, max_streams=16, most_bucket_bytes=11_000_000, algorithms=("auto", "halving-doubling")
    )

    def steps(setting: Setting) -> float:
        away = [math.log2(setting.streams / default.streams), math.log2(setting.bucket_bytes / default.bucket_bytes)]
        return sum(map(abs, away)) + 2 * (setting.algorithm != default.algorithm)

    settings = [space.setting(point) for point in space.points()]
    furthest = max(map(steps, settings))
    return Landscape(
        f"level, {slower:.0%}", space, {each: 0.15 * (1 + slower * steps(each) / furthest) for each in settings}
    )


def _landscape(
    name: str,
    space: Space,
    bucket_seconds: Callable[[Setting], float],
    gradient_bytes: int = 64 * MIB,
    compute: tuple[float, float] = (0.2, 0.4),
) -> Landscape:
    forward, backward = compute
    seconds = {}
    for setting in map(space.setting, space.points()):
        buckets = math.ceil(gradient_bytes / setting.bucket_bytes)
        each, end = bucket_seconds(setting), 0.0
        for bucket in range(1, buckets + 1):
            ready = backward * min(1.0, bucket * setting.bucket_bytes / gradient_bytes)
            end = max(end, ready) + each
        seconds[setting] = forward + max(backward, end)
    return Landscape(name, space, seconds)


RECORDED = {link: recorded(link) for link in ("capped", "plain", "uneven")}

SIMULATED = {
    landscape.name.removeprefix("simulated "): landscape
    for landscape in (
        simulated("capped", link=1.2e8, flow=2.5e7, latency=1e-4),
        simulated("distant", link=1.2e9, flow=4e7, latency=5e-3),
        simulated("scattered", link=1.2e9, flow=1.2e9, latency=5e-5, shared=4.0),
        simulated("fast", link=1e10, flow=1e10, latency=2e-5, cost_of_conversion=1e-9),
    )
}
