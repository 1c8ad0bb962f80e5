"""Rows that arrive, and sums that leave, chunk by chunk, while the caller computes on other chunks.

Two ways to move the same bytes. In both, one rule makes the overlap: the transfer of the chunk that is needed next is
started before the caller gets this one.

    ring      each rank passes pieces to its next neighbour: (n - 1) x c messages, n x c small GEMMs. A gather begins
              with the rank's own rows, which need no transfer, and a scatter ends with them: no head and no tail.
    chunked   c collectives. Each GEMM is n times as large as the ring's, but 1/c of the transfer, the head of a gather
              or the tail of a scatter, has nothing to hide behind. With c = 1 nothing is split.

For groups of two ranks or more. All of it runs on the caller's thread and, on CUDA, in its current stream.
`Work.wait()` blocks the host on gloo, whose own threads move the data meanwhile. On NCCL it only makes the current
stream wait: the host runs ahead, and a transfer starts when the GEMM before it in the stream ends, beside the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch.profiler import record_function

from slipstream.runtime import collectives
from slipstream.runtime.collectives import Group
from slipstream.runtime.failures import naming
from slipstream.runtime.rows import RowSplit, length

Exchange = Literal["ring", "chunked"]
_GATHER, _SCATTER = "gather of rows", "scatter of sums"
"""What is moved, in traces and in errors (PeerError, when another rank has failed)."""


@dataclass(frozen=True)
class Part:
    """Some rows of a matrix: their data, and where they stand in any other matrix with the same rows."""

    data: list[torch.Tensor]
    """Blocks (batch, rows, w): what has arrived, or where to write what shall leave."""
    of: Callable[[torch.Tensor], list[torch.Tensor]]
    """The blocks of the same rows in a contiguous matrix (M, any w)."""


Produce = Callable[[Part], None]
"""Writes the values of a part's rows into its data."""


def rank_and_size(group: Group) -> tuple[int, int]:
    """Return this rank's place in the group and the group's size; (0, 1) when no process group was initialised."""
    if group is None and not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def gathered(shard: torch.Tensor, split: RowSplit, group: Group, exchange: Exchange) -> Iterator[Part]:
    """Yield the rows of all ranks, part by part, while the next part travels.

    `shard` (counts[rank], w) is this rank's rows, contiguous. Nothing moves before the first part is asked for.
    """
    return _ring_gather(shard, split, group) if exchange == "ring" else _chunked_gather(shard, split, group)


def scattered(
    produce: Produce, split: RowSplit, shard: torch.Tensor, group: Group, exchange: Exchange
) -> Callable[[], None]:
    """Have all rows produced, part by part, and sum them over the ranks while the next part is produced.

    `shard` (counts[rank], w), contiguous, receives this rank's rows of the sum. Returns when the last part has been
    produced; call the result before the shard is read: until then the last transfers can hide behind other work.
    """
    if exchange == "ring":
        return _ring_scatter(produce, split, shard, group)
    return _chunked_scatter(produce, split, shard, group)


def gather_whole(shard: torch.Tensor, counts: tuple[int, ...], group: Group) -> Callable[[], torch.Tensor]:
    """Start gathering the rows of all ranks in one transfer; the result waits for it and returns them (M, w)."""
    split = RowSplit(counts)
    buffer, work = _start_gather(shard, split, 0, group)

    def finish() -> torch.Tensor:
        _wait(work, _GATHER)
        blocks = split.padded_blocks(buffer, 0)
        return blocks[0][0] if len(blocks) == 1 else torch.cat([block[0] for block in blocks])

    return finish


def _ring_gather(shard: torch.Tensor, split: RowSplit, group: Group) -> Iterator[Part]:
    """At step s a rank holds the rows of the rank s places before it, and passes them on."""
    rank, size = rank_and_size(group)
    whole = shard.new_empty(split.total, shard.shape[1])

    def held(step: int, chunk: int) -> torch.Tensor:
        owner = (rank - step) % size
        return shard[split.local_piece(rank, chunk)] if step == 0 else whole[split.piece(owner, chunk)]

    def pass_on(step: int, chunk: int) -> list[dist.Work]:
        with naming(_GATHER):
            return collectives.ring_exchange(held(step, chunk), held(step + 1, chunk), group)

    # A rank's own rows wait for nobody: all of them leave at once. Later pieces leave as they arrive.
    flying = deque(pass_on(0, chunk) for chunk in range(split.chunks))
    for step in range(size):
        for chunk in range(split.chunks):
            if step:
                _wait(flying.popleft(), _GATHER)
                if step < size - 1:
                    flying.append(pass_on(step, chunk))
            rows = split.piece((rank - step) % size, chunk)
            yield Part([held(step, chunk).unsqueeze(0)], partial(_one_block, rows))


