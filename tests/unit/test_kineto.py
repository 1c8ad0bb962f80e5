"""Kineto files to Timelines: what launched what, which copies communicate, steps, phases, shapes, devices."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from slipstream.analyze.analysis import analyze
from slipstream.core.errors import TraceError
from slipstream.core.recording import Recording
from slipstream.core.timeline import NO_TIME, UNKNOWN, Collective, Group, Kind, Phase, Timeline
from slipstream.trace.classify import Classifier, parse_user_rule
from slipstream.trace.kineto import read_kineto
from traces import ALL_GATHER, ALL_REDUCE, GEMM, LAYOUTS, PID, REDUCE_SCATTER, SEND_RECV, Trace

US = 1_000


def kinds(timeline: Timeline) -> list[Kind]:
    return [Kind(kind) for kind in timeline.kind.tolist()]


def names(timeline: Timeline) -> list[str]:
    return [timeline.names[index] for index in timeline.name.tolist()]


def shapes(timeline: Timeline) -> list[str | None]:
    return [timeline.shapes[index] if index != UNKNOWN else None for index in timeline.shape.tolist()]


def collectives(timeline: Timeline) -> list[Collective | None]:
    return [timeline.collectives[index] if index != UNKNOWN else None for index in timeline.collective.tolist()]


def step_numbers(timeline: Timeline) -> list[int | None]:
    return [timeline.steps[index].number if index != UNKNOWN else None for index in timeline.step.tolist()]


def phases(timeline: Timeline) -> list[Phase]:
    return [Phase(phase) for phase in timeline.phase.tolist()]


# -- layouts


def small_job() -> Trace:
    """Two steps of one rank: launched early, run late."""
    trace = Trace(rank=1, world_size=4)
    for number in (3, 4):
        at = (number - 3) * 100 * US
        trace.step(number, at, at + 90 * US)
        trace.op("aten::mm", at + 5 * US, at + 15 * US, [[8, 4], [4, 2]])
        trace.launch(GEMM, at + 60 * US, at + 80 * US, at=at + 10 * US)
        trace.note("nccl:all_reduce", at + 20 * US, at + 30 * US, **{"Input Dims": [[100]], "Input type": ["float"]})
        trace.launch(ALL_REDUCE, at + 70 * US, at + 110 * US, at=at + 25 * US, stream=20)
    return trace


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_timeline(layout: str) -> None:
    timeline = small_job().timeline(layout)
    assert names(timeline) == [GEMM, ALL_REDUCE] * 2
    assert kinds(timeline) == [Kind.COMPUTE, Kind.COMM] * 2
    assert timeline.start_ns.tolist() == [60 * US, 70 * US, 160 * US, 170 * US]
    assert timeline.end_ns.tolist() == [80 * US, 110 * US, 180 * US, 210 * US]
    assert timeline.launch_ns.tolist() == [10 * US, 25 * US, 110 * US, 125 * US]
    assert step_numbers(timeline) == [3, 3, 4, 4]
    assert [timeline.lanes[lane].name for lane in timeline.lane] == ["stream 7", "stream 20"] * 2
    assert [shape and json.loads(shape) for shape in shapes(timeline)] == [[[8, 4], [4, 2]], None] * 2
    assert collectives(timeline)[1] == Collective("all_reduce", Group(), 400, "float")
    assert timeline.device == "gpu 0"


def test_the_order_of_events_changes_nothing() -> None:
    trace = small_job()
    expected = trace.timeline()
    for seed in range(20):
        random.Random(seed).shuffle(trace.events)
        shuffled = trace.timeline()
        assert names(shuffled) == names(expected)
        for column in ("start_ns", "end_ns", "launch_ns", "kind", "step", "phase", "sequence"):
            assert getattr(shuffled, column).tolist() == getattr(expected, column).tolist()
        assert shapes(shuffled) == shapes(expected)
        assert collectives(shuffled) == collectives(expected)


# -- launches


def test_a_span_whose_launch_was_not_recorded_has_no_launch_time() -> None:
    trace = Trace()
    trace.launch(GEMM, 50 * US, 60 * US, at=10 * US)
    trace.kernel(GEMM, 60 * US, 70 * US, correlation=999)
    trace.kernel(GEMM, 70 * US, 80 * US)
    assert trace.timeline().launch_ns.tolist() == [10 * US, NO_TIME, NO_TIME]


@pytest.mark.parametrize("correlation", [0, -1, 2**31, 2**63 - 1, 2**64, "7", 7.0, None, True, [1]])
def test_correlation_ids_of_any_kind(correlation: Any) -> None:
    trace = Trace()
    trace.call("cudaLaunchKernel", 10 * US, 12 * US, correlation)
    trace.kernel(GEMM, 50 * US, 60 * US, correlation=correlation)
    (launch,) = trace.timeline().launch_ns.tolist()
    known = correlation in ("7", 7.0) or (isinstance(correlation, int) and 0 <= correlation < 2**63)
    assert launch == (10 * US if known else NO_TIME)


def test_a_graph_launch_launches_all_of_its_kernels() -> None:
    trace = Trace()
    for number in (1, 2):
        at = number * 1000 * US
        trace.step(number, at, at + 900 * US)
        trace.op("aten::mm", at, at + 10 * US, [[8, 8]])
        trace.call("cudaGraphLaunch", at + 20 * US, at + 30 * US, number)
        for kernel in range(4):
            start = at + (40 + 300 * kernel) * US
            trace.kernel(ALL_REDUCE if kernel == 2 else GEMM, start, start + 250 * US, correlation=number)
    timeline = trace.timeline()
    assert step_numbers(timeline) == [1] * 4 + [2] * 4, "the last kernels of a step run in the next one's window"
    assert shapes(timeline) == [None] * 8
    (rank,) = analyze(Recording(timelines=(timeline,))).ranks
    assert rank.overlap.account.comm_ns == 500 * US


# -- shapes


def test_the_innermost_operator_around_the_launch_gives_the_shape() -> None:
    trace = Trace()
    trace.op("aten::linear", 0, 100 * US, [[1]])
    trace.op("aten::addmm", 10 * US, 50 * US, [[2]])
    trace.op("aten::other_thread", 15 * US, 40 * US, [[3]], thread=2)
    trace.launch(GEMM, 200 * US, 210 * US, at=20 * US)
    trace.launch(GEMM, 210 * US, 220 * US, at=60 * US)
    trace.launch(GEMM, 220 * US, 230 * US, at=120 * US)
    trace.launch(GEMM, 230 * US, 240 * US, at=30 * US, thread=2)
    assert shapes(trace.timeline()) == ["[[2]]", "[[1]]", None, "[[3]]"]


def test_an_operator_without_recorded_shapes_hides_those_around_it() -> None:
    trace = Trace()
    trace.op("aten::linear", 0, 100 * US, [[1]])
    trace.op("aten::addmm", 10 * US, 50 * US)
    trace.launch(GEMM, 200 * US, 210 * US, at=20 * US)
    assert shapes(trace.timeline()) == [None]


def test_the_grid_is_part_of_the_shape() -> None:
    trace = Trace()
    trace.op("aten::mm", 0, 100 * US, [[2]])
    for index, grid in enumerate([[1, 1, 1], [2, 1, 1], [1, 1, 1]]):
        trace.launch(GEMM, (200 + index) * US, (201 + index) * US, at=(10 + index) * US, grid=grid)
    found = shapes(trace.timeline())
    assert found[0] == found[2] == "[[2]] grid [1, 1, 1]"
    assert found[1] == "[[2]] grid [2, 1, 1]"


def test_without_launches_the_external_id_tells_the_operator() -> None:
    trace = Trace()
    trace.op("aten::mm", 0, 100 * US, [[2]], **{"External id": 77})
    trace.kernel(GEMM, 200 * US, 210 * US, correlation=5, **{"External id": 77})
    trace.kernel(GEMM, 300 * US, 310 * US, correlation=77, **{"External id": 77})
    assert shapes(trace.timeline()) == ["[[2]]", None], "an id that repeats the correlation is none"


# -- steps


def test_work_belongs_to_the_step_that_launched_it() -> None:
    trace = Trace()
    trace.step(1, 0, 100 * US)
    trace.step(2, 110 * US, 200 * US)
    for at in (-5, 50, 105, 150, 250):
        trace.launch(GEMM, (500 + at) * US, (501 + at) * US, at=at * US)
    assert step_numbers(trace.timeline()) == [None, 1, 1, 2, None]


def test_without_launches_marks_on_the_device_count() -> None:
    trace = Trace()
    trace.step(1, 0, 100 * US)
    trace.step(2, 100 * US, 200 * US)
    trace.device_note("ProfilerStep#1", 400 * US, 500 * US)
    trace.device_note("ProfilerStep#2", 500 * US, 600 * US)
    for start in (410, 480, 510):
        trace.kernel(GEMM, start * US, (start + 5) * US)
    timeline = trace.timeline()
    assert step_numbers(timeline) == [1, 1, 2]
    assert timeline.steps_from == "step annotations on the device"


def test_without_launches_and_device_marks_the_host_marks_are_a_guess() -> None:
    trace = Trace()
    trace.step(1, 0, 100 * US)
    trace.step(2, 100 * US, 200 * US)
    trace.kernel(GEMM, 50 * US, 60 * US)
    trace.kernel(GEMM, 150 * US, 160 * US)
    timeline = trace.timeline()
    assert step_numbers(timeline) == [1, 2]
    assert timeline.steps_from.startswith("inferred")


def test_marks_inside_the_profilers_own_are_not_steps() -> None:
    trace = Trace()
    for number in (1, 2):
        at = number * 100 * US
        trace.step(number, at, at + 100 * US)
        trace.note(f"train step {number + 700}", at + 10 * US, at + 90 * US)
        trace.launch(GEMM, at + 60 * US, at + 70 * US, at=at + 50 * US)
        trace.launch(GEMM, at + 96 * US, at + 97 * US, at=at + 95 * US)
    assert [step.number for step in trace.timeline().steps] == [1, 2]


def test_steps_from_the_optimizer() -> None:
    trace = Trace()
    for number in range(3):
        at = number * 100 * US
        trace.launch(GEMM, at + 50 * US, at + 60 * US, at=at + 20 * US)
        trace.note("Optimizer.step#AdamW.step", at + 80 * US, at + 95 * US)
        trace.launch("multi_tensor_apply_kernel", at + 110 * US, at + 120 * US, at=at + 85 * US)
    timeline = trace.timeline()
    assert step_numbers(timeline) == [0, 0, 1, 1, 2, 2]
    assert timeline.steps_from.startswith("inferred from Optimizer.step")


def test_nothing_marked_is_one_step() -> None:
    trace = Trace()
    trace.launch(GEMM, 50 * US, 60 * US, at=20 * US)
    timeline = trace.timeline()
    assert step_numbers(timeline) == [0]
    assert timeline.steps_from.startswith("not marked")


# -- phases


def test_phases_by_what_launched() -> None:
    trace = Trace()
    trace.op("aten::linear", 0, 10 * US)
    trace.launch(GEMM, 100 * US, 110 * US, at=5 * US)
    node = "autograd::engine::evaluate_function: AddmmBackward0"
    trace.op(node, 20 * US, 30 * US, thread=2)
    trace.op("aten::mm", 21 * US, 29 * US, thread=2)
    trace.launch(GEMM, 110 * US, 120 * US, at=25 * US, thread=2)
    trace.launch(GEMM, 120 * US, 130 * US, at=40 * US)
    trace.note("Optimizer.step#SGD.step", 50 * US, 60 * US)
    trace.launch(GEMM, 130 * US, 140 * US, at=55 * US)
    timeline = trace.timeline()
    assert phases(timeline) == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OPTIMIZER]
    assert timeline.phases_from == "autograd and optimizer ranges on the host"


def test_without_autograd_ranges_phases_are_not_known() -> None:
    trace = small_job()
    timeline = trace.timeline()
    assert phases(timeline) == [Phase.UNKNOWN] * 4
    assert timeline.phases_from.startswith("not recorded")


# -- what is communicated


def test_a_kernel_says_what_it_communicates() -> None:
    trace = Trace()
    said = {
        "Collective name": "_allgather_base",
        "In msg nelems": 1000,
        "Out msg nelems": 2000,
        "Group size": 2,
        "dtype": "BFloat16",
        "Process Group Name": "7",
        "Process Group Description": "fsdp",
        "Process Group Ranks": "[0, 4]",
        "Seq": 12,
        "Comms Id": 10159970886766084423,
    }
    trace.kernel("ncclDevKernel_Generic", 0, 10 * US, **said)
    timeline = trace.timeline()
    assert collectives(timeline) == [Collective("all_gather", Group("7", "fsdp", 2, (0, 4)), 4000, "BFloat16")]
    assert timeline.sequence.tolist() == [12]


def test_the_annotation_around_the_launch_says_it_else() -> None:
    trace = Trace(
        rank=0, distributedInfo={"rank": 0, "pg_config": [{"pg_name": "0", "pg_size": 4, "ranks": [0, 1, 2, 3]}]}
    )
    trace.op("c10d::allgather_", 0, 50 * US)
    trace.op("record_param_comms", 5 * US, 40 * US, **{"Collective name": "wait", "In msg nelems": 0})
    trace.note("nccl:_all_gather_base", 10 * US, 30 * US, **{"Input Dims": [[100]], "Input type": ["float"]})
    trace.launch("ncclDevKernel_Generic_4", 100 * US, 110 * US, at=20 * US)
    assert collectives(trace.timeline()) == [
        Collective("all_gather", Group("0", "", 4, (0, 1, 2, 3)), 1600, "float"),
    ]


def test_the_operator_around_the_launch_says_it_with_its_number() -> None:
    trace = Trace()
    said = {"Collective name": "allreduce", "In msg nelems": 10, "dtype": "Float", "Process Group Name": "3", "Seq": 8}
    trace.op("record_param_comms", 0, 50 * US, **said)
    trace.launch(ALL_REDUCE, 100 * US, 110 * US, at=20 * US)
    timeline = trace.timeline()
    assert collectives(timeline) == [Collective("all_reduce", Group("3"), 40, "Float")]
    assert timeline.sequence.tolist() == [8]


@pytest.mark.parametrize(
    ("kernel", "op"),
    [
        (ALL_REDUCE, "all_reduce"),
        (ALL_GATHER, "all_gather"),
        (REDUCE_SCATTER, "reduce_scatter"),
        (SEND_RECV, "send_recv"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_Generic_4"),
    ],
)
def test_else_the_name_says_it(kernel: str, op: str) -> None:
    trace = Trace()
    trace.note("nccl:coalesced", 0, 10 * US)
    trace.launch(kernel, 100 * US, 110 * US, at=5 * US)
    assert collectives(trace.timeline()) == [Collective(op)]


def test_compute_communicates_nothing() -> None:
    """Whatever is launched inside a collective's annotation."""
    trace = Trace()
    trace.note("nccl:all_reduce", 0, 10 * US, **{"Input Dims": [[100]], "Input type": ["float"]})
    trace.launch(GEMM, 100 * US, 110 * US, at=5 * US)
    assert collectives(trace.timeline()) == [None]


