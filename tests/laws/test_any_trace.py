"""Whatever a trace holds, the whole way from its bytes to the report gives a result or an error meant for the user."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from slipstream.analyze.analysis import analyze
from slipstream.core.errors import SlipstreamError
from slipstream.core.recording import Recording
from slipstream.core.store import load, save
from slipstream.report.json import to_json
from slipstream.report.terminal import show
from slipstream.trace import ranks
from slipstream.trace.classify import Classifier
from slipstream.trace.kineto import read_kineto
from traces import ALL_REDUCE, GEMM, Trace, dumps

ODD: st.SearchStrategy[Any] = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        1,
        7,
        2**31,
        2**40,
        2**63,
        2**64,
        -(2**63),
        10**30,
        0.5,
        1e300,
        float("nan"),
        "",
        "7",
        "x",
        [],
        {},
    ]
)
SMALL = st.integers(0, 3)


def mostly(usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Now and then anything."""
    return st.integers(0, 11).flatmap(lambda chance: ODD if chance == 7 else usual)


DEVICE_NAMES = (
    GEMM,
    ALL_REDUCE,
    "ncclDevKernel_SendRecv",
    "Memcpy PtoP (Device -> Device)",
    "Memcpy DtoD (Device -> Device)",
    "__amd_rocclr_copyBuffer",
    "[/bold]",
    "\ud800",
)
NOTE_NAMES = (
    "nccl:all_reduce",
    "nccl:send 0->1",
    "gloo:all_reduce",
    "ProfilerStep#1",
    "ProfilerStep#2",
    "step 2",
    "Optimizer.step#SGD.step",
)
OPERATOR_NAMES = (
    "autograd::engine::evaluate_function: MmBackward0",
    "aten::mm",
    "c10d::allreduce_",
    "record_param_comms",
    "method wait of Work",
    "",
)
PLACES = (
    (("kernel", "kernel", "gpu_memcpy", "gpu_memset", "Kernel"), DEVICE_NAMES),
    (("user_annotation", "gpu_user_annotation", "Operator"), NOTE_NAMES),
    (("cpu_op", "Operator", "python_function"), OPERATOR_NAMES),
    (("cuda_runtime", "Runtime", "overhead"), ("cudaLaunchKernel", "cudaGraphLaunch")),
)
OPS = st.sampled_from(["allreduce", "_allgather_base", "reduce_scatter", "wait", "send", "x"])
ARGS = st.fixed_dictionaries(
    {},
    optional={
        "correlation": mostly(SMALL),
        "External id": mostly(SMALL),
        "device": mostly(st.integers(0, 1)),
        "stream": mostly(SMALL),
        "Input Dims": mostly(st.sampled_from([[[4, 4]], [[]], [[[1], [2]]], [4], [["a"]]])),
        "Input type": mostly(st.sampled_from([["float"], [""], [["float"]], "float"])),
        "grid": mostly(st.sampled_from([[1, 1, 1], [2, 1, 1]])),
        "Collective name": mostly(
            st.sampled_from(["allreduce", "_allgather_base", "reduce_scatter", "wait", "send", "x"])
        ),
        "In msg nelems": mostly(SMALL),
        "Out msg nelems": mostly(SMALL),
        "Group size": mostly(st.integers(0, 4)),
        "dtype": mostly(st.sampled_from(["Float", "BFloat16", "?"])),
        "Process Group Name": mostly(st.sampled_from(["0", "1", "[/x]"])),
        "Process Group Description": mostly(st.sampled_from(["dp", "tp"])),
        "Process Group Ranks": mostly(st.sampled_from(["[0, 1]", "[0, ...]", [0, 1]])),
        "Seq": mostly(SMALL),
        "name": mostly(st.sampled_from(["python", "pt_gloo_runloop"])),
    },
)
EVENTS = st.sampled_from(PLACES).flatmap(
    lambda place: st.fixed_dictionaries(
        {
            "ph": st.sampled_from(["X"] * 16 + ["M", "B", "i", "s", ""]),
            "cat": mostly(st.sampled_from(place[0])),
            "name": mostly(st.sampled_from(place[1])),
            "ts": mostly(st.integers(0, 200)),
            "dur": mostly(st.integers(-2, 90)),
        },
        optional={"pid": mostly(SMALL), "tid": mostly(SMALL), "args": mostly(ARGS)},
    )
)
METADATA = st.fixed_dictionaries(
    {},
    optional={
        "distributedInfo": mostly(
            st.fixed_dictionaries(
                {},
                optional={
                    "rank": mostly(SMALL),
                    "world_size": mostly(SMALL),
                    "backend": ODD,
                    "pg_config": mostly(
                        st.lists(
                            mostly(
                                st.fixed_dictionaries(
                                    {"pg_name": mostly(st.sampled_from(["0", "1"]))},
                                    optional={"pg_size": ODD, "ranks": ODD, "pg_desc": ODD},
                                )
                            ),
                            max_size=2,
                        )
                    ),
                },
            )
        ),
        "deviceProperties": ODD,
        "traceName": ODD,
        "with_stack": ODD,
    },
)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A trace whose events are plausible but for some values."""
    trace = Trace(**draw(METADATA))
    trace.events = draw(st.lists(EVENTS, max_size=14))
    return dumps({**trace.metadata, "traceEvents": trace.events}).encode("utf-8", "surrogatepass")


@settings(max_examples=150)
@given(st.lists(files(), min_size=1, max_size=3))
def test_any_trace(tmp_path_factory: Any, contents: list[bytes]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(tmp_path_factory.mktemp("any"), contents)


def check(folder: Path, contents: list[bytes]) -> None:
    candidates = []
    for index, content in enumerate(contents):
        try:
            found = read_kineto(iter([content]), f"{index}.json", Classifier())
        except SlipstreamError as error:
            assert "\n" not in str(error)
            continue
        candidates.append(ranks.Candidate(f"{index}.json", found.metadata, tuple(found.timelines)))
    if not candidates:
        return
    timelines, sources, ranks_from, notes = ranks.assign(candidates)
    recording = Recording(
        timelines=tuple(timelines), sources=tuple(sources), ranks_from=ranks_from, warnings=tuple(notes)
    )
    analysis = analyze(recording)
    text = json.dumps(to_json(analysis), allow_nan=False)
    show(analysis, Console(file=io.StringIO(), width=140), tables=True)
    save(recording, folder / "run.slip", force=True)
    assert json.dumps(to_json(analyze(load(folder / "run.slip")))) == text
