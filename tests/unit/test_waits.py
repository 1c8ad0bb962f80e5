"""Waiting against transfer: matching across ranks, without trusting that their clocks agree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.analyze.analysis import Analysis, analyze
from slipstream.analyze.overlap import measure as overlap
from slipstream.analyze.waits import Waits, measure
from slipstream.core.recording import Recording
from slipstream.core.timeline import UNKNOWN, Collective, Group, Kind, Lane, Step, Timeline, build
from slipstream.trace.read import read

WORLD = Collective("all_reduce", Group("0", "world", 2, (0, 1)), 4000)
HOUR = 3_600_000_000_000
TRACES = Path(__file__).parents[3] / "shared" / "traces"

Span = tuple[int, int]


def rank(
    number: int,
    comm: Sequence[Span],
    *,
    compute: Sequence[Span] = (),
    what: Sequence[Collective] | Collective = WORLD,
    sequence: Sequence[int] | None = None,
    step: Sequence[int] | None = None,
    lane: Sequence[int] | None = None,
    device: str = "gpu 0",
) -> Timeline:
    """A timeline with these collectives, and compute on a lane of its own."""
    kinds = [what] * len(comm) if isinstance(what, Collective) else list(what)
    known = tuple(dict.fromkeys(kinds))
    spans, others = [*comm, *compute], len(compute)
    steps = list(step or [0] * len(comm))
    return build(
        rank=number,
        device=device,
        lanes=(Lane("stream 20"), Lane("stream 21"), Lane("stream 7")),
        names=("k",),
        collectives=known,
        steps=tuple(Step(number) for number in range(max(steps, default=0) + 1)),
        columns={
            "start_ns": [start for start, _ in spans],
            "end_ns": [end for _, end in spans],
            "kind": [Kind.COMM] * len(comm) + [Kind.COMPUTE] * others,
            "collective": [known.index(kind) for kind in kinds] + [UNKNOWN] * others,
            "sequence": [*(sequence or [UNKNOWN] * len(comm)), *[UNKNOWN] * others],
            "step": [*steps, *[0] * others],
            "lane": [*(lane or [0] * len(comm)), *[2] * others],
        },
    )


def waits(*timelines: Timeline) -> Waits:
    found = measure(timelines, [overlap(timeline) for timeline in timelines])
    assert found is not None
    return found


def per_rank(found: Waits, field: str) -> list[int]:
    return [getattr(one, field) for one in found.ranks]


# -- one collective


def test_the_rank_that_comes_last_only_transfers() -> None:
    found = waits(rank(0, [(0, 100)]), rank(1, [(70, 100)]))
    assert [values.tolist() for values in found.wait_ns] == [[70], [0]]
    assert [values.tolist() for values in found.transfer_ns] == [[30], [30]]
    assert per_rank(found, "wait_ns") == per_rank(found, "exposed_wait_ns") == [70, 0]
    assert (per_rank(found, "times_last"), per_rank(found, "awaited_ns")) == ([0, 1], [0, 70])
    assert (found.matched, found.unmatched, found.partial) == (1, 0, False)


def test_waiting_that_compute_hides_is_not_exposed() -> None:
    found = waits(rank(0, [(0, 100)], compute=[(10, 40), (60, 90)]), rank(1, [(70, 100)]))
    assert per_rank(found, "wait_ns") == [70, 0]
    assert per_rank(found, "exposed_wait_ns") == [30, 0]
    assert per_rank(found, "awaited_ns") == [0, 30]


def test_one_rank_alone_tells_nothing() -> None:
    assert measure([rank(0, [(0, 100)])], [overlap(rank(0, [(0, 100)]))]) is None


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 99)), min_size=2, max_size=5), st.data())
def test_clocks_do_not_matter(entries: list[tuple[int, int]], data: st.DataObject) -> None:
    """Each rank's clock may be hours off: only the report of the offset changes."""
    group = Group("0", "", len(entries), tuple(range(len(entries))))
    what = Collective("all_reduce", group)
    timelines = [
        rank(number, [(enter, 100 + last), (300 + enter, 450)], compute=[(0, 20), (310, 350)], what=what)
        for number, (enter, last) in enumerate(entries)
    ]
    near = waits(*timelines)
    by = [0, *(data.draw(st.integers(-(10**5), 10**5)) * HOUR for _ in entries[1:])]
    far = waits(*(timeline.shifted(ns) for timeline, ns in zip(timelines, by, strict=True)))
    assert [values.tolist() for values in far.wait_ns] == [values.tolist() for values in near.wait_ns]
    assert [values.tolist() for values in far.transfer_ns] == [values.tolist() for values in near.transfer_ns]
    assert far.ranks == near.ranks
    assert far.clock_error_ns == near.clock_error_ns
    assert [a - b for a, b in zip(far.clock_offset_ns, near.clock_offset_ns, strict=True)] == by


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(100, 199)), min_size=2, max_size=5))
def test_wait_and_transfer_make_up_each_span(spans: list[Span]) -> None:
    what = Collective("all_reduce", Group("0", "", len(spans), tuple(range(len(spans)))))
    found = waits(*(rank(number, [span], what=what) for number, span in enumerate(spans)))
    shortest = min(end - start for start, end in spans)
    for (start, end), wait, transfer in zip(spans, found.wait_ns, found.transfer_ns, strict=True):
        assert (wait.tolist(), transfer.tolist()) == ([end - start - shortest], [shortest])
    assert sum(per_rank(found, "awaited_ns")) == sum(per_rank(found, "exposed_wait_ns"))
    assert sum(per_rank(found, "times_last")) == found.matched == 1