# -- copies

PEER = "Memcpy PtoP (Device -> Device)"
LOCAL = "Memcpy DtoD (Device -> Device)"
BLIT = "__amd_rocclr_copyBuffer.kd"
SAID = {"Input Dims": [[100]], "Input type": ["float"]}


def copy_kind(name: str, *, cat: str = "gpu_memcpy", around: str = "", note: str = "", kernel: bool = False) -> Kind:
    """Kind of a copy that was launched inside an operator and an annotation, with a collective's kernel or not."""
    trace = Trace()
    if around:
        trace.op(around, 0, 50 * US, [[1]])
    if note:
        trace.note(note, 5 * US, 40 * US, **SAID)
    trace.launch(name, 100 * US, 110 * US, at=10 * US, cat=cat, stream=3)
    if kernel:
        trace.launch(ALL_REDUCE, 110 * US, 120 * US, at=20 * US, stream=20)
    trace.launch(GEMM, 130 * US, 140 * US, at=60 * US)
    timeline = trace.timeline()
    return kinds(timeline)[names(timeline).index(name)]


def test_a_copy_between_gpus_is_communication() -> None:
    assert copy_kind(PEER) is Kind.COMM
    assert copy_kind(PEER, note="nccl:all_gather") is Kind.COMM
    assert copy_kind(PEER, around="c10d::allgather_") is Kind.COMM
    assert copy_kind(PEER, around="symm_mem::low_contention_all_gather") is Kind.COMM


