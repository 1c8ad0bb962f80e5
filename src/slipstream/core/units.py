"""Units exist at the edge only: inside, time is int64 nanoseconds and sizes are int bytes."""

_TIME_STEPS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"))
_BYTE_STEPS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def format_ns(ns: int | float) -> str:
    """Write nanoseconds with three significant digits and the unit that fits: `1234567` -> `1.23 ms`."""
    for step, unit in _TIME_STEPS:
        if abs(ns) >= step:
            return f"{_three_digits(ns / step)} {unit}"
    return f"{ns:.0f} ns"


def format_bytes(size: int | float) -> str:
    """Write bytes in decimal units, the ones that links are sold in: `25000000` -> `25.0 MB`."""
    for step, unit in _BYTE_STEPS:
        if abs(size) >= step:
            return f"{_three_digits(size / step)} {unit}"
    return f"{size:.0f} B"


def format_rate(bytes_per_s: float) -> str:
    """Write a bandwidth: `4.5e11` -> `450 GB/s`."""
    return f"{format_bytes(bytes_per_s)}/s"


def format_share(part: int | float, whole: int | float) -> str:
    """Write a part of a whole in percent; `-` where there is no whole."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    return f"{percent:.0f} %" if percent >= 10 or percent == 0 else f"{percent:.1f} %"


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    if magnitude >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if magnitude >= 10 else f"{value:.2f}"
