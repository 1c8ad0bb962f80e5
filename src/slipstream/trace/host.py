"""Traces without a device (gloo on CPU): what counts as compute and as communication on host threads.

Communication is what the transport's own ranges say (`gloo:all_reduce` on a worker thread). Compute is the time that
operators work themselves, without what they call: `aten::addmm` calls `aten::copy_` and then multiplies in its own
time. Ranges that only enclose others (engine nodes, hooks, steps, collectives' launches) never count, and neither
does a thread that is blocked: a wait, whatever operator it stands in, is not compute.
"""

from __future__ import annotations

import numpy as np

from slipstream.core.intervals import Int64Array
from slipstream.core.nesting import Segments, innermost
from slipstream.core.timeline import UNKNOWN, Kind
from slipstream.trace.classify import COLLECTIVE_HOST_OPS, HOST_COMM, HOST_CONTAINERS, HOST_WAIT, Classifier
from slipstream.trace.columns import Table

_COLUMNS = ("start", "end", "thread", "name", "shape", "part", "kind", "said")


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
