"""Kineto (torch.profiler) traces: the tables of one file become Timelines, one for each device in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from slipstream.core.errors import TraceError
from slipstream.core.intervals import Int64Array, union
from slipstream.core.timeline import (
    NO_TIME,
    UNKNOWN,
    Annotations,
    Collective,
    Interner,
    Kind,
    Lane,
    Phase,
    Timeline,
    build,
)
from slipstream.trace import host, link
from slipstream.trace.classify import (
    COLLECTIVE_HOST_OPS,
    COPY_NAME,
    HOST_COMM,
    PEER_COPY,
    Classifier,
    operation,
    own_name,
)
from slipstream.trace.collectives import Groups
from slipstream.trace.columns import Table
from slipstream.trace.events import EventStream
from slipstream.trace.phases import phases_of, settle
from slipstream.trace.rows import DEVICE_WORK, Rows
from slipstream.trace.steps import (
    OPTIMIZER_MARK,
    UPDATE_KERNEL,
    Steps,
    by_marks,
    by_optimizer,
    by_period,
    marks_of_steps,
    step_number,
)
from slipstream.trace.times import INVALID


@dataclass
class KinetoFile:
    """What one trace file holds. The rank of its timelines is still that of the file's own metadata, or 0."""

    timelines: list[Timeline]
    metadata: dict[str, Any]
    warnings: list[str] = field(default_factory=list)


def read_kineto(
    chunks: Any, name: str, classifier: Classifier, progress: Callable[[], None] = lambda: None
) -> KinetoFile:
    """Read one trace from its decompressed bytes. `name` is what messages call it."""
    stream = EventStream(chunks, name)
    rows = Rows.read(stream, progress)
    reader = _Assembly(rows, Groups(stream.metadata.get("distributedInfo")), classifier, name)
    timelines = reader.timelines()
    return KinetoFile(timelines, stream.metadata, _losses(stream, rows) + reader.warnings)


def _losses(stream: EventStream, rows: Rows) -> list[str]:
    warnings = []
    if not stream.complete:
        warnings.append(
            f"the file is cut off after {stream.total_bytes:,} bytes: {stream.lost_bytes:,} of them, and all that "
            "would have followed, could not be read; the numbers cover what was"
        )
    elif stream.lost_bytes:
        share = 100 * stream.lost_bytes / max(stream.total_bytes, 1)
        warnings.append(f"{stream.lost_bytes:,} bytes ({share:.2g} % of the file) are not valid JSON and were skipped")
    if stream.repaired:
        warnings.append(f"{stream.repaired:,} events with unescaped quotes in their names were mended")
    if rows.without_time:
        warnings.append(f"{rows.without_time:,} events without a usable time were left out")
    if rows.begin_end:
        warnings.append(f"{rows.begin_end:,} begin and end events (ph B, E) were left out; whole ones (ph X) are read")
    if rows.negative:
        warnings.append(f"{rows.negative:,} events have a negative duration; each counts as empty")
    return warnings


