"""Which host work launched which device work, and what that tells about it.

A launch call and the span it started share a correlation id. The time and thread of the call then say what was
running on the host: the operator (for its input shapes), the process group's annotation (for what is communicated)
and the phase of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.core.intervals import Int64Array
from slipstream.core.nesting import innermost
from slipstream.core.timeline import NO_TIME, UNKNOWN
from slipstream.trace.columns import Table, lookup


@dataclass(frozen=True)
class Launches:
    """For each device span: when and on which host thread it was launched (`NO_TIME`, -1 where not recorded)."""

    time_ns: Int64Array
    thread: Int64Array


def find_launches(device: Table, calls: Table) -> Launches:
    """Join device spans with launch calls by correlation id."""
    row = lookup(calls["correlation"], device["correlation"])
    known = row >= 0
    safe = np.maximum(row, 0)
    if not len(calls):
        return Launches(np.full(len(device), NO_TIME, np.int64), np.full(len(device), UNKNOWN, np.int64))
    return Launches(
        np.where(known, calls["start"][safe], NO_TIME),
        np.where(known, calls["thread"][safe], UNKNOWN),
    )


def enclosing(ranges: Table, launches: Launches) -> Int64Array:
    """For each launch, the row of the innermost of `ranges` (start, end, thread) that was open; -1 for none."""
    found = np.full(len(launches.time_ns), UNKNOWN, np.int64)
    for rows, at in _by_thread(ranges["thread"], launches):
        segments = innermost(ranges["start"][rows], ranges["end"][rows])
        inside = segments.at(launches.time_ns[at])
        found[at] = np.where(inside >= 0, rows[np.maximum(inside, 0)], UNKNOWN)
    return found


def operators(device: Table, ops: Table, launches: Launches) -> Int64Array:
    """For each device span, the row in `ops` of the operator that launched it; -1 for none.

    The time of the launch call decides. Where calls were not recorded, the external id does, if it is one: in older
    traces it only repeats the correlation id.
    """
    found = enclosing(ops, launches)
    missing = found < 0
    external = device["external"]
    is_id = (external != device["correlation"]) & (external > 0)
    if missing.any() and is_id.any():
        by_id = lookup(ops["external"], np.where(missing & is_id, external, UNKNOWN))
        found = np.where(missing, by_id, found)
    return found


def take(values: Int64Array, rows: Int64Array, absent: int = UNKNOWN) -> Int64Array:
    """`values[rows]`, `absent` where the row is -1."""
    if not len(values):
        return np.full(len(rows), absent, np.int64)
    return np.where(rows >= 0, values[np.maximum(rows, 0)], absent).astype(np.int64)


def _by_thread(threads: Int64Array, launches: Launches) -> list[tuple[Int64Array, npt.NDArray[np.int64]]]:
    """Rows of the ranges and of the launches of each thread that has both."""
    pairs = []
    for thread in np.unique(launches.thread[launches.thread >= 0]):
        rows = np.flatnonzero(threads == thread)
        if len(rows):
            pairs.append((rows, np.flatnonzero(launches.thread == thread)))
    return pairs