# -- matching


def test_by_place_within_the_step() -> None:
    first = rank(0, [(0, 50), (60, 100), (200, 300)], step=[0, 0, 1])
    second = rank(1, [(30, 50), (80, 100), (280, 300)], step=[0, 0, 1])
    found = waits(first, second)
    assert found.wait_ns[0].tolist() == [30, 20, 80]
    assert (found.matched, found.unmatched) == (3, 0)


def test_a_step_with_other_counts_is_not_matched_and_does_not_spoil_the_others() -> None:
    first = rank(0, [(0, 50), (60, 100), (200, 300)], step=[0, 0, 1])
    second = rank(1, [(30, 50), (280, 300)], step=[0, 1])
    found = waits(first, second)
    assert found.wait_ns[0].tolist() == [UNKNOWN, UNKNOWN, 80]
    assert (found.matched, found.unmatched) == (1, 2)


def test_other_operations_in_the_same_place_are_not_matched() -> None:
    gather = Collective("all_gather", WORLD.group)
    found = waits(
        rank(0, [(0, 50), (60, 90)], what=[WORLD, gather]), rank(1, [(10, 50), (60, 90)], what=[gather, gather])
    )
    assert (found.matched, found.unmatched) == (1, 1)


def test_by_recorded_number_whatever_the_place() -> None:
    """One rank's recording began a collective later and ended one later."""
    first = rank(0, [(0, 50), (60, 100), (110, 150)], sequence=[7, 8, 9])
    second = rank(1, [(80, 100), (140, 150), (160, 200)], sequence=[8, 9, 10])
    found = waits(first, second)
    assert found.wait_ns[0].tolist() == [UNKNOWN, 20, 30]
    assert found.wait_ns[1].tolist() == [0, 0, UNKNOWN]
    assert (found.matched, found.unmatched, found.partial) == (2, 2, True)


def test_recorded_numbers_need_no_steps() -> None:
    first = rank(0, [(0, 50)], sequence=[7], step=[0])
    second = rank(1, [(40, 50)], sequence=[7], step=[1])
    assert waits(first, second).wait_ns[0].tolist() == [40]


def test_kernels_that_share_a_number_are_matched_in_order() -> None:
    first = rank(0, [(0, 50), (60, 100)], sequence=[7, 7])
    second = rank(1, [(40, 50), (90, 100)], sequence=[7, 7])
    assert waits(first, second).wait_ns[0].tolist() == [40, 30]


