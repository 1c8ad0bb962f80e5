"""Dilation: the same work beside communication and alone, or the reason why it cannot be told."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import strategies
from slipstream.analyze.dilation import Dilation, measure
from slipstream.core.timeline import UNKNOWN, Kind, Lane, Timeline, build

Work = tuple[int, int, str, str | None]
"""Start, end, kernel, shape."""


def timeline(compute: Sequence[Work], comm: Sequence[tuple[int, int]]) -> Timeline:
    names = tuple(dict.fromkeys(["nccl", *(name for _, _, name, _ in compute)]))
    shapes = tuple(dict.fromkeys(shape for _, _, _, shape in compute if shape is not None))
    rows = [(start, end, Kind.COMPUTE, name, shape) for start, end, name, shape in compute]
    rows += [(start, end, Kind.COMM, "nccl", None) for start, end in comm]
    return build(
        rank=0,
        device="gpu 0",
        lanes=(Lane("stream 7"),),
        names=names,
        shapes=shapes,
        columns={
            "start_ns": np.array([row[0] for row in rows], np.int64),
            "end_ns": np.array([row[1] for row in rows], np.int64),
            "kind": [row[2] for row in rows],
            "name": [names.index(row[3]) for row in rows],
            "shape": [UNKNOWN if row[4] is None else shapes.index(row[4]) for row in rows],
        },
    )


def test_the_same_work_is_compared_with_itself() -> None:
    """100 ns alone, 130 ns beside communication; of another shape 10 and 12."""
    compute = [
        (0, 100, "gemm", "[8]"),
        (100, 200, "gemm", "[8]"),
        (1000, 1130, "gemm", "[8]"),
        (200, 210, "gemm", "[1]"),
        (1130, 1142, "gemm", "[1]"),
    ]
    found = measure(timeline(compute, [(1000, 1142)]))
    assert found == Dilation(142, 110, 2, 2)
    assert (found.extra_ns, found.ratio) == (32, pytest.approx(142 / 110))


def test_one_nanosecond_beside_counts_as_beside() -> None:
    found = measure(timeline([(0, 100, "k", "s"), (200, 320, "k", "s")], [(319, 400)]))
    assert (found.beside, found.extra_ns) == (1, 20)
    found = measure(timeline([(0, 100, "k", "s"), (200, 320, "k", "s")], [(320, 400)]))
    assert found.beside == 0


def test_the_median_of_the_lone_ones_counts() -> None:
    alone = [(0, 100, "k", "s"), (100, 210, "k", "s"), (210, 710, "k", "s")]
    assert measure(timeline([*alone, (1000, 1130, "k", "s")], [(1000, 1130)])).alone_ns == 110
    assert measure(timeline([*alone[:2], (1000, 1130, "k", "s")], [(1000, 1130)])).alone_ns == 105


def test_work_without_its_like_is_left_out_and_counted() -> None:
    compute = [(0, 100, "k", "s"), (1000, 1120, "k", "s"), (1120, 1200, "other", "s"), (1200, 1250, "k", None)]
    found = measure(timeline(compute, [(1000, 1250)]))
    assert (found.matched, found.beside, found.extra_ns) == (1, 3, 20)


def test_equal_shapes_of_other_kernels_are_not_alike() -> None:
    found = measure(timeline([(0, 100, "a", "s"), (1000, 1120, "b", "s")], [(1000, 1120)]))
    assert found.extra_ns is None and "equal shapes" in found.reason


@pytest.mark.parametrize(
    ("compute", "comm", "reason"),
    [
        ([(0, 100, "k", "s")], [(200, 300)], "no compute ran beside communication"),
        ([(0, 100, "k", "s")], [], "no compute ran beside communication"),
        ([], [(0, 100)], "no compute ran beside communication"),
        ([(0, 0, "k", "s")], [(0, 100)], "no compute ran beside communication"),
        ([(0, 100, "k", None)], [(0, 100)], "input shapes were not recorded"),
        ([(0, 100, "k", None), (200, 300, "k", "s")], [(0, 100)], "input shapes were not recorded"),
        ([(0, 100, "k", "s")], [(0, 100)], "no kernel ran both"),
        ([(0, 100, "k", "s"), (200, 280, "k", "s")], [(200, 280)], "seems faster beside communication"),
    ],
)
def test_not_measurable_has_a_reason(compute: list[Work], comm: list[tuple[int, int]], reason: str) -> None:
    found = measure(timeline(compute, comm))
    assert (found.extra_ns, found.ratio) == (None, None)
    assert reason in found.reason


def test_a_little_faster_is_noise() -> None:
    found = measure(timeline([(0, 100, "k", "s"), (200, 298, "k", "s")], [(200, 298)]))
    assert (found.extra_ns, found.ratio) == (-2, pytest.approx(0.98))


@given(strategies.timelines(max_spans=15), st.sampled_from([-(2**50), 1, 1712195495507888958]))
def test_laws(timeline: Timeline, by: int) -> None:
    found = measure(timeline)
    assert found == measure(timeline.shifted(by))
    assert 0 <= found.matched <= found.beside <= int((timeline.kind == Kind.COMPUTE).sum())
    assert (found.extra_ns is None) == (found.ratio is None) == bool(found.reason)
    assert found.reason or found.matched
    if found.extra_ns is not None:
        assert found.took_ns - found.alone_ns == found.extra_ns
        assert found.took_ns >= found.matched
