"""Reduce-scatters in flight: launched as soon as a layer's gradients are complete, waited for as late as possible."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from slipstream.runtime.collectives import all_reduce, scatter_sum
from slipstream.runtime.sharded.flat import Flat
from slipstream.runtime.sharded.groups import Groups
from slipstream.runtime.sharded.lanes import Lane, Pending
from slipstream.runtime.sharded.memory import Ledger
from slipstream.runtime.sharded.unit import Observer


@dataclass
class Reduction:
    """One gradient buffer on its way to the shard: the scatter, then the all-reduce over the replicas if there are."""

    name: str
    flat: Flat
    gradient: torch.Tensor
    shard: torch.Tensor
    scatter: Pending
    replicate: Pending | None = None


class Reductions:
    """A queue of at most `limit` reductions; each keeps the unsharded gradients of a layer alive.

    All ranks launch in the same order, which is the order of the queue, so the collectives of a group match.
    """

    def __init__(
        self,
        groups: Groups,
        device: torch.device,
        ledger: Ledger,
        *,
        limit: int,
        divisor: int,
        observe: Observer,
    ) -> None:
        self._groups, self._limit, self._divisor, self._observe = groups, limit, divisor, observe
        self._ledger = ledger
        self._scatters, self._replicates = Lane(device), Lane(device)
        self._eager = device.type == "cuda"  # streams chain the two collectives; on CPU somebody has to look
        self._queue: deque[Reduction] = deque()

    def launch(self, name: str, flat: Flat) -> None:
        """Start to reduce the gradients collected in `flat`; waits for the oldest when `limit` are under way."""
        while len(self._queue) >= max(self._limit, 1):
            self._retire()
        gradient = flat.take_gradient()
        self._observe("scatter", name)
        self._scatters.after_compute()
        with self._scatters.entered():
            shard = torch.empty(flat.layout.shard, dtype=gradient.dtype, device=gradient.device)
        pending = self._scatters.start(
            f"scatter {name}", lambda: (scatter_sum(shard, gradient, self._groups.scatter), gradient)
        )
        self._ledger.gradients.add(pending.work.held_bytes)
        self._queue.append(Reduction(name, flat, gradient, shard, pending))
        self.pump()
        if not self._limit:
            self.drain()

    def pump(self) -> None:
        """Start the all-reduces of those whose scatter has ended, in order."""
        if self._groups.replicate is None:
            return
        for reduction in self._queue:
            if reduction.replicate is None:
                if not (self._eager or reduction.scatter.done()):
                    return
                self._replicate(reduction)

    def drain(self) -> None:
        """Wait for all and hand the gradients to the shards."""
        while self._queue:
            self._retire()

    def abandon(self) -> None:
        """Wait for all and drop what they bring: the pass they belong to has failed."""
        while self._queue:
            reduction = self._queue.popleft()
            (reduction.replicate or reduction.scatter).wait()
            self._release(reduction)

    def _replicate(self, reduction: Reduction) -> None:
        self._observe("replicate", reduction.name)
        reduction.replicate = self._replicates.start(
            f"replicate {reduction.name}",
            lambda: (all_reduce(reduction.shard, self._groups.replicate), reduction.shard),
            after=reduction.scatter,
        )

    def _retire(self) -> None:
        self.pump()
        reduction = self._queue[0]
        if self._groups.replicate is not None and reduction.replicate is None:
            self._replicate(reduction)  # waits for the scatter
        (reduction.replicate or reduction.scatter).wait()
        self._observe("scattered", reduction.name)
        self._queue.popleft()
        self._release(reduction)
        if self._divisor != 1:
            reduction.shard.div_(self._divisor)
        reduction.flat.accept(reduction.shard)

    def _release(self, reduction: Reduction) -> None:
        self._ledger.gradients.add(-reduction.scatter.work.held_bytes)
        reduction.flat.release_gradient(reduction.gradient)
