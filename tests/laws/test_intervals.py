"""Laws of sets of time: the fast code equals the bitmap, and what must not matter does not matter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from oracle import Span, owners, painted, runs
from slipstream.core.intervals import Int64Array, Intervals, owned, union

LOW, HIGH = -20, 20
FAR = 2**62 - 1  # times within +-FAR: every difference of two of them is an int64

times = st.integers(LOW, HIGH)
any_spans = st.lists(st.tuples(times, times), max_size=12)  # empty, reversed, touching, equal ones included
shifts = st.one_of(st.integers(-1000, 1000), st.sampled_from([-FAR - LOW, FAR - HIGH, 1712195495507888958]))


@st.composite
def stretches(draw: st.DrawFn) -> list[int]:
    """A strictly rising map of LOW..HIGH into +-FAR, gaps of one and of 2**61 among them."""
    edge = st.sampled_from([-FAR, -(2**61), 0, 2**61, FAR - 60])
    near = st.builds(int.__add__, edge, st.integers(0, 60))
    count = HIGH - LOW + 1
    return sorted(draw(st.sets(near, min_size=count, max_size=count)))


def columns(spans: Sequence[Span]) -> tuple[Int64Array, Int64Array]:
    table = np.array(spans, np.int64).reshape(-1, 2)
    return table[:, 0].copy(), table[:, 1].copy()


def of(spans: Sequence[Span]) -> Intervals:
    return union(*columns(spans))


def rows(starts: Int64Array, ends: Int64Array) -> list[Span]:
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def listed(found: Intervals) -> list[Span]:
    """The pieces of a set, after checking what every set promises."""
    assert found.starts.dtype == found.ends.dtype == np.int64
    pieces = rows(found.starts, found.ends)
    assert all(start < end for start, end in pieces)
    assert all(end < start for (_, end), (start, _) in pairwise(pieces))
    return pieces


def owned_rows(spans: Sequence[Span]) -> list[Span]:
    return rows(*owned(*columns(spans)))


# Equal to the bitmap


@given(any_spans)
def test_union_paints(spans: list[Span]) -> None:
    assert listed(of(spans)) == runs(painted(spans))
    assert of(spans).length == len(painted(spans))
    assert len(of(spans)) == len(runs(painted(spans)))


@given(any_spans, any_spans)
def test_intersect_paints(a: list[Span], b: list[Span]) -> None:
    assert listed(of(a).intersect(of(b))) == runs(painted(a) & painted(b))


@given(any_spans, any_spans)
def test_subtract_paints(a: list[Span], b: list[Span]) -> None:
    assert listed(of(a).subtract(of(b))) == runs(painted(a) - painted(b))


@given(any_spans, times, times)
def test_between_paints(spans: list[Span], start: int, end: int) -> None:
    assert listed(of(spans).between(start, end)) == runs(painted(spans) & painted([(start, end)]))


@given(any_spans, any_spans)
def test_covered_counts_painted_instants(spans: list[Span], queries: list[Span]) -> None:
    found = of(spans).covered(*columns(queries))
    assert found.dtype == np.int64
    assert found.tolist() == [len(painted(spans) & painted([query])) for query in queries]


@given(any_spans)
def test_owned_gives_each_instant_to_its_owner(spans: list[Span]) -> None:
    owner = owners(spans)
    for row, (start, end) in enumerate(owned_rows(spans)):
        assert set(range(start, end)) == {t for t in owner if owner[t] == row}


# Nothing is lost


@given(any_spans, any_spans)
def test_hidden_and_exposed_add_up(comm: list[Span], compute: list[Span]) -> None:
    hidden, exposed = of(comm).intersect(of(compute)), of(comm).subtract(of(compute))
    assert hidden.length + exposed.length == of(comm).length
    assert of(listed(hidden) + listed(exposed)).length == of(comm).length


@given(any_spans)
def test_owned_pieces_are_disjoint_and_add_up(spans: list[Span]) -> None:
    pieces = owned_rows(spans)
    assert all(start <= end for start, end in pieces)
    assert sum(end - start for start, end in pieces) == of(spans).length
    assert of(pieces).length == of(spans).length


@given(any_spans)
def test_owned_pieces_lie_in_their_spans(spans: list[Span]) -> None:
    for (start, end), (own_start, own_end) in zip(spans, owned_rows(spans), strict=True):
        assert start <= own_start <= own_end <= max(start, end)
        assert own_end == max(start, end)  # what is owned is the last part: others started before, none takes it back


# What must not matter


@given(any_spans, any_spans, shifts)
def test_shift_changes_nothing(a: list[Span], b: list[Span], by: int) -> None:
    assert_same_under(lambda t: t + by, a, b)


@given(any_spans, any_spans, stretches())
def test_size_of_the_numbers_changes_nothing(a: list[Span], b: list[Span], table: list[int]) -> None:
    """Up to the limits of int64: the same spans on a stretched clock give the same, stretched, answers."""
    assert_same_under(lambda t: table[t - LOW], a, b)


def assert_same_under(clock: Callable[[int], int], a: list[Span], b: list[Span]) -> None:
    def moved(spans: Sequence[Span]) -> list[Span]:
        return [(clock(start), clock(end)) for start, end in spans]

    near_a, near_b, far_a, far_b = of(a), of(b), of(moved(a)), of(moved(b))
    assert listed(far_a) == moved(listed(near_a))
    assert far_a.length == sum(end - start for start, end in moved(listed(near_a)))
    assert listed(far_a.intersect(far_b)) == moved(listed(near_a.intersect(near_b)))
    assert listed(far_a.subtract(far_b)) == moved(listed(near_a.subtract(near_b)))
    assert owned_rows(moved(a)) == moved(owned_rows(a))
    for start, end in b:
        inside = moved(listed(near_a.between(start, end)))
        assert listed(far_a.between(clock(start), clock(end))) == inside
        queried = far_a.covered(*columns([(clock(start), clock(end))]))
        assert queried.tolist() == [sum(e - s for s, e in inside)]


@given(any_spans, st.data())
def test_order_of_rows_changes_nothing(spans: list[Span], data: st.DataObject) -> None:
    """For `owned`: each distinct span owns the same; which of several equal rows owns it is the first one's luck."""
    shuffled = data.draw(st.permutations(spans))
    assert listed(of(shuffled)) == listed(of(spans))

    def each(table: list[Span]) -> Counter[tuple[Span, Span]]:
        return Counter(zip(table, owned_rows(table), strict=True))

    assert each(shuffled) == each(spans)


def cut(span: Span, at: int) -> list[Span]:
    return [(span[0], at), (at, span[1])] if span[0] <= at <= span[1] else [span]


@given(any_spans, times, any_spans)
def test_splitting_changes_no_set(spans: list[Span], at: int, queries: list[Span]) -> None:
    pieces = [piece for span in spans for piece in cut(span, at)]
    assert listed(of(pieces)) == listed(of(spans))
    assert of(pieces).covered(*columns(queries)).tolist() == of(spans).covered(*columns(queries)).tolist()
    assert sum(e - s for s, e in owned_rows(pieces)) == sum(e - s for s, e in owned_rows(spans))


@given(any_spans, st.tuples(times, times), times)
def test_splitting_moves_no_owned_time(others: list[Span], span: Span, at: int) -> None:
    """Unless another span starts before the cut and reaches it: that one then started before the second piece."""
    others = [s for s in others if not span[0] <= s[0] <= at <= s[1]]
    pieces = cut(span, at)
    whole, *rest = owned_rows([span, *others])
    split = owned_rows([*pieces, *others])
    assert split[len(pieces) :] == rest
    assert sum(e - s for s, e in split[: len(pieces)]) == whole[1] - whole[0]
