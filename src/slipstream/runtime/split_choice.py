"""How to split a GEMM and its transfer: which exchange, how many chunks, or not at all.

A GEMM of M rows, and a transfer of those rows, `moved` elements each, over n ranks. The GEMM turns them into (gather),
or makes them from (scatter), rows of `multiplied` elements on this rank. Alone they take

    G(M) = launch + 2 cost(M) moved multiplied / F                 a GEMM; few rows cost as much as more of them
    X(b) = alpha + b / B                                           a message that brings a rank b bytes

and together, in c chunks, with S = (n - 1)/n M moved bytes to receive,

    chunked    X(S/c) + (c - 1) max(X(S/c), G(M/c)) + G(M/c)       c = 1: one after the other
    ring       max(nc G(M/nc), (n - 1)c X(S/(n - 1)c) + G(M/nc))   the first GEMM needs no transfer

    + friction x hidden, where hidden = the GEMMs + the transfers - the line above

The last line is what a hidden second costs in slower compute. It is 1 or more where the transport takes the cores that
compute (loopback): splitting never pays there.

In c chunks 1/c of the transfer stays exposed. All else hides when a chunk's GEMM outlasts its transfer, and there M and
`moved` cancel: in bf16 when n_out = n multiplied >= (n - 1) F/B, whatever the tokens. Worked, at the peak rates of H100
SXM (F = 989 TFLOP/s, B = 450 GB/s), n = 8, where (n - 1) F/B = 15,384. Gate and up of Llama-3 70B have moved = 8,192,
n_out = 57,344, multiplied = 7,168. At 8,192 tokens G = 973 us, S = 117 MB, X = 261 us: unsplit 1,234 us; in 4 chunks
973 + 261/4 = 1,038 us, 1.19 times faster. At 512 tokens, with cost(M) = max(M, 512) (splitting and not splitting were
seen to cross there on 8 x H100), G = 61 us and X = 16 us: unsplit 77 us, in 2 chunks 2 x 61 + 8 = 130 us, so it is left
whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from slipstream.runtime.symmetric import How

Direction = Literal["gather", "scatter"]

MOST_CHUNKS = 16
"""More were never predicted to be faster at rates measured anywhere; each costs a launch and a message."""
LEAST_GAIN = 0.05
"""A split must be predicted to be faster by this share. Timings vary by as much."""


@dataclass(frozen=True)
class Split:
    """A way to run a GEMM beside its transfer."""

    exchange: How
    chunks: int


UNSPLIT = Split("chunked", 1)
"""One transfer, one GEMM, one after the other."""


@dataclass(frozen=True)
class Link:
    """Cost of a message: `alpha_ns` however small, and one second for `bytes_per_s` that a rank receives."""

    alpha_ns: float
    bytes_per_s: float

    def ns(self, received: float) -> float:
        """Time of a message that brings each rank so many bytes."""
        return self.alpha_ns + 1e9 * received / self.bytes_per_s


@dataclass(frozen=True)
class Rates:
    """What this machine does, alone: measure it (`measure_rates`) or write it down with its source.

    A reduce-scatter has its own link because some backends move more for it: gloo 2.13 an all-reduce's bytes.
    """

    flops_per_s: float
    launch_ns: float
    row_costs: tuple[tuple[int, float], ...]
    """(rows, rows at full speed that take as long), ascending: a GEMM of few rows reads a whole weight, fills no SM.

    Straight lines between them, level before the first, full speed after the last: ((512, 512),) is max(rows, 512).
    """
    gather: Link
    scatter: Link
    ring: Link
    friction: float = 0.0
    """Nanoseconds of slower compute for each nanosecond of communication that is hidden behind it."""

    def gemm_ns(self, rows: float, columns: float) -> float:
        """Time of a GEMM of 2 x rows x columns FLOPs; `columns` is k x n_out."""
        return self.launch_ns + 2e9 * self._cost(rows) * columns / self.flops_per_s

    def _cost(self, rows: float) -> float:
        most, at_most = self.row_costs[-1]
        if rows >= most:
            return at_most + rows - most
        above = bisect_right([known for known, _ in self.row_costs], rows)
        if above == 0:
            return self.row_costs[0][1]
        (low, at_low), (high, at_high) = self.row_costs[above - 1 : above + 1]
        return at_low + (at_high - at_low) * (rows - low) / (high - low)


@dataclass(frozen=True)
class Problem:
    """One GEMM and its transfer. The same on all ranks, or they choose differently and hang: give the largest share."""

    direction: Direction
    ranks: int
    rows: int
    """Rows of the whole matrix, M."""
    moved: int
    """Elements of a row that travels: k of a gather, n_out of a scatter."""
    multiplied: int
    """The GEMM's other width on this rank: n_out of a gather, k of a scatter."""
    element_bytes: int

    @property
    def received(self) -> float:
        """Bytes that each rank receives (and sends), S."""
        return (self.ranks - 1) / self.ranks * self.rows * self.moved * self.element_bytes


def choose_split(problem: Problem, rates: Rates) -> Split:
    """Return the split that is predicted to be fastest; UNSPLIT where none wins by LEAST_GAIN."""
    best = min(_candidates(problem.rows), key=lambda split: predicted_ns(split, problem, rates))
    enough = (1 - LEAST_GAIN) * predicted_ns(UNSPLIT, problem, rates)
    return best if predicted_ns(best, problem, rates) < enough else UNSPLIT


@lru_cache(maxsize=1024)
def predicted_ns(split: Split, problem: Problem, rates: Rates) -> float:
    """Predict the time of the GEMM and its transfer, run as `split` ("ring" or "chunked")."""
    gemms, transfers, together = (_ring if split.exchange == "ring" else _chunked)(split.chunks, problem, rates)
    return together + rates.friction * (gemms + transfers - together)


def _candidates(rows: int) -> Iterator[Split]:
    """Powers of two, the simplest first: `min` keeps the first of equals."""
    chunks = 1
    while chunks <= min(MOST_CHUNKS, max(rows, 1)):
        yield Split("chunked", chunks)
        yield Split("ring", chunks)
        chunks *= 2


def _chunked(chunks: int, problem: Problem, rates: Rates) -> tuple[float, float, float]:
    """All GEMMs, all transfers, and the time of both in a pipeline of two stages."""
    link = rates.gather if problem.direction == "gather" else rates.scatter
    gemm = rates.gemm_ns(problem.rows / chunks, problem.moved * problem.multiplied)
    transfer = link.ns(problem.received / chunks)
    return chunks * gemm, chunks * transfer, transfer + (chunks - 1) * max(transfer, gemm) + gemm


def _ring(chunks: int, problem: Problem, rates: Rates) -> tuple[float, float, float]:
    """The same for a ring, where one rank's share of the rows needs no transfer."""
    pieces, hops = problem.ranks * chunks, (problem.ranks - 1) * chunks
    gemm = rates.gemm_ns(problem.rows / pieces, problem.moved * problem.multiplied)
    transfer = rates.ring.ns(problem.received / hops)
    return pieces * gemm, hops * transfer, max(pieces * gemm, hops * transfer + gemm)
