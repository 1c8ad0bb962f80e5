"""Collectives on flat tensors, asynchronous, under the names of every supported torch.

torch 2.13 renamed `all_gather_into_tensor` and `reduce_scatter_tensor`; the old names warn there and the new ones do
not exist before. `Work.wait()` blocks the host on gloo; on NCCL it only makes the current stream wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

Group: TypeAlias = dist.ProcessGroup | None
"""A process group; None is the default group."""

_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(tensor: torch.Tensor, group: Group = None) -> dist.Work:
    """Start summing `tensor` over the group, in place."""
    return _started(dist.all_reduce(tensor, group=group, async_op=True))


def all_gather(output: torch.Tensor, shard: torch.Tensor, group: Group = None) -> dist.Work:
    """Start gathering every rank's `shard` (n elements) into `output` (n x group size), in order of rank."""
    return _started(_all_gather(output, shard, group=group, async_op=True))


def reduce_scatter(shard: torch.Tensor, full: torch.Tensor, group: Group = None) -> dist.Work:
    """Start summing `full` (n x group size) over the group; each rank gets its own n elements in `shard`."""
    return _started(_reduce_scatter(shard, full, group=group, async_op=True))


class Handle(Protocol):
    """A collective under way, as `dist.Work` is one; `held_bytes` of buffers beside the caller's live until its end."""

    held_bytes: int

    def wait(self) -> Any:
        """Wait for the end, as `Work.wait` does."""

    def is_completed(self) -> bool:
        """Tell whether all bytes have arrived."""


def scatter_sum(shard: torch.Tensor, full: torch.Tensor, group: Group = None) -> Handle:
    """Start what `reduce_scatter` does, on gloo with half its bytes.

    gloo has no reduce-scatter of its own and runs an all-reduce, 2 (n-1)/n of `full` on the wire. Here each rank sends
    each other rank its n-th, (n-1)/n in all, and `wait` adds up what came, in order of rank. That costs a buffer as
    large as `full`. Measured on a 1 Gbit/s link, 2 ranks, 4 MiB: 27 ms instead of 37 (medians), 18 and 35 (best).
    """
    if full.device.type == "cpu" and "cpu:gloo" in dist.get_backend_config(group):
        return _SummedExchange(shard, full, group)
    return _Reduction(reduce_scatter(shard, full, group))


class _Reduction:
    def __init__(self, work: dist.Work) -> None:
        self.held_bytes = 0
        self.wait, self.is_completed = work.wait, work.is_completed


class _SummedExchange:
    def __init__(self, shard: torch.Tensor, full: torch.Tensor, group: Group) -> None:
        self._shard, self._received = shard, torch.empty_like(full)
        self.held_bytes = int(self._received.nbytes)
        self._work = _started(dist.all_to_all_single(self._received, full, group=group, async_op=True))
        self.is_completed = self._work.is_completed

    def wait(self) -> None:
        self._work.wait()
        torch.sum(self._received.view(-1, self._shard.numel()), dim=0, out=self._shard)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "async_op=True returns a Work on every rank of the group"
    return work


def ring_exchange(send: torch.Tensor, receive: torch.Tensor, group: Group = None) -> list[dist.Work]:
    """Start sending `send` to the next rank of the group and receiving `receive` from the previous one.

    Both must be contiguous, stay alive and unchanged until every returned Work has been waited for. An empty tensor is
    not sent and not waited for: the rank at the other end must know, from the same shapes, that nothing comes. Messages
    between two ranks arrive in the order in which they were started, so every rank must start its exchanges in the same
    order.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    messages = [
        dist.P2POp(dist.isend, send, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, receive, group=group, group_peer=(rank - 1) % size),
    ]
    messages = [message for message in messages if message.tensor.numel()]
    works: list[dist.Work] = dist.batch_isend_irecv(messages) if messages else []
    return works
