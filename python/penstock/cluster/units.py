"""Quantities with units, as cluster files have them: ``1 Gbit/s``, ``20 ms``, ``128 KiB``, ``0.1 %``.

A number without a unit is refused: 1000 could be bits or bytes, kilo or mega. Values become whole numbers of the smallest unit,
so that what is written and read again is the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from penstock.cluster.places import Entry

__all__ = ["DELAY", "RATE", "SHARE", "SIZE", "Quantity"]


@dataclass(frozen=True)
class Quantity:
    """A kind of quantity: the units that a file may use, and each one's size in the smallest."""

    what: str
    example: str
    units: dict[str, int]
    smallest: str
    usual: str
    """The unit that an error suggests."""

    @property
    def pattern(self) -> str:
        """The texts of this quantity, as a regular expression."""
        return rf"[0-9]{{1,18}}(?:\.[0-9]{{1,18}})? ?(?:{'|'.join(map(re.escape, self.units))})"

    def read(self, entry: Entry) -> Fraction:
        """An entry's value in the smallest unit; it may be a fraction of one.

        Raises:
            penstock.errors.Config: it is another kind of value, or its unit is missing or unknown.
        """
        allowed = f"{self.what} with its unit, such as `{self.example}`"
        text = entry.shown_raw if entry.is_scalar else ""
        number = re.match(r"\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*(.*)", text)
        if number and number.group(1).startswith("-"):
            raise entry.wrong(f"must be {allowed}, not {text!r}, which is negative")
        if number and not number.group(2):
            raise entry.wrong(
                f"must be {allowed}: {text!r} has no unit; `{number.group(1)} {self.usual}`, for one, would have"
            )
        value = entry.text(allowed)
        if not re.fullmatch(self.pattern, value):
            if number and number.group(2) not in self.units:
                raise entry.wrong(f"must be {allowed}: {_hint(number.group(2), list(self.units))}")
            raise entry.wrong(f"must be {allowed}, not {text!r}")
        digits, unit = re.fullmatch(r"([0-9.]+) ?(.+)", value).groups()  # type: ignore[union-attr]
        return Fraction(digits) * self.units[unit]

    def show(self, value: int) -> str:
        """The text of a value in the smallest unit, with the largest unit that takes at most three decimals."""
        for unit, size in sorted(self.units.items(), key=lambda item: -item[1]):
            thousandths = Fraction(1000 * value, size)
            if value >= size and thousandths.denominator == 1:
                return f"{_decimal(Fraction(value, size))} {unit}"
        return f"{value} {self.smallest}"


def _decimal(value: Fraction) -> str:
    whole, rest = divmod(value, 1)
    return f"{whole}.{int(rest * 1000):03d}".rstrip("0").rstrip(".")


def _hint(unit: str, units: list[str]) -> str:
    meant = {each.lower().replace("/s", "ps").replace("bitps", "bps"): each for each in units}
    near = meant.get(unit.lower().replace("/s", "ps").replace("bitps", "bps"))
    there = f"the units are {', '.join(units)}"
    return f"there is no unit {unit!r}; {f'did you mean {near!r}? T' + there[1:] if near else there}"


RATE = Quantity(
    "a rate",
    "1 Gbit/s",
    {"bit/s": 1, "kbit/s": 10**3, "Mbit/s": 10**6, "Gbit/s": 10**9, "Tbit/s": 10**12},
    "bit/s",
    "Mbit/s",
)
DELAY = Quantity("a delay", "20 ms", {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}, "ns", "ms")
SIZE = Quantity(
    "a size",
    "128 KiB",
    {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30},
    "B",
    "KiB",
)
SHARE = Quantity("a share", "0.1 %", {"%": 1}, "%", "%")
