"""Numbers as texts for people: bytes, times, metrics and ratios; and quantities that people write."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

SAME = "the same"
BYTES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}  # in seconds
_QUANTITY = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]+)", re.IGNORECASE)


def parse_quantity(text: str, units: Mapping[str, float]) -> float:
    """Return a number with a unit, times what `units` says of the unit; NaN if malformed or infinite.

    >>> parse_quantity("10 MB", BYTES), parse_quantity("1.5h", TIMES), parse_quantity("10", TIMES)
    (10000000.0, 5400.0, nan)
    """
    match = _QUANTITY.fullmatch(text)
    try:
        value = float(match[1]) * units[match[2].lower()] if match else math.nan
    except (ValueError, KeyError):
        return math.nan
    return value if math.isfinite(value) else math.nan


def format_bytes(value: float) -> str:
    """Return a number of bytes as a text with three digits and a unit (powers of 1000).

    >>> format_bytes(950), format_bytes(46_562_080), format_bytes(999_999)
    ('950 B', '46.6 MB', '1 MB')
    """
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    value = _three_digits(value)
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:g} {units[0]}"


def format_time(seconds: float) -> str:
    """Return a time as a text with three digits and a unit.

    >>> format_time(3.14159), format_time(90), format_time(86_400)
    ('3.14 s', '1.5 min', '1 d')
    """
    size, unit = time_unit(seconds)
    return f"{_three_digits(seconds / size):g} {unit}"


def time_unit(longest: float) -> tuple[float, str]:
    """Return the unit that suits a time of `longest` seconds: its length in seconds, and its name."""
    for size, unit in ((86_400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if longest >= size:
            return size, unit
    return 1.0, "s"


def format_metric(name: str, mean: float, std: float | None = None) -> str:
    """Return a metric as a text, with its standard deviation if given; accuracies are in percent.

    >>> format_metric("test_accuracy", 0.9712, 0.0031), format_metric("test_loss", 0.08765)
    ('97.1 ± 0.3%', '0.0877')
    """
    if is_share(name):
        return f"{100 * mean:.1f}%" if std is None else f"{100 * mean:.1f} ± {100 * std:.1f}%"
    return f"{mean:.3g}" if std is None else f"{mean:.3g} ± {std:.2g}"


def spell_out(name: str) -> str:
    """Return a name with spaces for underscores: `test_accuracy` becomes `test accuracy`."""
    return name.replace("_", " ")


def is_share(name: str) -> bool:
    """Return whether a metric is a share, such as an accuracy, which is shown in percent."""
    return name.endswith(("accuracy", "_acc"))


def lower_is_better(name: str) -> bool:
    """Return whether a metric is better when it is lower."""
    return any(word in name for word in ("loss", "error", "perplexity", "mse", "mae"))


def format_factor(ratio: float) -> str:
    """Return `ratio` in words: above 1, how many times fewer; below 1, how many times more.

    >>> format_factor(46.31), format_factor(4.631), format_factor(1.0), format_factor(0.5)
    ('46× fewer', '4.6× fewer', 'the same', '2.0× more')
    """
    if abs(ratio - 1) < 0.005:
        return SAME
    factor, word = (ratio, "fewer") if ratio > 1 else (1 / ratio, "more")
    # One decimal would show a factor close to 1 as "1.0× fewer".
    digits = 0 if factor >= 9.95 else 1 if factor >= 1.1 else 3
    return f"{factor:.{digits}f}× {word}"


def _three_digits(value: float) -> float:
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, 2 - math.floor(math.log10(abs(value))))
