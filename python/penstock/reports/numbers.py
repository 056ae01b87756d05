"""Numbers as people write them, with their units. One rounding for text, charts and tables. Pure."""

from __future__ import annotations


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
    """Such as ``64 MiB``; sizes that are no whole multiple are rounded to three digits."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= 0.9995 * unit:
            return f"{nbytes / unit:.3g} {name}" if nbytes < 999.5 * unit else f"{nbytes / unit:.0f} {name}"
    return f"{nbytes:.0f} B"


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