def test_a_copy_between_gpus_that_another_operator_made_is_none() -> None:
    assert copy_kind(PEER, around="aten::copy_") is Kind.COPY


def test_a_copy_in_place_of_a_collectives_kernel_is_communication() -> None:
    """Copy engines do the work of the collective then."""
    assert copy_kind(LOCAL, note="nccl:all_gather") is Kind.COMM
    assert copy_kind(BLIT, cat="kernel", note="nccl:all_gather") is Kind.COMM


def test_a_copy_beside_a_collectives_kernel_is_a_copy() -> None:
    """It arranges the buffers."""
    assert copy_kind(LOCAL, note="nccl:all_reduce", kernel=True) is Kind.COPY
    assert copy_kind(BLIT, cat="kernel", note="nccl:all_reduce", kernel=True) is Kind.COPY


def test_other_copies_are_copies() -> None:
    assert copy_kind(LOCAL) is Kind.COPY
    assert copy_kind(LOCAL, around="aten::copy_") is Kind.COPY
    assert copy_kind(LOCAL, around="c10d::allreduce_") is Kind.COPY
    assert copy_kind(BLIT, cat="kernel") is Kind.COPY
    assert copy_kind("Memset (Device)", cat="gpu_memset") is Kind.COPY
    assert copy_kind("Memcpy HtoD (Pageable -> Device)") is Kind.COPY


