"""Times, bytes and shares for people: three significant digits, decimal units."""

from __future__ import annotations

import math
from collections.abc import Callable

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def digits(value: float) -> str:
    """``value`` with three significant digits and no exponent: 0.0123, 1.23, 12.3, 123, 1234."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(float(f'{value:.3g}')))))}f}"


def count(value: float) -> str:
    """A mean number of things: "16", "0.125"."""
    return str(int(value)) if value == int(value) else digits(value)


def seconds(value: float) -> str:
    """A time given in seconds: "3.66 s", "710 ms", "12.5 µs"."""
    unit, name = time_unit(value)
    return f"{digits(value / unit)} {name}"


def spread(value: float, half: float) -> str:
    """A time and half of its interval, both in seconds: "1.02 s ± 0.08"."""
    unit, name = time_unit(value)
    shown = digits(value / unit)
    rounded = f"{half / unit:.{len(shown.partition('.')[2])}f}"
    return f"{shown} {name} ± {rounded if float(rounded) else digits(half / unit)}"


def time_unit(largest: float) -> tuple[float, str]:
    """(seconds per unit, its name) in which a time of ``largest`` seconds reads well."""
    fitting = (row for row in _TIMES if float(f"{abs(largest):.3g}") >= row[0])
    return next(fitting, _TIMES[-1] if largest else _TIMES[0])


def nbytes(value: float) -> str:
    """An amount given in bytes: "244 MB", "1.20 GB", "12 B"."""
    for unit, name in _BYTES:
        if float(f"{abs(value):.3g}") >= unit:
            return f"{digits(value / unit)} {name}"
    return f"{value:.0f} B"


def byte_unit(largest: float) -> tuple[float, str]:
    """(bytes per unit, its name) in which an amount of ``largest`` bytes reads well."""
    return next((row for row in _BYTES if abs(largest) >= row[0]), (1.0, "B"))


def percent(share: float) -> str:
    """A share of one: "71 %"."""
    return f"{100 * share:.0f} %"


def ratio(value: float) -> str:
    """A speed-up: "5.15x"."""
    return f"{digits(value)}x"


def signed(value: float, words_of: Callable[[float], str]) -> str:
    """A difference in the words of ``words_of``: "+12.3 ms", "-4.1 GB", or "0"."""
    return "0" if not value else f"{'+' if value > 0 else '-'}{words_of(abs(value))}"
