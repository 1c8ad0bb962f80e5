"""Decimal text to nanoseconds: exactly what `decimal` says, for every notation and every mixture of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from decimal import Context, Decimal, InvalidOperation

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.trace.times import INVALID, nanoseconds

EXACT = Context(prec=200)
LIMIT = 2**61


def oracle(text: bytes) -> int:
    try:
        ns = EXACT.multiply(Decimal(text.decode("ascii")), Decimal(1000))
    except (InvalidOperation, UnicodeDecodeError):
        return INVALID
    if not ns.is_finite() or abs(ns) >= LIMIT:
        return INVALID
    return int(ns.to_integral_value(context=EXACT))


def check(texts: Sequence[bytes]) -> None:
    found = nanoseconds(texts)
    assert found.dtype == np.int64
    assert found.tolist() == [oracle(text) for text in texts]


digits = st.integers(0, 10**17).map(str)
three_decimals = st.tuples(digits, st.integers(0, 999)).map(lambda part: f"{part[0]}.{part[1]:03d}")
any_decimals = st.tuples(digits, st.text("0123456789", max_size=12)).map(".".join)
exponents = st.tuples(any_decimals | digits, st.sampled_from("eE"), st.integers(-30, 30)).map(
    lambda part: f"{part[0]}{part[1]}{part[2]}"
)
negative = (digits | three_decimals | exponents).map(lambda text: "-" + text)
no_numbers = st.sampled_from(["", "null", "NaN", "Infinity", "-Infinity", "true", ".", "-", "e5", "1,2", "1 2", "0x1"])
numbers = digits | three_decimals | any_decimals | exponents | negative


@given(st.lists((numbers | no_numbers).map(str.encode), max_size=8))
@example([b"9" * 16])
@example([b"9" * 17])
@example([b"2305843009213693.951", b"2305843009213693.952"])
@example([b"2305843009213693", b"2305843009213694"])
@example([b"-2305843009213693.951", b"-2305843009213694"])
@example([b"9999999999999999.999"])
@example([b"0.000", b"00.000", b"007.000"])
@example([b"1.", b"2.5"])
@example([b"1,2", b"3"])
@example([b"1", b""])
def test_equals_decimal(texts: list[bytes]) -> None:
    check(texts)


@given(st.lists(three_decimals.map(str.encode), min_size=1, max_size=30))
def test_equals_decimal_where_all_have_three_decimals(texts: list[bytes]) -> None:
    check(texts)


@given(st.lists(digits.map(str.encode), min_size=1, max_size=30))
def test_equals_decimal_where_all_are_whole(texts: list[bytes]) -> None:
    check(texts)


def test_what_a_float_cannot_hold() -> None:
    assert nanoseconds([b"1712195495507888.958"]).tolist() == [1712195495507888958]
    assert round(float("1712195495507888.958") * 1000) != 1712195495507888958


def test_text_in_quotes() -> None:
    assert nanoseconds([b'"12.5"', b'" 7 "', b'""', b'"x"']).tolist() == [12_500, 7_000, INVALID, INVALID]


@pytest.mark.parametrize("text", [b"1e999999", b"-1e999999", b"1e9999999999", b"sNaN", b"9" * 100_000, b"\xff", b"[1]"])
def test_what_is_no_time(text: bytes) -> None:
    assert nanoseconds([b"1", text, b"2.5"]).tolist() == [1000, INVALID, 2500]


def test_less_than_a_nanosecond_is_rounded() -> None:
    assert nanoseconds([b"1.0004", b"1.0006", b"1e-9"]).tolist() == [1000, 1001, 0]


def test_none() -> None:
    assert nanoseconds([]).tolist() == []


def test_a_million_are_quick() -> None:
    """The common layouts are converted as whole columns."""
    for texts in ([b"1712195495507888.958"] * 1_000_000, [b"1712195495507888"] * 1_000_000):
        began = time.monotonic()
        nanoseconds(texts)
        assert time.monotonic() - began < 3
