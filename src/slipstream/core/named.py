"""A Timeline's columns as values that a reader understands, and back: what every export writes and reads.

A `Named` column is still interned: the text "all_reduce" stands once, however many spans carry it, and whoever
writes or reads a format turns each value into text once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.core.header import TimelineHeader, damaged
from slipstream.core.intervals import Int64Array
from slipstream.core.timeline import (
    NO_TIME,
    UNKNOWN,
    Annotations,
    Collective,
    Group,
    Kind,
    Phase,
    Timeline,
    build,
)


@dataclass(frozen=True, slots=True)
class Named:
    """A column whose row `i` holds `values[codes[i]]`. The last value is None, so that code -1 means unknown."""

    codes: npt.NDArray[Any]
    values: tuple[Any, ...]

    def mapped(self, change: Callable[[Any], Any]) -> list[Any]:
        """The rows, each value changed once."""
        table = np.empty(len(self.values), object)
        table[:] = [change(value) for value in self.values]
        return table[self.codes].tolist()  # type: ignore[no-any-return]

    def only(self, rows: npt.NDArray[Any]) -> Named:
        """These rows, with the values that occur in them."""
        unknown = len(self.values) - 1
        codes = self.codes[rows] % len(self.values)
        used = np.flatnonzero(np.bincount(codes, minlength=unknown)[:unknown])
        position = np.full(len(self.values), UNKNOWN)
        position[used] = np.arange(len(used))
        return Named(position[codes], (*(self.values[index] for index in used), None))


NAMED_TYPES: Mapping[str, type] = {
    "lane": str,
    "lane_is_host": bool,
    "kind": str,
    "name": str,
    "op": str,
    "group": str,
    "group_description": str,
    "group_size": int,
    "group_ranks": str,
    "bytes": int,
    "dtype": str,
    "shape": str,
    "step": int,
    "phase": str,
}
"""Every named column, in the order in which it is written. An absent value is unknown; so is an empty text, except
in `lane` and `name`."""

NUMBERS: Mapping[str, int | None] = {"start_ns": None, "end_ns": None, "launch_ns": NO_TIME, "sequence": UNKNOWN}
"""The columns that are numbers of their own, with the number that stands for unknown. All are nanoseconds but one."""

_KINDS = tuple(kind.name.lower() for kind in Kind)
_PHASES = (None, *(phase.name.lower() for phase in Phase if phase))
_BLOCK = 1 << 12
_MOST_RANKS = 1 << 20
_OF_COLLECTIVE = ("op", "group", "group_description", "group_size", "group_ranks", "bytes", "dtype")


def named_columns(timeline: Timeline) -> dict[str, Named]:
    """Every named column of a timeline."""
    collectives, groups = timeline.collectives, [collective.group for collective in timeline.collectives]
    tables: dict[str, tuple[npt.NDArray[Any], Sequence[Any]]] = {
        "lane": (timeline.lane, [lane.name for lane in timeline.lanes]),
        "lane_is_host": (timeline.lane, [lane.is_host for lane in timeline.lanes]),
        "kind": (timeline.kind, _KINDS),
        "name": (timeline.name, timeline.names),
        "op": (timeline.collective, [collective.op for collective in collectives]),
        "group": (timeline.collective, [group.name for group in groups]),
        "group_description": (timeline.collective, [group.description for group in groups]),
        "group_size": (timeline.collective, [group.size for group in groups]),
        "group_ranks": (timeline.collective, [_text_of(group.ranks) for group in groups]),
        "bytes": (timeline.collective, [collective.size_bytes for collective in collectives]),
        "dtype": (timeline.collective, [collective.dtype for collective in collectives]),
        "shape": (timeline.shape, timeline.shapes),
        "step": (timeline.step, [step.number for step in timeline.steps]),
        "phase": (timeline.phase, _PHASES),
    }
    assert tables.keys() == NAMED_TYPES.keys()
    return {column: Named(codes, (*values, None)) for column, (codes, values) in tables.items()}


def blocks(timeline: Timeline) -> Iterator[Timeline]:
    """The timeline in pieces of some thousand spans, so that a writer never holds the text of all."""
    for start in range(0, len(timeline), _BLOCK):
        yield timeline.select(np.arange(start, min(start + _BLOCK, len(timeline))))


def timeline_from_named(
    header: TimelineHeader,
    named: Mapping[str, Named],
    numbers: Mapping[str, Int64Array],
    where: str,
    annotations: Annotations | None = None,
) -> Timeline:
    """Make the Timeline that has these columns, with rows in any order. The values of `name` become its names."""
    if np.any(numbers["end_ns"] < numbers["start_ns"]):
        raise damaged("a span ends before it starts", where)
    lanes = {(lane.name, lane.is_host): index for index, lane in enumerate(header.lanes)}
    steps = {step.number: index for index, step in enumerate(header.steps)}
    shapes = {value: index for index, value in enumerate(filter(None, named["shape"].values))}
    kinds = {kind: index for index, kind in enumerate(_KINDS)}
    phases = {phase: index for index, phase in enumerate(_PHASES)}
    collectives, collective = _collectives(named, where)
    no_shape, no_step, no_phase = {"": UNKNOWN, None: UNKNOWN}, {None: UNKNOWN}, {"": 0, None: 0}
    return build(
        rank=header.rank,
        device=header.device,
        lanes=header.lanes,
        names=named["name"].values[:-1],
        collectives=collectives,
        shapes=tuple(shapes),
        steps=header.steps,
        steps_from=header.steps_from,
        phases_from=header.phases_from,
        annotations=annotations or Annotations.none(),
        columns={
            "lane": _indices("lane", _joined(named["lane"], named["lane_is_host"]), lanes, where),
            "kind": _indices("kind", named["kind"], kinds, where),
            "name": _known("name", named["name"].codes, where),
            "collective": collective,
            "shape": _indices("shape", named["shape"], shapes | no_shape, where),
            "step": _indices("step", named["step"], steps | no_step, where),
            "phase": _indices("phase", named["phase"], phases | no_phase, where),
            **numbers,
        },
    )


def _indices(column: str, named: Named, table: Mapping[Any, int], where: str) -> Int64Array:
    missing = min(table.values(), default=0) - 1
    index = np.array([table.get(value, missing) for value in named.values], np.int64)
    rows: Int64Array = index[named.codes]
    wrong = np.flatnonzero(rows == missing)
    if len(wrong):
        raise damaged(f"{column} holds {named.values[named.codes[wrong[0]]]!r}, which it does not declare", where)
    return rows


def _known(column: str, codes: npt.NDArray[Any], where: str) -> npt.NDArray[Any]:
    if np.any(codes < 0):
        raise damaged(f"{column} is missing in a row", where)
    return codes


def _joined(*columns: Named) -> Named:
    """One column whose values are the tuples that occur."""
    codes = np.zeros(len(columns[0].codes), np.int64)
    for column in columns:
        size = len(column.values)
        codes = codes * size + column.codes % size
        _, rows, codes = np.unique(codes, return_index=True, return_inverse=True)
    tuples = (tuple(column.values[column.codes[row]] for column in columns) for row in rows)
    return Named(codes, (*tuples, None))


def _collectives(named: Mapping[str, Named], where: str) -> tuple[tuple[Collective, ...], Int64Array]:
    op = named["op"]
    rows = np.flatnonzero(np.array([bool(value) for value in op.values])[op.codes])
    joined = _joined(*(Named(named[column].codes[rows], named[column].values) for column in _OF_COLLECTIVE))
    index = np.full(len(op.codes), UNKNOWN, np.int64)
    index[rows] = joined.codes
    try:
        return tuple(_collective(*values) for values in joined.values[:-1]), index
    except ValueError as error:
        raise damaged(f"group_ranks cannot be read: {error}", where) from error


def _collective(
    op: str,
    group: str | None,
    description: str | None,
    group_size: int | None,
    ranks: str | None,
    size_bytes: int | None,
    dtype: str | None,
) -> Collective:
    its_group = Group(group or "", description or "", group_size, _ranks_of(ranks or ""))
    return Collective(op, its_group, size_bytes, dtype or "")


def _text_of(ranks: Sequence[int]) -> str:
    """`0..7 16`: a group of a thousand ranks is mostly runs, and a spreadsheet takes `0-7` for a date."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return " ".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)


def _ranks_of(text: str) -> tuple[int, ...]:
    ranks: list[int] = []
    for run in text.split():
        first, _, last = run.partition("..")
        count = int(last or first) - int(first) + 1
        if not 0 < count + len(ranks) <= _MOST_RANKS:
            raise ValueError(f"{run!r} names too many ranks")
        ranks.extend(range(int(first), int(first) + count))
    return tuple(ranks)
