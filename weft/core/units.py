"""Units: format numbers with three significant digits and a unit."""

from __future__ import annotations

import math

TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
COUNTS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def time(seconds: float) -> str:
    """
    >>> time(0.00123), time(12.3456), time(0.0035), time(0)
    ('1.23 ms', '12.3 s', '3.50 ms', '0 s')
    """
    return _format(seconds, TIMES, "s")


def clock(seconds: float) -> str:
    """
    >>> clock(187), clock(3729)
    ('3:07', '1:02:09')
    """
    if not math.isfinite(seconds):
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(num_bytes: float) -> str:
    """
    >>> size(123_456_789), size(0)
    ('123 MB', '0 B')
    """
    return _format(num_bytes, SIZES, "B")


def count(number: float) -> str:
    """
    >>> count(1_234_567), count(12)
    ('1.23 M', '12.0')
    """
    return _format(number, COUNTS, "")


def short(text: str) -> str:
    """Strip the trailing zeros of a formatted number, for axis labels.

    >>> short("3.50 ms"), short("12.0"), short("500 µs")
    ('3.5 ms', '12', '500 µs')
    """
    number, _, unit = text.partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}".strip()


def _format(value: float, units: tuple[tuple[float, str], ...], zero_unit: str) -> str:
    if not math.isfinite(value):
        return "unknown"
    if not value:
        return f"0 {zero_unit}".strip()
    factor, unit = next((u for u in units if abs(value) >= 0.9995 * u[0]), units[-1])
    decimals = max(0, 2 - math.floor(math.log10(abs(value / factor) * 1.0005)))
    return f"{value / factor:,.{min(decimals, 3)}f} {unit}".strip()
