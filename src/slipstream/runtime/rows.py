"""Which rows of a matrix belong to which rank, and how they are cut in chunks.

A matrix of M rows that is sharded by rows over n ranks is their rows one after the other, in order of rank. To overlap
a GEMM with the transfer of its rows, each rank's rows are cut further in c pieces; chunk k is piece k of every rank.
Nothing needs to divide anything: sizes differ by one row, and a piece may be empty.

    M = 7, n = 2, c = 2       rank 0        rank 1
                              0 1 | 2 3     4 5 | 6
    chunk 0                   0 1           4 5
    chunk 1                   2 3           6
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from slipstream.core.errors import UsageError


def even_shares(total: int, parts: int) -> tuple[int, ...]:
    """Cut `total` things in `parts` shares that differ by one at most, the larger ones first.

    >>> even_shares(7, 3)
    (3, 2, 2)
    """
    return tuple(total // parts + (part < total % parts) for part in range(parts))


@dataclass(frozen=True)
class RowSplit:
    """`counts[r]` rows belong to rank r; each rank's rows are cut in `chunks` pieces."""

    counts: tuple[int, ...]
    chunks: int = 1

    @staticmethod
    def of(counts: Sequence[int], chunks: int, ranks: int) -> RowSplit:
        """Check what a user gave. UsageError when there is not one count a rank, or a number makes no sense."""
        if len(counts) != ranks:
            what = f"{len(counts)} counts for a group of {ranks}"
            raise UsageError(what, where="rows", do="give one for each rank of the group")
        if chunks < 1:
            raise UsageError(f"cannot cut rows in {chunks} chunks", where="chunks", do="give 1 or more")
        if any(count < 0 for count in counts):
            raise UsageError(f"a rank cannot have fewer than no rows: {tuple(counts)}", where="rows")
        return RowSplit(tuple(counts), chunks)

    @property
    def total(self) -> int:
        """Rows of the whole matrix."""
        return sum(self.counts)

    def owned(self, rank: int) -> slice:
        """The rows of `rank`, as rows of the whole."""
        stop = list(accumulate(self.counts))[rank]
        return slice(stop - self.counts[rank], stop)

    def piece(self, rank: int, chunk: int) -> slice:
        """The rows of `rank` in `chunk`, as rows of the whole."""
        sizes = even_shares(self.counts[rank], self.chunks)
        start = self.owned(rank).start + sum(sizes[:chunk])
        return slice(start, start + sizes[chunk])

    def local_piece(self, rank: int, chunk: int) -> slice:
        """The rows of `rank` in `chunk`, as rows of its own shard."""
        rows, first = self.piece(rank, chunk), self.owned(rank).start
        return slice(rows.start - first, rows.stop - first)

    def longest(self, chunk: int) -> int:
        """Rows of the largest piece of `chunk`: what a collective, which moves the same from each rank, must carry."""
        return max(length(self.piece(rank, chunk)) for rank in range(len(self.counts)))

    def blocks(self, whole: torch.Tensor, chunk: int) -> list[torch.Tensor]:
        """Views of `chunk`'s rows of a contiguous `whole` (M, w): 3-D, (batch, rows, w).

        One block when all ranks have as many rows, so that one GEMM does the whole chunk; otherwise one a rank.
        """
        if len(set(self.counts)) > 1:
            return [whole[self.piece(rank, chunk)].unsqueeze(0) for rank in range(len(self.counts))]
        if self.chunks == 1:
            return [whole.unsqueeze(0)]
        return [whole.view(len(self.counts), -1, whole.shape[1])[:, self.local_piece(0, chunk)]]

    def padded_blocks(self, buffer: torch.Tensor, chunk: int) -> list[torch.Tensor]:
        """Views of the same rows, block by block, of a collective's `buffer` (n x longest(chunk), w).

        A rank with a shorter piece leaves the end of its part of the buffer undefined, and no view shows that.
        """
        parts = buffer.view(len(self.counts), -1, buffer.shape[1])
        if len(set(self.counts)) > 1:
            return [part[: length(self.piece(rank, chunk))].unsqueeze(0) for rank, part in enumerate(parts)]
        return [buffer.unsqueeze(0)] if self.chunks == 1 else [parts]


def length(rows: slice) -> int:
    """Number of rows of a slice made here (both ends set, step 1)."""
    return int(rows.stop - rows.start)
