"""Which of many nested ranges is the innermost one, at every moment of a thread.

Host events of one thread nest like calls. Three questions about them have one answer, the thread cut into
segments that each belong to the innermost range: which operator launched this kernel, how long did an operator
work itself (without what it called), and which phase was running.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream.core.intervals import Int64Array


@dataclass(frozen=True, slots=True)
class Segments:
    """Consecutive pieces of one thread: from `starts[i]` to `starts[i + 1]` the innermost range is `owner[i]`.

    `owner` is -1 where no range is open; neighbours differ. `parent[r]` is the innermost range that holds all of
    range `r`, -1 for none.
    """

    starts: Int64Array
    owner: Int64Array
    parent: Int64Array

    def at(self, times: Int64Array) -> Int64Array:
        """The innermost range at each time, -1 for none."""
        if not len(self.starts):
            return np.full(len(times), -1, np.int64)
        index = np.searchsorted(self.starts, times, side="right") - 1
        return np.where(index >= 0, self.owner[np.maximum(index, 0)], -1)

    def pieces(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """`(starts, ends, owner)` of the segments that belong to a range."""
        belongs = self.owner[:-1] >= 0
        return self.starts[:-1][belongs], self.starts[1:][belongs], self.owner[:-1][belongs]


def innermost(starts: Int64Array, ends: Int64Array) -> Segments:
    """Cut a thread into segments by the innermost of the half-open ranges `starts[i], ends[i]`.

    Innermost is the range that opened last among those that are open; of those that open together the shortest,
    and of equal ones the last row. An empty range (`end <= start`) owns nothing and holds nothing, but has a
    parent. Calls nest; where clocks make two ranges cross all the same, the later one owns what they share and
    neither is the parent of the other.
    """
    order = np.lexsort((-ends, starts))
    opened, closed = starts[order], ends[order]

    edges = np.sort(np.concatenate((opened, closed)), kind="stable")
    latest = np.searchsorted(opened, edges, side="right") - 1
    owner = _last_above(closed, latest, edges)
    changes = np.diff(owner, prepend=-1) != 0

    # A parent opened earlier, is still open, and closes no earlier.
    parent = np.empty(len(starts), np.int64)
    parent[order] = _last_above(closed, np.arange(-1, len(starts) - 1), np.maximum(closed - 1, opened))
    names = np.append(order, -1)
    return Segments(edges[changes], names[owner[changes]], names[parent])


def _last_above(values: Int64Array, upto: Int64Array, threshold: Int64Array) -> Int64Array:
    """For each query, the largest `i <= upto` with `values[i] > threshold`, -1 for none.

    Walks a tree of maxima from the leaf to the left until a block holds an answer, then down to it, all queries
    at once: 2 log n rounds at most, and few for calls, whose answer is mostly near.
    """
    limits = np.iinfo(np.int64)
    leaves = 1 << len(values).bit_length()
    tree = np.full(2 * leaves, limits.min)
    tree[leaves] = limits.max  # stands for "none", so that every walk ends
    tree[leaves + 1 : leaves + 1 + len(values)] = values
    level = leaves
    while level > 1:
        tree[level // 2 : level] = tree[level : 2 * level].reshape(-1, 2).max(axis=1)
        level //= 2

    node = upto + leaves + 1
    active = np.flatnonzero(tree[node] <= threshold)
    while len(active):
        up = (node[active] - 1) >> 1  # holds the block to the left, and else only what is to be or was searched
        node[active] = up
        active = active[tree[up] <= threshold[active]]
    active = np.flatnonzero(node < leaves)
    while len(active):
        right = 2 * node[active] + 1
        node[active] = right - (tree[right] <= threshold[active])
        active = active[right < leaves]
    return node - leaves - 1
