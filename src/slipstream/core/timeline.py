"""What happened on one device of one rank: a table of spans, and beside it a table of annotations.

A span is work on a lane. Everything that an analysis needs to know about a span is a column here, so that a
Timeline that was written and read again gives the same answers. Repeated things (names, shapes, collectives,
lanes, steps) are interned: the column holds an index into a tuple, -1 where the trace did not say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from slipstream.core.intervals import EMPTY, Int64Array, Intervals, union

UNKNOWN = -1
"""In an index column: the trace did not say."""

NO_TIME = np.iinfo(np.int64).min
"""In `launch_ns`: the launch was not recorded."""


class Kind(IntEnum):
    """What a span does. Only compute, comm and copy make a device busy."""

    COMPUTE = 0
    COMM = 1
    COPY = 2
    HOST = 3
    OTHER = 4


class Phase(IntEnum):
    """Which part of a training step launched a span."""

    UNKNOWN = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3


@dataclass(frozen=True, slots=True, order=True)
class Lane:
    """A device stream or a host thread, on which spans do not overlap."""

    name: str
    is_host: bool = False


@dataclass(frozen=True, slots=True, order=True)
class Group:
    """A process group. `name` is "" where the trace names none.

    `ranks` is empty where the trace lists none, and shorter than `size` where it cut the list.
    """

    name: str = ""
    description: str = ""
    size: int | None = None
    ranks: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """How reports call the group: its description if it has one, else its name."""
        return self.description or self.name or "unnamed"


@dataclass(frozen=True, slots=True)
class Collective:
    """What a comm span communicates.

    `op` is a name from `slipstream.trace.classify.OPS`, or the kernel's own name where nothing tells the operation.
    `size_bytes` is the message size that bandwidth is conventionally counted on: the unsharded buffer (output
    of an all-gather, input of a reduce-scatter), None if not recorded.
    """

    op: str
    group: Group = Group()
    size_bytes: int | None = None
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One training step. `host_start_ns, host_end_ns` is its window on the host, if the trace has one."""

    number: int
    host_start_ns: int | None = None
    host_end_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Annotations:
    """Named ranges that never count as busy: user ranges, step marks, `nccl:all_reduce` on a device lane."""

    start_ns: Int64Array
    end_ns: Int64Array
    lane: npt.NDArray[np.int32]
    name: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.start_ns)

    @staticmethod
    def none() -> Annotations:
        """An empty table."""
        no_time, no_index = np.empty(0, np.int64), np.empty(0, np.int32)
        return Annotations(no_time, no_time, no_index, no_index)


