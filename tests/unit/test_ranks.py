"""Which rank each file is: metadata, names, order; and what must not be believed."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest

from slipstream.core.timeline import Lane, Step, Timeline, build
from slipstream.trace.ranks import Candidate, assign

_clock = count()


def timeline(device: str = "gpu 0", steps: tuple[int, ...] = (0,)) -> Timeline:
    now = next(_clock)  # no two traces hold the same spans
    return build(
        rank=0,
        device=device,
        columns={"start_ns": np.array([now]), "end_ns": np.array([now + 1])},
        lanes=(Lane("stream 7"),),
        names=("k",),
        steps=tuple(map(Step, steps)),
    )


def candidate(name: str, *, rank: Any = None, trace: str | None = None, steps: tuple[int, ...] = (0,)) -> Candidate:
    metadata: dict[str, Any] = {}
    if rank is not None:
        metadata["distributedInfo"] = {"rank": rank}
    if trace is not None:
        metadata["traceName"] = trace
    return Candidate(name, metadata, (timeline(steps=steps),))


def ranks(*files: Candidate) -> tuple[list[int], str]:
    timelines, _, way, _ = assign(files)
    return [found.rank for found in timelines], way


def test_from_metadata_and_in_order_of_rank() -> None:
    timelines, sources, way, warnings = assign([candidate("b", rank=1), candidate("a", rank=0)])
    assert ([t.rank for t in timelines], sources, way, warnings) == ([0, 1], ["a", "b"], "distributedInfo", [])


def test_a_rank_may_be_text() -> None:
    assert ranks(candidate("a", rank="3"), candidate("b", rank=2.0)) == ([2, 3], "distributedInfo")


@pytest.mark.parametrize("info", [None, [], "x", 5, {}, {"rank": None}, {"rank": "x"}, {"rank": []}, {"rank": True}])
def test_metadata_without_a_rank_falls_back_to_names(info: Any) -> None:
    file = Candidate("worker5.json", {"distributedInfo": info}, (timeline(),))
    assert ranks(file) == ([5], "file names")


def test_from_the_name_that_the_trace_was_written_under() -> None:
    files = [candidate("x.json", trace="/data/rank_7.json"), candidate("y.json", trace="/data/rank_3.json")]
    assert ranks(*files) == ([3, 7], "trace metadata")


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank0.json", 0),
        ("rank-12.Mar_25_20_48_12.2861.pt.trace.json.gz", 12),
        ("rank_3.json", 3),
        ("trace_rank=4.json", 4),
        ("rank[5].pt.trace.json", 5),
        ("Rank 6.json", 6),
        ("worker0_step_12.1694128201545.pt.trace.json", 0),
        ("host_worker7.1700000000000.pt.trace.json", 7),
        ("node3_gpu5.json", 5),
        ("node12_rank5.json", 5),
        ("17.json", 17),
        ("dlrm.tar.gz::dlrm_kineto/worker2_step_12.json", 2),
        ("run/rank_9/trace.json", 9),
        ("global_rank_0008.json", 8),
        ("worker1_rank3.json", 3),
    ],
)
def test_from_file_names(name: str, rank: int) -> None:
    assert ranks(candidate(name)) == ([rank], "file names")


@pytest.mark.parametrize(
    "name",
    [
        "trace.json",
        "frank3.json",
        "coworker3.json",
        "step_12.json",
        "1694128201545.pt.trace.json",
        "rank.json",
        "v2.json",
    ],
)
def test_names_without_a_rank(name: str) -> None:
    assert ranks(candidate(name)) == ([0], "order")


def test_metadata_that_gives_all_files_one_rank_is_not_believed() -> None:
    """A copied launcher writes rank 0 everywhere: the names are right then."""
    files = [candidate("rank0.json", rank=0), candidate("rank1.json", rank=0)]
    timelines, _, way, warnings = assign(files)
    assert ([t.rank for t in timelines], way) == ([0, 1], "file names")
    assert len(warnings) == 1
    assert "rank0.json and rank1.json are both rank 0" in warnings[0]


def test_one_rank_may_have_a_file_for_each_step() -> None:
    files = [candidate("b.json", rank=0, steps=(2, 3)), candidate("a.json", rank=0, steps=(0, 1))]
    timelines, sources, way, warnings = assign(files)
    assert ([t.rank for t in timelines], way, warnings) == ([0, 0], "distributedInfo", [])
    assert sources == ["a.json", "b.json"], "in order of steps"


def test_some_files_may_have_metadata_and_others_names() -> None:
    assert ranks(candidate("a.json", rank=1), candidate("rank0.json")) == ([0, 1], "metadata and file names")


def test_otherwise_the_order_counts_and_is_told() -> None:
    timelines, sources, way, warnings = assign([candidate("x.json"), candidate("y.json")])
    assert ([t.rank for t in timelines], sources, way) == ([0, 1], ["x.json", "y.json"], "order")
    assert "order of the files" in warnings[0]


def test_clashing_names_fall_back_to_the_order() -> None:
    timelines, _, way, warnings = assign([candidate("a/rank0.json"), candidate("b/rank0.json")])
    assert ([t.rank for t in timelines], way) == ([0, 1], "order")
    assert len(warnings) == 2


def test_devices_of_one_file_without_rank_are_ranks() -> None:
    file = Candidate("trace.json", {}, (timeline("gpu 0"), timeline("gpu 1")))
    timelines, sources, _, warnings = assign([file])
    assert [(t.rank, t.device) for t in timelines] == [(0, "gpu 0"), (1, "gpu 1")]
    assert (sources, warnings) == (["trace.json"] * 2, [])


def test_devices_of_one_file_with_a_rank_keep_it() -> None:
    devices = (timeline("gpu 0"), timeline("gpu 1"))
    for file in (
        Candidate("trace.json", {"distributedInfo": {"rank": 4}}, devices),
        Candidate("rank4.json", {}, devices),
    ):
        assert [(t.rank, t.device) for t in assign([file])[0]] == [(4, "gpu 0"), (4, "gpu 1")]


def test_a_copy_of_a_trace_is_not_another_rank() -> None:
    first = candidate("rank0.json", rank=0)
    copy = Candidate("rank0 (copy).json", first.metadata, first.timelines)
    timelines, sources, way, warnings = assign([first, copy, candidate("rank1.json", rank=1)])
    assert ([t.rank for t in timelines], sources, way) == ([0, 1], ["rank0.json", "rank1.json"], "distributedInfo")
    assert warnings == ["rank0 (copy).json holds the same spans as rank0.json and was left out"]


def test_ranks_that_did_the_same_at_the_same_time_are_no_copies() -> None:
    """Spans of two ranks may be alike to the nanosecond, as in made traces and with clocks of whole microseconds."""
    first = candidate("a.json", rank=0)
    twin = Candidate("b.json", {"distributedInfo": {"rank": 1}}, first.timelines)
    assert [t.rank for t in assign([first, twin])[0]] == [0, 1]
    named = [Candidate(name, {}, first.timelines) for name in ("rank0.json", "rank1.json")]
    assert [t.rank for t in assign(named)[0]] == [0, 1]
