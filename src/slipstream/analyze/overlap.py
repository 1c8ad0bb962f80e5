"""How much communication was hidden behind compute, and where the exposed rest lies.

All sums are over unions of spans, so time counts once however many lanes work in it. The communication of a rank is
dealt out to its spans without remainder (`slipstream.core.intervals.owned`), so the parts of every table add up to
the rank's totals: hidden + exposed = comm, and head + stall + tail = exposed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from slipstream.core.intervals import Int64Array, Intervals, owned, union
from slipstream.core.timeline import UNKNOWN, Kind, Phase, Timeline

_FAR = 1 << 62
"""Later than any time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Where the time of a rank or a step went, in nanoseconds (docs/accounting.md draws it).

    span     from the first device span's start to the last one's end
    compute  union of compute; comm: union of communication; copy: union of copies
    hidden   communication beside compute; exposed: communication without
    head, stall, tail   exposed time before the first compute, between, and after the last compute that feeds
                        communication
    idle     span without compute, communication or copy
    """

    span_ns: int
    compute_ns: int
    comm_ns: int
    hidden_ns: int
    exposed_ns: int
    head_ns: int
    stall_ns: int
    tail_ns: int
    copy_ns: int
    idle_ns: int

    @staticmethod
    def total(parts: Iterable[Account]) -> Account:
        """The sum, field by field."""
        rows = list(parts)
        return Account(**{f.name: sum(getattr(row, f.name) for row in rows) for f in fields(Account)})


@dataclass(frozen=True, slots=True)
class Shares:
    """What each comm span of a timeline owns of the union of communication.

    Its row, its piece, how much of the piece was hidden and how much exposed. Each instant has one owner, the span
    that started first.
    """

    rows: Int64Array
    starts: Int64Array
    ends: Int64Array
    hidden: Int64Array
    exposed: Int64Array


@dataclass(frozen=True, slots=True)
class StepAccount:
    """The account of one step, and of its phases where they are known.

    `wall_ns` is the time to the next step's first device span, None for the last step. `collectives` counts comm spans.
    """

    index: int
    number: int
    account: Account
    wall_ns: int | None
    collectives: int
    phases: tuple[tuple[Phase, Account], ...]
    warmup: bool


@dataclass(frozen=True, slots=True)
class Overlap:
    """The overlap of one timeline: the whole, its steps, and what each comm span contributed."""

    account: Account
    steps: tuple[StepAccount, ...]
    outside: Account
    shares: Shares


def measure(timeline: Timeline) -> Overlap:
    """Account for one timeline. Head and tail of the whole are sums over its steps."""
    compute = timeline.busy(Kind.COMPUTE)
    busy = timeline.busy(Kind.COMPUTE, Kind.COMM, Kind.COPY)
    shares = _shares(timeline, compute)
    book = _Book(timeline, compute, busy, shares)
    working = np.flatnonzero(timeline.is_kind(Kind.COMPUTE, Kind.COMM, Kind.COPY))
    by_step = _grouped(working, timeline.step[working])
    steps = [_step(book, index, rows) for index, rows in by_step.items() if index != UNKNOWN]
    outside = _outside(book, by_step)
    whole = book.account(working, ends_count=False)
    parts = Account.total([outside, *(step.account for step in steps)])
    account = replace(whole, head_ns=parts.head_ns, stall_ns=parts.stall_ns, tail_ns=parts.tail_ns)
    return Overlap(account, tuple(_marked(timeline, steps, by_step)), outside, shares)


def _outside(book: _Book, by_step: dict[int, Int64Array]) -> Account:
    """Work outside all steps. What ran before the first step is the end of one that was not recorded whole."""
    rows = by_step.get(UNKNOWN, np.empty(0, np.int64))
    start = book.timeline.start_ns
    first = min((int(start[mine].min()) for index, mine in by_step.items() if index != UNKNOWN), default=_FAR)
    before = start[rows] < first
    return Account.total([book.account(rows[before], ends_count=True), book.account(rows[~before], ends_count=False)])


def _shares(timeline: Timeline, compute: Intervals) -> Shares:
    rows = np.flatnonzero(timeline.kind == Kind.COMM)
    starts, ends = owned(timeline.start_ns[rows], timeline.end_ns[rows])
    hidden = compute.covered(starts, ends)
    return Shares(rows, starts, ends, hidden, ends - starts - hidden)


def _grouped(rows: Int64Array, key: npt.NDArray[np.int32]) -> dict[int, Int64Array]:
    """Rows by key, in order of key."""
    order = np.argsort(key, kind="stable")
    values, first = np.unique(key[order], return_index=True)
    parts = np.split(rows[order], first[1:]) if len(rows) else []
    return dict(zip(values.tolist(), parts, strict=True))


def _step(book: _Book, index: int, rows: Int64Array) -> StepAccount:
    timeline = book.timeline
    phases = tuple(
        (Phase(phase), book.account(of_phase, ends_count=True))
        for phase, of_phase in _grouped(rows, timeline.phase[rows].astype(np.int32)).items()
        if phase != Phase.UNKNOWN
    )
    collectives = int((timeline.kind[rows] == Kind.COMM).sum())
    account = book.account(rows, ends_count=True)
    return StepAccount(index, timeline.steps[index].number, account, None, collectives, phases, False)


@dataclass(frozen=True, slots=True)
class _Book:
    """One timeline with what all of its accounts are computed from."""

    timeline: Timeline
    compute: Intervals
    busy: Intervals
    shares: Shares

    def account(self, rows: Int64Array, *, ends_count: bool) -> Account:
        """Account for the chosen rows. Without `ends_count` all their exposed time is stall."""
        if not len(rows):
            return Account(**{f.name: 0 for f in fields(Account)})
        timeline, shares = self.timeline, self.shares
        kind = timeline.kind[rows]
        mine = np.searchsorted(shares.rows, rows[kind == Kind.COMM])
        hidden, exposed = int(shares.hidden[mine].sum()), int(shares.exposed[mine].sum())
        head = tail = 0
        if ends_count and exposed:
            first, last = _feeding(timeline, rows)
            bare = union(shares.starts[mine], shares.ends[mine]).subtract(self.compute)
            head = bare.between(-_FAR, first).length
            tail = bare.between(last, _FAR).length
        start, end = timeline.start_ns[rows].min(), timeline.end_ns[rows].max()
        busy = int(self.busy.covered(np.array([start]), np.array([end]))[0])
        return Account(
            span_ns=int(end - start),
            compute_ns=_union_of(timeline, rows[kind == Kind.COMPUTE]).length,
            comm_ns=hidden + exposed,
            hidden_ns=hidden,
            exposed_ns=exposed,
            head_ns=head,
            stall_ns=exposed - head - tail,
            tail_ns=tail,
            copy_ns=_union_of(timeline, rows[kind == Kind.COPY]).length,
            idle_ns=int(end - start) - busy,
        )


def _feeding(timeline: Timeline, rows: Int64Array) -> tuple[int, int]:
    """Start of the first compute, and end of the last compute that feeds communication.

    The optimizer's compute consumes what was communicated; it feeds nothing, unless it is all there is. Without any
    compute everything lies before the first. A span without a length computes nothing.
    """
    compute = rows[(timeline.kind[rows] == Kind.COMPUTE) & (timeline.durations_ns[rows] > 0)]
    if not len(compute):
        return _FAR, _FAR
    feeding = compute[timeline.phase[compute] != Phase.OPTIMIZER]
    last = feeding if len(feeding) else compute
    return int(timeline.start_ns[compute].min()), int(timeline.end_ns[last].max())


def _union_of(timeline: Timeline, rows: Int64Array) -> Intervals:
    return union(timeline.start_ns[rows], timeline.end_ns[rows])


def _marked(timeline: Timeline, steps: list[StepAccount], by_step: dict[int, Int64Array]) -> list[StepAccount]:
    """Add the time to the next step, and mark the first steps that have not settled."""
    starts = [int(timeline.start_ns[by_step[step.index]].min()) for step in steps]
    walls: list[int | None] = [following - start for start, following in pairwise(starts)]
    unsettled = unsettled_steps([step.account.span_ns for step in steps], [step.collectives for step in steps])
    return [
        replace(s, wall_ns=wall, warmup=position < unsettled)
        for position, (s, wall) in enumerate(zip(steps, [*walls, None], strict=False))
    ]


def unsettled_steps(spans_ns: list[int], collectives: list[int]) -> int:
    """How many of the first steps are still warming up: at most half, and none where there are fewer than three.

    A step has not settled while its number of collectives differs from that of all later ones (DDP rebuilds its
    buckets after the first step), or while it takes over 1.5 times the median of the later ones (autotuning,
    allocation).
    """
    unsettled = 0
    while unsettled < len(spans_ns) // 2 and len(spans_ns) >= 3:
        later, counts = spans_ns[unsettled + 1 :], set(collectives[unsettled + 1 :])
        differs = len(counts) == 1 and collectives[unsettled] not in counts
        if not differs and spans_ns[unsettled] <= 1.5 * float(np.median(later)):
            break
        unsettled += 1
    return unsettled
