"""HolisticTraceAnalysis's numbers come out of our spans once its conventions are applied to them.

The values are what HTA 0.5.0 printed on 2026-12-01 (`benchmarks/hta_values.py`; pandas 3.1.1, for the MI300X trace
pandas 2.3.3, since HTA fails on it with 3). Where the two differ, it is by these conventions, and by nothing else:

- starts are rounded up and ends down to whole microseconds: half the kernels of a trace get shorter;
- of a trace with several profiler steps, what was launched in the last one is dropped, and so is what has no
  recorded launch; with `include_last_profiler_step` what was launched behind the last step's end is;
- overlap is divided by communication;
- a step mark that the profiler drew on a device counts like one of the host. On the MI300X trace the last mark is
  therefore one of the device, 37 ms late, and dropping the last step drops nothing.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from reference_traces import trace
from slipstream.core.intervals import Intervals, union
from slipstream.core.timeline import NO_TIME, Kind, Timeline
from slipstream.trace.read import read
from slipstream.trace.steps import step_number

A100 = "facebookresearch_HTA__nccl_data_a100_ddp2_rank0.json.gz"
CONTROL = "facebookresearch_HTA__trace_diff_control_a100_rank3of8.json.gz"
TEST = "facebookresearch_HTA__trace_diff_test_v100_rank1of2.json.gz"
MI300X = "AMD-AGI_TraceLens__mi300_resnet_act_checkpoint_ddp8_rank0.json.gz"
DLRM = "facebookresearch_param__dlrm_kineto_8rank_v100.tar.gz"

OVERLAP_PERCENT = [
    (A100, 0, False, 14.31),
    (A100, 0, True, 15.14),
    (CONTROL, 0, False, 47.03),
    (CONTROL, 0, True, 46.24),
    (TEST, 0, False, 68.80),
    (TEST, 0, True, 69.07),
    (MI300X, 0, False, 22.45),
    (MI300X, 0, True, 22.45),
    *[(DLRM, rank, False, percent) for rank, percent in enumerate((4.5, 2.47, 7.88, 3.31, 0.56, 0.64, 7.56, 9.51))],
]

COMPUTE_US = [
    (A100, 0, False, 75169),
    (A100, 0, True, 113012),
    (CONTROL, 0, False, 234760),
    (CONTROL, 0, True, 281336),
    (TEST, 0, False, 429216),
    (TEST, 0, True, 514576),
    *[(DLRM, rank, False, us) for rank, us in enumerate((1034, 1246, 1068, 1240, 1126, 1041, 1051, 1059))],
    ("EDGE_AMD-AGI_TraceLens__vllm_cudagraph_execution.json.gz", 0, False, 10250),
    ("EDGE_facebookresearch_HTA__cuda_sync_events.json.gz", 0, False, 49),
    ("EDGE_pytorch_kineto__tb_plugin_resnet50_legacy_capital_cats.json.gz", 0, False, 505812),
    ("EDGE_pytorch_kineto__tb_plugin_resnet50_legacy_capital_cats.json.gz", 0, True, 607048),
]


MI300X_COMPUTE_US, BETWEEN_TICKS = 17018, 21
"""A kernel that neither starts nor ends on the other side of a microsecond's tick gets the length -1 us by rounding;
HTA subtracts those that stand alone. There are 21 on the MI300X trace, none on the others."""


@cache
def timelines(path: Path) -> tuple[Timeline, ...]:
    return read([path]).timelines


def busy(timeline: Timeline, kind: Kind, *, last_step: bool) -> Intervals:
    """Our spans of one kind, in microseconds, by the conventions above."""
    rows = (timeline.kind == kind) & launched_in_time(timeline, last_step=last_step)
    return union(-(-timeline.start_ns[rows] // 1000), timeline.end_ns[rows] // 1000)


def launched_in_time(timeline: Timeline, *, last_step: bool) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    notes = timeline.annotations
    marks = np.array([step_number(timeline.names[name]) is not None for name in notes.name.tolist()], np.bool_)
    if len({*notes.name[marks].tolist()}) < 2:
        return np.ones(len(timeline), np.bool_)
    launch = -(-timeline.launch_ns // 1000)
    first_dropped = -(-int(notes.start_ns[marks].max()) // 1000)
    last_kept = int(notes.end_ns[marks].max()) // 1000
    in_time = launch <= last_kept if last_step else launch < first_dropped
    return np.asarray(in_time & (timeline.launch_ns != NO_TIME))


@pytest.mark.parametrize(("name", "rank", "last_step", "percent"), OVERLAP_PERCENT)
def test_overlap(name: str, rank: int, last_step: bool, percent: float) -> None:
    timeline = timelines(trace(name))[rank]
    comm = busy(timeline, Kind.COMM, last_step=last_step)
    hidden = comm.intersect(busy(timeline, Kind.COMPUTE, last_step=last_step))
    assert round(100 * hidden.length / comm.length, 2) == percent


@pytest.mark.parametrize(("name", "rank", "last_step", "compute_us"), COMPUTE_US)
def test_compute(name: str, rank: int, last_step: bool, compute_us: int) -> None:
    assert busy(timelines(trace(name))[rank], Kind.COMPUTE, last_step=last_step).length == compute_us


def test_kernels_between_two_ticks_are_subtracted() -> None:
    (timeline,) = timelines(trace(MI300X))
    rows = (timeline.kind == Kind.COMPUTE) & launched_in_time(timeline, last_step=True)
    lost = -(-timeline.start_ns[rows] // 1000) > timeline.end_ns[rows] // 1000
    assert int(lost.sum()) == BETWEEN_TICKS
    compute = busy(timeline, Kind.COMPUTE, last_step=True)
    assert compute.length - BETWEEN_TICKS == MI300X_COMPUTE_US


def test_what_the_conventions_cost() -> None:
    """14.31 % where 15.61 % of the communication was hidden."""
    (timeline,) = timelines(trace(A100))
    comm, compute = timeline.busy(Kind.COMM), timeline.busy(Kind.COMPUTE)
    assert round(100 * comm.intersect(compute).length / comm.length, 2) == 15.61
