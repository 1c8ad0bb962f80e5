"""Which phase of the step launched each span: forward, backward or optimizer."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from slipstream.core.intervals import Int64Array
from slipstream.core.timeline import NO_TIME, Phase

_PHASE_RANGES: tuple[tuple[re.Pattern[str], Phase], ...] = (
    (re.compile(r"^autograd::engine::evaluate_function"), Phase.BACKWARD),
    (re.compile(r"^Optimizer\.step#"), Phase.OPTIMIZER),
    (re.compile(r"(?i)^\W*backward\W*$"), Phase.BACKWARD),
    (re.compile(r"(?i)^\W*optim(izer)?(_?step)?\W*$"), Phase.OPTIMIZER),
    (re.compile(r"(?i)^\W*forward\W*$|^DistributedDataParallel\.forward"), Phase.FORWARD),
)
"""Host ranges that mark a phase: autograd's engine, torch's optimizer hook, and the usual spellings of people's own."""


def phase_of(name: str) -> Phase:
    """The phase that a host range of this name marks; UNKNOWN for most."""
    return next((phase for pattern, phase in _PHASE_RANGES if pattern.search(name)), Phase.UNKNOWN)


def phases_of(names: Sequence[str]) -> Int64Array:
    """`phase_of` each name, as a column."""
    return np.array([phase_of(name) for name in names], np.int64)


def settle(phase: Int64Array, step: Int64Array, times: Int64Array) -> tuple[Int64Array, str]:
    """Give a phase to spans that were launched outside all marked ranges, step by step.

    Up to the last launch of backward they are forward; behind it they prepare the optimizer (clipping, scaling).
    Returns the phases and where they come from. Without any backward only the optimizer is known, if it is marked.
    """
    if not (phase == Phase.BACKWARD).any():
        if (phase == Phase.OPTIMIZER).any():
            return np.where(phase == Phase.OPTIMIZER, phase, Phase.UNKNOWN), "optimizer ranges on the host"
        return np.full(len(phase), Phase.UNKNOWN, np.int64), "not recorded: no autograd or optimizer ranges"
    settled = phase.copy()
    for index in np.unique(step):
        rows = np.flatnonzero(step == index)
        backward = rows[phase[rows] == Phase.BACKWARD]
        if not len(backward):
            continue
        last = times[backward].max()
        open_rows = rows[(phase[rows] == Phase.UNKNOWN) & (times[rows] != NO_TIME)]
        settled[open_rows] = np.where(times[open_rows] > last, Phase.OPTIMIZER, Phase.FORWARD)
    return settled, "autograd and optimizer ranges on the host"
