"""Print what HolisticTraceAnalysis says of traces: the numbers that tests/golden/test_hta.py reproduces.

    python -m venv out/hta && out/hta/bin/pip install HolisticTraceAnalysis
    out/hta/bin/python benchmarks/hta_values.py ../shared/traces/*.json.gz ../shared/traces/*.tar.gz

For each trace and rank: overlap in percent of communication and compute in microseconds, as HTA prints them, without
and with the last profiler step. Needs HTA, and nothing of Slipstream.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path


def values(files: dict[int, str], *, last_step: bool) -> list[dict[str, float]]:
    """HTA's two tables of a job, by rank."""
    from hta.trace_analysis import TraceAnalysis

    analysis = TraceAnalysis(trace_files=files, trace_dir="/", include_last_profiler_step=last_step)
    overlap = analysis.get_comm_comp_overlap(visualize=False).to_dict("records")
    breakdown = analysis.get_temporal_breakdown(visualize=False).to_dict("records")
    return [
        {
            "rank": int(one["rank"]),
            "overlap_percent": float(one["comp_comm_overlap_pctg"]),
            "compute_us": float(two["compute_time(us)"]),
        }
        for one, two in zip(overlap, breakdown, strict=True)
    ]


def files_of(trace: Path, folder: Path) -> dict[int, str]:
    """The files of a job by rank; HTA reads no archives."""
    if not trace.name.endswith(".tar.gz"):
        return {0: str(trace.resolve())}
    with tarfile.open(trace) as archive:
        archive.extractall(folder, filter="data")
    found = {path: re.search(r"(?:rank|worker)\D*(\d+)", path.name) for path in folder.rglob("*.json*")}
    return {int(rank[1]): str(path) for path, rank in found.items() if rank}


def main(paths: Sequence[str]) -> int:
    """Print a line of JSON for each trace."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    print(json.dumps({"HolisticTraceAnalysis": version("HolisticTraceAnalysis"), "pandas": version("pandas")}))
    for path in map(Path, paths):
        with tempfile.TemporaryDirectory() as folder:
            for last_step in (False, True):
                try:
                    found: object = values(files_of(path, Path(folder)), last_step=last_step)
                except Exception as error:
                    found = f"{type(error).__name__}: {error}"[:200]
                print(json.dumps({"trace": path.name, "last_step": last_step, "found": found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
