"""What it costs this rank to send its gradients as float16: measured once, for the prediction of that change."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

__all__ = ["costs"]

_BYTES = 16 << 20
"""Of float32, as a large bucket: more than the caches next to a core, which take half as long."""
_TIMES = 3


def costs() -> tuple[float, float]:
    """Nanoseconds a byte of gradient, as DDP's `fp16_compress_hook` works: what is done before a bucket is sent, less the
    division that DDP does without a hook, and what is done once it has arrived. Some ms, on the calling thread."""
    with torch.no_grad():
        gradient = torch.ones(_BYTES // 4, dtype=torch.float32, device="cpu")
        sent = gradient.to(torch.float16)
        there = _shortest_ns(lambda: gradient.to(torch.float16).div_(2)) - _shortest_ns(lambda: gradient.div_(1))
        back = _shortest_ns(lambda: gradient.copy_(sent))
    return max(0.0, there / _BYTES), back / _BYTES


def _shortest_ns(work: Callable[[], object]) -> float:
    """Of a few times: the others lost their processor, or met cold memory."""
    took = []
    for _ in range(_TIMES):
        began = time.perf_counter_ns()
        work()
        took.append(time.perf_counter_ns() - began)
    return float(min(took))
