"""Measures, on a running group, the rates that decide how to split."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from slipstream.runtime import collectives
from slipstream.runtime.collectives import Group
from slipstream.runtime.exchange import rank_and_size
from slipstream.runtime.split_choice import Link, Rates

SMALL = 1024
"""Elements of the message that measures alpha."""
REPEATS = 7
"""Medians of so many; one run in three is disturbed on a shared machine."""


def measure_rates(
    group: Group, rows: int, k: int, n_out: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Rates:
    """Time GEMMs of (rows, k) by (k, n_out) and transfers of (rows, k), alone and beside each other.

    Give the shape that matters most, as one rank multiplies it. Call it on all ranks of a group of two or more, with
    nothing else running; it takes about 100 GEMMs and transfers. All ranks get the same rates, those of the slowest.
    """
    rank, size = rank_and_size(group)
    probe = _Probe(group, rank, size, torch.ones(-(-rows // size) * size, k, dtype=dtype, device=device))
    x, weight = torch.ones(rows, k, dtype=dtype, device=device), torch.ones(k, n_out, dtype=dtype, device=device)
    few = max(1, rows // 32)
    gemm, floor, launch = (
        probe.median(lambda: x @ weight),
        probe.median(lambda: x[:few] @ weight),
        probe.median(lambda: x[:1, :1] @ weight[:1, :1]),
    )
    gather, scatter, ring = (probe.link(start) for start in (probe.gather, probe.scatter, probe.ring))
    return Rates(
        flops_per_s=2e9 * rows * k * n_out / max(gemm - launch, 1.0),
        launch_ns=launch,
        full_rows=min(rows, round(rows * max(floor - launch, 0.0) / max(gemm - launch, 1.0))),
        gather=gather,
        scatter=scatter,
        ring=ring,
        friction=probe.friction(lambda: x @ weight),
    )


class _Probe:
    """Runs and times transfers of one matrix, or of its first elements."""

    def __init__(self, group: Group, rank: int, size: int, whole: torch.Tensor) -> None:
        self.group, self.size, self.whole = group, size, whole.flatten()
        self.other = torch.empty_like(self.whole)

    def gather(self, elements: int) -> list[dist.Work]:
        return [collectives.all_gather(self.other[: elements * self.size], self.whole[:elements], self.group)]

    def scatter(self, elements: int) -> list[dist.Work]:
        return [collectives.reduce_scatter(self.other[:elements], self.whole[: elements * self.size], self.group)]

    def ring(self, elements: int) -> list[dist.Work]:
        """One hop. All of a gather's n - 1 would only repeat it."""
        return collectives.ring_exchange(self.whole[:elements], self.other[:elements], self.group)

    def link(self, start: Callable[[int], list[dist.Work]]) -> Link:
        """Alpha from a small message, bandwidth from the largest."""
        most = len(self.whole) // self.size
        hops = 1 if start == self.ring else self.size - 1
        small, large = min(SMALL, most), most
        alpha = self.median(lambda: _finish(start(small)))
        slowest = self.median(lambda: _finish(start(large)))
        return Link(alpha, 1e9 * hops * large * self.whole.element_size() / max(slowest - alpha, 1.0))

    def friction(self, compute: Callable[[], object]) -> float:
        """What of the shorter of GEMMs and a transfer, run at once, is not gained."""
        most = len(self.whole) // self.size
        transfer = self.median(lambda: _finish(self.gather(most)))
        gemms = max(1, round(transfer / self.median(compute)))

        def computing() -> None:
            for _ in range(gemms):
                compute()

        def both() -> None:
            works = self.gather(most)
            computing()
            _finish(works)

        alone, together = self.median(computing), self.median(both)
        return max(0.0, together - max(alone, transfer)) / min(alone, transfer)

    def median(self, call: Callable[[], object]) -> float:
        """Nanoseconds of the call: the median here, the largest of all ranks."""
        times = [self._time(call) for _ in range(REPEATS)]
        slowest = torch.tensor([statistics.median(times)], dtype=torch.float64, device=self.whole.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.group)
        return float(slowest.item())

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
