"""Traces without a device: work of operators, communication of worker threads, and threads that only wait."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from slipstream.analyze.analysis import Analysis, analyze
from slipstream.core.timeline import Kind, Phase, Timeline
from slipstream.trace.classify import (
    COLLECTIVE_HOST_OPS,
    HOST_COMM,
    HOST_CONTAINERS,
    HOST_WAIT,
    Classifier,
    parse_user_rule,
)
from slipstream.trace.kineto import read_kineto
from slipstream.trace.read import read
from traces import Trace

DATA = Path(__file__).parents[1] / "data"
FIXTURES = ("gloo_ddp", "gloo_blocked/a", "gloo_blocked/b", "gloo_blocked/c")
US = 1_000
WORKER = 50

Piece = tuple[int, int, str]


def compute(timeline: Timeline) -> list[Piece]:
    """Compute spans in whole microseconds."""
    rows = [row for row, kind in enumerate(timeline.kind.tolist()) if kind == Kind.COMPUTE]
    return [
        (int(timeline.start_ns[r]) // US, int(timeline.end_ns[r]) // US, timeline.names[timeline.name[r]]) for r in rows
    ]


def work(trace: Trace) -> list[Piece]:
    """Compute of a trace to which communication on a worker thread is added."""
    trace.note("gloo:all_reduce", 900 * US, 950 * US, thread=WORKER)
    return compute(trace.timeline())


def ops(*ranges: tuple[int, int, str], thread: int = 1) -> Trace:
    trace = Trace()
    for start, end, name in ranges:
        trace.op(name, start * US, end * US, thread=thread)
    return trace


# -- what is work


def test_an_operator_works_in_its_own_time() -> None:
    trace = ops((0, 100, "aten::addmm"), (10, 30, "aten::copy_"))
    assert work(trace) == [(0, 10, "aten::addmm"), (10, 30, "aten::copy_"), (30, 100, "aten::addmm")]


@pytest.mark.parametrize(
    "around", ["autograd::engine::evaluate_function: MmBackward0", "MmBackward0", "FSDP::pre_forward", "f"]
)
def test_what_only_encloses_does_no_work(around: str) -> None:
    assert work(ops((0, 100, around), (10, 50, "aten::mm"))) == [(10, 50, "aten::mm")]


def test_compiled_kernels_work() -> None:
    assert work(ops((0, 9, "graph_0_cpp_fused_add_1"))) == [(0, 9, "graph_0_cpp_fused_add_1")]


# -- what waits


@pytest.mark.parametrize(
    "wait",
    [
        "_c10d_functional::wait_tensor",
        "c10d::allreduce_",
        "c10d::barrier",
        "record_param_comms",
        "c10d::monitored_barrier_",
    ],
)
def test_a_wait_and_what_encloses_it_is_no_compute(wait: str) -> None:
    trace = ops((0, 100, "mylib::reduce_and_wait"), (5, 35, "aten::mm"), (40, 100, wait))
    assert work(trace) == [(5, 35, "aten::mm")]


def test_a_backward_that_ends_in_a_long_wait() -> None:
    trace = ops(
        (0, 1000, "autograd::engine::evaluate_function: MyBackward"),
        (0, 1000, "MyBackward"),
        (10, 200, "aten::mm"),
        (200, 210, "c10d::allreduce_"),
    )
    trace.note("gloo:all_reduce", 210 * US, 990 * US, thread=WORKER)
    timeline = trace.timeline()
    assert compute(timeline) == [(10, 200, "aten::mm")]
    (rank,) = analyze_timelines(timeline).ranks
    assert (rank.overlap.account.hidden_ns, rank.overlap.account.exposed_ns) == (0, 780 * US)


def test_a_python_frame_that_waits_blocks_what_encloses_it() -> None:
    trace = ops((0, 100, "mylib::step"), (10, 20, "aten::mm"))
    trace.raw(
        ph="X",
        cat="python_function",
        name="<method wait of torch._C._distributed_c10d.Work object>".strip("<>"),
        pid=4242,
        tid=1,
        ts=30 * US,
        dur=70 * US,
    )
    trace.raw(ph="X", cat="python_function", name="model.py(3): forward", pid=4242, tid=1, ts=0, dur=100 * US)
    assert work(trace) == [(10, 20, "aten::mm")]


def test_work_within_a_wait_counts() -> None:
    trace = ops((0, 100, "_c10d_functional::wait_tensor"), (10, 30, "aten::copy_"))
    assert work(trace) == [(10, 30, "aten::copy_")]


def test_waiting_on_one_thread_blocks_no_other() -> None:
    trace = ops((0, 100, "aten::mm"))
    trace.op("mylib::wait_for_all", 0, 100 * US, thread=2)
    trace.op("c10d::barrier", 0, 100 * US, thread=2)
    assert work(trace) == [(0, 100, "aten::mm")]


def test_communication_on_the_thread_itself_is_no_compute() -> None:
    trace = ops((0, 100, "aten::custom"), (10, 20, "aten::mm"))
    trace.note("gloo:broadcast", 30 * US, 90 * US)
    assert work(trace) == [(10, 20, "aten::mm")]


# -- the timeline


def test_lanes_steps_phases_and_what_is_communicated() -> None:
    trace = Trace(rank=0)
    trace.thread_name(WORKER, "pt_gloo_runloop")
    for number in (0, 1):
        at = number * 1000 * US
        trace.step(number, at, at + 900 * US)
        trace.op("aten::mm", at, at + 100 * US, [[8, 8]])
        trace.op("autograd::engine::evaluate_function: MmBackward0", at + 200 * US, at + 300 * US)
        trace.op("aten::mm", at + 210 * US, at + 290 * US, [[8, 8]])
        trace.note("Optimizer.step#SGD.step", at + 400 * US, at + 500 * US)
        trace.op("aten::add_", at + 410 * US, at + 450 * US)
        said = {"Input Dims": [[100]], "Input type": ["float"]}
        trace.note("gloo:all_reduce", at + 250 * US, at + 350 * US, thread=WORKER, **said)
    timeline = trace.timeline()
    assert timeline.device == "cpu"
    assert {lane.name: lane.is_host for lane in timeline.lanes} == {"thread 1": True, "pt_gloo_runloop": True}
    assert timeline.step.tolist() == [0] * 4 + [1] * 4
    phases = [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    comm = timeline.kind == Kind.COMM
    assert [Phase(phase) for phase in timeline.phase[~comm].tolist()] == phases * 2
    assert {(c.op, c.size_bytes) for c in timeline.collectives} == {("all_reduce", 400)}
    (rank,) = analyze_timelines(timeline).ranks
    assert [step.account.hidden_ns for step in rank.overlap.steps] == [40 * US] * 2
    assert [step.account.tail_ns for step in rank.overlap.steps] == [60 * US] * 2


def test_pieces_of_an_operator_have_shapes_of_their_own() -> None:
    trace = Trace()
    for start in (0, 200):
        trace.op("aten::addmm", start * US, (start + 100) * US, [[2]])
        trace.op("aten::copy_", (start + 10) * US, (start + 20) * US, [[3]])
    trace.note("gloo:all_reduce", 0, 5 * US, thread=WORKER)
    timeline = trace.timeline()
    shapes = [timeline.shapes[shape] for shape in timeline.shape.tolist() if shape >= 0]
    assert len(set(shapes)) == 3, "addmm before, copy_, addmm after"
    assert shapes[:3] == shapes[3:]


def test_a_users_rule_decides() -> None:
    trace = ops((0, 50, "MyKernel"), (60, 70, "aten::noise"))
    trace.note("exchange", 10 * US, 30 * US, thread=WORKER)
    rules = [parse_user_rule(text) for text in ("MyKernel=compute", "aten::noise=other", "exchange=comm")]
    (timeline,) = read_kineto(iter([trace.text().encode()]), "t.json", Classifier(rules)).timelines
    assert compute(timeline) == [(0, 50, "MyKernel")]
    (rank,) = analyze_timelines(timeline).ranks
    assert rank.overlap.account.hidden_ns == 20 * US


def analyze_timelines(*timelines: Timeline) -> Analysis:
    from slipstream.core.recording import Recording

    return analyze(Recording(timelines=timelines))


# -- recorded traces, against a slow reading of the same files


def events_of(path: Path) -> list[dict[str, Any]]:
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)
    return [event for event in found["traceEvents"] if event.get("ph") == "X"]


def range_of(event: dict[str, Any]) -> tuple[int, int]:
    start = int(Decimal(event["ts"]) * 1000)
    return start, start + int(Decimal(event["dur"]) * 1000)


def joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start:
            found.append((start, end))
    return found


def length(ranges: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in joined(ranges))


def common(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> int:
    return length(a) + length(b) - length(a + b)


def slow_compute(events: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Own time of operators that work, thread by thread, by walking a stack."""
    threads = defaultdict(list)
    for event in events:
        if event["cat"] == "cpu_op" or HOST_COMM.match(event["name"]):
            threads[event["tid"]].append((*range_of(event), event["name"]))
    found: list[tuple[int, int]] = []
    for ranges in threads.values():
        ranges.sort(key=lambda r: (r[0], -r[1]))
        parent: list[int | None] = []
        stack: list[int] = []
        for row, (start, end, _) in enumerate(ranges):
            while stack and ranges[stack[-1]][1] <= start:
                stack.pop()
            assert not stack or ranges[stack[-1]][1] >= end, "ranges of a thread nest"
            parent.append(stack[-1] if stack else None)
            stack.append(row)
        idle = set()
        for row, (_, _, name) in enumerate(ranges):
            if HOST_WAIT.search(name) or COLLECTIVE_HOST_OPS.match(name) or HOST_COMM.match(name):
                above: int | None = row
                while above is not None:
                    idle.add(above)
                    above = parent[above]
            if HOST_CONTAINERS.search(name):
                idle.add(row)
        for row, (start, end, _) in enumerate(ranges):
            if row not in idle:
                inner = joined([ranges[child][:2] for child, above in enumerate(parent) if above == row])
                edges = [start, *(edge for piece in inner for edge in piece), end]
                found += list(zip(edges[::2], edges[1::2], strict=True))
    return found


