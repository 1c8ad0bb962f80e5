"""Reading back what `slipstream.report` exports: Chrome JSON, CSV and Parquet.

All three hold the header of the recording as JSON and each span's values by name, so a reader only has to find the
columns. Rows may have been sorted or filtered meanwhile. Only the Chrome export has annotations.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import msgspec
import numpy as np

from slipstream.core.errors import MachineError, TraceError
from slipstream.core.files import AnyPath, existing_file
from slipstream.core.header import Header, TimelineHeader, damaged, decode_header, recording_from
from slipstream.core.intervals import Int64Array
from slipstream.core.named import NAMED_TYPES, NUMBERS, Named, timeline_from_named
from slipstream.core.recording import Recording
from slipstream.core.timeline import UNKNOWN, Annotations, Interner, Timeline
from slipstream.trace.times import INVALID, nanoseconds

CHROME_START = '{"slipstream":'
"""How a Chrome export begins: the header comes first, so that the first bytes tell what the file is."""

CSV_START = "# slipstream "
"""How a CSV export begins; the header is the rest of the line."""

PARQUET_KEY = b"slipstream"
"""The key of the header in the metadata of a Parquet schema."""

TABLE_TYPES: Mapping[str, type] = {
    "timeline": int,
    "rank": int,
    "device": str,
    **NAMED_TYPES,
    **dict.fromkeys(NUMBERS, int),
}
"""The columns of CSV and Parquet. `timeline` tells two files of the same rank and device apart."""

ANNOTATION = "annotation"
"""The category of annotations in a Chrome export."""

_ROWS = 1 << 12
_LONGEST_FIELD = 1 << 24
_ZERO = msgspec.Raw(b"0")


class _Args(msgspec.Struct, gc=False):
    kind: str | None = None
    op: str | None = None
    group: str | None = None
    group_description: str | None = None
    group_size: int | None = None
    group_ranks: str | None = None
    bytes: int | None = None
    dtype: str | None = None
    shape: str | None = None
    step: int | None = None
    phase: str | None = None
    launch_ns: int | None = None
    sequence: int | None = None


class _Event(msgspec.Struct, gc=False):
    ph: str
    pid: int
    tid: int = 0
    name: str = ""
    cat: str = ""
    ts: msgspec.Raw = _ZERO
    dur: msgspec.Raw = _ZERO
    args: _Args = msgspec.field(default_factory=_Args)


class _Export(msgspec.Struct):
    slipstream: msgspec.Raw
    traceEvents: list[_Event]


@dataclass(frozen=True, slots=True)
class _Table:
    """All rows of a CSV or Parquet file."""

    timeline: Int64Array
    named: Mapping[str, Named]
    numbers: Mapping[str, Int64Array]


def read_chrome_export(path: AnyPath) -> Recording:
    """Read what `write_chrome` wrote."""
    where = os.fspath(path)
    with existing_file(path) as file:
        data = file.read()
    try:
        export = msgspec.json.decode(data, type=_Export)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _foreign("Chrome export", str(error), where) from error
    header = decode_header(export.slipstream, where)
    events: list[list[_Event]] = [[] for _ in header.timelines]
    for event in export.traceEvents:
        if event.ph == "X":
            if not 1 <= event.pid <= len(events):
                raise damaged(f"an event has the process {event.pid}, which it does not declare", where)
            events[event.pid - 1].append(event)
    parts = zip(header.timelines, first_threads(header), events, strict=True)
    return recording_from(header, [_timeline_of_events(*part, where) for part in parts])


def read_csv(path: AnyPath) -> Recording:
    """Read what `write_csv` wrote."""
    where = os.fspath(path)
    with existing_file(path) as binary, io.TextIOWrapper(binary, "utf-8-sig", newline="") as file:
        try:
            first = file.readline()
            if not first.startswith(CSV_START):
                raise _foreign("CSV export", f"its first line does not begin with {CSV_START!r}", where)
            header = decode_header(first[len(CSV_START) :].encode(), where)
            with _long_fields():
                table = _csv_table(csv.reader(file, strict=True))
        except (csv.Error, KeyError, ValueError, OverflowError) as error:
            raise damaged(str(error), where) from error
    return _recording(header, table, where)


def read_parquet(path: AnyPath) -> Recording:
    """Read what `write_parquet` wrote. Needs pyarrow."""
    arrow, parquet = pyarrow()
    where = os.fspath(path)
    with existing_file(path) as file:
        try:
            rows = parquet.read_table(file, page_checksum_verification=True)
        except (arrow.ArrowException, OSError, ValueError) as error:
            raise _foreign("Parquet export", str(error), where) from error
    metadata = rows.schema.metadata or {}
    if PARQUET_KEY not in metadata:
        raise _foreign("Parquet export", "its schema has no metadata of Slipstream", where)
    header = decode_header(metadata[PARQUET_KEY], where)
    try:
        return _recording(header, _parquet_table(arrow, rows), where)
    except (arrow.ArrowException, KeyError, ValueError) as error:
        raise damaged(str(error), where) from error


def pyarrow() -> tuple[Any, Any]:
    """The modules `pyarrow` and `pyarrow.parquet`."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MachineError("Parquet needs pyarrow", do="run: pip install 'slipstream[parquet]'") from error
    return pyarrow, pyarrow.parquet


