"""Steps: by the marks of the host and the time of launch, by the optimizer, by a period; and what is outside."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.intervals import Int64Array
from slipstream.core.timeline import NO_TIME, UNKNOWN, Step
from slipstream.trace.steps import by_marks, by_optimizer, by_period, find_period, marks_of_steps, step_number


def array(values: list[int]) -> Int64Array:
    return np.array(values, np.int64)


def one_lane(count: int) -> Int64Array:
    return np.zeros(count, np.int64)


# -- names of marks


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("ProfilerStep#0", 0),
        ("ProfilerStep#1009", 1009),
        ("step 3", 3),
        ("Step_12", 12),
        ("train_step_7", 7),
        ("training step 7", 7),
        ("Iteration: 5", 5),
        ("iter#5", 5),
        ("iteration 5", 5),
        ("ProfilerStep", None),
        ("ProfilerStep#", None),
        ("ProfilerStep#1x", None),
        ("optimizer step 3", None),
        ("Optimizer.step#Adam.step", None),
        ("footstep 3", None),
        ("step -3", None),
        (f"step {'9' * 30}", None),
        ("nccl:all_reduce", None),
    ],
)
def test_step_number(name: str, number: int | None) -> None:
    assert step_number(name) == number


def test_the_profilers_own_marks_come_first() -> None:
    ranges = [("ProfilerStep#3", 0, 10), ("train step 700", 1, 9), ("ProfilerStep#4", 10, 20), ("step 701", 0, 900)]
    assert marks_of_steps(ranges) == [(3, 0, 10), (4, 10, 20)]


def test_of_nested_spellings_the_outer_one_counts() -> None:
    ranges = [("iteration 5", 0, 10), ("step 1", 1, 4), ("step 2", 4, 8), ("iteration 6", 10, 20), ("aten::mm", 0, 99)]
    assert marks_of_steps(ranges) == [(5, 0, 10), (6, 10, 20)]
    assert marks_of_steps([]) == []


# -- marks


def test_a_span_belongs_to_the_step_that_launched_it() -> None:
    """However late it runs; between two windows to the earlier one; outside all of them to none."""
    marks = [(7, 100, 200), (8, 210, 300)]
    found = by_marks(marks, array([50, 100, 199, 205, 210, 299, 300, 301]), one_lane(8), "marks")
    assert found is not None
    assert found.index.tolist() == [UNKNOWN, 0, 0, 0, 1, 1, 1, UNKNOWN]
    assert found.steps == (Step(7, 100, 200), Step(8, 210, 300))
    assert found.source == "marks"


def test_marks_in_any_order_and_twice() -> None:
    marks = [(8, 210, 300), (7, 100, 200), (8, 210, 300)]
    found = by_marks(marks, array([150, 250]), one_lane(2), "")
    assert found is not None and found.index.tolist() == [0, 1]
    assert [step.number for step in found.steps] == [7, 8]


def test_marks_of_one_step_on_several_streams_are_one() -> None:
    marks = [(3, 0, 100), (4, 95, 200), (3, 90, 150), (4, 140, 250)]
    found = by_marks(marks, array([10, 92, 96, 240]), one_lane(4), "")
    assert found is not None
    assert found.steps == (Step(3, 0, 150), Step(4, 95, 250))
    assert found.index.tolist() == [0, 0, 1, 1]


def test_a_number_that_comes_again_is_another_step() -> None:
    found = by_marks([(0, 0, 10), (1, 10, 20), (0, 20, 30)], array([5, 15, 25]), one_lane(3), "")
    assert found is not None and [step.number for step in found.steps] == [0, 1, 0]


def test_without_a_known_launch_a_span_goes_with_the_one_before_it_on_its_lane() -> None:
    times = array([NO_TIME, 120, NO_TIME, 220, NO_TIME, NO_TIME])
    lane = array([0, 0, 0, 1, 0, 1])
    found = by_marks([(0, 100, 200), (1, 200, 300)], times, lane, "")
    assert found is not None
    assert found.index.tolist() == [UNKNOWN, 0, 0, 1, 0, 1]


def test_a_lane_of_which_nothing_is_known_follows_the_others_in_time() -> None:
    times = array([120, NO_TIME, 220, NO_TIME])
    found = by_marks([(0, 100, 200), (1, 200, 300)], times, array([0, 9, 0, 9]), "")
    assert found is not None
    assert found.index.tolist() == [0, 0, 1, 1]


def test_no_marks() -> None:
    assert by_marks([], array([1]), one_lane(1), "") is None


# -- optimizers


def test_steps_end_with_the_optimizer() -> None:
    times = array([0, 50, 99, 100, 150, 199, 250])
    found = by_optimizer([(90, 100), (190, 200)], times, one_lane(7), 0)
    assert found is not None
    assert found.index.tolist() == [0, 0, 0, 1, 1, 1, UNKNOWN]
    assert found.source.startswith("inferred")


def test_optimizers_that_step_one_after_another_end_one_step_together() -> None:
    ends = [(90, 100), (100, 110), (190, 200), (200, 210), (290, 300), (300, 310)]
    found = by_optimizer(ends, array([50, 105, 150, 205, 250, 305]), one_lane(6), 0)
    assert found is not None and len(found.steps) == 3
    assert found.index.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("ends", [[], [(90, 100)]])
def test_one_optimizer_step_tells_no_period(ends: list[tuple[int, int]]) -> None:
    assert by_optimizer(ends, array([1]), one_lane(1), 0) is None


# -- periods


def periodic(body: list[int], times: int, *, gap: int = 50) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Work, launch times and pauses of a body that repeats with a pause before it."""
    work = array(body * times)
    pause = array([gap if i % len(body) == 0 and i else 1 for i in range(len(work))])
    return work, np.cumsum(pause + 10), pause


