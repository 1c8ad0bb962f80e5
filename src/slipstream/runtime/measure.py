"""What a planner needs to know: when things happen on the device, and what a reduction costs on this link."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from slipstream.runtime.buckets import MIB, Link, fit_link
from slipstream.runtime.collectives import Group
from slipstream.runtime.reductions import Reduction

PROBE_BYTES = (64 * 1024, 1 * MIB, 16 * MIB)
"""Where latency rules, where neither does, and where bandwidth does. On 1 Gbit/s all probes take half a second."""

REPEATS = 3


class Clock:
    """Marks moments of the device's work. On CUDA the host runs ahead, and only events know when work is done."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        """Mark this point of the work submitted so far."""
        if not self._cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def since_ns(self, start: Any, marks: Sequence[Any]) -> list[int]:
        """Nanoseconds from `start` to each mark. On CUDA it waits for the device."""
        if not self._cuda:
            return [mark - start for mark in marks]
        torch.cuda.synchronize()
        return [round(start.elapsed_time(mark) * 1e6) for mark in marks]


def measure_link(reduction: Reduction, dtype: torch.dtype, device: torch.device, group: Group, largest: int) -> Link:
    """Time reductions of up to `largest` bytes on empty buffers: a collective call, with the same result on all ranks.

    The time of a reduction is that on the rank that came last (the others also waited for it), the median of a few.
    Each starts after a meeting: what a late rank finds in its socket has taken it no time.
    """
    sizes = [size for size in PROBE_BYTES if size <= max(largest, PROBE_BYTES[1])]
    ranks = dist.get_world_size(group)
    buffers = [torch.zeros(-(-size // dtype.itemsize // ranks) * ranks, dtype=dtype, device=device) for size in sizes]
    clock = Clock(device)
    _reduce_ns(reduction, buffers[0], clock, group)  # connections are made on the first use
    took = torch.tensor([[_reduce_ns(reduction, buffer, clock, group) for _ in range(REPEATS)] for buffer in buffers])
    took = took.to(device)
    dist.all_reduce(took, dist.ReduceOp.MIN, group=group)
    return fit_link(sizes, [statistics.median(row) / 1e9 for row in took.tolist()])


def _reduce_ns(reduction: Reduction, buffer: torch.Tensor, clock: Clock, group: Group) -> int:
    dist.all_reduce(torch.zeros(1, device=buffer.device), group=group)
    start = clock.mark()
    reduction.start(buffer)()
    return max(1, *clock.since_ns(start, [clock.mark()]))
