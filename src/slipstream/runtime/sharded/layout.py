"""Where the parameters of a layer lie in one flat buffer that is cut into equal shards, one a rank.

Arithmetic only, in elements; no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 16
"""Each parameter and each shard starts at a multiple of this: 64 bytes of fp32, 32 of bf16, the widest vector loads."""


@dataclass(frozen=True)
class Layout:
    """Parameter i is [starts[i], starts[i] + counts[i]) of the flat buffer, shard r [r x shard, (r + 1) x shard).

    What no parameter covers (between two parameters, after the last) is padding.
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    ranks: int
    shard: int

    @classmethod
    def of(cls, counts: Sequence[int], ranks: int) -> Layout:
        """Lay parameters of `counts` elements one behind the other and cut the whole into `ranks` equal shards."""
        starts, end = [], 0
        for count in counts:
            starts.append(end)
            end += _rounded_up(count, ALIGN)
        return cls(tuple(starts), tuple(counts), ranks, _rounded_up(-(-end // ranks), ALIGN))

    @property
    def total(self) -> int:
        """Elements of the flat buffer, padding included."""
        return self.shard * self.ranks

    def part(self, index: int, rank: int) -> tuple[int, int]:
        """Range of the parameter that `rank` owns, counted from the parameter's first element; may be empty."""
        start, count = self.starts[index], self.counts[index]
        return _clamped(rank * self.shard - start, count), _clamped((rank + 1) * self.shard - start, count)

    def place(self, index: int, rank: int) -> tuple[int, int]:
        """The same range, counted from the first element of the rank's shard."""
        first, last = self.part(index, rank)
        offset = self.starts[index] - rank * self.shard
        return (first + offset, last + offset) if first < last else (0, 0)

    def gaps(self, filled: set[int]) -> list[tuple[int, int]]:
        """Ranges of the flat buffer that no parameter in `filled` covers, in order."""
        found, end = [], 0
        for index in sorted(filled):
            if self.starts[index] > end:
                found.append((end, self.starts[index]))
            end = self.starts[index] + self.counts[index]
        return [*found, (end, self.total)] if end < self.total else found


def _rounded_up(count: int, step: int) -> int:
    return -(-count // step) * step


def _clamped(value: int, high: int) -> int:
    return max(0, min(value, high))