def no_updates(work: Int64Array) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.zeros(len(work), np.bool_)


def test_a_period_with_a_pause() -> None:
    work, launch, pause = periodic([1, 2, 3, 4, 5], 4)
    found = by_period(work, launch, pause, no_updates(work))
    assert found is not None
    assert found.index.tolist() == [i // 5 for i in range(20)]
    assert "inferred" in found.source and "5 spans" in found.source


def test_a_period_ends_behind_the_updates() -> None:
    work = periodic([1, 2, 3, 9, 9], 4)[0]
    shifted = array([3, 9, 9, *work.tolist(), 1, 2])
    found = by_period(shifted, np.arange(len(shifted)) * 10, np.ones(len(shifted), np.int64), shifted == 9)
    assert found is not None
    assert found.index.tolist() == [0, 0, 0, *[i // 5 + 1 for i in range(20)], 5, 5]


def test_layers_are_no_steps() -> None:
    """Something must happen once a step: layers repeat without a pause that stands out."""
    work, launch, pause = periodic([1, 2, 3, 4], 10, gap=1)
    assert by_period(work, launch, pause, no_updates(work)) is None


def test_layers_within_steps() -> None:
    body = [7, *[1, 2, 3, 4] * 6, 8]
    work, launch, pause = periodic(body, 4)
    found = by_period(work, launch, pause, no_updates(work))
    assert found is not None and len(found.steps) == 4


def test_a_graph_is_not_parted() -> None:
    work, _, pause = periodic([1, 2, 3, 4], 4)
    assert by_period(work, np.zeros(16, np.int64), pause, no_updates(work)) is None


@pytest.mark.parametrize(
    "sequence", [[], [1], [1, 1, 1, 1], [1, 2], [1, 2, 1, 2, 1, 2], list(range(50)), [1, 2, 3, 4] * 2]
)
def test_no_period(sequence: list[int]) -> None:
    assert find_period(array(sequence)) is None


def test_a_period_survives_odd_work() -> None:
    sequence = [1, 2, 3, 4, 5, 6, 7, 8] * 20
    sequence[37] = 99
    assert find_period(array(sequence)) == 8


@given(st.lists(st.integers(0, 5), max_size=60))
def test_any_sequence_has_a_period_or_none(sequence: list[int]) -> None:
    period = find_period(array(sequence))
    if period is not None:
        same = [sequence[i] == sequence[i - period] for i in range(period, len(sequence))]
        assert sum(same) >= 0.95 * len(same)
        assert 3 * period <= len(sequence)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99), st.booleans()), max_size=40))
def test_by_period_never_fails(rows: list[tuple[int, int, bool]]) -> None:
    work = array([row[0] for row in rows])
    pause = array([row[1] for row in rows])
    updates = np.array([row[2] for row in rows], np.bool_)
    found = by_period(work, np.cumsum(pause), pause, updates)
    if found is not None:
        assert len(found.index) == len(rows)
        assert found.index.min() == 0 and found.index.max() == len(found.steps) - 1
        assert (np.diff(found.index) >= 0).all()


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 100), st.integers(1, 50)), max_size=6),
    st.lists(st.tuples(st.integers(-5, 160) | st.just(NO_TIME), st.integers(0, 2)), max_size=10),
)
def test_by_marks_never_fails(marks: list[tuple[int, int, int]], spans: list[tuple[int, int]]) -> None:
    windows = [(number, start, start + length) for number, start, length in marks]
    times, lane = array([time for time, _ in spans]), array([lane for _, lane in spans])
    found = by_marks(windows, times, lane, "")
    if found is None:
        assert not windows
        return
    assert all(UNKNOWN <= index < len(found.steps) for index in found.index)
    for (time, _), index in zip(spans, found.index.tolist(), strict=True):
        if time != NO_TIME and index != UNKNOWN:
            start = found.steps[index].host_start_ns
            assert start is not None and start <= time
