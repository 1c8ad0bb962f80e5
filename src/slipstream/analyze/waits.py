"""Waiting against transfer: which part of a collective's time passed before its last rank had entered it.

A collective ends on all its ranks together, so the rank that was in it for the shortest time entered last, and its
time is the transfer; what the others were in it beyond that, they waited. This needs no common clock. The ends,
compared over many collectives, tell how far apart the ranks' clocks are and how well the assumption holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.analyze.overlap import Overlap
from slipstream.core.intervals import Int64Array
from slipstream.core.timeline import UNKNOWN, Collective, Group, Kind, Timeline

POINT_TO_POINT = frozenset({"send", "recv", "send_recv"})
"""Operations between some ranks of a group: the others pass them by, so they cannot be matched by counting."""

Key = tuple[Group, int, int | None, int]
"""Group, number of the lane where the group has no name, step where the collective has no number, its number."""


@dataclass(frozen=True, slots=True)
class RankWaits:
    """One rank's part in the waiting.

    wait_ns, exposed_wait_ns   how long it waited in collectives, and how much of that was not hidden
    times_last, awaited_ns     how often it came last, and the exposed time that others spent waiting for it
    """

    rank: int
    wait_ns: int
    exposed_wait_ns: int
    times_last: int
    awaited_ns: int


@dataclass(frozen=True, slots=True)
class Waits:
    """Waiting and transfer of all collectives that could be matched across ranks.

    wait_ns, transfer_ns   arrays a timeline, aligned with the rows of its `Shares`; -1 where not matched
    members                how many ranks each was matched on, likewise
    matched, unmatched     instances, counted once however many ranks they have
    clock_offset_ns        each timeline's clock against the first's; clock_error_ns: what the ends still differ by
                           after that (95th percentile), None where nothing was matched
    partial                some collectives were not recorded on all of their ranks: waiting is a lower bound
    """

    wait_ns: tuple[Int64Array, ...]
    transfer_ns: tuple[Int64Array, ...]
    members: tuple[Int64Array, ...]
    ranks: tuple[RankWaits, ...]
    matched: int
    unmatched: int
    clock_offset_ns: tuple[int, ...]
    clock_error_ns: int | None
    partial: bool


def measure(timelines: Sequence[Timeline], overlaps: Sequence[Overlap]) -> Waits | None:
    """Match collectives across ranks; None if there is only one rank (and device)."""
    if len({(timeline.rank, timeline.device) for timeline in timelines}) < 2:
        return None
    matches, unmatched, partial = _match(timelines, overlaps)
    waits = [np.full(len(overlap.shares.rows), UNKNOWN, np.int64) for overlap in overlaps]
    transfers = [values.copy() for values in waits]
    sharing = [values.copy() for values in waits]
    exposed_wait = np.zeros(len(timelines), np.int64)
    awaited = np.zeros(len(timelines), np.int64)
    last = np.zeros(len(timelines), np.int64)
    compute = [timeline.busy(Kind.COMPUTE) for timeline in timelines]
    for members, table in matches:
        length = _gather(members, table, timelines, overlaps, "durations_ns")
        transfer = length.min(axis=0)
        latest = np.array(members)[length.argmin(axis=0)]
        last += np.bincount(latest, minlength=len(timelines))
        for position, member in enumerate(members):
            shares = overlaps[member].shares
            rows = table[position]
            waits[member][rows] = length[position] - transfer
            transfers[member][rows] = transfer
            sharing[member][rows] = len(members)
            entered_last = np.minimum(shares.ends[rows], timelines[member].end_ns[shares.rows[rows]] - transfer)
            until = np.maximum(entered_last, shares.starts[rows])
            bare = until - shares.starts[rows] - compute[member].covered(shares.starts[rows], until)
            exposed_wait[member] += bare.sum()
            np.add.at(awaited, latest, bare)
    offsets, error = _clocks(matches, timelines, overlaps)
    ranks = tuple(
        RankWaits(
            timeline.rank,
            int(waits[i][waits[i] > 0].sum()),
            int(exposed_wait[i]),
            int(last[i]),
            int(awaited[i]),
        )
        for i, timeline in enumerate(timelines)
    )
    count = sum(table.shape[1] for _, table in matches)
    return Waits(tuple(waits), tuple(transfers), tuple(sharing), ranks, count, unmatched, offsets, error, partial)


Match = tuple[list[int], Int64Array]
"""Timelines that share collectives, and for each the positions in its `Shares` (one column an instance)."""


def _match(timelines: Sequence[Timeline], overlaps: Sequence[Overlap]) -> tuple[list[Match], int, bool]:
    """Match instances by group and number within the group: the recorded one, else the place within the step."""
    by_bucket: dict[Key, dict[int, list[tuple[str, int]]]] = defaultdict(dict)
    present: dict[Group, set[tuple[int, str]]] = defaultdict(set)
    for index, (timeline, overlap) in enumerate(zip(timelines, overlaps, strict=True)):
        for bucket, entries in _buckets(timeline, overlap).items():
            by_bucket[bucket][index] = entries
            present[bucket[0]].add((timeline.rank, timeline.device))
    found: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)
    unmatched, partial = 0, False
    for (group, *_), members in by_bucket.items():
        expected = group.size or len(group.ranks) or len(present[group])
        partial |= max(expected, len(present[group])) > len(members)
        counts = {len(entries) for entries in members.values()}
        one_group = len(group.ranks) >= expected or len(present[group]) <= expected
        if len(members) < 2 or len(counts) > 1 or not one_group:
            unmatched += max(counts)
            continue
        order = sorted(members)
        for instance in zip(*(members[index] for index in order), strict=True):
            if len({op for op, _ in instance}) == 1:
                found[tuple(order)].append([position for _, position in instance])
            else:
                unmatched += 1
    matches = [(list(order), np.array(rows, np.int64).T) for order, rows in found.items()]
    return matches, unmatched, partial


def _buckets(timeline: Timeline, overlap: Overlap) -> dict[Key, list[tuple[str, int]]]:
    """Collectives of one timeline, in order, by group and recorded number, or step: (operation, position in shares).

    Groups of one name whose ranks are not recorded may be several; `_match` finds out by their size.
    """
    buckets: dict[Key, list[tuple[str, int]]] = defaultdict(list)
    rows = overlap.shares.rows
    lanes = list(dict.fromkeys(timeline.lane[rows].tolist()))
    columns = (timeline.collective[rows], timeline.lane[rows], timeline.step[rows], timeline.sequence[rows])
    for position, (which, lane, step, number) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        collective = timeline.collectives[which] if which != UNKNOWN else Collective("unknown")
        if collective.op in POINT_TO_POINT:
            continue
        group = Group(collective.group.name, "", collective.group.size, collective.group.ranks)
        unnamed = lanes.index(lane) if not group.name else 0
        step_number = timeline.steps[step].number if step != UNKNOWN and number == UNKNOWN else None
        buckets[group, unnamed, step_number, number].append((collective.op, position))
    return buckets


def _gather(
    members: list[int], table: Int64Array, timelines: Sequence[Timeline], overlaps: Sequence[Overlap], column: str
) -> Int64Array:
    """A column of the matched spans: one row a member, one column an instance."""
    values = [
        getattr(timelines[member], column)[overlaps[member].shares.rows[rows]]
        for member, rows in zip(members, table, strict=True)
    ]
    return np.array(values, np.int64)


def _clocks(
    matches: list[Match], timelines: Sequence[Timeline], overlaps: Sequence[Overlap]
) -> tuple[tuple[int, ...], int | None]:
    """Offset of each clock against the first one it can be compared with, and what is left after removing it."""
    offsets = np.zeros(len(timelines), np.int64)
    known = np.zeros(len(timelines), np.bool_)
    left: list[npt.NDArray[np.int64]] = []
    for members, table in sorted(matches, key=lambda match: -len(match[0])):
        ends = _gather(members, table, timelines, overlaps, "end_ns")
        reference = next((p for p, member in enumerate(members) if known[member]), 0)
        known[members[reference]] = True
        for position, member in enumerate(members):
            apart = ends[position] - (ends[reference] - offsets[members[reference]])
            if not known[member]:
                offsets[member], known[member] = np.sort(apart)[len(apart) // 2], True  # exact; np.median is float
            if position != reference:
                left.append(np.abs(apart - offsets[member]))
    if not left:
        return tuple(offsets.tolist()), None
    return tuple(offsets.tolist()), int(np.percentile(np.concatenate(left), 95))
