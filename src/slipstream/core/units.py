"""Units exist at the edge only: inside, time is int64 nanoseconds and sizes are int bytes."""

_TIME_STEPS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"))
_BYTE_STEPS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def format_ns(ns: int | float) -> str:
    """Write nanoseconds with three significant digits and the unit that fits: `1234567` -> `1.23 ms`."""
    return _in_fitting_unit(ns, _TIME_STEPS, "ns")


def format_bytes(size: int | float) -> str:
    """Write bytes in decimal units, the ones that links are sold in: `25000000` -> `25.0 MB`."""
    return _in_fitting_unit(size, _BYTE_STEPS, "B")


def format_rate(bytes_per_s: float) -> str:
    """Write a bandwidth: `4.5e11` -> `450 GB/s`."""
    return f"{format_bytes(bytes_per_s)}/s"


def format_share(part: int | float, whole: int | float) -> str:
    """Write a part of a whole in percent; `-` where there is no whole."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    return f"{percent:.0f} %" if abs(percent) >= 9.95 or percent == 0 else f"{percent:.1f} %"


def _in_fitting_unit(value: int | float, steps: tuple[tuple[int, str], ...], base: str) -> str:
    for step, unit in steps:
        if abs(value) >= 0.9995 * step:  # what would round to 1000 of the unit below
            return f"{_three_digits(value / step)} {unit}"
    return f"{value:z.0f} {base}"


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    if magnitude >= 99.95:  # would round to 100.0
        return f"{value:.0f}"
    return f"{value:.1f}" if magnitude >= 9.995 else f"{value:.2f}"
