"""Laws of the account of hidden and exposed time, on random timelines, against an oracle that paints every instant."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import strategies
from oracle import owners, painted
from slipstream.analyze import tables
from slipstream.analyze.analysis import analyze
from slipstream.analyze.overlap import Account, Overlap, measure
from slipstream.core.recording import Recording
from slipstream.core.timeline import COLUMNS, UNKNOWN, Kind, Phase, Timeline, build

BUSY = (Kind.COMPUTE, Kind.COMM, Kind.COPY)
A_YEAR = 31_536_000_000_000_000


# -- the oracle


@dataclass
class Painted:
    """A timeline as sets of instants."""

    timeline: Timeline

    def rows(self, *kinds: Kind) -> list[int]:
        return [row for row, kind in enumerate(self.timeline.kind.tolist()) if kind in kinds]

    def span(self, row: int) -> tuple[int, int]:
        return int(self.timeline.start_ns[row]), int(self.timeline.end_ns[row])

    def instants(self, rows: Iterable[int]) -> set[int]:
        return painted([self.span(row) for row in rows])

    def owned(self) -> dict[int, set[int]]:
        """The instants that each comm span owns."""
        rows = self.rows(Kind.COMM)
        found: dict[int, set[int]] = {row: set() for row in rows}
        for instant, position in owners([self.span(row) for row in rows]).items():
            found[rows[position]].add(instant)
        return found

    def account(self, rows: list[int], *, ends_count: bool = True) -> Account:
        if not rows:
            return Account.total([])
        mine = [row for row in rows if row in self.rows(Kind.COMM)]
        owned = self.owned()
        comm = set().union(*(owned[row] for row in mine)) if mine else set()
        bare = comm - self.instants(self.rows(Kind.COMPUTE))
        compute = [row for row in rows if row in self.rows(Kind.COMPUTE) and self.span(row)[1] > self.span(row)[0]]
        feeding = [row for row in compute if self.timeline.phase[row] != Phase.OPTIMIZER] or compute
        head, tail = set(), set()
        if ends_count:
            first = min((self.span(row)[0] for row in compute), default=10**9)
            last = max((self.span(row)[1] for row in feeding), default=10**9)
            head, tail = {t for t in bare if t < first}, {t for t in bare if t >= last}
        start, end = min(self.span(row)[0] for row in rows), max(self.span(row)[1] for row in rows)
        return Account(
            span_ns=end - start,
            compute_ns=len(self.instants(row for row in rows if row in self.rows(Kind.COMPUTE))),
            comm_ns=len(comm),
            hidden_ns=len(comm - bare),
            exposed_ns=len(bare),
            head_ns=len(head),
            stall_ns=len(bare - head - tail),
            tail_ns=len(tail),
            copy_ns=len(self.instants(row for row in rows if row in self.rows(Kind.COPY))),
            idle_ns=len(set(range(start, end)) - self.instants(self.rows(*BUSY))),
        )

    def of_step(self, step: int) -> list[int]:
        return [row for row in self.rows(*BUSY) if self.timeline.step[row] == step]


@given(strategies.timelines())
def test_equals_the_oracle(timeline: Timeline) -> None:
    oracle, found = Painted(timeline), measure(timeline)
    check_whole(oracle, found)
    check_steps(oracle, found)
    check_outside(oracle, found)
    check_shares(oracle, found)


def check_steps(oracle: Painted, found: Overlap) -> None:
    timeline = oracle.timeline
    assert [step.index for step in found.steps] == sorted({*timeline.step[oracle.rows(*BUSY)].tolist()} - {UNKNOWN})
    for step in found.steps:
        rows = oracle.of_step(step.index)
        assert step.account == oracle.account(rows)
        assert step.collectives == len([row for row in rows if timeline.kind[row] == Kind.COMM])
        phases = {Phase(int(timeline.phase[row])) for row in rows} - {Phase.UNKNOWN}
        assert {phase for phase, _ in step.phases} == phases
        for phase, account in step.phases:
            assert account == oracle.account([row for row in rows if timeline.phase[row] == phase])


def check_whole(oracle: Painted, found: Overlap) -> None:
    whole = oracle.account(oracle.rows(*BUSY))
    for field in ("span_ns", "compute_ns", "comm_ns", "hidden_ns", "exposed_ns", "copy_ns", "idle_ns"):
        assert getattr(found.account, field) == getattr(whole, field)


def check_outside(oracle: Painted, found: Overlap) -> None:
    """What ran before the first step has a head and a tail like a step; what came later only stalls."""
    timeline = oracle.timeline
    in_steps = [row for row in oracle.rows(*BUSY) if timeline.step[row] != UNKNOWN]
    first = min((oracle.span(row)[0] for row in in_steps), default=10**9)
    outside = oracle.of_step(UNKNOWN)
    before = oracle.account([row for row in outside if oracle.span(row)[0] < first])
    later = oracle.account([row for row in outside if oracle.span(row)[0] >= first], ends_count=False)
    assert found.outside == Account.total([before, later])


def check_shares(oracle: Painted, found: Overlap) -> None:
    shares = found.shares
    compute, owned = oracle.instants(oracle.rows(Kind.COMPUTE)), oracle.owned()
    assert shares.rows.tolist() == list(owned)
    for position, instants in enumerate(owned.values()):
        assert set(range(int(shares.starts[position]), int(shares.ends[position]))) == instants
        assert int(shares.hidden[position]) == len(instants & compute)
        assert int(shares.exposed[position]) == len(instants - compute)


# -- sums

wide = strategies.timelines(max_spans=25, times=strategies.WIDE_TIMES)


def check_sums(account: Account, busy_ns: int | None = None) -> None:
    assert account.hidden_ns + account.exposed_ns == account.comm_ns
    assert account.head_ns + account.stall_ns + account.tail_ns == account.exposed_ns
    assert all(value >= 0 for value in asdict(account).values())
    assert account.hidden_ns <= account.compute_ns or busy_ns is None
    if busy_ns is not None:
        assert busy_ns + account.idle_ns == account.span_ns


@given(strategies.timelines() | wide)
def test_parts_add_up(timeline: Timeline) -> None:
    found = measure(timeline)
    check_bounds(found.account)
    check_parts(found)
    check_sums(found.account, timeline.busy(*BUSY).length)
    check_sums(found.outside)
    for step in found.steps:
        check_sums(step.account)
        for _, account in step.phases:
            check_sums(account)


def check_bounds(account: Account) -> None:
    assert max(account.compute_ns, account.comm_ns) <= account.span_ns
    assert account.hidden_ns <= min(account.compute_ns, account.comm_ns)
    assert account.compute_ns + account.exposed_ns + account.idle_ns <= account.span_ns
    assert account.span_ns <= account.compute_ns + account.exposed_ns + account.copy_ns + account.idle_ns


def check_parts(found: Overlap) -> None:
    """Steps and what is outside of them add up to the whole."""
    parts = Account.total([found.outside, *(step.account for step in found.steps)])
    for field in ("comm_ns", "hidden_ns", "exposed_ns", "head_ns", "stall_ns", "tail_ns"):
        assert getattr(parts, field) == getattr(found.account, field)


@settings(max_examples=50)
@given(st.lists(strategies.timelines(max_spans=8), min_size=1, max_size=3))
def test_collectives_and_groups_add_up_to_the_ranks(timelines: list[Timeline]) -> None:
    found = analyze(Recording(timelines=tuple(timelines)))
    accounts = [rank.overlap.account for rank in found.ranks]
    for rows in (found.collectives, found.groups):
        assert sum(row.hidden_ns for row in rows) == sum(account.hidden_ns for account in accounts)
        assert sum(row.exposed_ns for row in rows) == sum(account.exposed_ns for account in accounts)
        assert sum(row.count for row in rows) == sum(int((t.kind == Kind.COMM).sum()) for t in timelines)
        assert sum(row.duration_ns for row in rows) == sum(
            int(t.durations_ns[t.kind == Kind.COMM].sum()) for t in timelines
        )
    assert [row.exposed_ns for row in found.collectives] == sorted(
        (r.exposed_ns for r in found.collectives), reverse=True
    )


@given(strategies.timelines())
def test_lanes_hold_every_span(timeline: Timeline) -> None:
    rows = tables.lanes(timeline)
    assert sum(row.spans for row in rows) == len(timeline)
    for kind, field in ((Kind.COMPUTE, "compute_ns"), (Kind.COMM, "comm_ns"), (Kind.COPY, "copy_ns")):
        longest = max((getattr(row, field) for row in rows), default=0)
        assert longest <= timeline.busy(kind).length <= sum(getattr(row, field) for row in rows)


# -- what must not matter


def without_rows(found: Overlap) -> tuple[object, ...]:
    return found.account, found.steps, found.outside


def test_an_empty_timeline() -> None:
    nothing = build(rank=0, device="gpu 0", columns={"start_ns": []}, lanes=(), names=())
    found = measure(nothing)
    assert found.account == Account.total([]) and found.steps == ()


@given(strategies.timelines(), st.sampled_from([-A_YEAR, -1, 1, 1712195495507888958]))
def test_shifting_all_times_changes_nothing(timeline: Timeline, by: int) -> None:
    near, far = measure(timeline), measure(timeline.shifted(by))
    assert without_rows(far) == without_rows(near)
    assert (far.shares.starts - by).tolist() == near.shares.starts.tolist()
    assert far.shares.exposed.tolist() == near.shares.exposed.tolist()


def rebuilt(timeline: Timeline, columns: dict[str, object]) -> Timeline:
    shared = ("lanes", "names", "collectives", "shapes", "steps", "steps_from", "phases_from", "annotations")
    rest = {name: getattr(timeline, name) for name in shared}
    return build(rank=timeline.rank, device=timeline.device, columns=columns, **rest)  # type: ignore[arg-type]


@given(strategies.timelines(), st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_nothing_that_is_summed(timeline: Timeline, random: object) -> None:
    """Which of two equal spans owns their time may change, so per step only where equal spans are of one step."""
    order = np.arange(len(timeline))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = rebuilt(timeline, {column: getattr(timeline, column)[order] for column in COLUMNS})
    near, far = measure(timeline), measure(shuffled)
    for field in ("span_ns", "compute_ns", "comm_ns", "hidden_ns", "exposed_ns", "copy_ns", "idle_ns"):
        assert getattr(far.account, field) == getattr(near.account, field)
    spans = list(zip(timeline.start_ns.tolist(), timeline.end_ns.tolist(), strict=True))
    if len(set(spans)) == len(spans):
        assert without_rows(far) == without_rows(near)


def split(timeline: Timeline, row: int, at: int) -> Timeline:
    """The same timeline with one span cut into two that touch."""
    columns = {column: np.append(getattr(timeline, column), getattr(timeline, column)[row]) for column in COLUMNS}
    columns["end_ns"][row] = columns["start_ns"][-1] = at
    return rebuilt(timeline, dict(columns))


@given(strategies.timelines(), st.data())
def test_splitting_a_span_changes_no_sum(timeline: Timeline, data: st.DataObject) -> None:
    """And no part of one step; between steps whose communication overlaps, a piece may change hands."""
    long = np.flatnonzero(timeline.durations_ns > 1)
    assume(len(long))
    row = int(data.draw(st.sampled_from(long.tolist())))
    at = data.draw(st.integers(int(timeline.start_ns[row]) + 1, int(timeline.end_ns[row]) - 1))
    one_step = replace(timeline, step=np.zeros(len(timeline), np.int32)) if timeline.steps else timeline
    whole, pieces = measure(one_step), measure(split(one_step, row, at))
    assert pieces.account == whole.account
    assert [step.account for step in pieces.steps] == [step.account for step in whole.steps]


@given(strategies.timelines())
def test_only_times_kinds_steps_and_phases_count(timeline: Timeline) -> None:
    busy = timeline.select(timeline.is_kind(*BUSY))
    assert without_rows(measure(busy)) == without_rows(measure(timeline))
    zeros = np.zeros(len(timeline), np.int32)
    plain = replace(timeline, lane=zeros, name=zeros.copy(), shape=zeros.copy(), collective=zeros.copy())
    assert measure(plain).account == measure(timeline).account


@settings(max_examples=50)
@given(strategies.recordings())
def test_the_analysis_of_any_recording_works(recording: Recording) -> None:
    found = analyze(recording)
    assert len(found.ranks) == len(recording.timelines)
    if found.worst is not None:
        assert found.worst.exposed_ns == max(int(r.overlap.shares.exposed.max(initial=0)) for r in found.ranks)
