"""The plain answer: a typical step, and one line on what to look at."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings

import strategies
from slipstream.analyze.analysis import Analysis, analyze
from slipstream.analyze.answer import Answer, answer
from slipstream.analyze.overlap import Account, unsettled_steps
from slipstream.core.recording import Recording
from slipstream.core.timeline import UNKNOWN, Collective, Group, Kind, Lane, Phase, Step, Timeline, build

Span = tuple[Kind, int, int]
COMPUTE, COMM, COPY = Kind.COMPUTE, Kind.COMM, Kind.COPY
US = 1000


def timeline(
    *steps: Sequence[Span],
    rank: int = 0,
    op: str = "all_reduce",
    comm_lane: int = 1,
    marked: bool = True,
    phase: Phase = Phase.UNKNOWN,
    outside: Sequence[Span] = (),
) -> Timeline:
    """Steps of spans in microseconds; every step starts where its times say."""
    rows = [(index, *span) for index, step in enumerate(steps) for span in step]
    rows += [(UNKNOWN, *span) for span in outside]
    return build(
        rank=rank,
        device="gpu 0",
        lanes=(Lane("stream 7"), Lane("stream 20"), Lane("stream 3")),
        names=("k",),
        collectives=(Collective(op, Group("0", "dp", 2, (0, 1)), 1000),),
        steps=tuple(Step(index) for index in range(len(steps))),
        steps_from="step annotations" if marked else "not marked",
        columns={
            "start_ns": [row[2] * US for row in rows],
            "end_ns": [row[3] * US for row in rows],
            "step": [row[0] for row in rows],
            "kind": [row[1] for row in rows],
            "lane": [{COMPUTE: 0, COMM: comm_lane, COPY: 2}[row[1]] for row in rows],
            "collective": [0 if row[1] == COMM else UNKNOWN for row in rows],
            "phase": [phase] * len(rows),
        },
    )


def analysis(*timelines: Timeline) -> Analysis:
    return analyze(Recording(timelines=timelines))


def told(*timelines: Timeline) -> Answer:
    return answer(analysis(*timelines))


def moved(step: Sequence[Span], by: int) -> list[Span]:
    return [(kind, start + by, end + by) for kind, start, end in step]


STALL: list[Span] = [(COMPUTE, 0, 40), (COMM, 30, 60), (COMPUTE, 60, 100)]
"""Ten microseconds hidden, twenty exposed between two pieces of compute."""


# -- the typical step


def test_means_over_steps_and_ranks() -> None:
    found = told(timeline(STALL, moved(STALL, 200)), timeline(STALL, moved(STALL, 300), rank=1))
    assert found.account == Account(
        span_ns=100 * US,
        compute_ns=80 * US,
        comm_ns=30 * US,
        hidden_ns=10 * US,
        exposed_ns=20 * US,
        head_ns=0,
        stall_ns=20 * US,
        tail_ns=0,
        copy_ns=0,
        idle_ns=0,
    )
    assert (found.ranks, found.steps, found.warmup, found.per_step) == (2, 2, 0, True)
    assert found.wall_ns == 250 * US


def test_warm_up_is_left_out() -> None:
    slow = [(kind, start * 5, end * 5) for kind, start, end in STALL]
    found = told(timeline(slow, *(moved(STALL, at) for at in (1000, 1200, 1400))))
    assert (found.steps, found.warmup) == (4, 1)
    assert (found.account.span_ns, found.wall_ns) == (100 * US, 200 * US)


def test_without_marks_the_whole_trace_counts() -> None:
    found = told(timeline(STALL, marked=False, outside=[(COMM, 200, 210)]))
    assert (found.per_step, found.wall_ns) == (False, None)
    assert found.account.comm_ns == 40 * US


def test_work_that_is_in_no_step_is_not_lost() -> None:
    """Steps were marked, and nothing was launched in them."""
    found = told(timeline(outside=STALL))
    assert (found.per_step, found.account.comm_ns) == (False, 30 * US)


@settings(max_examples=50)
@given(strategies.recordings())
def test_the_laws_hold_for_the_means(recording: Recording) -> None:
    found = answer(analyze(recording))
    account = found.account
    assert account.hidden_ns + account.exposed_ns == account.comm_ns
    assert account.head_ns + account.stall_ns + account.tail_ns == account.exposed_ns
    assert found.look_at


# -- what settles


@pytest.mark.parametrize(
    ("spans", "counts", "unsettled"),
    [
        ([], [], 0),
        ([10], [1], 0),
        ([99, 10], [1, 9], 0),
        ([99, 10, 10], [1, 1, 1], 1),
        ([10, 10, 10], [1, 5, 5], 1),
        ([10, 10, 10], [5, 5, 1], 0),
        ([15, 10, 10, 10], [1, 1, 1, 1], 0),
        ([16, 10, 10, 10], [1, 1, 1, 1], 1),
        ([99, 99, 10, 10, 10], [1, 1, 1, 1, 1], 2),
        ([99, 99, 99, 10, 10], [1, 1, 1, 1, 1], 2),
        ([99, 98, 97, 10], [1, 1, 1, 1], 0),
        ([10, 10, 10, 10], [1, 2, 3, 4], 0),
        ([10, 10, 10, 10, 99], [1, 1, 1, 1, 1], 0),
    ],
)
def test_unsettled_steps(spans: list[int], counts: list[int], unsettled: int) -> None:
    assert unsettled_steps(spans, counts) == unsettled


# -- one line


def look_at(*timelines: Timeline) -> str:
    return told(*timelines).look_at


def test_no_communication() -> None:
    assert "No communication was recognised" in look_at(timeline([(COMPUTE, 0, 100)]))


def test_communication_without_length() -> None:
    assert "no measurable time" in look_at(timeline([(COMPUTE, 0, 100), (COMM, 50, 50)]))


def test_no_compute() -> None:
    assert "nothing to hide communication behind" in look_at(timeline([(COMM, 0, 100)]))


def test_communication_outside_the_steps() -> None:
    assert "outside the steps" in look_at(timeline([(COMPUTE, 0, 100)], outside=[(COMM, 200, 300)]))


def test_nothing_to_win() -> None:
    assert "Nothing to win here: 2.0 %" in look_at(timeline([(COMM, 0, 52), (COMPUTE, 0, 50), (COMPUTE, 52, 100)]))


def test_waiting() -> None:
    late = timeline([(COMPUTE, 0, 40), (COMM, 90, 100)], rank=1)
    text = look_at(timeline([(COMPUTE, 0, 40), (COMM, 40, 100)]), late)
    assert "Waiting, not bandwidth" in text and "Rank 1 comes last in 1 of 1" in text


def test_on_the_compute_lane() -> None:
    text = look_at(timeline([(COMPUTE, 0, 40), (COMM, 40, 60), (COMPUTE, 60, 100)], comm_lane=0))
    assert text.startswith("all_reduce run on a lane that also computes")


def test_idle() -> None:
    assert "idle for 69 % of the step" in look_at(timeline([(COMPUTE, 0, 10), (COMM, 10, 30), (COMPUTE, 99, 100)]))


def test_hidden_but_idle() -> None:
    text = look_at(timeline([(COMPUTE, 0, 20), (COMM, 10, 21), (COMPUTE, 90, 100)]))
    assert "Communication is hidden" in text and "idle for 69 %" in text


def test_idle_between_steps() -> None:
    """From one step to the next the device has nothing to do."""
    text = look_at(timeline(STALL, moved(STALL, 1000), moved(STALL, 2000)))
    assert "idle for 90 % of the step" in text


def test_tail() -> None:
    text = look_at(timeline([(COMPUTE, 0, 60), (COMM, 50, 100)]))
    assert text.startswith("100 % of the exposed time is tail") and "mostly all_reduce of group dp" in text


def test_head() -> None:
    text = look_at(timeline([(COMM, 0, 40), (COMPUTE, 40, 100)], op="all_gather"))
    assert text.startswith("100 % of the exposed time is head") and "all_gather" in text


def test_more_communication_than_compute() -> None:
    text = look_at(timeline([(COMPUTE, 0, 10), (COMM, 10, 90), (COMPUTE, 90, 100)]))
    assert "takes longer than compute" in text


def test_stalls() -> None:
    assert "There is enough compute to hide all communication, but 20.0 us a step stall" in look_at(timeline(STALL))


# -- the worst


def test_the_worst_collective() -> None:
    worst = [(COMPUTE, 0, 40), (COMM, 30, 95), (COMPUTE, 95, 100)]
    found = analysis(timeline(STALL, moved(worst, 200)), timeline(STALL, rank=1)).worst
    assert found is not None
    assert (found.rank, found.step, found.op, found.group) == (0, 1, "all_reduce", "dp")
    assert (found.start_ns, found.duration_ns, found.exposed_ns) == (230 * US, 65 * US, 55 * US)


def test_where_all_is_hidden_there_is_no_worst() -> None:
    assert analysis(timeline([(COMPUTE, 0, 100), (COMM, 10, 20)])).worst is None


# -- doubts


def test_no_communication_names_what_looks_most_like_it() -> None:
    warnings = analysis(timeline([(COMPUTE, 0, 100)])).warnings
    assert warnings == ("rank 0: no communication found among 1 compute spans, and none has a name like it",)


def test_many_silent_ranks_are_summed_up() -> None:
    warnings = analysis(*(timeline([(COMPUTE, 0, 100)], rank=rank) for rank in range(8))).warnings
    assert len(warnings) == 4
    assert warnings[-1] == "no communication found on 5 more ranks"
