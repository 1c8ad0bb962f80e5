"""What a Recording holds besides its columns, as data that every written form carries as JSON.

`header_of` takes a Recording apart, `timeline_from` and `recording_from` put it together again. The same header
stands in `.slip` files, Chrome exports, CSV and Parquet, so a reader of one knows the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.core.errors import TraceError
from slipstream.core.intervals import Int64Array
from slipstream.core.recording import SCHEMA, Origin, Recording
from slipstream.core.timeline import (
    COLUMNS,
    Annotations,
    Collective,
    Group,
    Interner,
    Kind,
    Lane,
    Phase,
    Step,
    Timeline,
)

ANNOTATION_COLUMNS: Mapping[str, npt.DTypeLike] = {
    "start_ns": np.int64,
    "end_ns": np.int64,
    "lane": np.int32,
    "name": np.int32,
}
"""Every column of the annotation table with its type."""

Columns = Mapping[str, npt.NDArray[Any]]


class CollectiveHeader(msgspec.Struct, omit_defaults=True, frozen=True):
    """A Collective whose group is an index into the groups of the recording: a group can list a thousand ranks."""

    op: str
    group: int
    size_bytes: int | None = None
    dtype: str = ""


class TimelineHeader(msgspec.Struct, omit_defaults=True, frozen=True, kw_only=True):
    """What a Timeline holds besides its columns. A form that writes a table with the spans leaves it out here."""

    rank: int
    device: str
    spans: int
    lanes: tuple[Lane, ...] = ()
    names: tuple[str, ...] = ()
    collectives: tuple[CollectiveHeader, ...] = ()
    shapes: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    steps_from: str = "none"
    phases_from: str = "none"
    columns: dict[str, str] = {}
    annotation_columns: dict[str, str] = {}


class Header(msgspec.Struct, omit_defaults=True, frozen=True, kw_only=True):
    """What a Recording holds besides its columns."""

    schema: int
    origin: Origin
    ranks_from: str
    world_size: int | None = None
    sources: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    warnings: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()
    timelines: tuple[TimelineHeader, ...] = ()


class _Version(msgspec.Struct):
    schema: int


def header_of(recording: Recording) -> Header:
    """Describe a recording with all of its tables."""
    groups = Interner()
    timelines = tuple(_timeline_header(timeline, groups) for timeline in recording.timelines)
    return Header(
        schema=SCHEMA,
        origin=recording.origin,
        ranks_from=recording.ranks_from,
        world_size=recording.world_size,
        sources=recording.sources,
        environment=dict(recording.environment),
        warnings=recording.warnings,
        groups=groups.values(),  # type: ignore[arg-type]
        timelines=timelines,
    )


def without(header: Header, *tables: str) -> Header:
    """The same header with these tables of its timelines left out, because the spans carry them."""
    empty: dict[str, Any] = dict.fromkeys(tables, ())
    timelines = tuple(msgspec.structs.replace(timeline, **empty) for timeline in header.timelines)
    groups = () if "collectives" in tables else header.groups
    return msgspec.structs.replace(header, timelines=timelines, groups=groups)


def encode_header(header: Header) -> bytes:
    """JSON on one line."""
    return msgspec.json.encode(header)


def decode_header(text: bytes | msgspec.Raw, where: str) -> Header:
    """Read what `encode_header` wrote; `where` is the file that errors name."""
    try:
        schema = msgspec.json.decode(text, type=_Version).schema
        if schema > SCHEMA:
            raise TraceError(
                f"was written by a newer version of Slipstream (schema {schema}, this one reads {SCHEMA})",
                where=where,
                do="upgrade with: pip install --upgrade slipstream",
            )
        return msgspec.json.decode(text, type=Header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise damaged(f"its description cannot be read: {error}", where) from error


def damaged(problem: str, where: str) -> TraceError:
    """The error for a file that Slipstream wrote and something has changed since."""
    return TraceError(f"is damaged ({problem})", where=where, do="copy or record it again")


def timeline_from(
    header: TimelineHeader,
    groups: Sequence[Group],
    columns: Columns,
    annotations: Columns | None,
    where: str,
) -> Timeline:
    """Make the Timeline that a header and its columns describe, after checking that they fit together."""
    if not all(0 <= collective.group < len(groups) for collective in header.collectives):
        raise damaged("a collective points outside the table of groups", where)
    problem = problem_of(header, columns, annotations)
    if problem:
        raise damaged(problem, where)
    return Timeline(
        rank=header.rank,
        device=header.device,
        lanes=header.lanes,
        names=header.names,
        collectives=tuple(_collective(collective, groups) for collective in header.collectives),
        shapes=header.shapes,
        steps=header.steps,
        steps_from=header.steps_from,
        phases_from=header.phases_from,
        annotations=Annotations(**annotations) if annotations else Annotations.none(),
        **columns,
    )


def recording_from(header: Header, timelines: Iterable[Timeline]) -> Recording:
    """Put the envelope around the timelines again."""
    return Recording(
        timelines=tuple(timelines),
        origin=header.origin,
        sources=header.sources,
        ranks_from=header.ranks_from,
        world_size=header.world_size,
        environment=header.environment,
        warnings=header.warnings,
    )


def problem_of(header: TimelineHeader, columns: Columns, annotations: Columns | None) -> str:
    """What makes these columns no Timeline, or "" if nothing does."""
    notes = {"lane": (-1, len(header.lanes)), "name": (0, len(header.names))}
    spans = notes | {
        "lane": (0, len(header.lanes)),
        "collective": (-1, len(header.collectives)),
        "shape": (-1, len(header.shapes)),
        "step": (-1, len(header.steps)),
        "kind": (0, len(Kind)),
        "phase": (0, len(Phase)),
    }
    return (
        _misfit(columns, COLUMNS, spans)
        or (_misfit(annotations, ANNOTATION_COLUMNS, notes) if annotations else "")
        or _disorder(columns["start_ns"], columns["end_ns"])
    )


def _misfit(columns: Columns, types: Mapping[str, npt.DTypeLike], bounds: Mapping[str, tuple[int, int]]) -> str:
    for column, dtype in types.items():
        if column not in columns:
            return f"column {column} is missing"
        if columns[column].dtype != dtype:
            return f"column {column} holds {columns[column].dtype}, not {np.dtype(dtype)}"
        if columns[column].shape != columns["start_ns"].shape:
            return f"column {column} has another length than start_ns"
    for column, (least, count) in bounds.items():
        values = columns[column]
        if len(values) and not (least <= values.min() and values.max() < count):
            return f"column {column} points outside its table"
    return ""


def _disorder(start_ns: Int64Array, end_ns: Int64Array) -> str:
    if np.any(end_ns < start_ns):
        return "a span ends before it starts"
    return "the spans are not sorted by start" if np.any(start_ns[1:] < start_ns[:-1]) else ""


def _timeline_header(timeline: Timeline, groups: Interner) -> TimelineHeader:
    return TimelineHeader(
        rank=timeline.rank,
        device=timeline.device,
        spans=len(timeline),
        lanes=timeline.lanes,
        names=timeline.names,
        collectives=tuple(CollectiveHeader(c.op, groups(c.group), c.size_bytes, c.dtype) for c in timeline.collectives),
        shapes=timeline.shapes,
        steps=timeline.steps,
        steps_from=timeline.steps_from,
        phases_from=timeline.phases_from,
    )


def _collective(header: CollectiveHeader, groups: Sequence[Group]) -> Collective:
    return Collective(header.op, groups[header.group], header.size_bytes, header.dtype)
