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
        return np.maximum(self._before(ends) - self._before(starts), 0)

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
        edges = np.unique(np.concatenate((self.starts, self.ends, other.starts, other.ends)))
        return _select(edges, self._contains(edges[:-1]) & other._contains(edges[:-1]))

    def subtract(self, other: Intervals) -> Intervals:
        """The time that is in this set and not in the other."""
        edges = np.unique(np.concatenate((self.starts, self.ends, other.starts, other.ends)))
        return _select(edges, self._contains(edges[:-1]) & ~other._contains(edges[:-1]))

    def between(self, start: int, end: int) -> Intervals:
        """The part of this set inside one window."""
        if end <= start:
            return EMPTY
        return self.intersect(Intervals(np.array([start], np.int64), np.array([end], np.int64)))

    def _contains(self, times: Int64Array) -> npt.NDArray[np.bool_]:
        if not len(self):
            return np.zeros(len(times), np.bool_)
        index = np.searchsorted(self.starts, times, side="right")
        inside: npt.NDArray[np.bool_] = (index > 0) & (times < self.ends[np.maximum(index - 1, 0)])
        return inside


EMPTY = Intervals(np.empty(0, np.int64), np.empty(0, np.int64))


def union(starts: Int64Array, ends: Int64Array) -> Intervals:
    """Merge any intervals, in any order, into a set. Empty ones (`end <= start`) vanish, touching ones fuse."""
    real = ends > starts
    if not real.all():
        starts, ends = starts[real], ends[real]
    if not len(starts):
        return EMPTY
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    reach = np.maximum.accumulate(ends[order])
    first = np.concatenate(([True], starts[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return Intervals(starts[first], reach[last])


def owned(starts: Int64Array, ends: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Give each instant of the union to exactly one interval: the earliest started among those that cover it.

    Returns `(own_starts, own_ends)` in the order of the input; an interval that owns nothing gets an empty one.
    The pieces are disjoint and their lengths add up to the length of the union, which is what lets a total be
    attributed to its parts without remainder. Ties (equal starts) go to the longest, then to the first row.
    """
    order = np.lexsort((-ends, starts))
    reach = np.maximum.accumulate(ends[order])
    free_from = np.concatenate(([np.iinfo(np.int64).min], reach[:-1]))[: len(order)]
    own_starts, own_ends = starts.copy(), np.maximum(ends, starts)
    own_starts[order] = np.minimum(np.maximum(starts[order], free_from), own_ends[order])
    return own_starts, own_ends


def _select(edges: Int64Array, chosen: npt.NDArray[np.bool_]) -> Intervals:
    """Union of the elementary pieces `edges[i], edges[i + 1]` that are chosen."""
    return union(edges[:-1][chosen], edges[1:][chosen])
