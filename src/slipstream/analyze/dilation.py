"""How much longer compute takes while communication runs beside it (SMs and memory bandwidth taken).

The same work is compared with itself: spans of one kernel at one input shape, some of which ran beside communication
and some alone. Keyed on less, it is not the same work: on kernel name and grid alone, one real trace showed compute
running 20 % *faster* beside communication.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.core.intervals import Int64Array
from slipstream.core.timeline import UNKNOWN, Kind, Timeline

_IMPOSSIBLE = 0.95
"""Below this ratio the comparison is not believed; noise explains less."""


@dataclass(frozen=True, slots=True)
class Dilation:
    """Extra compute time of the spans that ran beside communication, against the median of the same work alone.

    `matched` of the `beside` compute spans that touch communication had their like alone: they took `took_ns`, and
    alone would have taken `alone_ns`. Where `reason` is not empty, it says why nothing could be measured.
    """

    took_ns: int
    alone_ns: int
    matched: int
    beside: int
    reason: str = ""

    @property
    def extra_ns(self) -> int | None:
        """Time that communication cost compute; None if not measurable."""
        return None if self.reason else self.took_ns - self.alone_ns

    @property
    def ratio(self) -> float | None:
        """Time beside communication over time alone; None if not measurable."""
        return None if self.reason else self.took_ns / max(self.alone_ns, 1)


def measure(timeline: Timeline) -> Dilation:
    """Dilation of one timeline."""
    comm = timeline.busy(Kind.COMM)
    rows = np.flatnonzero((timeline.kind == Kind.COMPUTE) & (timeline.end_ns > timeline.start_ns))
    touched = comm.covered(timeline.start_ns[rows], timeline.end_ns[rows]) > 0
    beside = int(touched.sum())
    if not beside:
        return Dilation(0, 0, 0, 0, "no compute ran beside communication")
    shaped = timeline.shape[rows] != UNKNOWN
    if not shaped[touched].any():
        reason = "input shapes were not recorded; profile with record_shapes=True"
        return Dilation(0, 0, 0, beside, reason)
    rows, touched = rows[shaped], touched[shaped]
    work = timeline.name[rows].astype(np.int64) * len(timeline.shapes) + timeline.shape[rows]
    length = timeline.durations_ns[rows]
    alone_work, alone = _medians(work[~touched], length[~touched])
    at = np.searchsorted(alone_work, work[touched])
    at = np.minimum(at, len(alone_work) - 1)
    matched = alone_work[at] == work[touched] if len(alone_work) else np.zeros(int(touched.sum()), np.bool_)
    if not matched.any():
        return Dilation(0, 0, 0, beside, "no kernel ran both beside communication and alone at equal shapes")
    took = int(length[touched][matched].sum())
    would_take = round(float(alone[at[matched]].sum()))
    return Dilation(took, would_take, int(matched.sum()), beside, _doubt(took, would_take))


def _doubt(took: int, would_take: int) -> str:
    """Communication never makes compute faster. Where it seems to, something else differs between the two."""
    if took >= _IMPOSSIBLE * would_take:
        return ""
    return (
        f"the same work seems faster beside communication ({took / max(would_take, 1):.2f}x), so more than the "
        "communication differs (launch gaps, clocks, cache)"
    )


def _medians(keys: Int64Array, values: Int64Array) -> tuple[Int64Array, npt.NDArray[np.float64]]:
    """Distinct keys, sorted, and the median value of each."""
    order = np.lexsort((values, keys))
    keys, values = keys[order], values[order]
    distinct, first, count = np.unique(keys, return_index=True, return_counts=True)
    low, high = first + (count - 1) // 2, first + count // 2
    return distinct, (values[low] + values[high]) / 2 if len(keys) else values.astype(np.float64)
