"""Traces of a device: which kind each span is, who launched it, and one Timeline for each device of the file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from slipstream.core.intervals import Int64Array, union
from slipstream.core.timeline import NO_TIME, UNKNOWN, Annotations, Kind, Lane, Timeline, build
from slipstream.trace import link
from slipstream.trace.classify import COLLECTIVE_HOST_OPS, HOST_COMM, PEER_COPY
from slipstream.trace.columns import Table
from slipstream.trace.phases import settle
from slipstream.trace.rows import DEVICE_WORK
from slipstream.trace.steps import UPDATE_KERNEL, Steps, by_marks, by_optimizer, by_period
from slipstream.trace.tracefile import TraceFile, text_of


def timelines(file: TraceFile) -> list[Timeline]:
    """One Timeline for each device that ran a kernel."""
    order = np.argsort(file.device["start"], kind="stable")
    device = file.device.where(order)
    launches = link.find_launches(device, file.calls)
    columns = _device_columns(file, device, launches)
    kernels = np.isin(device["category"], [DEVICE_WORK.index("kernel"), DEVICE_WORK.index("concurrent_kernel")])
    units = np.unique(device["device"][kernels]) if kernels.any() else np.unique(device["device"])
    left_out = int((~np.isin(device["device"], units)).sum())
    if left_out:
        file.warnings.append(f"{left_out:,} copies on devices that run no kernel were left out")
    _tell_host_communication(file)
    return [_device_timeline(file, device, columns, launches, unit) for unit in units]


def _tell_host_communication(file: TraceFile) -> None:
    """Beside a device, what a transport on the host does (barriers, objects) is not the device's communication."""
    is_comm = np.array([bool(HOST_COMM.match(name)) for name in file.names], np.bool_)
    ranges = file.notes.where(is_comm[file.notes["name"]])
    if len(ranges):
        ms = union(ranges["start"], ranges["end"]).length / 1e6
        file.warnings.append(f"{len(ranges):,} collectives on host threads ({ms:.3f} ms, gloo or MPI) are not counted")


def _device_columns(file: TraceFile, device: Table, launches: link.Launches) -> dict[str, Int64Array]:
    """Columns that are found for all devices of the file together."""
    operator = link.operators(device, file.operators, launches)
    kind = _kinds(file, device)
    said, range_of = _descriptions(file, device, launches)
    kind = _peer_copies(file, device, kind, said, operator, launches)
    said = np.where(kind == Kind.COMM, said, UNKNOWN)
    return {
        "kind": kind,
        "said": said,
        "range": range_of,
        "shape": link.take(file.operators["shape"], operator),
        "sequence": _sequences(file, device, launches, said),
        "phase": file.marked_phases(launches),
    }