def test_subgroups_of_one_name_are_apart() -> None:
    left = Collective("all_reduce", Group("tp", "", 2, (0, 1)))
    right = Collective("all_reduce", Group("tp", "", 2, (2, 3)))
    found = waits(
        rank(0, [(0, 100)], what=left),
        rank(1, [(90, 100)], what=left),
        rank(2, [(0, 100)], what=right),
        rank(3, [(60, 100)], what=right),
    )
    assert [values.tolist() for values in found.wait_ns] == [[90], [0], [60], [0]]
    assert (found.matched, found.unmatched, found.partial) == (2, 0, False)


def test_subgroups_that_cannot_be_told_apart_are_not_matched() -> None:
    """Four ranks cannot be in one group of two."""
    what = Collective("all_reduce", Group("tp", "", 2))
    found = waits(*(rank(number, [(number, 100)], what=what) for number in range(4)))
    assert (found.matched, found.unmatched) == (0, 1)
    assert all(values.tolist() == [UNKNOWN] for values in found.wait_ns)


def test_collectives_without_a_group_are_matched_lane_by_lane() -> None:
    what = Collective("all_reduce")
    first = rank(0, [(0, 50), (10, 90), (60, 100)], lane=[0, 1, 0], what=what)
    second = rank(1, [(20, 50), (70, 90), (90, 100)], lane=[0, 1, 0], what=what)
    assert waits(first, second).wait_ns[0].tolist() == [20, 60, 30]


@pytest.mark.parametrize("op", ["send", "recv", "send_recv"])
def test_point_to_point_is_left_alone(op: str) -> None:
    what = Collective(op, WORLD.group)
    found = waits(rank(0, [(0, 100)], what=what), rank(1, [(90, 100)], what=what))
    assert (found.matched, found.unmatched) == (0, 0)
    assert found.clock_error_ns is None


def test_a_rank_without_a_trace_makes_it_partial() -> None:
    what = Collective("all_reduce", Group("0", "", 3, (0, 1, 2)))
    found = waits(rank(0, [(0, 100)], what=what), rank(1, [(90, 100)], what=what))
    assert (found.matched, found.partial) == (1, True)


def test_ranks_that_share_nothing() -> None:
    found = waits(
        rank(0, [(0, 100)], what=Collective("all_reduce", Group("a", "", 1, (0,)))),
        rank(1, [(90, 100)], what=Collective("all_reduce", Group("b", "", 1, (1,)))),
        rank(2, []),
    )
    assert (found.matched, found.unmatched) == (0, 2)


def test_devices_of_one_rank_are_members_too() -> None:
    found = waits(rank(0, [(0, 100)]), rank(0, [(60, 100)], device="gpu 1"))
    assert [values.tolist() for values in found.wait_ns] == [[60], [0]]


def test_several_files_of_one_rank() -> None:
    """Each rank wrote a file a step."""
    files = [
        rank(number, [(step * 200 + 50 * number, step * 200 + 100)], step=[step])
        for step in (0, 1)
        for number in (0, 1)
    ]
    found = waits(*files)
    assert [values.tolist() for values in found.wait_ns] == [[50], [0], [50], [0]]
    assert (found.matched, found.unmatched, found.partial) == (2, 0, False)


# -- clocks


def test_offsets_and_what_remains() -> None:
    ends = [100, 200, 300, 400]
    first = rank(0, [(end - 50, end) for end in ends])
    second = rank(1, [(end - 40 + 7, end + 7) for end in [100, 200, 300, 420]])
    found = waits(first, second)
    assert found.clock_offset_ns == (0, 7)
    assert found.clock_error_ns is not None and 0 < found.clock_error_ns <= 20


def test_offsets_through_groups_that_overlap() -> None:
    left, right = (
        Collective("all_reduce", Group(name, "", 2, ranks)) for name, ranks in (("a", (0, 1)), ("b", (1, 2)))
    )
    found = waits(
        rank(0, [(0, 100)], what=left),
        rank(1, [(10, 105), (110, 205)], what=[left, right]),
        rank(2, [(100, 212)], what=right),
    )
    assert found.clock_offset_ns == (0, 5, 12)
    assert found.clock_error_ns == 0