@pytest.mark.parametrize("folder", FIXTURES)
def test_recorded_traces_equal_a_slow_reading(folder: str) -> None:
    found = analyze(read([DATA / folder]))
    assert [rank.timeline.rank for rank in found.ranks] == [0, 1]
    for rank in found.ranks:
        events = events_of(DATA / folder / f"rank{rank.timeline.rank}.json.gz")
        comm = [range_of(event) for event in events if event["name"].startswith("gloo:")]
        busy = slow_compute(events)
        account = rank.overlap.account
        assert account.comm_ns == length(comm)
        assert account.compute_ns == length(busy)
        assert account.hidden_ns == common(comm, busy)


@pytest.mark.parametrize("folder", FIXTURES[1:])
def test_nothing_hides_behind_a_blocked_thread(folder: str) -> None:
    """The all-reduce of 32 MiB takes far longer than compute, which is over when it begins, or waits for it."""
    found = analyze(read([DATA / folder]))
    for rank in found.ranks:
        account = rank.overlap.account
        assert account.hidden_ns == 0
        assert account.exposed_ns > 80_000 * US
        (lane,) = {lane.lane for lane in rank.lanes if lane.compute_ns}
        assert "python" in lane
    (row,) = found.collectives
    assert (row.op, row.group.label, row.count, row.size_bytes) == ("all_reduce", "default_pg", 6, 6 * 32 * 2**20)


def test_a_wait_in_backward_is_a_stall_and_one_behind_it_a_tail() -> None:
    for folder, part in (("a", "stall_ns"), ("b", "tail_ns"), ("c", "tail_ns")):
        for rank in analyze(read([DATA / "gloo_blocked" / folder])).ranks:
            assert getattr(rank.overlap.account, part) == rank.overlap.account.exposed_ns > 0


def test_the_recorded_ddp_job() -> None:
    found = analyze(read([DATA / "gloo_ddp"]))
    (row,) = found.collectives
    assert (row.op, row.count) == ("all_reduce", 2 * 4 * 6)
    assert found.recording.world_size == 2
    for rank in found.ranks:
        assert [step.number for step in rank.overlap.steps] == [2, 3, 4, 5]
        assert all(step.collectives == 6 for step in rank.overlap.steps)
        assert rank.overlap.account.hidden_ns > 0.3 * rank.overlap.account.comm_ns
        assert {phase for step in rank.overlap.steps for phase, _ in step.phases} >= {Phase.FORWARD, Phase.BACKWARD}