def _kinds(file: TraceFile, device: Table) -> Int64Array:
    """Kind of each span, decided once for each pair of category and name."""
    pairs = device["category"].astype(np.int64) * len(file.names) + device["name"]
    distinct, inverse = np.unique(pairs, return_inverse=True)
    kinds = [
        file.classifier.kind(DEVICE_WORK[pair // len(file.names)], file.names[pair % len(file.names)])
        for pair in distinct.tolist()
    ]
    return np.array(kinds, np.int64)[inverse]


def _descriptions(file: TraceFile, device: Table, launches: link.Launches) -> tuple[Int64Array, Int64Array]:
    """What is known of the collective behind each span: from the kernel itself, else from the host around it.

    Returns the number of the description, and of the host range that gave it (-1: none, or the kernel itself).
    """
    said = device["collective"].astype(np.int64)
    range_of = np.full(len(said), UNKNOWN, np.int64)
    before = 0
    for table in (file.operators, file.notes):
        telling = table.where(table["collective"] != UNKNOWN)
        row = link.enclosing(telling, launches) if len(telling) else range_of * 0 + UNKNOWN
        fresh = (said == UNKNOWN) & (row != UNKNOWN)
        said = np.where(fresh, link.take(telling["collective"], row), said)
        range_of = np.where(fresh, row + before, range_of)
        before += len(telling)
    return said, range_of


def _sequences(file: TraceFile, device: Table, launches: link.Launches, said: Int64Array) -> Int64Array:
    known = (file.operators["sequence"] != UNKNOWN) & (file.operators["collective"] != UNKNOWN)
    telling = file.operators.where(known)
    if not len(telling):
        return device["sequence"]
    around = link.take(telling["sequence"], link.enclosing(telling, launches))
    return np.where((device["sequence"] == UNKNOWN) & (said != UNKNOWN), around, device["sequence"])


def _peer_copies(
    file: TraceFile, device: Table, kind: Int64Array, said: Int64Array, operator: Int64Array, launches: link.Launches
) -> Int64Array:
    """Copies that are communication become so.

    They are copies between GPUs, unless an operator that is no collective made them, and any copy that a
    collective made in place of a kernel (copy engines).
    """
    copies = kind == Kind.COPY
    if not copies.any():
        return kind
    peer = np.array([bool(PEER_COPY.search(name)) for name in file.names])[device["name"]]
    op_name = link.take(file.operators["name"], operator)
    is_collective_op = np.array([bool(COLLECTIVE_HOST_OPS.match(name)) for name in file.names], np.bool_)
    op_rows = file.operators.where(is_collective_op[file.operators["name"]])
    inside = link.enclosing(op_rows, launches) if len(op_rows) else np.full(len(kind), UNKNOWN, np.int64)
    by_collective = (said != UNKNOWN) | (inside != UNKNOWN)
    by_other_op = (op_name != UNKNOWN) & ~by_collective
    engine = copies & (said != UNKNOWN) & ~_shares_launcher_with_kernel(file, device, kind, launches)
    return np.where((copies & peer & ~by_other_op) | engine, int(Kind.COMM), kind)


def _shares_launcher_with_kernel(file: TraceFile, device: Table, kind: Int64Array, launches: link.Launches) -> Any:
    """Whether the host range that describes a span's collective also launched a communication kernel.

    If it did, that kernel is the collective and copies beside it only arrange its buffers.
    """
    shared = np.zeros(len(kind), np.bool_)
    for table in (file.operators, file.notes):
        telling = table.where(table["collective"] != UNKNOWN)
        if len(telling):
            row = link.enclosing(telling, launches)
            with_kernel = np.unique(row[(kind == Kind.COMM) & (row >= 0)])
            shared |= np.isin(row, with_kernel)
    return shared


def _device_timeline(
    file: TraceFile, device: Table, columns: dict[str, Int64Array], launches: link.Launches, unit: int
) -> Timeline:
    mine = device["device"] == unit
    spans = device.where(mine)
    own = {name: values[mine] for name, values in columns.items()}
    launched = launches.time_ns[mine]
    steps = _steps(file, spans, launched, int(unit))
    phase, phases_from = settle(own["phase"], steps.index, launched)
    collective, collectives = file.collectives(own["kind"], own["said"], spans["name"], own["range"])
    grids = [f" grid {text_of(grid)}" for grid in file.rows.grids.values()]
    shape, shapes = file.shapes(own["shape"], spans["grid"], grids)
    lanes, lane, annotations = _lanes(file, spans, int(unit))
    device_name = str(file.rows.devices.values()[unit])
    return build(
        rank=0,
        device=f"gpu {device_name}",
        lanes=lanes,
        names=file.names,
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


def _steps(file: TraceFile, spans: Table, launched: Int64Array, unit: int) -> Steps:
    lane = spans["stream"]
    marks = file.step_marks(file.notes)
    host_known = bool((launched != NO_TIME).any())
    if marks and host_known:
        found = by_marks(marks, launched, lane, "step annotations, by time of launch")
    else:
        mine = file.device_notes.where(file.device_notes["device"] == unit)
        on_device = file.step_marks(mine)
        source = "step annotations on the device"
        if not on_device and marks:
            on_device, source = marks, "inferred: host step annotations, by device time (no launches were recorded)"
        found = by_marks(on_device, spans["start"], lane, source) if on_device else None
    if found is None and host_known:
        first = int(launched[launched != NO_TIME].min())
        found = by_optimizer(file.optimizer_marks(), launched, lane, first)
    if found is None:
        found = _periodic(file, spans, launched)
    return found or Steps.none(len(spans))


def _periodic(file: TraceFile, spans: Table, launched: Int64Array) -> Steps | None:
    launch = np.where(launched == NO_TIME, spans["start"], launched)
    order = np.argsort(launch, kind="stable")
    work = spans["name"].astype(np.int64) * (len(file.rows.grids) + 1) + spans["grid"] + 1
    reach = np.maximum.accumulate(np.concatenate((spans["start"][:1], spans["end"][:-1])))
    pause = np.maximum(spans["start"] - reach, 0)
    updates = np.array([bool(UPDATE_KERNEL.search(name)) for name in file.names], np.bool_)[spans["name"]]
    found = by_period(work[order], launch[order], pause[order], updates[order])
    if found is None:
        return None
    index = np.empty(len(order), np.int64)
    index[order] = found.index
    return replace(found, index=index)


def _lanes(file: TraceFile, spans: Table, unit: int) -> tuple[tuple[Lane, ...], Int64Array, Annotations]:
    """The streams of one device and the host threads that annotate; the lane of each span; the annotations."""
    notes = file.device_notes.where(file.device_notes["device"] == unit)
    names = file.rows.streams.values()
    streams, place = np.unique(np.concatenate((spans["stream"], notes["stream"])), return_inverse=True)
    threads, thread = np.unique(file.notes["thread"], return_inverse=True)
    lanes = [Lane(f"stream {names[index]}") for index in streams.tolist()]
    lanes += [Lane(file.thread_label(index), is_host=True) for index in threads.tolist()]
    on = np.concatenate((thread + len(streams), place[len(spans) :]))
    annotations = Annotations(
        np.concatenate((file.notes["start"], notes["start"])),
        np.concatenate((file.notes["end"], notes["end"])),
        on.astype(np.int32),
        np.concatenate((file.notes["name"], notes["name"])).astype(np.int32),
    )
    return tuple(lanes), place[: len(spans)], annotations
