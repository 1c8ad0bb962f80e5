"""What one Kineto file holds, ready to be made into Timelines: its tables, names, groups and what they say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from slipstream.core.intervals import Int64Array
from slipstream.core.timeline import UNKNOWN, Collective, Interner, Kind, Phase
from slipstream.trace import link
from slipstream.trace.classify import COPY_NAME, PEER_COPY, Classifier, operation, own_name
from slipstream.trace.collectives import Groups
from slipstream.trace.columns import Table
from slipstream.trace.phases import phases_of
from slipstream.trace.rows import Rows
from slipstream.trace.steps import OPTIMIZER_MARK, marks_of_steps, step_number


class TraceFile:
    """The tables of one file with what their columns point to; `warnings` collects what is left out."""

    def __init__(self, rows: Rows, groups: Groups, classifier: Classifier, name: str) -> None:
        self.rows = rows
        self.classifier = classifier
        self.name = name
        self.names = tuple(str(n) for n in rows.names.values())
        self.said = rows.descriptions.resolve(groups)
        self.group = groups.default()
        self.device = self._without_empty_sayings(rows.device.table())
        self.calls = rows.calls.table()
        self.operators = self._without_empty_sayings(rows.operators.table())
        self.notes = self._without_empty_sayings(rows.notes.table())
        self.device_notes = rows.device_notes.table()
        self.warnings: list[str] = []

    def optimizer_marks(self) -> list[tuple[int, int]]:
        """Start and end of every optimizer step on the host."""
        marks = {index for index in np.unique(self.notes["name"]).tolist() if OPTIMIZER_MARK.match(self.names[index])}
        rows = zip(self.notes["name"].tolist(), self.notes["start"].tolist(), self.notes["end"].tolist(), strict=True)
        return [(start, end) for name, start, end in rows if name in marks]

    def marked_phases(self, launches: link.Launches) -> Int64Array:
        """The phase whose host range was open at each launch; UNKNOWN outside all of them."""
        phases = phases_of(self.names)
        shared = ("start", "end", "thread", "name")
        ranges = Table({name: np.concatenate((self.operators[name], self.notes[name])) for name in shared})
        ranges = ranges.where(phases[ranges["name"]] != Phase.UNKNOWN)
        return link.take(phases[ranges["name"]], link.enclosing(ranges, launches), int(Phase.UNKNOWN))

    def step_marks(self, notes: Table) -> list[tuple[int, int, int]]:
        told = {index: self.names[index] for index in np.unique(notes["name"]).tolist()}
        names = {index: name for index, name in told.items() if step_number(name) is not None}
        rows = zip(notes["name"].tolist(), notes["start"].tolist(), notes["end"].tolist(), strict=True)
        return marks_of_steps((names[name], start, end) for name, start, end in rows if name in names)

    def collectives(
        self, kind: Int64Array, said: Int64Array, name: Int64Array, range_of: Int64Array
    ) -> tuple[Int64Array, tuple[Collective, ...]]:
        """Intern what each comm span communicates; the kernel's name tells the operation where nothing else does.

        Of several copies that make up one collective (one host range), the first carries its bytes.
        """
        known = Interner()
        index = np.full(len(kind), UNKNOWN, np.int64)
        comm = np.flatnonzero(kind == Kind.COMM)
        counted: set[int] = set()
        columns = (comm, said[comm], name[comm], range_of[comm])
        for row, told, label, place in zip(*(column.tolist() for column in columns), strict=True):
            found = self.said[told] if told != UNKNOWN else None
            if found is None:
                found = self._unsaid(self.names[label])
            elif place != UNKNOWN and COPY_NAME.match(self.names[label]):
                found = replace(found, size_bytes=0) if place in counted else found
                counted.add(place)
            index[row] = known(found)
        return index, tuple(c for c in known.values() if isinstance(c, Collective))

    def shapes(self, shape: Int64Array, detail: Int64Array, details: list[str]) -> tuple[Int64Array, tuple[str, ...]]:
        """Intern input dimensions together with a detail (-1: none). Without dimensions a shape is not known."""
        dims = [text_of(value) for value in self.rows.shapes.values()]
        pairs = np.where(shape == UNKNOWN, UNKNOWN, shape.astype(np.int64) * (len(details) + 1) + detail + 1)
        distinct, inverse = np.unique(pairs, return_inverse=True)
        texts = []
        for pair in distinct[distinct >= 0].tolist():
            which, more = divmod(pair, len(details) + 1)
            texts.append(dims[which] + (details[more - 1] if more else ""))
        return inverse - int((distinct < 0).any()), tuple(texts)

    def thread_label(self, thread: int) -> str:
        key = self.rows.threads.values()[thread]
        number = key[1] if isinstance(key, tuple) else str(key)
        return self.rows.thread_labels.get(number) or f"thread {number}"

    def _unsaid(self, name: str) -> Collective:
        """A collective of which only the name is known. A copy names no operation and no group."""
        if PEER_COPY.search(name):
            return Collective("peer copy")
        return Collective(operation(name) or own_name(name), self.group)

    def _without_empty_sayings(self, table: Table) -> Table:
        """Forget what turned out to be about no collective, such as a `wait`, so that it hides nothing around it."""
        useful = np.array([*(said is not None for said in self.said), False], np.bool_)
        said = table["collective"]
        return Table({**table.columns, "collective": np.where(useful[said], said, UNKNOWN)})


def text_of(raw: object) -> str:
    """Text of an interned piece of JSON."""
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)