class _Assembly:
    """Turns the tables of one file into Timelines."""

    def __init__(self, rows: Rows, groups: Groups, classifier: Classifier, name: str) -> None:
        self._rows = rows
        self._classifier = classifier
        self._file = name
        self._names = tuple(str(n) for n in rows.names.values())
        self._said = rows.descriptions.resolve(groups)
        self._group = groups.default()
        self._calls = rows.calls.table()
        self._operators = self._without_empty_sayings(rows.operators.table())
        self._notes = self._without_empty_sayings(rows.notes.table())
        self._device_notes = rows.device_notes.table()
        self.warnings: list[str] = []

    def timelines(self) -> list[Timeline]:
        device = self._without_empty_sayings(self._rows.device.table())
        if not len(device):
            return [self._host_timeline()]
        order = np.argsort(device["start"], kind="stable")
        device = device.where(order)
        launches = link.find_launches(device, self._calls)
        columns = self._device_columns(device, launches)
        kernels = np.isin(device["category"], [DEVICE_WORK.index("kernel"), DEVICE_WORK.index("concurrent_kernel")])
        units = np.unique(device["device"][kernels]) if kernels.any() else np.unique(device["device"])
        left_out = int((~np.isin(device["device"], units)).sum())
        if left_out:
            self.warnings.append(f"{left_out:,} copies on devices that run no kernel were left out")
        self._tell_host_communication()
        return [self._device_timeline(device, columns, launches, unit) for unit in units]

    def _without_empty_sayings(self, table: Table) -> Table:
        """Forget what turned out to be about no collective, such as a `wait`, so that it hides nothing around it."""
        useful = np.array([*(said is not None for said in self._said), False], np.bool_)
        said = table["collective"]
        return Table({**table.columns, "collective": np.where(useful[said], said, UNKNOWN)})

    def _tell_host_communication(self) -> None:
        """Beside a device, what a transport on the host does (barriers, objects) is not the device's communication."""
        is_comm = np.array([bool(HOST_COMM.match(name)) for name in self._names], np.bool_)
        ranges = self._notes.where(is_comm[self._notes["name"]])
        if len(ranges):
            ms = union(ranges["start"], ranges["end"]).length / 1e6
            self.warnings.append(
                f"{len(ranges):,} collectives on host threads ({ms:.3f} ms, gloo or MPI) are not counted"
            )

    # -- devices

    def _device_columns(self, device: Table, launches: link.Launches) -> dict[str, Int64Array]:
        """Columns that are found for all devices of the file together."""
        operator = link.operators(device, self._operators, launches)
        kind = self._kinds(device)
        said, range_of = self._descriptions(device, launches)
        kind = self._peer_copies(device, kind, said, operator, launches)
        said = np.where(kind == Kind.COMM, said, UNKNOWN)
        return {
            "kind": kind,
            "said": said,
            "range": range_of,
            "shape": link.take(self._operators["shape"], operator),
            "sequence": self._sequences(device, launches, said),
            "phase": self._marked_phases(launches),
        }

    def _kinds(self, device: Table) -> Int64Array:
        """Kind of each span, decided once for each pair of category and name."""
        pairs = device["category"].astype(np.int64) * len(self._names) + device["name"]
        distinct, inverse = np.unique(pairs, return_inverse=True)
        kinds = [
            self._classifier.kind(DEVICE_WORK[pair // len(self._names)], self._names[pair % len(self._names)])
            for pair in distinct.tolist()
        ]
        return np.array(kinds, np.int64)[inverse]

    def _descriptions(self, device: Table, launches: link.Launches) -> tuple[Int64Array, Int64Array]:
        """What is known of the collective behind each span: from the kernel itself, else from the host around it.

        Returns the number of the description, and of the host range that gave it (-1: none, or the kernel itself).
        """
        said = device["collective"].astype(np.int64)
        range_of = np.full(len(said), UNKNOWN, np.int64)
        before = 0
        for table in (self._operators, self._notes):
            telling = table.where(table["collective"] != UNKNOWN)
            row = link.enclosing(telling, launches) if len(telling) else range_of * 0 + UNKNOWN
            fresh = (said == UNKNOWN) & (row != UNKNOWN)
            said = np.where(fresh, link.take(telling["collective"], row), said)
            range_of = np.where(fresh, row + before, range_of)
            before += len(telling)
        return said, range_of

    def _sequences(self, device: Table, launches: link.Launches, said: Int64Array) -> Int64Array:
        known = (self._operators["sequence"] != UNKNOWN) & (self._operators["collective"] != UNKNOWN)
        telling = self._operators.where(known)
        if not len(telling):
            return device["sequence"]
        around = link.take(telling["sequence"], link.enclosing(telling, launches))
        return np.where((device["sequence"] == UNKNOWN) & (said != UNKNOWN), around, device["sequence"])

    def _peer_copies(
        self, device: Table, kind: Int64Array, said: Int64Array, operator: Int64Array, launches: link.Launches
    ) -> Int64Array:
        """Copies that are communication become so.

        They are copies between GPUs, unless an operator that is no collective made them, and any copy that a
        collective made in place of a kernel (copy engines).
        """
        copies = kind == Kind.COPY
        if not copies.any():
            return kind
        peer = np.array([bool(PEER_COPY.search(name)) for name in self._names])[device["name"]]
        op_name = link.take(self._operators["name"], operator)
        is_collective_op = np.array([bool(COLLECTIVE_HOST_OPS.match(name)) for name in self._names], np.bool_)
        op_rows = self._operators.where(is_collective_op[self._operators["name"]])
        inside = link.enclosing(op_rows, launches) if len(op_rows) else np.full(len(kind), UNKNOWN, np.int64)
        by_collective = (said != UNKNOWN) | (inside != UNKNOWN)
        by_other_op = (op_name != UNKNOWN) & ~by_collective
        engine = copies & (said != UNKNOWN) & ~self._shares_launcher_with_kernel(device, kind, launches)
        return np.where((copies & peer & ~by_other_op) | engine, int(Kind.COMM), kind)

    def _shares_launcher_with_kernel(self, device: Table, kind: Int64Array, launches: link.Launches) -> Any:
        """Whether the host range that describes a span's collective also launched a communication kernel.

        If it did, that kernel is the collective and copies beside it only arrange its buffers.
        """
        shared = np.zeros(len(kind), np.bool_)
        for table in (self._operators, self._notes):
            telling = table.where(table["collective"] != UNKNOWN)
            if len(telling):
                row = link.enclosing(telling, launches)
                with_kernel = np.unique(row[(kind == Kind.COMM) & (row >= 0)])
                shared |= np.isin(row, with_kernel)
        return shared

    def _marked_phases(self, launches: link.Launches) -> Int64Array:
        phases = phases_of(self._names)
        ranges = _joined(self._operators, self._notes)
        ranges = ranges.where(phases[ranges["name"]] != Phase.UNKNOWN)
        if not len(ranges):
            return np.zeros(len(launches.time_ns), np.int64)
        row = link.enclosing(ranges, launches)
        return link.take(phases[ranges["name"]], row, int(Phase.UNKNOWN))

    def _device_timeline(
        self, device: Table, columns: dict[str, Int64Array], launches: link.Launches, unit: int
    ) -> Timeline:
        mine = device["device"] == unit
        spans = device.where(mine)
        own = {name: values[mine] for name, values in columns.items()}
        launched = launches.time_ns[mine]
        steps = self._steps(spans, launched, int(unit))
        phase, phases_from = settle(own["phase"], steps.index, launched)
        collective, collectives = self._collectives(own["kind"], own["said"], spans["name"], own["range"])
        grids = [f" grid {_text(grid)}" for grid in self._rows.grids.values()]
        shape, shapes = self._shapes(own["shape"], spans["grid"], grids)
        lanes, lane, annotations = self._lanes(spans, int(unit))
        device_name = str(self._rows.devices.values()[unit])
        return build(
            rank=0,
            device=f"gpu {device_name}",
            lanes=lanes,
            names=self._names,
            collectives=collectives,
            shapes=shapes,
            steps=steps.steps,
            steps_from=steps.source,
            phases_from=phases_from,
            annotations=annotations,
            columns={
                "start_ns": spans["start"],
                "end_ns": spans["end"],
                "lane": lane,
                "kind": own["kind"],
                "name": spans["name"],
                "collective": collective,
                "shape": shape,
                "step": steps.index,
                "phase": phase,
                "launch_ns": launched,
                "sequence": own["sequence"],
            },
        )

    def _steps(self, spans: Table, launched: Int64Array, unit: int) -> Steps:
        lane = spans["stream"]
        marks = self._step_marks(self._notes)
        host_known = bool((launched != NO_TIME).any())
        if marks and host_known:
            found = by_marks(marks, launched, lane, "step annotations, by time of launch")
        else:
            mine = self._device_notes.where(self._device_notes["device"] == unit)
            on_device = self._step_marks(mine)
            source = "step annotations on the device"
            if not on_device and marks:
                on_device, source = marks, "inferred: host step annotations, by device time (no launches were recorded)"
            found = by_marks(on_device, spans["start"], lane, source) if on_device else None
        if found is None and host_known:
            ends = [
                (int(s), int(e))
                for s, e, n in zip(self._notes["start"], self._notes["end"], self._notes["name"], strict=True)
                if OPTIMIZER_MARK.match(self._names[n])
            ]
            first = int(launched[launched != NO_TIME].min())
            found = by_optimizer(ends, launched, lane, first)
        if found is None:
            found = self._periodic(spans, launched)
        return found or Steps.none(len(spans))

    def _periodic(self, spans: Table, launched: Int64Array) -> Steps | None:
        launch = np.where(launched == NO_TIME, spans["start"], launched)
        order = np.argsort(launch, kind="stable")
        work = spans["name"].astype(np.int64) * (len(self._rows.grids) + 1) + spans["grid"] + 1
        reach = np.maximum.accumulate(np.concatenate((spans["start"][:1], spans["end"][:-1])))
        pause = np.maximum(spans["start"] - reach, 0)
        updates = np.array([bool(UPDATE_KERNEL.search(name)) for name in self._names], np.bool_)[spans["name"]]
        found = by_period(work[order], launch[order], pause[order], updates[order])
        if found is None:
            return None
        index = np.empty(len(order), np.int64)
        index[order] = found.index
        return replace(found, index=index)

    def _step_marks(self, notes: Table) -> list[tuple[int, int, int]]:
        told = {index: self._names[index] for index in np.unique(notes["name"]).tolist()}
        names = {index: name for index, name in told.items() if step_number(name) is not None}
        rows = zip(notes["name"].tolist(), notes["start"].tolist(), notes["end"].tolist(), strict=True)
        return marks_of_steps((names[name], start, end) for name, start, end in rows if name in names)

    def _collectives(
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
            found = self._said[told] if told != UNKNOWN else None
            if found is None:
                found = self._unsaid(self._names[label])
            elif place != UNKNOWN and COPY_NAME.match(self._names[label]):
                found = replace(found, size_bytes=0) if place in counted else found
                counted.add(place)
            index[row] = known(found)
        return index, tuple(c for c in known.values() if isinstance(c, Collective))

    def _unsaid(self, name: str) -> Collective:
        """A collective of which only the name is known. A copy names no operation and no group."""
        if PEER_COPY.search(name):
            return Collective("peer copy")
        return Collective(operation(name) or own_name(name), self._group)

    def _shapes(self, shape: Int64Array, detail: Int64Array, details: list[str]) -> tuple[Int64Array, tuple[str, ...]]:
        """Intern input dimensions together with a detail (-1: none). Without dimensions a shape is not known."""
        dims = [_text(value) for value in self._rows.shapes.values()]
        pairs = np.where(shape == UNKNOWN, UNKNOWN, shape.astype(np.int64) * (len(details) + 1) + detail + 1)
        distinct, inverse = np.unique(pairs, return_inverse=True)
        texts = []
        for pair in distinct[distinct >= 0].tolist():
            which, more = divmod(pair, len(details) + 1)
            texts.append(dims[which] + (details[more - 1] if more else ""))
        return inverse - int((distinct < 0).any()), tuple(texts)

    def _lanes(self, spans: Table, unit: int) -> tuple[tuple[Lane, ...], Int64Array, Annotations]:
        """The streams of one device and the host threads that annotate; the lane of each span; the annotations."""
        notes = self._device_notes.where(self._device_notes["device"] == unit)
        names = self._rows.streams.values()
        streams, place = np.unique(np.concatenate((spans["stream"], notes["stream"])), return_inverse=True)
        threads, thread = np.unique(self._notes["thread"], return_inverse=True)
        lanes = [Lane(f"stream {names[index]}") for index in streams.tolist()]
        lanes += [Lane(self._thread_label(index), is_host=True) for index in threads.tolist()]
        on = np.concatenate((thread + len(streams), place[len(spans) :]))
        annotations = Annotations(
            np.concatenate((self._notes["start"], notes["start"])),
            np.concatenate((self._notes["end"], notes["end"])),
            on.astype(np.int32),
            np.concatenate((self._notes["name"], notes["name"])).astype(np.int32),
        )
        return tuple(lanes), place[: len(spans)], annotations

    # -- traces without a device

    def _host_timeline(self) -> Timeline:
        spans = host.spans(self._operators, self._notes, self._names, self._classifier)
        if not len(spans):
            raise TraceError(self._why_empty(), where=self._file, do=self._what_to_record())
        if not (spans["kind"] == Kind.COMM).any() and self._launched_elsewhere():
            raise TraceError(self._why_empty(), where=self._file, do=self._what_to_record())
        marks = self._step_marks(self._notes)
        thread = spans["thread"]
        steps = by_marks(marks, spans["start"], thread, "step annotations, by start") if marks else None
        if steps is None:
            ends = [
                (int(s), int(e))
                for s, e, n in zip(self._notes["start"], self._notes["end"], self._notes["name"], strict=True)
                if OPTIMIZER_MARK.match(self._names[n])
            ]
            steps = by_optimizer(ends, spans["start"], thread, int(spans["start"].min()))
        steps = steps or Steps.none(len(spans))
        phases = phases_of(self._names)
        ranges = _joined(self._operators, self._notes)
        ranges = ranges.where(phases[ranges["name"]] != Phase.UNKNOWN)
        row = link.enclosing(ranges, link.Launches(spans["start"], thread))
        phase, phases_from = settle(
            link.take(phases[ranges["name"]], row, int(Phase.UNKNOWN)), steps.index, spans["start"]
        )
        collective, collectives = self._collectives(
            spans["kind"], spans["said"], spans["name"], np.full(len(spans), UNKNOWN, np.int64)
        )
        parts = [f" part {number}" for number in range(int(spans["part"].max()) + 1)]
        shape, shapes = self._shapes(spans["shape"], spans["part"], parts)
        threads, lane = np.unique(np.concatenate((thread, self._notes["thread"])), return_inverse=True)
        annotations = Annotations(
            self._notes["start"],
            self._notes["end"],
            lane[len(spans) :].astype(np.int32),
            self._notes["name"].astype(np.int32),
        )
        return build(
            rank=0,
            device="cpu",
            lanes=tuple(Lane(self._thread_label(index), is_host=True) for index in threads.tolist()),
            names=self._names,
            collectives=collectives,
            shapes=shapes,
            steps=steps.steps,
            steps_from=steps.source,
            phases_from=phases_from,
            annotations=annotations,
            columns={
                "start_ns": spans["start"],
                "end_ns": spans["end"],
                "lane": lane[: len(spans)],
                "kind": spans["kind"],
                "name": spans["name"],
                "collective": collective,
                "shape": shape,
                "step": steps.index,
                "phase": phase,
                "launch_ns": spans["start"],
                "sequence": np.full(len(spans), UNKNOWN, np.int64),
            },
        )

    def _thread_label(self, thread: int) -> str:
        key = self._rows.threads.values()[thread]
        number = key[1] if isinstance(key, tuple) else str(key)
        return self._rows.thread_labels.get(number) or f"thread {number}"

    def _launched_elsewhere(self) -> bool:
        """Whether the host launched device work, or collectives of a device, that the file does not hold."""
        device_launch = any(
            word in self._names[name]
            for name in np.unique(self._calls["name"]).tolist()
            for word in ("Launch", "Memcpy", "Memset")
        )
        told = {self._names[name] for name in np.unique(self._notes["name"]).tolist()}
        return device_launch or any(name.startswith(("nccl:", "rccl:", "hccl:")) for name in told)

    def _why_empty(self) -> str:
        counts = self._rows.categories
        collectives = Counter(self._names[name] for name in self._notes["name"].tolist())
        launched = ", ".join(f"{name} x {n}" for name, n in collectives.most_common(20) if name.startswith("nccl:"))
        seen = ", ".join(f"{n:,} {category}" for category, n in counts.most_common(5)) or "no events with a duration"
        if ranges := counts["cuda_profiler_range"]:
            return (
                f"holds no kernels: the CUPTI range profiler was on, which puts {ranges} cuda_profiler_range events "
                f"without streams in their place (it holds {seen})"
            )
        if launched:
            return f"launches collectives ({launched}) but holds no device work (it holds {seen})"
        return f"holds no device work and no host communication (it holds {seen})"

    def _what_to_record(self) -> str:
        if self._rows.categories["cuda_profiler_range"]:
            return "record again without the range profiler (no _ExperimentalConfig profiler_metrics)"
        return "record again with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"


def _joined(*tables: Table) -> Table:
    """The columns that host tables share, one table after the other."""
    return Table({name: np.concatenate([t[name] for t in tables]) for name in ("start", "end", "thread", "name")})


def _text(raw: object) -> str:
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)


assert INVALID == NO_TIME
