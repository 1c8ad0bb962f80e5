"""Sums over the communication of all ranks: by collective, by process group; and over each lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.analyze.overlap import Overlap
from slipstream.analyze.waits import Waits
from slipstream.core.intervals import Int64Array, union
from slipstream.core.timeline import UNKNOWN, Collective, Group, Kind, Timeline

BUS_FACTOR: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "send": lambda n: 1.0,
    "recv": lambda n: 1.0,
}
"""Bus bandwidth over algorithm bandwidth for a group of n, the convention of nccl-tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommRow:
    """Communication that belongs together, summed over ranks; times in nanoseconds.

    duration_ns   sum of the spans, waiting included; hidden + exposed may be less where spans overlap each other
    size_bytes    sum of the message sizes; None if any is not known
    busbw         bytes/s a rank on the bus, from the time of transfer if that is known, else from the durations,
                  which include waiting (`busbw_includes_wait`)
    wait_ns       sum of what each rank waited; None where no instance was matched across ranks
    transfer_ns   each matched instance once, since it takes the same time on all of its ranks; else None
    wait_at_least_ns       with one rank: the time beyond the shortest like it, which waiting is at least if transfers
                           of like collectives take alike; at most it is `duration_ns`
    partial       some of the ranks have no trace here: wait_ns is a lower bound, transfer_ns and busbw are no more
                  than bounds either
    on_compute_lane        how many ran on a lane that mostly computes, and so cannot overlap
    """

    op: str
    group: Group
    count: int
    size_bytes: int | None
    duration_ns: int
    busbw: float | None
    busbw_includes_wait: bool
    wait_ns: int | None
    transfer_ns: int | None
    wait_at_least_ns: int | None
    partial: bool
    hidden_ns: int
    exposed_ns: int
    on_compute_lane: int


@dataclass(frozen=True, slots=True)
class LaneRow:
    """One lane of one rank: what ran on it, and whether it is a compute lane that also communicates."""

    rank: int
    device: str
    lane: str
    spans: int
    compute_ns: int
    comm_ns: int
    copy_ns: int
    mixed: bool


@dataclass(frozen=True, slots=True)
class _Comm:
    """All comm spans of all ranks, side by side."""

    collective: list[Collective]
    which: Int64Array
    duration: Int64Array
    hidden: Int64Array
    exposed: Int64Array
    wait: Int64Array
    transfer: Int64Array
    members: Int64Array
    shortest: Int64Array
    on_compute_lane: np.ndarray[tuple[int], np.dtype[np.bool_]]


def collectives(timelines: Sequence[Timeline], overlaps: Sequence[Overlap], waits: Waits | None) -> list[CommRow]:
    """One row for each operation and group, the most exposed first."""
    comm = _gather(timelines, overlaps, waits)
    keys = [(c.op, c.group) for c in comm.collective]
    return _rows(comm, keys)


def groups(timelines: Sequence[Timeline], overlaps: Sequence[Overlap], waits: Waits | None) -> list[CommRow]:
    """One row for each process group, the most exposed first; `op` is empty."""
    comm = _gather(timelines, overlaps, waits)
    return _rows(comm, [("", c.group) for c in comm.collective])


def lanes(timeline: Timeline) -> list[LaneRow]:
    """What ran on each lane of one rank."""
    compute_lanes = _compute_lanes(timeline)
    rows = []
    for index, lane in enumerate(timeline.lanes):
        mine = timeline.lane == index
        if not mine.any():
            continue
        busy = {
            kind: union(timeline.start_ns[picked], timeline.end_ns[picked]).length
            for kind in (Kind.COMPUTE, Kind.COMM, Kind.COPY)
            if (picked := mine & (timeline.kind == kind)).any()
        }
        comm = busy.get(Kind.COMM, 0)
        rows.append(
            LaneRow(
                timeline.rank,
                timeline.device,
                lane.name,
                int(mine.sum()),
                busy.get(Kind.COMPUTE, 0),
                comm,
                busy.get(Kind.COPY, 0),
                bool(compute_lanes[index] and comm),
            )
        )
    return rows


