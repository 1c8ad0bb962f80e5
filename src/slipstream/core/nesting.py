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

    `owner` is -1 where no range is open. `parent[r]` is the range that was innermost when range `r` opened.
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
        """`(starts, ends, owner)` of the segments that belong to a range and are not empty."""
        if not len(self.starts):
            return self.starts, self.starts, self.owner
        starts, ends, owner = self.starts[:-1], self.starts[1:], self.owner[:-1]
        real = (owner >= 0) & (ends > starts)
        return starts[real], ends[real], owner[real]


def innermost(starts: Int64Array, ends: Int64Array) -> Segments:
    """Cut a thread into segments by the innermost of the ranges `starts[i], ends[i]`.

    Ranges that share an edge nest by length. Where two ranges cross, which nested calls cannot do but clocks
    sometimes make them do, the answer is one of the two.
    """
    count = len(starts)
    if not count:
        empty = np.empty(0, np.int64)
        return Segments(empty, empty, empty)
    ids = np.arange(count)
    times = np.concatenate((starts, ends))
    opens = np.concatenate((np.ones(count, np.int64), np.full(count, -1, np.int64)))
    length = np.concatenate((ends - starts, ends - starts))
    # At one instant: close before opening; open the longer first; close the shorter first; an empty range
    # opens and closes at once, so it closes after the opening.
    closing = np.where(opens < 0, np.where(length > 0, 0, 2), 1)
    inner = np.where(opens > 0, -length, length)
    order = np.lexsort((np.concatenate((ids, ids)), inner, closing, times))
    depth = np.cumsum(opens[order])
    opened = np.where(opens[order] > 0, np.concatenate((ids, ids))[order], -1)

    # After an edge at depth d, the innermost range is the last one that opened at depth d.
    by_depth = np.lexsort((np.arange(2 * count), depth))
    latest = np.where(opened[by_depth] >= 0, np.arange(2 * count), -1)
    latest = np.maximum.accumulate(latest)
    owner = np.empty(2 * count, np.int64)
    owner[by_depth] = np.where(latest >= 0, opened[by_depth][np.maximum(latest, 0)], -1)
    owner[depth <= 0] = -1

    before = np.concatenate(([-1], owner[:-1]))
    parent = np.full(count, -1, np.int64)
    is_open = opened >= 0
    parent[opened[is_open]] = before[is_open]
    return Segments(times[order], owner, parent)
