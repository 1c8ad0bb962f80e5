"""Events of one trace file as tables: device work, launch calls, operators, annotations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from slipstream.core.intervals import Int64Array
from slipstream.core.timeline import UNKNOWN, Interner
from slipstream.trace.classify import HOST_LAUNCH_ANNOTATION
from slipstream.trace.collectives import Descriptions
from slipstream.trace.columns import Columns, whole_numbers
from slipstream.trace.events import BLOCKING_PYTHON, Args, Event, EventStream
from slipstream.trace.steps import OPTIMIZER_MARK, step_number
from slipstream.trace.times import INVALID, nanoseconds

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset", "concurrent_kernel")
"""Categories of work on a device, in lower case: older releases wrote `Kernel`, newer ones `kernel`."""

LAUNCH_CALLS = ("cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime", "xpu_runtime", "mtia_runtime")
OPERATORS = ("cpu_op",)
OPERATORS_AND_NOTES = ("operator",)
"""Until 2021 annotations stood among the operators."""

PYTHON_FRAMES = ("python_function",)
HOST_NOTES = ("user_annotation",)
DEVICE_NOTES = ("gpu_user_annotation",)

_NO_ARGS = Args()
_HOST = ("start", "end", "thread", "name")
_PLACE = ("start", "end", "stream", "device", "name")
_SAID = ("collective", "sequence")


class Rows:
    """The tables that a pass over the file fills, and the names that their columns point to.

    `category` in `device` is an index into `DEVICE_WORK`; `collective` is a number of `descriptions`; -1 is unknown.
    """

    def __init__(self) -> None:
        self.names, self.shapes, self.grids = Interner(), Interner(), Interner()
        self.threads, self.streams, self.devices = Interner(), Interner(), Interner()
        self._written = Interner()
        self.descriptions = Descriptions()
        self.device = Columns(*_PLACE, "category", "correlation", "external", "grid", *_SAID)
        self.calls = Columns(*_HOST, "correlation")
        self.operators = Columns(*_HOST, "external", "shape", *_SAID)
        self.notes = Columns(*_HOST, *_SAID)
        self.device_notes = Columns(*_PLACE)
        self.thread_labels: dict[str, str] = {}
        self.categories: Counter[str] = Counter()
        self.without_time = 0
        self.negative = 0
        self.begin_end = 0
        self._sinks: dict[str, Callable[[list[Event]], None]] = {
            **dict.fromkeys(DEVICE_WORK, self._take_device),
            **dict.fromkeys(LAUNCH_CALLS, self._take_calls),
            **dict.fromkeys(OPERATORS, self._take_operators),
            **dict.fromkeys(OPERATORS_AND_NOTES, self._take_operators_and_notes),
            **dict.fromkeys(PYTHON_FRAMES, self._take_frames),
            **dict.fromkeys(HOST_NOTES, self._take_notes),
            **dict.fromkeys(DEVICE_NOTES, self._take_device_notes),
        }

    @staticmethod
    def read(stream: EventStream, progress: Callable[[], None]) -> Rows:
        """Read all events of a file."""
        rows = Rows()
        for events in stream.blocks():
            rows.take(events)
            progress()
        return rows

    def take(self, events: Sequence[Event]) -> None:
        """Add one block of events."""
        by_category: dict[str, list[Event]] = {}
        for event in events:
            if event.ph == "X":
                by_category.setdefault(event.cat, []).append(event)
            elif event.ph in ("B", "E"):
                self.begin_end += 1
            elif event.ph == "M" and event.name == "thread_name" and event.args is not None:
                self.thread_labels[str(event.tid)] = str(event.args.name)
        for category, found in by_category.items():
            self.categories[category.lower()] += len(found)
            if sink := self._sinks.get(category.lower()):
                sink(found)

    def _take_device(self, events: list[Event]) -> None:
        category = DEVICE_WORK.index(events[0].cat.lower())
        grids = [bytes((event.args or _NO_ARGS).grid) for event in events]
        self._add(
            self.device,
            events,
            **self._places(events),
            **self._said(events),
            category=np.full(len(events), category, np.int64),
            correlation=_correlations(events),
            external=_external_ids(events),
            grid=np.array([self.grids(grid) if grid else UNKNOWN for grid in grids], np.int64),
        )

    def _take_calls(self, events: list[Event]) -> None:
        self._add(self.calls, events, thread=self._threads(events), correlation=_correlations(events))

    def _take_operators(self, events: list[Event]) -> None:
        shapes = [bytes((event.args or _NO_ARGS).input_dims) for event in events]
        self._add(
            self.operators,
            events,
            **self._said(events),
            thread=self._threads(events),
            external=_external_ids(events),
            shape=np.array([self.shapes(shape) if shape else UNKNOWN for shape in shapes], np.int64),
        )

    def _take_operators_and_notes(self, events: list[Event]) -> None:
        self._take_operators([event for event in events if not _is_note(event.name)])
        self._take_notes([event for event in events if _is_note(event.name)])

    def _take_frames(self, events: list[Event]) -> None:
        """Frames only tell where a thread is blocked."""
        wait, synchronize = BLOCKING_PYTHON
        self._take_operators([event for event in events if wait in event.name or synchronize in event.name])

    def _take_notes(self, events: list[Event]) -> None:
        self._add(self.notes, events, **self._said(events, annotate=True), thread=self._threads(events))

    def _take_device_notes(self, events: list[Event]) -> None:
        self._add(self.device_notes, events, **self._places(events))

    def _add(self, table: Columns, events: list[Event], **columns: Int64Array) -> None:
        """Add a block with its names and times. An event without a start is left out; a bad length counts as 0."""
        start = nanoseconds([event.ts for event in events])
        length = nanoseconds([event.dur or b"0" for event in events])
        self.negative += int(((length < 0) & (length != INVALID)).sum())
        good = (start != INVALID) & (length != INVALID)
        block = {
            "start": start,
            "end": start + np.maximum(length, 0),
            "name": np.array(self.names.all([event.name for event in events]), np.int64),
            **columns,
        }
        if not good.all():
            self.without_time += int((~good).sum())
            block = {name: values[good] for name, values in block.items()}
        table.add(**block)

    def _threads(self, events: list[Event]) -> Int64Array:
        """Host thread of each event. The same number is one thread whether it is written as a number or as text."""
        written = Interner()
        index = np.array(written.all([(event.pid, event.tid) for event in events]), np.int64)
        threads = self.threads.all([(str(pid), str(tid)) for pid, tid in cast(Any, written.values())])
        return np.array(threads, np.int64)[index]

    def _places(self, events: list[Event]) -> dict[str, Int64Array]:
        """Device and stream of each event: from `args`, else from where a viewer would draw it."""
        devices, streams = [], []
        for event in events:
            args = event.args or _NO_ARGS
            devices.append(args.device if args.device is not None else str(event.pid))
            streams.append(args.stream if args.stream is not None else str(event.tid).removeprefix("stream "))
        return {
            "device": np.array(self.devices.all(map(str, devices)), np.int64),
            "stream": np.array(self.streams.all(map(str, streams)), np.int64),
        }

    def _said(self, events: list[Event], *, annotate: bool = False) -> dict[str, Int64Array]:
        """What each event says about a collective, and the collective's recorded number."""
        said = np.full(len(events), UNKNOWN, np.int64)
        sequence = said.copy()
        for index, event in enumerate(events):
            # Few events say anything: look before the call.
            if (args := event.args) is not None and (args.collective is not None or annotate):
                said[index] = self.descriptions.add(event.name, args)
                sequence[index] = whole_numbers([args.sequence])[0]
        return {"collective": said, "sequence": sequence}


def _is_note(name: str) -> bool:
    return step_number(name) is not None or bool(OPTIMIZER_MARK.match(name) or HOST_LAUNCH_ANNOTATION.match(name))


def _correlations(events: list[Event]) -> Int64Array:
    return whole_numbers([(event.args or _NO_ARGS).correlation for event in events])


def _external_ids(events: list[Event]) -> Int64Array:
    return whole_numbers([(event.args or _NO_ARGS).external_id for event in events])