def test_copy_engine_collectives_say_what_they_move() -> None:
    trace = Trace()
    trace.note("nccl:all_reduce", 5 * US, 40 * US, **SAID)
    trace.launch(PEER, 100 * US, 110 * US, at=10 * US, cat="gpu_memcpy", stream=3)
    assert collectives(trace.timeline()) == [Collective("all_reduce", Group(), 400, "float")]


# -- lanes and devices


def test_two_devices_in_one_file() -> None:
    trace = Trace()
    trace.step(1, 0, 100 * US)
    for device in (0, 1):
        trace.launch(GEMM, 50 * US, 60 * US, at=20 * US, device=device)
        trace.launch(ALL_REDUCE, (55 + device) * US, 70 * US, at=30 * US, device=device, stream=20)
        trace.device_note("nccl:all_reduce", (55 + device) * US, 70 * US, device=device, stream=20)
    found = trace.file().timelines
    assert [timeline.device for timeline in found] == ["gpu 0", "gpu 1"]
    for device, timeline in enumerate(found):
        assert timeline.start_ns.tolist() == [50 * US, (55 + device) * US]
        assert step_numbers(timeline) == [1, 1]
        assert len(timeline.annotations) == 2, "those of the host and its own"


def test_a_device_that_runs_no_kernel_is_left_out_and_told() -> None:
    trace = Trace()
    trace.kernel(GEMM, 0, 10 * US)
    trace.kernel(PEER, 0, 10 * US, device=1, cat="gpu_memcpy")
    found = trace.file()
    assert [timeline.device for timeline in found.timelines] == ["gpu 0"]
    assert "1 copies on devices that run no kernel" in found.warnings[0]