def _ring_scatter(produce: Produce, split: RowSplit, shard: torch.Tensor, group: Group) -> Callable[[], None]:
    """A block's sum starts at the rank after its owner and travels the ring, each rank adding, until it gets home."""
    rank, size = rank_and_size(group)
    flying: deque[_Hop] = deque()
    for step in range(size):
        owner = (rank - 1 - step) % size
        for chunk in range(split.chunks):
            rows = split.piece(owner, chunk)
            home = step == size - 1
            sums = shard[split.local_piece(rank, chunk)] if home else shard.new_empty(length(rows), shard.shape[1])
            produce(Part([sums.unsqueeze(0)], partial(_one_block, rows)))
            if home:
                continue
            if step:
                flying.popleft().add_to(sums)
            above = shard.new_empty(length(split.piece((owner - 1) % size, chunk)), shard.shape[1])
            with naming(_SCATTER):
                flying.append(_Hop(collectives.ring_exchange(sums, above, group), sums, above))

    def finish() -> None:
        for chunk, hop in enumerate(flying):
            hop.add_to(shard[split.local_piece(rank, chunk)])

    return finish


@dataclass(frozen=True)
class _Hop:
    """One exchange of a ring scatter, with the buffers that must live until it is over."""

    works: list[dist.Work]
    sent: torch.Tensor
    received: torch.Tensor

    def add_to(self, sums: torch.Tensor) -> None:
        _wait(self.works, _SCATTER)
        sums += self.received


def _chunked_gather(shard: torch.Tensor, split: RowSplit, group: Group) -> Iterator[Part]:
    coming = _start_gather(shard, split, 0, group)
    for chunk in range(split.chunks):
        buffer, work = coming
        # One transfer at a time: two that share the wire would both be late, and the first is the one that is needed.
        _wait(work, _GATHER)
        if chunk + 1 < split.chunks:
            coming = _start_gather(shard, split, chunk + 1, group)
        yield Part(split.padded_blocks(buffer, chunk), partial(split.blocks, chunk=chunk))


def _start_gather(
    shard: torch.Tensor, split: RowSplit, chunk: int, group: Group
) -> tuple[torch.Tensor, list[dist.Work]]:
    """Start one collective for `chunk`: its buffer (n x longest piece, w), and what to wait for."""
    rank, size = rank_and_size(group)
    mine = _padded(shard[split.local_piece(rank, chunk)], split.longest(chunk))
    if not mine.numel():
        return mine, []
    buffer = mine.new_empty(size * len(mine), mine.shape[1])
    with naming(_GATHER):
        return buffer, [collectives.all_gather(buffer, mine, group)]


def _chunked_scatter(produce: Produce, split: RowSplit, shard: torch.Tensor, group: Group) -> Callable[[], None]:
    finish = _nothing
    for chunk in range(split.chunks):
        buffer = shard.new_empty(len(split.counts) * split.longest(chunk), shard.shape[1])
        produce(Part(split.padded_blocks(buffer, chunk), partial(split.blocks, chunk=chunk)))
        finish()
        finish = _start_scatter(buffer, split, chunk, shard, group)
    return finish


def _start_scatter(
    buffer: torch.Tensor, split: RowSplit, chunk: int, shard: torch.Tensor, group: Group
) -> Callable[[], None]:
    """Start one collective that sums `buffer`; the result waits for it and leaves `chunk`'s sums in `shard`."""
    rank, size = rank_and_size(group)
    mine = shard[split.local_piece(rank, chunk)]
    if not buffer.numel():
        return _nothing
    sums = mine if len(mine) * size == len(buffer) else mine.new_empty(len(buffer) // size, mine.shape[1])
    with naming(_SCATTER):
        works = [collectives.reduce_scatter(sums, buffer, group)]

    def finish() -> None:
        _wait(works, _SCATTER)
        if sums is not mine:
            mine.copy_(sums[: len(mine)])

    return finish


def _one_block(rows: slice, whole: torch.Tensor) -> list[torch.Tensor]:
    return [whole[rows].unsqueeze(0)]


def _padded(piece: torch.Tensor, rows: int) -> torch.Tensor:
    """The piece with undefined rows after it, so that every rank sends as many."""
    if len(piece) == rows:
        return piece
    padded = piece.new_empty(rows, piece.shape[1])
    padded[: len(piece)] = piece
    return padded


def _wait(works: list[dist.Work], what: str) -> None:
    with record_function(f"slipstream::wait {what}"), naming(what):
        for work in works:
            work.wait()


def _nothing() -> None:
    """Nothing is in flight."""
