"""Which training step each span belongs to.

A device works on what the host launched some time ago, so a span belongs to the step in whose host window it was
*launched*; cutting device time at the host's step marks would move work between steps. Where no step is marked, the
optimizer's marks are used, then a period in the sequence of device work; both are reported as inferred.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.core.intervals import Int64Array
from slipstream.core.timeline import NO_TIME, UNKNOWN, Step

BoolArray = npt.NDArray[np.bool_]

STEP_MARK = re.compile(r"^(?:ProfilerStep#|(?:train(?:ing)?[ _]?)?(?:step|iteration|iter)[ _#:]*)(\d+)$", re.IGNORECASE)
"""Annotations that name a step: torch.profiler's own, and the usual spellings of people's own."""

OPTIMIZER_MARK = re.compile(r"^Optimizer\.step#")
"""torch wraps every optimizer's step in such a range."""

_LEAST_PERIODS = 3
_MATCH = 0.95
_SHORTEST_PERIOD = 4
_STANDS_OUT = 1.5

UPDATE_KERNEL = re.compile(r"(?i)multi_tensor_apply|fused_?adam|adamw?_|\bsgd|addcdiv|fused_?sgd|lamb_|adagrad")
"""Kernels that optimizers launch."""


@dataclass(frozen=True)
class Steps:
    """The steps of a trace, the step index of each span (-1: outside all steps), and where the steps came from."""

    steps: tuple[Step, ...]
    index: Int64Array
    source: str

    @staticmethod
    def none(count: int) -> Steps:
        """All spans in one unmarked step."""
        return Steps((Step(0),), np.zeros(count, np.int64), "not marked: the whole trace counts as one step")


def step_number(name: str) -> int | None:
    """The number that a step mark carries, None for other names."""
    found = STEP_MARK.match(name)
    return int(found[1]) if found and len(found[1]) < 18 else None


def marks_of_steps(ranges: Iterable[tuple[str, int, int]]) -> list[tuple[int, int, int]]:
    """Of named host ranges, those that mark steps: `(number, start, end)`.

    People mark steps inside the profiler's own, with numbers of their own. One spelling is taken: the profiler's if
    there is one, else the one that marks the most time.
    """
    spellings: dict[str, list[tuple[int, int, int]]] = {}
    for name, start, end in ranges:
        if (number := step_number(name)) is not None:
            spellings.setdefault(name.rstrip("0123456789"), []).append((number, start, end))
    return max(
        spellings.values(),
        key=lambda marks: (marks is spellings.get("ProfilerStep#"), sum(end - start for _, start, end in marks)),
        default=[],
    )


def by_marks(marks: Iterable[tuple[int, int, int]], times: Int64Array, lane: Int64Array, source: str) -> Steps | None:
    """Assign spans by the host windows `(number, start, end)`; `times` is when each was launched, or `NO_TIME`.

    Work launched between two windows belongs to the earlier one. A span without a known launch goes with the span
    before it on its lane.
    """
    windows = _joined(marks)
    if not windows:
        return None
    starts = np.array([start for _, start, _ in windows], np.int64)
    last_end = max(end for _, _, end in windows)
    index = np.searchsorted(starts, times, side="right") - 1
    index = np.where(times > last_end, UNKNOWN, index)
    index = _filled(index, times == NO_TIME, lane)
    return Steps(tuple(Step(*window) for window in windows), index, source)


