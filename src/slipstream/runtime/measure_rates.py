"""Measures, on a running group, the rates that decide how to split."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist

from slipstream.runtime import collectives
from slipstream.runtime.collectives import Group
from slipstream.runtime.exchange import rank_and_size
from slipstream.runtime.split_choice import Link, Rates

SMALL = 1024
"""Elements of the message that measures alpha."""
REPEATS = 15
"""The least of so many. These are costs alone: whatever else runs on the machine only ever adds to them."""


def measure_rates(
    group: Group, rows: int, k: int, n_out: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Rates:
    """Time GEMMs of (rows, k) by (k, n_out) and transfers of (rows, k), alone and beside each other.

    Give the shape that matters most, as one rank multiplies it. Call it on all ranks of a group of two or more, with
    nothing else running; it takes about two hundred GEMMs and transfers. All ranks get the same rates: the slowest's.
    """
    _, size = rank_and_size(group)
    probe = _Probe(group, size, torch.ones(-(-rows // size) * size, k, dtype=dtype, device=device))
    x, weight = torch.ones(rows, k, dtype=dtype, device=device), torch.ones(k, n_out, dtype=dtype, device=device)
    launch = probe.least(lambda: x[:1, :1] @ weight[:1, :1])
    # Halves of halves, in one go: a machine that is slower for a while is slower for all of them.
    sizes = [rows >> halvings for halvings in range(7) if rows >> halvings]
    times = probe.shortest([partial(torch.mm, x[:few], weight) for few in sizes])
    whole = max(times[0] - launch, 1.0)
    # Rows do not get cheaper in smaller GEMMs; where they seem to, that is noise.
    a_row = accumulate((rows * (ns - launch) / whole / few for few, ns in zip(sizes, times, strict=True)), max)
    return Rates(
        flops_per_s=2e9 * rows * k * n_out / whole,
        launch_ns=launch,
        row_costs=tuple(sorted((few, few * cost) for few, cost in zip(sizes, a_row, strict=True))),
        gather=probe.link(probe.gather, size - 1),
        scatter=probe.link(probe.scatter, size - 1),
        ring=probe.link(probe.ring, 1),
        friction=probe.friction(lambda: x @ weight),
    )


class _Probe:
    """Runs and times transfers of one matrix, or of its first elements."""

    def __init__(self, group: Group, size: int, whole: torch.Tensor) -> None:
        self.group, self.size, self.whole = group, size, whole.flatten()
        self.other = torch.empty_like(self.whole)

    def gather(self, elements: int) -> list[dist.Work]:
        return [collectives.all_gather(self.other[: elements * self.size], self.whole[:elements], self.group)]

    def scatter(self, elements: int) -> list[dist.Work]:
        return [collectives.reduce_scatter(self.other[:elements], self.whole[: elements * self.size], self.group)]

    def ring(self, elements: int) -> list[dist.Work]:
        """One hop. All of a gather's n - 1 would only repeat it."""
        return collectives.ring_exchange(self.whole[:elements], self.other[:elements], self.group)

    def link(self, start: Callable[[int], list[dist.Work]], received: int) -> Link:
        """Alpha from a small message, bandwidth from the largest, which brings `received` times what a rank sends."""
        most = len(self.whole) // self.size
        alpha, whole = self.shortest([lambda: _finish(start(min(SMALL, most))), lambda: _finish(start(most))])
        # A disturbed alpha can exceed what it is part of, which must not make an infinite bandwidth.
        return Link(alpha, 1e9 * received * most * self.whole.element_size() / max(whole - alpha, whole / 2))

    def friction(self, compute: Callable[[], object]) -> float:
        """Measure what of the shorter of GEMMs and a transfer, run at once, is not gained."""
        most = len(self.whole) // self.size
        transfer, gemm = self.shortest([lambda: _finish(self.gather(most)), compute])
        gemms = max(1, round(transfer / gemm))

        def computing() -> None:
            for _ in range(gemms):
                compute()

        def both() -> None:
            works = self.gather(most)
            computing()
            _finish(works)

        transfer, alone, together = self.shortest([lambda: _finish(self.gather(most)), computing, both])
        return max(0.0, together - max(alone, transfer)) / min(alone, transfer)

    def least(self, call: Callable[[], object]) -> float:
        """Nanoseconds of the call: the least of its times here, the largest of all ranks."""
        return self.shortest([call])[0]

    def shortest(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        """Time several calls in turn, so that a disturbance meets all of them."""
        times = [[self._time(call) for call in calls] for _ in range(REPEATS)]
        least = [min(column) for column in zip(*times, strict=True)]
        slowest = torch.tensor(least, dtype=torch.float64, device=self.whole.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.group)
        return [float(ns) for ns in slowest.tolist()]

    def _time(self, call: Callable[[], object]) -> int:
        dist.barrier(self.group)
        self._synchronize()
        start = time.perf_counter_ns()
        call()
        self._synchronize()
        return time.perf_counter_ns() - start

    def _synchronize(self) -> None:
        if self.whole.is_cuda:
            torch.cuda.synchronize(self.whole.device)


def _finish(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
