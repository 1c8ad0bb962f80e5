"""What the fast code must agree with: slow, and as plain as the sentence that each function stands for.

A span or range is a pair `(start, end)` of small integers; it covers the instants `start <= t < end`.
"""

from __future__ import annotations

from collections.abc import Sequence

Span = tuple[int, int]


def painted(spans: Sequence[Span]) -> set[int]:
    """Every instant that some span covers."""
    return {t for start, end in spans for t in range(start, end)}


def runs(instants: set[int]) -> list[Span]:
    """The longest unbroken runs of instants, in order."""
    starts = sorted(t for t in instants if t - 1 not in instants)
    ends = sorted(t + 1 for t in instants if t + 1 not in instants)
    return list(zip(starts, ends, strict=True))


def owners(spans: Sequence[Span]) -> dict[int, int]:
    """Which span owns each covered instant: the one that started first, of those the longest, then the first row."""
    owner = {}
    for t in painted(spans):
        covering = [row for row, (start, end) in enumerate(spans) if start <= t < end]
        owner[t] = min(covering, key=lambda row: (spans[row][0], -spans[row][1], row))
    return owner


def call_stack(ranges: Sequence[Span]) -> tuple[dict[int, int], list[int]]:
    """Walk the clock with a stack of open ranges: which is on top at each instant, and the parent of each range.

    At an instant, first whatever has ended leaves the stack, from wherever it is; then what starts goes on top:
    the longest first, equal ones in row order. The parent is the topmost that stays at least as long. An empty
    range is put on top and taken off again before the instant is over.
    """
    top, parent, stack = {}, [-1] * len(ranges), list[int]()
    ranges = [(start, max(start, end)) for start, end in ranges]
    for t in range(min((r[0] for r in ranges), default=0), max((r[1] for r in ranges), default=0) + 1):
        stack = [row for row in stack if ranges[row][1] > t]
        starting = [row for row in range(len(ranges)) if ranges[row][0] == t]
        for row in sorted(starting, key=lambda row: -ranges[row][1]):
            for other in reversed(stack):
                if ranges[other][1] >= ranges[row][1]:
                    parent[row] = other
                    break
            if ranges[row][1] > t:
                stack.append(row)
        top[t] = stack[-1] if stack else -1
    return top, parent
