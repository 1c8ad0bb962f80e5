from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.units import format_bytes, format_ns, format_rate, format_share


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (-0.3, "0 ns"),
        (999, "999 ns"),
        (999.6, "1.00 us"),
        (1_234_567, "1.23 ms"),
        (-1_234_567, "-1.23 ms"),
        (9_996, "10.0 us"),
        (99_960, "100 us"),
        (999_499, "999 us"),
        (999_500, "1.00 ms"),
        (999_999_999, "1.00 s"),
        (12_345_000_000_000, "12345 s"),
        (math.nan, "nan ns"),
    ],
)
def test_times(ns: float, text: str) -> None:
    assert format_ns(ns) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (512, "512 B"), (25_000_000, "25.0 MB"), (999_999, "1.00 MB"), (3 * 10**15, "3000 TB")],
)
def test_sizes(size: float, text: str) -> None:
    assert format_bytes(size) == text


def test_rates() -> None:
    assert format_rate(4.5e11) == "450 GB/s"


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (1, 0, "-"),
        (0, 5, "0 %"),
        (1, 3, "33 %"),
        (1, 30, "3.3 %"),
        (9.96, 100, "10 %"),
        (-50, 100, "-50 %"),
        (-1, 30, "-3.3 %"),
        (3, 2, "150 %"),
    ],
)
def test_shares(part: float, whole: float, text: str) -> None:
    assert format_share(part, whole) == text


@given(st.integers(1_000, 999 * 10**9), st.sampled_from([1, -1]))
def test_three_digits_and_half_a_percent(size: int, sign: int) -> None:
    scale = {"s": 10**9, "ms": 10**6, "us": 10**3}
    number, unit = format_ns(sign * size).split()
    assert len(number.lstrip("-").replace(".", "")) == 3
    assert float(number) * scale[unit] == pytest.approx(sign * size, rel=0.005)