def _compute_lanes(timeline: Timeline) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Lanes that compute for longer than they communicate. Communication there can never overlap that compute."""
    count, length = len(timeline.lanes), timeline.durations_ns
    compute, comm = (
        np.bincount(timeline.lane, weights=length * (timeline.kind == kind), minlength=count)
        for kind in (Kind.COMPUTE, Kind.COMM)
    )
    return np.asarray((compute > 0) & (compute >= comm))


def _gather(timelines: Sequence[Timeline], overlaps: Sequence[Overlap], waits: Waits | None) -> _Comm:
    known: dict[Collective, int] = {}
    which, duration, shortest, mixed = [], [], [], []
    for timeline, overlap in zip(timelines, overlaps, strict=True):
        rows = overlap.shares.rows
        table = [known.setdefault(c, len(known)) for c in (*timeline.collectives, Collective("unknown"))]
        kind_of = np.array(table, np.int64)[timeline.collective[rows]]
        which.append(kind_of)
        duration.append(timeline.durations_ns[rows])
        shortest.append(_shortest_alike(kind_of, timeline.durations_ns[rows]))
        mixed.append(_compute_lanes(timeline)[timeline.lane[rows]])
    absent = [np.full(len(overlap.shares.rows), UNKNOWN, np.int64) for overlap in overlaps]
    return _Comm(
        list(known),
        _joined(which),
        _joined(duration),
        _joined([overlap.shares.hidden for overlap in overlaps]),
        _joined([overlap.shares.exposed for overlap in overlaps]),
        _joined(absent if waits is None else list(waits.wait_ns)),
        _joined(absent if waits is None else list(waits.transfer_ns)),
        _joined(absent if waits is None else list(waits.members)),
        _joined(shortest),
        np.concatenate(mixed) if mixed else np.empty(0, np.bool_),
    )


def _shortest_alike(kind_of: Int64Array, duration: Int64Array) -> Int64Array:
    """For each span, the shortest duration among those of the same operation, group and size."""
    if not len(kind_of):
        return duration
    least = np.full(int(kind_of.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(least, kind_of, duration)
    return np.asarray(least[kind_of], np.int64)


def _joined(parts: list[Int64Array]) -> Int64Array:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _rows(comm: _Comm, keys: list[tuple[str, Group]]) -> list[CommRow]:
    distinct = list(dict.fromkeys(keys))
    number = np.array([distinct.index(key) for key in keys], np.int64)[comm.which] if keys else comm.which
    rows = [
        _row(comm, np.flatnonzero(number == index), op, group)
        for index, (op, group) in enumerate(distinct)
        if (number == index).any()
    ]
    return sorted(rows, key=lambda row: (-row.exposed_ns, -row.hidden_ns, row.op, row.group.name))


def _row(comm: _Comm, picked: Int64Array, op: str, group: Group) -> CommRow:
    matched = picked[comm.transfer[picked] != UNKNOWN]
    sizes = [comm.collective[which].size_bytes for which in comm.which[picked].tolist()]
    known = [size for size in sizes if size is not None]
    beyond = int((comm.duration[picked] - comm.shortest[picked]).sum())
    busbw, includes_wait = _bus_bandwidth(comm, picked, matched)
    partial = any(
        comm.members[row] < _size(comm.collective[comm.which[row]].group, int(comm.members[row])) for row in matched
    )
    return CommRow(
        op=op,
        group=group,
        count=len(picked),
        size_bytes=sum(known) if len(known) == len(sizes) else None,
        duration_ns=int(comm.duration[picked].sum()),
        busbw=busbw,
        busbw_includes_wait=includes_wait or partial,
        wait_ns=int(comm.wait[matched].sum()) if len(matched) else None,
        transfer_ns=_once_an_instance(comm, matched) if len(matched) else None,
        wait_at_least_ns=None if len(matched) else beyond,
        partial=partial,
        hidden_ns=int(comm.hidden[picked].sum()),
        exposed_ns=int(comm.exposed[picked].sum()),
        on_compute_lane=int(comm.on_compute_lane[picked].sum()),
    )


def _size(group: Group, absent: int) -> int:
    return group.size or len(group.ranks) or absent


def _once_an_instance(comm: _Comm, matched: Int64Array) -> int:
    """Sum of transfer over instances: each of its ranks carries the whole, so each counts for its share."""
    return round(float((comm.transfer[matched] / comm.members[matched]).sum()))


def _bus_bandwidth(comm: _Comm, picked: Int64Array, matched: Int64Array) -> tuple[float | None, bool]:
    """Bytes over the bus by time, over the spans whose size and group are known."""
    rows = matched if len(matched) else picked
    times = comm.transfer if len(matched) else comm.duration
    moved = [_bus_bytes(comm.collective[which]) for which in comm.which[rows].tolist()]
    told = [(size, time) for size, time in zip(moved, times[rows].tolist(), strict=True) if size]
    time = sum(time for _, time in told)
    return (sum(size for size, _ in told) / time * 1e9 if time else None), not len(matched)


def _bus_bytes(collective: Collective) -> float | None:
    factor, size = BUS_FACTOR.get(collective.op), collective.group.size
    if factor is None or not size or not collective.size_bytes:
        return None
    return float(factor(size)) * collective.size_bytes