def first_threads(header: Header) -> list[int]:
    """The thread number of each timeline's first lane in a Chrome export; process numbers are 1, 2, ...

    After the lanes comes one more thread, for annotations of no lane. No number stands for two things: some viewers
    make a thread of the same number for each process.
    """
    counts = (len(timeline.lanes) + 1 for timeline in header.timelines)
    return list(accumulate(counts, initial=len(header.timelines) + 1))[:-1]


def _foreign(form: str, reason: str, where: str) -> TraceError:
    return TraceError(f"is no {form} of Slipstream ({reason})", where=where, do="export it again")


def _timeline_of_events(header: TimelineHeader, thread: int, events: Sequence[_Event], where: str) -> Timeline:
    lane = np.array([event.tid for event in events], np.int64) - thread
    if len(lane) and not (lane.min() >= 0 and lane.max() <= len(header.lanes)):
        raise damaged("an event has a thread that it does not declare", where)
    lane[lane == len(header.lanes)] = UNKNOWN
    start_ns, durations_ns = (_times([getattr(e, key) for e in events], where) for key in ("ts", "dur"))
    name = _interned([event.name for event in events])
    is_note = np.array([event.cat == ANNOTATION for event in events], bool)
    spans = np.flatnonzero(~is_note)
    args = [event.args for event in events if event.cat != ANNOTATION]
    named = {
        "lane": Named(lane[spans], (*(lane.name for lane in header.lanes), None)),
        "lane_is_host": Named(lane[spans], (*(lane.is_host for lane in header.lanes), None)),
        "name": Named(name.codes[spans], name.values),
    }
    named |= {
        column: _interned([getattr(row, column) for row in args]) for column in NAMED_TYPES if column not in named
    }
    end_ns = start_ns + durations_ns
    numbers = {"start_ns": start_ns[spans], "end_ns": end_ns[spans]}
    numbers |= {
        column: _filled([getattr(row, column) for row in args], unknown)
        for column, unknown in NUMBERS.items()
        if unknown is not None
    }
    annotations = Annotations(
        start_ns[is_note], end_ns[is_note], lane[is_note].astype(np.int32), name.codes[is_note].astype(np.int32)
    )
    return timeline_from_named(header, named, numbers, where, annotations)


def _times(texts: Sequence[msgspec.Raw], where: str) -> Int64Array:
    times = nanoseconds([bytes(text) for text in texts])
    if np.any(times == INVALID):
        raise damaged("an event has a time that is no number", where)
    return times


def _interned(values: Sequence[Any]) -> Named:
    interner = Interner()
    codes = np.array(interner.all(values), np.int64)
    return Named(codes, (*interner.values(), None))


def _filled(values: Sequence[int | None], unknown: int) -> Int64Array:
    return np.array([unknown if value is None else value for value in values], np.int64)


