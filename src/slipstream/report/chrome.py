"""A Recording as Chrome trace JSON, for ui.perfetto.dev and chrome://tracing: a process for each timeline.

Times are the decimal text of whole nanoseconds, and `args` name everything else that a span carries, so that the file
reads back to the same recording. Text is written as it is made, one event on a line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

import msgspec
import numpy as np

from slipstream.core.header import Header, encode_header, header_of, without
from slipstream.core.named import NUMBERS, Named, blocks, named_columns
from slipstream.core.recording import Recording
from slipstream.core.timeline import UNKNOWN, Timeline
from slipstream.trace.exported import ANNOTATION, CHROME_START, first_threads

_CATEGORIES = {"compute": "kernel", "comm": "kernel", "copy": "gpu_memcpy", "host": "cpu_op", "other": "other"}
"""The categories of PyTorch's profiler, which viewers and their users know."""

_NOT_IN_ARGS = ("lane", "lane_is_host", "name", "kind")


def write_chrome(recording: Recording, file: IO[str]) -> None:
    """Write the recording as one JSON object: the header, then the events."""
    header = without(header_of(recording), "names", "collectives", "shapes")
    file.write(f'{CHROME_START}{encode_header(header).decode()},\n"displayTimeUnit":"ms",\n"traceEvents":[')
    before = "\n"
    for events in _events(recording, header):
        file.write(before + ",\n".join(events))
        before = ",\n"
    file.write("\n]}\n")


def _events(recording: Recording, header: Header) -> Iterator[list[str]]:
    """The text of all events, some thousand at a time."""
    threads = first_threads(header)
    for process, (timeline, thread) in enumerate(zip(recording.timelines, threads, strict=True), start=1):
        yield _titles(timeline, process, thread)
        for block in blocks(timeline):
            yield _spans(block, process, thread)
        if len(timeline.annotations):
            yield _annotations(timeline, process, thread)


def _titles(timeline: Timeline, process: int, thread: int) -> list[str]:
    """The events that name the process and its threads, and keep them in the order of the recording."""

    def title(what: str, tid: int, **args: object) -> str:
        return _json({"ph": "M", "pid": process, "tid": tid, "name": what, "args": args})

    titles = [
        title("process_name", thread, name=f"rank {timeline.rank} {timeline.device}"),
        title("process_sort_index", thread, sort_index=process),
    ]
    lanes = [lane.name for lane in timeline.lanes]
    if np.any(timeline.annotations.lane == UNKNOWN):
        lanes.append("annotations")
    for tid, lane in enumerate(lanes, start=thread):
        titles += [title("thread_name", tid, name=lane), title("thread_sort_index", tid, sort_index=tid)]
    return titles


def _spans(timeline: Timeline, process: int, thread: int) -> list[str]:
    named = named_columns(timeline)
    kind = named["kind"]
    parts = [
        _places(timeline.lane, timeline, process, thread),
        kind.mapped(lambda kind: f',"cat":"{_CATEGORIES.get(kind)}"'),
        named["name"].mapped(_name),
        _times(timeline.start_ns, timeline.durations_ns),
        kind.mapped(lambda kind: f',"args":{{"kind":"{kind}"'),
    ]
    parts += [_args(column, values) for column, values in named.items() if column not in _NOT_IN_ARGS]
    parts += [
        ["" if value == unknown else f',"{column}":{value}' for value in getattr(timeline, column).tolist()]
        for column, unknown in NUMBERS.items()
        if unknown is not None
    ]
    return ["".join(row) + "}}" for row in zip(*parts, strict=True)]


def _annotations(timeline: Timeline, process: int, thread: int) -> list[str]:
    notes = timeline.annotations
    parts = (
        _places(notes.lane, timeline, process, thread),
        Named(notes.name, (*timeline.names, None)).mapped(_name),
        _times(notes.start_ns, notes.end_ns - notes.start_ns),
    )
    return ["".join(row) + f',"cat":"{ANNOTATION}"}}' for row in zip(*parts, strict=True)]


def _places(lane: Any, timeline: Timeline, process: int, thread: int) -> list[str]:
    """The last thread is for code -1, annotations of no lane."""
    threads = range(thread, thread + len(timeline.lanes) + 1)
    return Named(lane, tuple(threads)).mapped(lambda tid: f'{{"ph":"X","pid":{process},"tid":{tid}')


def _name(name: str | None) -> str:
    return f',"name":{_json(name)}'


def _times(start_ns: Any, durations_ns: Any) -> list[str]:
    pairs = zip(start_ns.tolist(), durations_ns.tolist(), strict=True)
    return [f',"ts":{_microseconds(start)},"dur":{_microseconds(duration)}' for start, duration in pairs]


def _args(column: str, values: Named) -> list[str]:
    return values.mapped(lambda value: "" if value in (None, "") else f',"{column}":{_json(value)}')


def _microseconds(ns: int) -> str:
    """Exact decimal text: as floats, microseconds since 1970 are wrong by tens of nanoseconds."""
    whole, rest = divmod(abs(ns), 1000)
    return f"{'-' if ns < 0 else ''}{whole}.{rest:03d}"


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