def _joined(marks: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Marks in order of start; those of one number that overlap (drawn on several streams) are one."""
    windows: list[tuple[int, int, int]] = []
    latest: dict[int, int] = {}
    for number, start, end in sorted(marks, key=lambda mark: mark[1:]):
        at = latest.get(number)
        if at is not None and start < windows[at][2]:
            windows[at] = (number, windows[at][1], max(windows[at][2], end))
        else:
            latest[number] = len(windows)
            windows.append((number, start, end))
    return windows


def by_optimizer(marks: Iterable[tuple[int, int]], times: Int64Array, lane: Int64Array, first: int) -> Steps | None:
    """Assign spans by the ends of optimizer steps; `first` is when the trace begins on the host.

    Several optimizers that step one after another end one step together: marks that are close, against the time
    between them, are one.
    """
    ends = np.array(sorted(end for _, end in marks), np.int64)
    if len(ends) < 2:
        return None
    gaps = np.diff(ends)
    breaks = np.flatnonzero(gaps > 0.25 * np.max(gaps))
    ends = ends[np.append(breaks, len(ends) - 1)]
    if len(ends) < 2:
        return None
    starts = np.concatenate(([min(first, int(ends[0]) - 1)], ends[:-1]))
    windows = [(number, int(start), int(end)) for number, (start, end) in enumerate(zip(starts, ends, strict=True))]
    return by_marks(windows, times, lane, "inferred from Optimizer.step annotations")


def by_period(work: Int64Array, launch: Int64Array, pause: Int64Array, updates: BoolArray) -> Steps | None:
    """Find a period in the sequence of device work, in order of launch.

    work     an id of what each span does
    launch   when it was launched; spans of one launch (a graph) are never parted
    pause    how long its device was idle before it
    updates  whether it looks like an optimizer's work

    Layers repeat too. A period is taken for a step only if something in it happens once a step: an optimizer's
    update, or a pause that stands out.
    """
    period = find_period(work)
    if period is None:
        return None
    whole = len(work) // period * period
    typical = np.median(pause[:whole].reshape(-1, period)[1:], axis=0)
    often = updates[:whole].reshape(-1, period).mean(axis=0) > 0.5
    if often.any() and not often.all():
        offset = _after_the_block(often)
    elif typical.max() > _STANDS_OUT * np.partition(typical, -2)[-2]:
        offset = int(np.argmax(typical))
    else:
        return None
    number = (np.arange(len(work)) - offset) // period
    number -= number.min()
    edges = np.flatnonzero(np.diff(number)) + 1
    if (launch[edges] == launch[edges - 1]).any():
        return None
    found = tuple(Step(i) for i in range(int(number.max()) + 1))
    return Steps(found, number, f"inferred: every {period} spans the device work repeats")


def find_period(sequence: Int64Array) -> int | None:
    """The smallest distance at which 95 % of a sequence repeats itself at least three times, or None.

    Candidates come from the rarest entries, which occur once or a few times a step; layers repeat too, but not over
    the whole sequence.
    """
    count = len(sequence)
    values, inverse, occurrences = np.unique(sequence, return_inverse=True, return_counts=True)
    rare = [v for v in np.argsort(occurrences, kind="stable") if occurrences[v] >= _LEAST_PERIODS][:16]
    candidates: set[int] = set()
    for value in rare:
        at = np.flatnonzero(inverse == value)
        for stride in range(1, min(9, len(at) // 2 + 1)):
            candidates.add(int(np.median(at[stride:] - at[:-stride])))
    for period in sorted(candidates):
        if _SHORTEST_PERIOD <= period <= count // _LEAST_PERIODS and len(values) > 1:
            same = float(np.mean(sequence[period:] == sequence[:-period]))
            if same >= _MATCH:
                return period
    return None


def _after_the_block(often: BoolArray) -> int:
    """The position behind the longest cyclic run of marked positions."""
    count = len(often)
    start = int(np.flatnonzero(~often)[0])
    turned = np.roll(often, -start)
    best, run, end = 0, 0, 0
    for position, marked in enumerate(turned.tolist()):
        run = run + 1 if marked else 0
        if run > best:
            best, end = run, position + 1
    return (start + end) % count


def _filled(index: Int64Array, unknown: BoolArray, lane: Int64Array) -> Int64Array:
    """Replace unknown entries by the entry before them on the same lane.

    Work before the first known entry of its lane was launched before the recording began: it is outside all steps.
    A lane of which nothing is known follows the other lanes in time. Rows are in order of time.
    """
    filled = np.where(unknown, UNKNOWN, index)
    everywhere = _carried(filled, ~unknown)
    for value in np.unique(lane[unknown]):
        rows = np.flatnonzero(lane == value)
        known = ~unknown[rows]
        filled[rows] = _carried(filled[rows], known) if known.any() else everywhere[rows]
    return filled


def _carried(values: Int64Array, known: BoolArray) -> Int64Array:
    """Each value, or the last known one before it; -1 before the first."""
    latest = np.maximum.accumulate(np.where(known, np.arange(len(values)), -1))
    return np.where(latest >= 0, values[np.maximum(latest, 0)], UNKNOWN)
