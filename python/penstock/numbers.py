"""Numbers as people write them, with their units. One rounding for messages, text, charts and tables. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def number(value: float) -> str:
    """Without an exponent and without trailing zeros: ``1,200``, ``0.05``, ``0``."""
    text = f"{value:,.10f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def milliseconds(seconds: float) -> str:
    """``491.2 ms``: what is compared in one unit."""
    return f"{1e3 * seconds:.1f} ms"


def duration(seconds: float) -> str:
    """Three digits and the unit that fits: ``1.23 s``, ``88.1 ms``, ``45.2 µs``."""
    if seconds >= 0.9995:
        return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 0.9995e-3 else f"{seconds * 1e6:.3g} µs"


def size(nbytes: float) -> str:
    """Of memory and tensors: ``64 MiB``. What is no whole multiple is rounded to three digits."""
    return _three_digits(nbytes, ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")))


def traffic(nbytes: float) -> str:
    """What a network carries: ``117 MB``."""
    return _three_digits(nbytes, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")))


def byte_rate(bytes_per_s: float) -> str:
    """``117 MB/s``."""
    return f"{traffic(bytes_per_s)}/s"


def bit_rate(bit_per_s: float) -> str:
    """Four digits: ``422.2 Mbit/s``, from ten thousand on ``12.5 Gbit/s``; ``unlimited``."""
    if not math.isfinite(bit_per_s):
        return "unlimited"
    unit, name = (1e9, "Gbit/s") if bit_per_s >= 9999.5e6 else (1e6, "Mbit/s")
    return f"{bit_per_s / unit:.4g} {name}" if bit_per_s < 9999.5 * unit else f"{bit_per_s / unit:.0f} {name}"


def share(fraction: float) -> str:
    """``95%``."""
    return f"{fraction:.0%}"


def change(fraction: float) -> str:
    """``+1.2%``: by how much something is more, or less."""
    return f"{fraction:+.1%}"


def times(ratio: float) -> str:
    """``4.61 ×``."""
    return f"{ratio:.2f} ×"


def plural(count: int, thing: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count} {thing}{'s' if count != 1 else ''}"


def _three_digits(value: float, units: Sequence[tuple[float, str]]) -> str:
    for unit, name in units:
        if value >= 0.9995 * unit:
            return f"{value / unit:.3g} {name}" if value < 999.5 * unit else f"{value / unit:.0f} {name}"
    return f"{value:.0f} B"