def _recording(header: Header, table: _Table, where: str) -> Recording:
    """Part the rows of a table by timeline."""
    count = len(header.timelines)
    if len(table.timeline) and not (table.timeline.min() >= 0 and table.timeline.max() < count):
        raise damaged(f"a row belongs to none of its {count} timelines", where)
    order = np.argsort(table.timeline, kind="stable")
    cuts = np.searchsorted(table.timeline[order], np.arange(1, count))
    timelines = []
    for described, rows in zip(header.timelines, np.split(order, cuts), strict=False):
        named = {column: values.only(rows) for column, values in table.named.items()}
        numbers = {column: values[rows] for column, values in table.numbers.items()}
        timelines.append(timeline_from_named(described, named, numbers, where))
    return recording_from(header, timelines)


def _csv_table(reader: Iterator[list[str]]) -> _Table:
    """Read all rows, some thousand at a time, so that their text is never held at once."""
    order = next(reader, [])
    missing = TABLE_TYPES.keys() - set(order)
    if missing:
        raise ValueError(f"it has no column {min(missing)}")
    interners = {column: Interner() for column in NAMED_TYPES}
    codes: dict[str, list[Int64Array]] = {column: [] for column in NAMED_TYPES}
    numbers: dict[str, list[Int64Array]] = {column: [] for column in ("timeline", *NUMBERS)}
    while rows := list(islice(reader, _ROWS)):
        if odd := next((row for row in rows if len(row) != len(order)), None):
            raise ValueError(f"a row has {len(odd)} values, not {len(order)}: it is cut off, or was edited")
        columns = dict(zip(order, zip(*rows, strict=True), strict=True))
        for column, interner in interners.items():
            codes[column].append(np.array(interner.all(columns[column]), np.int64))
        for column, parts in numbers.items():
            parts.append(_csv_numbers(columns[column], NUMBERS.get(column)))
    named = {
        column: Named(_all(codes[column]), (*(_csv_value(text, kind) for text in interners[column].values()), None))
        for column, kind in NAMED_TYPES.items()
    }
    return _Table(_all(numbers.pop("timeline")), named, {column: _all(parts) for column, parts in numbers.items()})


def _all(parts: Sequence[Int64Array]) -> Int64Array:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _csv_numbers(texts: Sequence[str], unknown: int | None) -> Int64Array:
    if unknown is None:
        return np.array([int(text) for text in texts], np.int64)
    return np.array([int(text) if text else unknown for text in texts], np.int64)


def _csv_value(text: Any, kind: type) -> Any:
    if kind is bool:
        return {"true": True, "false": False}[text.lower()]
    if kind is int:
        return int(text) if text else None
    return text


@contextmanager
def _long_fields() -> Iterator[None]:
    """Python's limit of 131072 characters is shorter than some kernel names. It holds for the whole process."""
    before = csv.field_size_limit(_LONGEST_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _parquet_table(arrow: Any, rows: Any) -> _Table:
    types = {str: arrow.string(), int: arrow.int64(), bool: arrow.bool_()}
    named = {column: _arrow_named(arrow, rows.column(column), types[kind]) for column, kind in NAMED_TYPES.items()}
    numbers = {
        column: _arrow_numbers(arrow, rows.column(column), NUMBERS.get(column)) for column in ("timeline", *NUMBERS)
    }
    return _Table(numbers.pop("timeline"), named, numbers)


def _arrow_numbers(arrow: Any, column: Any, unknown: int | None) -> Any:
    if unknown is None and column.null_count:
        raise ValueError("a row has no time, or belongs to no timeline")
    return column.cast(arrow.int64()).fill_null(unknown or 0).to_numpy()


def _arrow_named(arrow: Any, column: Any, kind: Any) -> Named:
    encoded = column if arrow.types.is_dictionary(column.type) else column.dictionary_encode()
    encoded = encoded.unify_dictionaries().combine_chunks()
    codes = encoded.indices.fill_null(-1).to_numpy()
    return Named(codes, (*encoded.dictionary.cast(kind).to_pylist(), None))
