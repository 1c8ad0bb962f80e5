"""Laws of nesting: the fast code equals a walk along the clock with a stack, for calls and for crossing ranges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from oracle import Span, call_stack, painted
from slipstream.core.intervals import union
from slipstream.core.nesting import Segments, innermost

FAR = 2**62 - 200
times = st.integers(-15, 15)
any_ranges = st.lists(st.tuples(times, times), max_size=12)  # crossing, empty and reversed ones included


@dataclass
class Calls:
    """Ranges that nest, row by row with the caller before its callees, and the truth about them."""

    ranges: list[Span] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)


def grow(draw: st.DrawFn, calls: Calls, start: int, end: int, parent: int, depth: int) -> None:
    """Fill `start, end` with callees that may touch each other and the edges, and may fill it entirely."""
    while depth and start < end and draw(st.booleans()):
        begin = draw(st.integers(start, end))
        stop = draw(st.integers(begin, end))
        row = len(calls.ranges)
        calls.ranges.append((begin, stop))
        calls.parent.append(parent)
        grow(draw, calls, begin, stop, row, depth - 1)
        start = stop


@st.composite
def call_trees(draw: st.DrawFn) -> Calls:
    calls = Calls()
    grow(draw, calls, draw(times), draw(st.integers(15, 30)), -1, 4)
    return calls


ranges_of_calls = call_trees().map(lambda calls: calls.ranges)
all_ranges = st.one_of(ranges_of_calls, any_ranges)


def cut(ranges: Sequence[Span], by: int = 0) -> Segments:
    table = np.array(ranges, np.int64).reshape(-1, 2) + by
    return innermost(table[:, 0], table[:, 1])


def owner_at(segments: Segments, instants: Sequence[int]) -> list[int]:
    found: list[int] = segments.at(np.array(instants, np.int64)).tolist()
    return found


# Equal to the stack


@given(all_ranges)
def test_owner_is_the_top_of_the_stack(ranges: list[Span]) -> None:
    top, _ = call_stack(ranges)
    clock = range(-20, 35)
    assert owner_at(cut(ranges), clock) == [top.get(t, -1) for t in clock]


@given(all_ranges)
def test_parent_is_the_stack_below(ranges: list[Span]) -> None:
    assert cut(ranges).parent.tolist() == call_stack(ranges)[1]


@given(all_ranges)
def test_pieces_are_the_answers_of_at(ranges: list[Span]) -> None:
    top, _ = call_stack(ranges)
    pieces = list(zip(*(column.tolist() for column in cut(ranges).pieces()), strict=True))
    assert {t: owner for start, end, owner in pieces for t in range(start, end)} == {
        t: owner for t, owner in top.items() if owner >= 0
    }
    assert sum(end - start for start, end, _ in pieces) == len(painted(ranges))


# What calls promise


@given(call_trees())
def test_parent_of_a_call_is_its_caller(calls: Calls) -> None:
    """Of a call that takes time: one that takes none at a shared edge could be on either side."""
    found = cut(calls.ranges).parent.tolist()
    for row, (start, end) in enumerate(calls.ranges):
        assert found[row] == calls.parent[row] or start == end


@given(call_trees())
def test_self_time_is_length_without_callees(calls: Calls) -> None:
    expected = [end - start for start, end in calls.ranges]
    for (start, end), parent in zip(calls.ranges, calls.parent, strict=True):
        if parent >= 0:
            expected[parent] -= end - start
    starts, ends, owner = cut(calls.ranges).pieces()
    found = [0] * len(calls.ranges)
    for row, length in zip(owner.tolist(), (ends - starts).tolist(), strict=True):
        found[row] += length
    assert found == expected


# What holds for crossing ranges too


@given(all_ranges)
def test_an_owner_is_open_for_all_of_its_piece(ranges: list[Span]) -> None:
    segments = cut(ranges)
    for start, end, row in zip(*(column.tolist() for column in segments.pieces()), strict=True):
        assert ranges[row][0] <= start < end <= ranges[row][1]
    assert all(a != b for a, b in zip(segments.owner[:-1], segments.owner[1:], strict=True))
    assert np.all(segments.starts[1:] > segments.starts[:-1])


@given(all_ranges)
def test_pieces_cover_what_the_ranges_cover(ranges: list[Span]) -> None:
    starts, ends, _ = cut(ranges).pieces()
    table = np.array(ranges, np.int64).reshape(-1, 2)
    whole = union(table[:, 0], table[:, 1])
    assert int(np.sum(ends - starts)) == whole.length == union(starts, ends).length


@given(all_ranges)
def test_a_parent_holds_its_child(ranges: list[Span]) -> None:
    for row, parent in enumerate(cut(ranges).parent.tolist()):
        if parent >= 0:
            start, end = ranges[row]
            assert ranges[parent][0] <= start <= max(start, end) <= ranges[parent][1]


@given(all_ranges, st.sampled_from([-FAR, -1000, 1, 1712195495507888958, FAR]))
def test_shift_changes_nothing(ranges: list[Span], by: int) -> None:
    near, far = cut(ranges), cut(ranges, by)
    assert (far.starts - by).tolist() == near.starts.tolist()
    assert far.owner.tolist() == near.owner.tolist()
    assert far.parent.tolist() == near.parent.tolist()


@given(all_ranges, st.data())
def test_order_of_rows_changes_only_which_of_equal_ranges(ranges: list[Span], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(ranges))
    near, far = cut(ranges), cut(shuffled)

    def named(table: list[Span], rows: list[int]) -> list[Span | None]:
        return [table[row] if row >= 0 else None for row in rows]

    clock = range(-20, 35)
    assert named(shuffled, owner_at(far, clock)) == named(ranges, owner_at(near, clock))
    far_parents, near_parents = named(shuffled, far.parent.tolist()), named(ranges, near.parent.tolist())
    assert Counter(zip(shuffled, far_parents, strict=True)) == Counter(zip(ranges, near_parents, strict=True))


@given(any_ranges, st.tuples(times, times))
def test_an_empty_range_owns_nothing(ranges: list[Span], span: Span) -> None:
    empty = (max(span), min(span))
    clock = range(-20, 35)
    assert owner_at(cut([*ranges, empty]), clock) == owner_at(cut(ranges), clock)


def test_no_ranges() -> None:
    nothing = cut([])
    assert owner_at(nothing, [0, 5]) == [-1, -1]
    assert [len(column) for column in nothing.pieces()] == [0, 0, 0]
    assert owner_at(cut([(3, 3)]), [2, 3, 4]) == [-1, -1, -1]


def test_crossing_ranges_by_example() -> None:
    """The later one owns what they share, and once it is over the earlier one has what is left."""
    assert owner_at(cut([(0, 10), (5, 15), (8, 20)]), [4, 5, 8, 10, 15, 19, 20]) == [0, 1, 2, 2, 2, 2, -1]
    assert owner_at(cut([(0, 30), (5, 15), (8, 20)]), [4, 5, 8, 15, 20, 30]) == [0, 1, 2, 2, 0, -1]
    assert cut([(0, 30), (5, 15), (8, 20)]).parent.tolist() == [-1, 0, 0]