def test_a_file_of_copies_only() -> None:
    trace = Trace()
    trace.kernel(PEER, 0, 10 * US, device=1, cat="gpu_memcpy")
    (timeline,) = trace.file().timelines
    assert (timeline.device, kinds(timeline)) == ("gpu 1", [Kind.COMM])


def test_annotations_are_never_busy() -> None:
    trace = Trace()
    trace.kernel(GEMM, 0, 10 * US)
    trace.device_note("nccl:all_reduce", 0, 500 * US, stream=20)
    trace.note("nccl:all_reduce", 0, 500 * US)
    (rank,) = analyze(Recording(timelines=(trace.timeline(),))).ranks
    assert (rank.overlap.account.comm_ns, rank.overlap.account.span_ns) == (0, 10 * US)


def test_a_collective_on_a_compute_lane_is_shown_as_such() -> None:
    trace = Trace()
    trace.kernel(GEMM, 0, 50 * US)
    trace.kernel(ALL_REDUCE, 50 * US, 70 * US)
    trace.kernel(ALL_GATHER, 50 * US, 70 * US, stream=20)
    found = analyze(Recording(timelines=(trace.timeline(),)))
    assert {row.op: row.on_compute_lane for row in found.collectives} == {"all_reduce": 1, "all_gather": 0}
    assert {lane.lane: lane.mixed for lane in found.ranks[0].lanes} == {"stream 7": True, "stream 20": False}


def test_where_device_and_stream_are_told_only_by_place() -> None:
    trace = Trace()
    trace.raw(ph="X", cat="kernel", name=GEMM, pid=3, tid="stream 9", ts=0, dur=5 * US)
    trace.raw(ph="X", cat="kernel", name=GEMM, pid="3", tid=9, ts=5 * US, dur=5 * US, args={})
    timeline = trace.timeline()
    assert (timeline.device, [lane.name for lane in timeline.lanes]) == ("gpu 3", ["stream 9"])


def test_the_name_of_a_thread_may_be_text_or_number() -> None:
    """The same thread in both."""
    trace = Trace()
    trace.op("aten::mm", 0, 50 * US, [[7]])
    trace.events[-1]["tid"] = "1"
    trace.launch(GEMM, 100 * US, 110 * US, at=20 * US)
    assert shapes(trace.timeline()) == ["[[7]]"]


# -- doubtful events


