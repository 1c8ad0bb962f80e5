"""Reference values of traces from other projects, and their awkward files: a right answer or a clear error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from reference_traces import reference, trace
from slipstream.analyze.analysis import Analysis, analyze
from slipstream.cli.main import main
from slipstream.trace.read import read

US = 1000


@cache
def analysis(path: Path) -> Analysis:
    return analyze(read([path]))


def kineto_entries() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, entry in reference().get("reference", {}).items():
        if ".json" in name and "total" in entry:
            yield name, entry


ENTRIES = dict(kineto_entries())
EDGES = {
    "EDGE_AMD-AGI_TraceLens__vllm_cudagraph_execution.json.gz": "no communication found among 425 compute spans",
    "EDGE_facebookresearch_HTA__amd_mi250_minitoy.json.gz": "no communication found among 14 compute spans",
    "EDGE_facebookresearch_HTA__cuda_sync_events.json.gz": "no communication found among 4 compute spans",
    "EDGE_facebookresearch_HTA__cupti_profiler_ranges_no_kernels.json.gz": None,
    "EDGE_facebookresearch_HTA__distributed_info_not_found.json.gz": None,
    "EDGE_facebookresearch_HTA__large_integer_commsid.json.gz": "steps not marked",
    "EDGE_facebookresearch_HTA__rank_not_found.json.gz": None,
    "EDGE_path_text_as_gz.json.gz": None,
    "EDGE_pytorch_kineto__tb_plugin_resnet50_legacy_capital_cats.json.gz": "no communication found among 9,456",
}
"""What a warning must say; None for a file that cannot be used."""


def test_the_reference_traces_are_here() -> None:
    if not ENTRIES:
        pytest.skip("the reference traces are not here")
    assert len(ENTRIES) == 12


@pytest.mark.parametrize("name", ENTRIES)
def test_reference_values(name: str) -> None:
    """Within a microsecond; the members of the archive one by one, and with them its ranks."""
    file, _, member = name.partition("::")
    found = analysis(trace(file))
    ranks = [rank for rank in found.ranks if not member or rank.source.endswith(member)]
    expected = ENTRIES[name]["total"]
    assert len(ranks) == len(expected)
    for rank, (device, values) in zip(ranks, expected.items(), strict=True):
        account = rank.overlap.account
        assert rank.timeline.device == f"gpu {device}"
        assert rank.timeline.rank == ENTRIES[name]["rank"]
        for field, key in (
            ("comm_ns", "comm"),
            ("compute_ns", "comp"),
            ("copy_ns", "mem"),
            ("hidden_ns", "overlap"),
            ("exposed_ns", "exposed"),
            ("idle_ns", "idle"),
            ("span_ns", "span"),
        ):
            assert getattr(account, field) == pytest.approx(values[key] * US, abs=US), field
        assert len(rank.overlap.shares.rows) == values["comm_k"]
        lanes = {lane.lane.removeprefix("stream ") for lane in rank.lanes if lane.comm_ns}
        assert lanes == set(values["comm_streams"])


@pytest.mark.parametrize("name", ENTRIES)
def test_steps(name: str) -> None:
    """Every step of the profiler is there with its window. What was launched in it is not cut off where it ends."""
    file, _, member = name.partition("::")
    (rank,) = (rank for rank in analysis(trace(file)).ranks if not member or rank.source.endswith(member))
    windows = ENTRIES[name]["steps_cpu_window"]
    steps = {f"ProfilerStep#{step.number}": step for step in rank.timeline.steps}
    assert steps.keys() == windows.keys()
    for mark, step in steps.items():
        assert step.host_start_ns is not None and step.host_end_ns is not None
        assert step.host_end_ns - step.host_start_ns == pytest.approx(windows[mark]["step_us"] * US, abs=US)
    in_windows = sum(window["comm_us"] for window in windows.values())
    in_steps = sum(step.account.comm_ns for step in rank.overlap.steps) + rank.overlap.outside.comm_ns
    assert in_steps == rank.overlap.account.comm_ns >= (in_windows - 1) * US


# -- through the command


@pytest.mark.parametrize("name", EDGES)
def test_awkward_files(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path, warning = trace(name), EDGES[name]
    code = main(["analyze", str(path), "--json"])
    out, err = capsys.readouterr()
    if warning is None:
        assert (code, out, err.count("\n")) == (3, "", 1)
        assert name in err and "; " in err
    else:
        found = json.loads(out)
        assert (code, err) == (0, "")
        assert any(warning in text for text in found["warnings"])
        assert sum(rank["compute_ns"] + rank["comm_ns"] for rank in found["ranks"]) > 0


def test_the_known_edges_are_all_there_are() -> None:
    if not ENTRIES:
        pytest.skip("the reference traces are not here")
    assert {name for name in reference()["files"] if name.startswith("EDGE")} == set(EDGES)


@pytest.mark.parametrize(
    "name", ["GindaChen_nsys-ai__mfu_2gpu_before.sqlite", "openxla_xprof__tpu_inference_2.xplane.pb"]
)
def test_formats_that_are_not_read_yet(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["analyze", str(trace(name))])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert name in err


def test_the_json_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight ranks from one archive, with what they waited for."""
    path = trace("facebookresearch_param__dlrm_kineto_8rank_v100.tar.gz")
    assert main(["analyze", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in found["ranks"]] == list(range(8))
    assert found["ranks_from"] == "distributedInfo"
    assert sum(row["transfer_ns"] for row in found["collectives"]) == 217 * US
    assert {step["step"] for step in found["steps"]} == {10}
