"""The process groups of a sharded model."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from slipstream.core.errors import UsageError
from slipstream.runtime.collectives import Group


@dataclass(frozen=True)
class Groups:
    """Who gathers, who scatters, who replicates.

    `gather` and `scatter` hold the same ranks, on two communicators: on one, a gather that backward needs now would
    queue behind a scatter that nobody waits for yet. `replicate` (hybrid sharding) joins the ranks that hold the same
    shard; gradients are all-reduced over it after the scatter.
    """

    gather: Group = None
    scatter: Group = None
    replicate: Group = None

    @classmethod
    def new(cls, shard_ranks: int | None = None, timeout: timedelta | None = None) -> Groups:
        """Make the groups over all ranks, which must all call this: shards over `shard_ranks` neighbours (default all).

        With 8 ranks and shard_ranks 4, ranks 0-3 and 4-7 each hold one copy of the model. A rank that hangs ends the
        others after `timeout` (default: the back end's).

        Raises UsageError when the ranks cannot be divided so.
        """
        world = dist.get_world_size()
        size = shard_ranks or world
        if not 0 < size <= world or world % size:
            raise UsageError(f"{world} ranks cannot be cut into shards over {size}", do="choose a divisor of the ranks")
        inside = [list(range(first, first + size)) for first in range(0, world, size)]
        across = [list(range(first, world, size)) for first in range(size)]
        return cls(
            gather=_own(inside, timeout, "gather"),
            scatter=_own(inside, timeout, "scatter"),
            replicate=_own(across, timeout, "replicate") if size < world else None,
        )

    @classmethod
    def over(cls, group: Group, timeout: timedelta | None = None) -> Groups:
        """Shard over an existing group (an axis of a mesh); the second communicator is made here, by its ranks only."""
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        return cls(group, dist.new_group(ranks, timeout=timeout, use_local_synchronization=True))


def _own(partition: list[list[int]], timeout: timedelta | None, what: str) -> Group:
    group, _ = dist.new_subgroups_by_enumeration(partition, timeout=timeout, group_desc=f"slipstream {what}")
    return group
