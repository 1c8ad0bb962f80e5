"""Collectives on flat tensors, asynchronous, under the names of every supported torch.

torch 2.13 renamed `all_gather_into_tensor` and `reduce_scatter_tensor`; the old names warn there and the new ones do
not exist before. `Work.wait()` blocks the host on gloo; on NCCL it only makes the current stream wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

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
