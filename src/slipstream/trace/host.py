"""Traces without a device (gloo on CPU): what counts as compute and as communication on host threads.

Communication is what the transport's own ranges say (`gloo:all_reduce` on a worker thread). Compute is the time that
operators work themselves, without what they call: `aten::addmm` calls `aten::copy_` and then multiplies in its own
time. Ranges that only enclose others (engine nodes, hooks, steps, collectives' launches) never count, and neither
does a thread that is blocked: a wait, whatever operator it stands in, is not compute.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from slipstream.core.errors import TraceError
from slipstream.core.intervals import Int64Array
from slipstream.core.nesting import Segments, innermost
from slipstream.core.timeline import UNKNOWN, Annotations, Kind, Lane, Timeline, build
from slipstream.trace import link
from slipstream.trace.classify import COLLECTIVE_HOST_OPS, HOST_COMM, HOST_CONTAINERS, HOST_WAIT, Classifier
from slipstream.trace.columns import Table
from slipstream.trace.phases import settle
from slipstream.trace.steps import Steps, by_marks, by_optimizer
from slipstream.trace.tracefile import TraceFile

_COLUMNS = ("start", "end", "thread", "name", "shape", "part", "kind", "said")


def timeline(file: TraceFile) -> Timeline:
    """The one Timeline of a file without device work. Raises `TraceError` if there is nothing to tell from it."""
    busy = spans(file.operators, file.notes, file.names, file.classifier)
    if not len(busy) or (not (busy["kind"] == Kind.COMM).any() and _launched_elsewhere(file)):
        raise TraceError(_why_empty(file), where=file.name, do=_what_to_record(file))
    start, thread = busy["start"], busy["thread"]
    steps = _steps(file, busy)
    phase, phases_from = settle(file.marked_phases(link.Launches(start, thread)), steps.index, start)
    unknown = np.full(len(busy), UNKNOWN, np.int64)
    collective, collectives = file.collectives(busy["kind"], busy["said"], busy["name"], unknown)
    parts = [f" part {number}" for number in range(int(busy["part"].max()) + 1)]
    shape, shapes = file.shapes(busy["shape"], busy["part"], parts)
    threads, lane = np.unique(np.concatenate((thread, file.notes["thread"])), return_inverse=True)
    note_lane, note_name = lane[len(busy) :].astype(np.int32), file.notes["name"].astype(np.int32)
    return build(
        rank=0,
        device="cpu",
        lanes=tuple(Lane(file.thread_label(index), is_host=True) for index in threads.tolist()),
        names=file.names,
        collectives=collectives,
        shapes=shapes,
        steps=steps.steps,
        steps_from=steps.source,
        phases_from=phases_from,
        annotations=Annotations(file.notes["start"], file.notes["end"], note_lane, note_name),
        columns={
            "start_ns": start,
            "end_ns": busy["end"],
            "lane": lane[: len(busy)],
            "kind": busy["kind"],
            "name": busy["name"],
            "collective": collective,
            "shape": shape,
            "step": steps.index,
            "phase": phase,
            "launch_ns": start,
        },
    )


def _steps(file: TraceFile, busy: Table) -> Steps:
    marks = file.step_marks(file.notes)
    found = by_marks(marks, busy["start"], busy["thread"], "step annotations, by start") if marks else None
    if found is None:
        found = by_optimizer(file.optimizer_marks(), busy["start"], busy["thread"], int(busy["start"].min()))
    return found or Steps.none(len(busy))


def spans(operators: Table, notes: Table, names: tuple[str, ...], classifier: Classifier) -> Table:
    """Busy spans of all host threads: columns start, end, thread, name, shape, part, kind, said.

    An operator that calls others works in several pieces; `part` numbers them, since like is compared with like.
    """
    comm = _communication(notes, names, classifier)
    parts = [comm]
    for thread in np.unique(operators["thread"]).tolist():
        mine = operators.where(operators["thread"] == thread)
        parts.append(_own_work(mine, comm.where(comm["thread"] == thread), names, classifier))
    return Table({column: np.concatenate([part[column] for part in parts]) for column in _COLUMNS})


def _communication(notes: Table, names: tuple[str, ...], classifier: Classifier) -> Table:
    is_comm = np.array([_is_comm(name, classifier) for name in names], np.bool_)
    found = notes.where(is_comm[notes["name"]])
    return Table(
        {
            **{column: found[column] for column in ("start", "end", "thread", "name")},
            "shape": np.full(len(found), UNKNOWN, np.int64),
            "part": np.zeros(len(found), np.int64),
            "kind": np.full(len(found), int(Kind.COMM), np.int64),
            "said": found["collective"],
        }
    )


def _is_comm(name: str, classifier: Classifier) -> bool:
    user = classifier.user_kind(name)
    return bool(HOST_COMM.match(name)) if user is None else user is Kind.COMM


def _own_work(operators: Table, comm: Table, names: tuple[str, ...], classifier: Classifier) -> Table:
    """The pieces of one thread in which an operator that computes is the innermost range."""
    starts = np.concatenate((operators["start"], comm["start"]))
    ends = np.concatenate((operators["end"], comm["end"]))
    segments = innermost(starts, ends)
    blocked = np.array([_is_blocking(name) for name in names], np.bool_)
    contained = np.array([_is_container(name, classifier) for name in names], np.bool_)
    waits = np.concatenate((blocked[operators["name"]], np.ones(len(comm), np.bool_)))
    works = np.concatenate((~contained[operators["name"]], np.zeros(len(comm), np.bool_)))
    works &= ~waits & ~_around(segments, waits)
    start, end, owner = segments.pieces()
    chosen = works[owner]
    start, end, owner = start[chosen], end[chosen], owner[chosen]
    return Table(
        {
            "start": start,
            "end": end,
            "thread": operators["thread"][owner],
            "name": operators["name"][owner],
            "shape": operators["shape"][owner],
            "part": _numbered(owner),
            "kind": np.full(len(start), int(Kind.COMPUTE), np.int64),
            "said": np.full(len(start), UNKNOWN, np.int64),
        }
    )


def _numbered(owner: Int64Array) -> Int64Array:
    """How many pieces of the same owner came before each piece."""
    order = np.argsort(owner, kind="stable")
    turned = owner[order]
    first = np.flatnonzero(np.diff(turned, prepend=turned[:1] - 1))
    number = np.empty(len(owner), np.int64)
    number[order] = np.arange(len(owner)) - np.repeat(first, np.diff(np.append(first, len(owner))))
    return number


def _around(
    segments: Segments, waits: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Mask of the ranges that have a waiting range somewhere inside them."""
    around = np.zeros(len(waits), np.bool_)
    level: Int64Array = segments.parent[waits]
    level = np.unique(level[level >= 0])
    while len(level):
        fresh = level[~around[level]]
        around[fresh] = True
        level = np.unique(segments.parent[fresh])
        level = level[level >= 0]
    return around


def _is_blocking(name: str) -> bool:
    return bool(HOST_WAIT.search(name) or COLLECTIVE_HOST_OPS.match(name))


def _is_container(name: str, classifier: Classifier) -> bool:
    user = classifier.user_kind(name)
    return bool(HOST_CONTAINERS.search(name)) if user is None else user is not Kind.COMPUTE


def _launched_elsewhere(file: TraceFile) -> bool:
    """Whether the host launched device work, or collectives of a device, that the file does not hold."""
    device_launch = any(
        word in file.names[name]
        for name in np.unique(file.calls["name"]).tolist()
        for word in ("Launch", "Memcpy", "Memset")
    )
    told = {file.names[name] for name in np.unique(file.notes["name"]).tolist()}
    return device_launch or any(name.startswith(("nccl:", "rccl:", "hccl:")) for name in told)


def _why_empty(file: TraceFile) -> str:
    counts = file.rows.categories
    collectives = Counter(file.names[name] for name in file.notes["name"].tolist())
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


def _what_to_record(file: TraceFile) -> str:
    if file.rows.categories["cuda_profiler_range"]:
        return "record again without the range profiler (no _ExperimentalConfig profiler_metrics)"
    return "record again with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