COLUMNS: Mapping[str, npt.DTypeLike] = {
    "start_ns": np.int64,
    "end_ns": np.int64,
    "lane": np.int32,
    "kind": np.int8,
    "name": np.int32,
    "collective": np.int32,
    "shape": np.int32,
    "step": np.int32,
    "phase": np.int8,
    "launch_ns": np.int64,
    "sequence": np.int64,
}
"""Every column of the span table with its type, in the order in which it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The spans of one device of one rank, sorted by start. Columns all have the same length and are read-only.

    start_ns, end_ns   when the span ran, int64 ns on the clock of this trace file; `end_ns >= start_ns`
    lane, name, shape  indices into `lanes`, `names`, `shapes`; a shape is the text of the input dimensions of
                       the operator that launched the span, with the launch grid
    kind, phase        values of `Kind` and `Phase`
    collective         index into `collectives`; -1 unless the span is comm
    step               index into `steps`; -1 for work outside all steps
    launch_ns          when the host launched it; `NO_TIME` where not recorded
    sequence           number of the collective within its group, as recorded; -1 where not recorded
    """

    rank: int
    device: str
    lanes: tuple[Lane, ...]
    names: tuple[str, ...]
    collectives: tuple[Collective, ...] = ()
    shapes: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    steps_from: str = "none"
    phases_from: str = "none"
    start_ns: Int64Array
    end_ns: Int64Array
    lane: npt.NDArray[np.int32]
    kind: npt.NDArray[np.int8]
    name: npt.NDArray[np.int32]
    collective: npt.NDArray[np.int32]
    shape: npt.NDArray[np.int32]
    step: npt.NDArray[np.int32]
    phase: npt.NDArray[np.int8]
    launch_ns: Int64Array
    sequence: Int64Array
    annotations: Annotations = field(default_factory=Annotations.none)

    def __post_init__(self) -> None:
        count = len(self.start_ns)
        for column, dtype in COLUMNS.items():
            values = getattr(self, column)
            assert values.dtype == dtype, f"{column} is {values.dtype}, not {dtype}"
            assert len(values) == count, f"{column} has {len(values)} rows, not {count}"
            values.flags.writeable = False
        assert bool(np.all(self.end_ns >= self.start_ns)), "a span ends before it starts"

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def durations_ns(self) -> Int64Array:
        """Length of each span."""
        return self.end_ns - self.start_ns

    def is_kind(self, *kinds: Kind) -> npt.NDArray[np.bool_]:
        """Mask of the spans of these kinds."""
        mask: npt.NDArray[np.bool_] = np.isin(self.kind, [int(kind) for kind in kinds])
        return mask

    def busy(self, *kinds: Kind) -> Intervals:
        """Union of the spans of these kinds over all lanes."""
        mask = self.is_kind(*kinds)
        return union(self.start_ns[mask], self.end_ns[mask]) if mask.any() else EMPTY

    def select(self, rows: npt.NDArray[np.bool_] | Int64Array) -> Timeline:
        """The same timeline with only these rows (a mask, or indices)."""
        return replace(self, **{column: getattr(self, column)[rows] for column in COLUMNS})

    def shifted(self, ns: int) -> Timeline:
        """The same timeline with every time moved by `ns`."""
        moved = np.where(self.launch_ns == NO_TIME, NO_TIME, self.launch_ns + ns)
        notes = replace(self.annotations, start_ns=self.annotations.start_ns + ns, end_ns=self.annotations.end_ns + ns)
        steps = tuple(
            replace(s, host_start_ns=_moved(s.host_start_ns, ns), host_end_ns=_moved(s.host_end_ns, ns))
            for s in self.steps
        )
        return replace(
            self,
            start_ns=self.start_ns + ns,
            end_ns=self.end_ns + ns,
            launch_ns=moved,
            annotations=notes,
            steps=steps,
        )


def build(*, rank: int, device: str, columns: Mapping[str, npt.ArrayLike], **rest: object) -> Timeline:
    """Make a Timeline from columns in any order of rows, absent ones filled with "not recorded".

    Rows are sorted by (start, end, lane, name), so that the order in which a file lists them changes nothing.
    """
    count = len(np.asarray(columns["start_ns"]))
    filled = {
        column: np.asarray(columns[column], dtype)
        if column in columns
        else np.full(count, _ABSENT.get(column, 0), dtype)
        for column, dtype in COLUMNS.items()
    }
    order = np.lexsort((filled["name"], filled["lane"], filled["end_ns"], filled["start_ns"]))
    table = {column: values[order] for column, values in filled.items()}
    return Timeline(rank=rank, device=device, **table, **rest)  # type: ignore[arg-type]


class Interner:
    """Gives equal values one small integer each, in order of first sight."""

    def __init__(self) -> None:
        self._index: dict[object, int] = {}

    def __call__(self, value: object) -> int:
        return self._index.setdefault(value, len(self._index))

    def all(self, values: Iterable[object]) -> list[int]:
        """Intern many values."""
        index = self._index
        return [index.setdefault(value, len(index)) for value in values]

    def values(self) -> tuple[object, ...]:
        """What was interned; position is the integer."""
        return tuple(self._index)

    def __len__(self) -> int:
        return len(self._index)


_ABSENT = {
    "collective": UNKNOWN,
    "shape": UNKNOWN,
    "step": UNKNOWN,
    "launch_ns": NO_TIME,
    "sequence": UNKNOWN,
}


def _moved(time: int | None, ns: int) -> int | None:
    return None if time is None else time + ns


def column_names() -> tuple[str, ...]:
    """Names of the columns of the span table."""
    assert set(COLUMNS) <= {f.name for f in fields(Timeline)}
    return tuple(COLUMNS)
