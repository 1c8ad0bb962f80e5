"""Sets of time, as sorted, disjoint, half-open intervals of int64 nanoseconds.

This is the only place where intervals are merged or intersected. Everything is a whole-array operation in
O(n log n); the oracle in the tests paints the same intervals into a bitmap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Intervals:
    """A set of time: `starts[i] < ends[i] < starts[i + 1]`, so touching and empty intervals never occur.

    Build one with `union`; the constructor trusts its arguments.
    """

    starts: Int64Array
    ends: Int64Array

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def length(self) -> int:
        """Total time covered, in nanoseconds."""
        return int(np.sum(self.ends - self.starts))

    def covered(self, starts: Int64Array, ends: Int64Array) -> Int64Array:
        """For each query interval, the nanoseconds of it that lie in this set (queries may overlap each other)."""
        return (self._before(ends) - self._before(starts)).clip(min=0)

    def _before(self, times: Int64Array) -> Int64Array:
        """For each time, the length of the part of this set that lies before it."""
        if not len(self):
            return np.zeros(len(times), np.int64)
        passed = np.concatenate(([0], np.cumsum(self.ends - self.starts)))
        index = np.searchsorted(self.starts, times, side="right")
        last = np.maximum(index - 1, 0)
        beyond = np.maximum(self.ends[last] - times, 0)
        return np.where(index > 0, passed[index] - beyond, 0).astype(np.int64)

    def intersect(self, other: Intervals) -> Intervals:
        """The time that is in both sets."""
        few, many = (self, other) if len(self) <= len(other) else (other, self)
        # Both are sorted, so each of the few meets one run of the many. Pieces of disjoint, non-touching sets
        # are disjoint and do not touch: the result needs no merging.
        first = np.searchsorted(many.ends, few.starts, side="right")
        met = np.searchsorted(many.starts, few.ends, side="left") - first
        mine = np.repeat(np.arange(len(few)), met)
        theirs = np.arange(len(mine)) + np.repeat(first - (np.cumsum(met) - met), met)
        return Intervals(
            np.maximum(few.starts[mine], many.starts[theirs]), np.minimum(few.ends[mine], many.ends[theirs])
        )

    def subtract(self, other: Intervals) -> Intervals:
        """The time that is in this set and not in the other."""
        gaps = Intervals(np.concatenate(([_LIMITS.min], other.ends)), np.concatenate((other.starts, [_LIMITS.max])))
        return self.intersect(gaps)

    def between(self, start: int, end: int) -> Intervals:
        """The part of this set inside one window."""
        if end <= start:
            return EMPTY
        return self.intersect(Intervals(np.array([start], np.int64), np.array([end], np.int64)))


_LIMITS = np.iinfo(np.int64)
EMPTY = Intervals(np.empty(0, np.int64), np.empty(0, np.int64))


def union(starts: Int64Array, ends: Int64Array) -> Intervals:
    """Merge any intervals, in any order, into a set. Empty ones (`end <= start`) vanish, touching ones fuse."""
    real = ends > starts
    if not real.all():
        starts, ends = starts[real], ends[real]
    if not len(starts):
        return EMPTY
    if not (starts[1:] >= starts[:-1]).all():  # rows of a Timeline come sorted
        order = np.argsort(starts, kind="stable")  # fast on runs, and several lanes put together are runs
        starts, ends = starts[order], ends[order]
    reach = np.maximum.accumulate(ends)
    first = np.concatenate(([True], starts[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return Intervals(starts[first], reach[last])


def owned(starts: Int64Array, ends: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Give each instant of the union to exactly one interval: the earliest started among those that cover it.

    Returns `(own_starts, own_ends)` in the order of the input; an interval that owns nothing gets an empty one.
    The pieces are disjoint and their lengths add up to the length of the union, which is what lets a total be
    attributed to its parts without remainder. Ties (equal starts) go to the longest, then to the first row.
    Cutting an interval in two keeps the total, but its second piece loses to what started before the cut.
    """
    order = np.lexsort((-ends, starts))
    reach = np.maximum.accumulate(ends[order])
    free_from = np.concatenate(([_LIMITS.min], reach[:-1]))[: len(order)]
    own_starts, own_ends = starts.copy(), np.maximum(ends, starts)
    own_starts[order] = np.minimum(np.maximum(starts[order], free_from), own_ends[order])
    return own_starts, own_ends
