"""How much communication was hidden behind compute, and where the exposed rest lies.

All sums are over unions of spans, so time counts once however many lanes work in it. The communication of a rank is
dealt out to its spans without remainder (`slipstream.core.intervals.owned`), so the parts of every table add up to
the rank's totals: hidden + exposed = comm, and head + stall + tail = exposed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from slipstream.core.intervals import EMPTY, Int64Array, Intervals, owned, union
from slipstream.core.timeline import UNKNOWN, Kind, Phase, Timeline

BoolArray = npt.NDArray[np.bool_]


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
    """What each comm span of a timeline owns: its row, its piece of the union of communication, how much of the
    piece was hidden, and how much was exposed. Each instant has one owner, the span that started first.
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
    shares = _shares(timeline, compute)
    busy = timeline.busy(Kind.COMPUTE, Kind.COMM, Kind.COPY)
    accounts = [_step(timeline, shares, compute, busy, index) for index in range(len(timeline.steps))]
    steps = _marked(timeline, [step for step in accounts if step is not None])
    outside = _account(timeline, timeline.step == UNKNOWN, shares, compute, busy, ends_count=False)
    whole = _account(timeline, np.ones(len(timeline), np.bool_), shares, compute, busy, ends_count=False)
    parts = Account.total([outside, *(step.account for step in steps)])
    account = Account(
        span_ns=whole.span_ns,
        compute_ns=compute.length,
        comm_ns=whole.comm_ns,
        hidden_ns=whole.hidden_ns,
        exposed_ns=whole.exposed_ns,
        head_ns=parts.head_ns,
        stall_ns=parts.stall_ns,
        tail_ns=parts.tail_ns,
        copy_ns=whole.copy_ns,
        idle_ns=whole.idle_ns,
    )
    return Overlap(account, tuple(steps), outside, shares)


def _shares(timeline: Timeline, compute: Intervals) -> Shares:
    rows = np.flatnonzero(timeline.kind == Kind.COMM)
    starts, ends = owned(timeline.start_ns[rows], timeline.end_ns[rows])
    hidden = compute.covered(starts, ends)
    return Shares(rows, starts, ends, hidden, ends - starts - hidden)


def _step(
    timeline: Timeline, shares: Shares, compute: Intervals, busy: Intervals, index: int
) -> StepAccount | None:
    mine = timeline.step == index
    if not (mine & timeline.is_kind(Kind.COMPUTE, Kind.COMM, Kind.COPY)).any():
        return None
    account = _account(timeline, mine, shares, compute, busy, ends_count=True)
    phases = tuple(
        (phase, _account(timeline, mine & (timeline.phase == phase), shares, compute, busy, ends_count=True))
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
        if (mine & (timeline.phase == phase)).any()
    )
    collectives = int((mine & (timeline.kind == Kind.COMM)).sum())
    return StepAccount(index, timeline.steps[index].number, account, None, collectives, phases, False)


def _account(
    timeline: Timeline, mine: BoolArray, shares: Shares, compute: Intervals, busy: Intervals, *, ends_count: bool
) -> Account:
    """Account for the chosen spans. Without `ends_count` all their exposed time is stall."""
    chosen = mine[shares.rows]
    starts, ends = shares.starts[chosen], shares.ends[chosen]
    hidden, exposed = int(shares.hidden[chosen].sum()), int(shares.exposed[chosen].sum())
    head = tail = 0
    if ends_count and exposed:
        first, last = _feeding(timeline, mine)
        bare = union(starts, ends).subtract(compute)
        head = bare.between(np.iinfo(np.int64).min // 2, first).length
        tail = bare.between(last, np.iinfo(np.int64).max // 2).length
    work = mine & timeline.is_kind(Kind.COMPUTE, Kind.COMM, Kind.COPY)
    span = idle = 0
    if work.any():
        start, end = timeline.start_ns[work].min(), timeline.end_ns[work].max()
        span = int(end - start)
        idle = span - int(busy.covered(np.array([start]), np.array([end]))[0])
    return Account(
        span_ns=span,
        compute_ns=_union_of(timeline, mine & (timeline.kind == Kind.COMPUTE)).length,
        comm_ns=hidden + exposed,
        hidden_ns=hidden,
        exposed_ns=exposed,
        head_ns=head,
        stall_ns=exposed - head - tail,
        tail_ns=tail,
        copy_ns=_union_of(timeline, mine & (timeline.kind == Kind.COPY)).length,
        idle_ns=idle,
    )


def _feeding(timeline: Timeline, mine: BoolArray) -> tuple[int, int]:
    """Start of the first compute, and end of the last compute that feeds communication.

    The optimizer's compute consumes what was communicated; it feeds nothing, unless it is all there is. Without any
    compute everything lies before the first.
    """
    compute = mine & (timeline.kind == Kind.COMPUTE)
    if not compute.any():
        never = np.iinfo(np.int64).max // 2
        return never, never
    feeding = compute & (timeline.phase != Phase.OPTIMIZER)
    last = feeding if feeding.any() else compute
    return int(timeline.start_ns[compute].min()), int(timeline.end_ns[last].max())


def _union_of(timeline: Timeline, mask: BoolArray) -> Intervals:
    return union(timeline.start_ns[mask], timeline.end_ns[mask]) if mask.any() else EMPTY


def _marked(timeline: Timeline, steps: list[StepAccount]) -> list[StepAccount]:
    """Add the time to the next step, and mark the first steps that have not settled."""
    starts = [int(timeline.start_ns[timeline.step == step.index].min()) for step in steps]
    walls = [later - start for start, later in zip(starts, starts[1:], strict=False)]
    walls_or_none: list[int | None] = [*walls, None]
    unsettled = unsettled_steps([step.account.span_ns for step in steps], [step.collectives for step in steps])
    return [
        StepAccount(s.index, s.number, s.account, wall, s.collectives, s.phases, position < unsettled)
        for position, (s, wall) in enumerate(zip(steps, walls_or_none, strict=True))
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
