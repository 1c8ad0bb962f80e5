"""The recording examples run, their traces hold what the analyses are tested on, and they leave no process."""

import gzip
import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]

EXAMPLES = Path(__file__).parents[2] / "examples"
Event = dict[str, Any]


def record(script: str, folder: Path, *options: str) -> None:
    command = [sys.executable, str(EXAMPLES / script), str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def spans(path: Path) -> list[Event]:
    events: list[Event] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def gloo(events: list[Event]) -> list[Event]:
    return [event for event in events if event["name"].startswith("gloo:")]


def overlap(one: Event, other: Event) -> float:
    end = min(one["ts"] + one["dur"], other["ts"] + other["dur"])
    return max(0.0, end - max(one["ts"], other["ts"]))


def operators_across(events: list[Event]) -> set[str]:
    """Name the operators that span most of some collective, on another thread (0.92 of it is the least seen)."""
    operators = [event for event in events if event["cat"] == "cpu_op"]
    return {
        operator["name"]
        for collective in gloo(events)
        for operator in operators
        if operator["tid"] != collective["tid"] and overlap(operator, collective) > 0.5 * collective["dur"]
    }


def test_ddp_trains_and_each_rank_has_a_trace_with_communication(tmp_path: Path) -> None:
    record("record_ddp.py", tmp_path, "--steps", "2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.json.gz", "rank1.json.gz"]
    for path in tmp_path.iterdir():
        events = spans(path)
        assert len(gloo(events)) == 2 * 6, "one all-reduce a layer and step"
        assert sum(event["name"].startswith("ProfilerStep#") for event in events) == 2


def test_blocked_waits_look_like_long_operators(tmp_path: Path) -> None:
    record("record_blocked_wait.py", tmp_path)
    for rank in ("rank0.json.gz", "rank1.json.gz"):
        assert "ReduceInBackwardBackward" in operators_across(spans(tmp_path / "a" / rank))
        assert "_c10d_functional::wait_tensor" in operators_across(spans(tmp_path / "b" / rank))
        # Python's wait in dist.all_reduce is no operator: the thread shows a gap.
        assert operators_across(spans(tmp_path / "c" / rank)) == set()


@pytest.mark.parametrize("script", ["record_ddp.py", "record_blocked_wait.py"])
def test_a_folder_with_traces_is_refused(tmp_path: Path, script: str) -> None:
    (tmp_path / "rank7.json.gz").touch()
    command = [sys.executable, str(EXAMPLES / script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "holds traces already" in done.stderr


def living(session: int) -> list[str]:
    """Name the processes of a session that have not ended (one that waits to be reaped has)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:  # ended while we looked
            continue
        state, _parent, _group, its_session = rest.split()[:4]
        if int(its_session) == session and state not in "ZX":
            found.append(name)
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("moment", ["while the ranks start", "while they train"])
def test_ctrl_c_leaves_no_process(tmp_path: Path, moment: str) -> None:
    command = [sys.executable, str(EXAMPLES / "record_ddp.py"), str(tmp_path), "--steps", "100000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as job:
        assert job.stdout is not None
        if moment == "while they train":
            assert job.stdout.readline().startswith("Training")
        else:
            wait_until(lambda: len(living(job.pid)) >= 3)
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=60)
    assert (job.returncode, errors) == (130, "")
    wait_until(lambda: not living(job.pid))


def wait_until(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