def test_odd_times_are_counted_and_told() -> None:
    trace = Trace()
    trace.kernel(GEMM, 0, 10 * US)
    trace.kernel(GEMM, 20 * US, 15 * US)
    trace.raw(ph="X", cat="kernel", name=GEMM, pid=0, tid=7, dur=5 * US)
    trace.raw(ph="X", cat="kernel", name=GEMM, pid=0, tid=7, ts="soon", dur=5 * US)
    trace.raw(ph="X", cat="kernel", name=GEMM, pid=0, tid=7, ts=30 * US)
    found = trace.file()
    assert found.timelines[0].durations_ns.tolist() == [10 * US, 0, 0]
    assert [warning.split(" events")[0] for warning in found.warnings] == ["2", "1"]


def test_events_that_are_not_complete_are_left_alone() -> None:
    trace = Trace()
    trace.kernel(GEMM, 0, 10 * US)
    for phase in ("B", "E", "i", "C", "s", "f", "b", "e", "", None):
        trace.raw(ph=phase, cat="kernel", name=ALL_REDUCE, pid=0, tid=7, ts=0, dur=50 * US)
    trace.raw(cat="kernel", name=ALL_REDUCE, pid=0, tid=7, ts=0, dur=50 * US)
    assert names(trace.timeline()) == [GEMM]


@pytest.mark.parametrize("cut", ["kineto", "compact", "array"])
def test_a_file_that_was_cut_off_tells_how_much_was_lost(cut: str) -> None:
    text = small_job().text(cut)
    half = text[: text.rindex(ALL_REDUCE) + 5]
    found = read_kineto(iter([half.encode()]), "t.json", Classifier())
    assert len(found.timelines[0]) == 3
    assert "cut off after" in found.warnings[0] and f"{len(half):,} bytes" in found.warnings[0]


def test_a_users_rule_decides() -> None:
    trace = Trace()
    trace.kernel("my_exchange", 0, 10 * US)
    trace.kernel(ALL_REDUCE, 10 * US, 20 * US)
    classifier = Classifier([parse_user_rule("exchange=comm"), parse_user_rule("nccl=compute")])
    found = read_kineto(iter([trace.text().encode()]), "t.json", classifier)
    assert kinds(found.timelines[0]) == [Kind.COMM, Kind.COMPUTE]
    assert collectives(found.timelines[0])[0] == Collective("my_exchange")


# -- what cannot be used


def error(trace: Trace) -> str:
    with pytest.raises(TraceError) as found:
        trace.file()
    message = str(found.value)
    assert message.startswith("trace.json: ") and "; " in message and "\n" not in message
    return message


def test_nothing_in_it() -> None:
    assert "no device work and no host communication" in error(Trace())


def test_launches_without_device_work() -> None:
    trace = Trace()
    trace.op("aten::mm", 0, 10 * US)
    trace.call("cudaLaunchKernel", 1 * US, 2 * US, 1)
    message = error(trace)
    assert "no device work" in message and "ProfilerActivity.CUDA" in message


def test_collectives_without_device_work_are_named() -> None:
    trace = Trace()
    trace.op("aten::mm", 0, 10 * US)
    for _ in range(3):
        trace.note("nccl:all_to_all", 0, 5 * US)
    assert "nccl:all_to_all x 3" in error(trace)


def test_the_range_profiler() -> None:
    trace = Trace()
    trace.op("aten::mm", 0, 10 * US)
    trace.call("cudaLaunchKernel", 1 * US, 2 * US, 1)
    trace.raw(ph="X", cat="cuda_profiler_range", name="gemm", pid=PID, tid=1, ts=0, dur=5 * US)
    assert "range profiler" in error(trace)


def test_times_of_the_whole_64_bits() -> None:
    """What lies beyond is left out; what remains is computed without overflow."""
    trace = Trace()
    trace.kernel(GEMM, 0, 10 * US)
    for text in (
        "9223372036854775807",
        "9223372036854775.807",
        "4611686018427387.903",
        "-4611686018427387.903",
        "1e300",
    ):
        for times in ({"ts": text, "dur": "1"}, {"ts": "0", "dur": text}):
            trace.raw(ph="X", cat="kernel", name=ALL_REDUCE, pid=0, tid=8, **times)
    with np.errstate(all="raise"):
        found = trace.file()
        (rank,) = analyze(Recording(timelines=tuple(found.timelines))).ranks
    account = rank.overlap.account
    assert account.hidden_ns + account.exposed_ns == account.comm_ns >= 0
    assert account.head_ns + account.stall_ns + account.tail_ns == account.exposed_ns
    assert 0 <= account.idle_ns <= account.span_ns