# -- in the analysis


def job(slow: int, ranks: int = 4) -> Analysis:
    """Ranks that all-reduce ten times; one of them always enters 900 ns late."""
    what = Collective("all_reduce", Group("0", "world", ranks, tuple(range(ranks))), 1_000_000)
    timelines = []
    for number in range(ranks):
        late = 900 if number == slow else 0
        comm = [(at + late, at + 1000) for at in range(0, 20_000, 2000)]
        timelines.append(rank(number, comm, compute=[(at - 1000, at) for at, _ in comm], what=what))
    return analyze(Recording(timelines=tuple(timelines)))


def test_a_slow_rank_is_named_with_its_share() -> None:
    found = job(slow=2)
    assert found.waits is not None
    assert [one.times_last for one in found.waits.ranks] == [0, 0, 10, 0]
    assert [one.awaited_ns for one in found.waits.ranks] == [0, 0, 3 * 10 * 900, 0]
    (row,) = found.collectives
    assert (row.wait_ns, row.transfer_ns, row.count) == (3 * 10 * 900, 10 * 100, 40)
    assert row.busbw == pytest.approx(1_000_000 * 2 * 3 / 4 / 100e-9)
    assert not row.busbw_includes_wait


def test_what_could_not_be_matched_is_told() -> None:
    found = analyze(Recording(timelines=(rank(0, [(0, 50), (60, 90)]), rank(1, [(10, 50)]))))
    assert any("2 collectives could not be matched" in warning for warning in found.warnings)


# -- a recorded job of eight ranks


@pytest.fixture(scope="module")
def dlrm() -> Analysis:
    path = TRACES / "facebookresearch_param__dlrm_kineto_8rank_v100.tar.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not here")
    return analyze(read([path]))


@pytest.fixture(scope="module")
def dlrm_reference() -> dict[str, Any]:
    if not (TRACES / "reference.json").exists():
        pytest.skip("reference.json is not here")
    found: dict[str, Any] = json.loads((TRACES / "reference.json").read_text())
    return dict(found["reference"]["dlrm_8rank_cross_rank"])


def test_dlrm_transfers_217_us(dlrm: Analysis, dlrm_reference: dict[str, Any]) -> None:
    assert sum(row.transfer_ns or 0 for row in dlrm.collectives) == dlrm_reference["sum_of_min_dur_us"] * 1000
    assert [r.overlap.account.comm_ns // 1000 for r in dlrm.ranks] == dlrm_reference["per_rank_comm_us"]


def test_dlrm_instances(dlrm: Analysis, dlrm_reference: dict[str, Any]) -> None:
    """Each of the eight collectives: the shortest and the longest of its ranks, and how far apart they ended."""
    assert dlrm.waits is not None and dlrm.waits.matched == 8
    transfer = np.array(dlrm.waits.transfer_ns) // 1000
    wait = np.array(dlrm.waits.wait_ns) // 1000
    assert (transfer == transfer[0]).all()
    expected = np.array(dlrm_reference["collectives"])
    assert transfer[0].tolist() == expected[:, 0].tolist()
    assert (transfer + wait).max(axis=0).tolist() == expected[:, 1].tolist()
    assert dlrm.waits.clock_error_ns is not None
    assert dlrm.waits.clock_error_ns <= expected[:, 3].max() * 1000


def test_dlrm_waits_most_of_the_time(dlrm: Analysis) -> None:
    assert dlrm.waits is not None
    waiting = sum(one.wait_ns for one in dlrm.waits.ranks)
    total = sum(rank.overlap.account.comm_ns for rank in dlrm.ranks)
    assert waiting == total - 8 * 217_000
    late = max(dlrm.waits.ranks, key=lambda one: one.awaited_ns)
    assert (late.rank, late.times_last) == (7, 5)
