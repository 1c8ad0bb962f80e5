"""`slipstream analyze` against HolisticTraceAnalysis and against the floor, on the same file, in pairs.

    python -m benchmarks.analyze_speed [--trace REAL.json.gz] [--megabytes 250] [--rounds 3]

A large trace is made by repeating a real one, each copy later in time, with correlation ids and step numbers of its
own. Every contender is a whole process, started in turn (A B C A B C ...), so that a machine whose speed drifts
slows all of them; medians of wall seconds and peak memory are printed, and the ratios.

HolisticTraceAnalysis is installed from PyPI into a virtual environment of its own (out/bench/hta). The floor is
what nobody who looks at every event can go below: decompress, then decode the same bytes into typed structs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "out" / "bench"
DEFAULT_TRACE = (
    HERE.parent.parent / "shared" / "traces" / "facebookresearch_HTA__trace_diff_control_a100_rank3of8.json.gz"
)
HTA = "HolisticTraceAnalysis"

HTA_SCRIPT = """
import json, sys
from hta.trace_analysis import TraceAnalysis
found = TraceAnalysis(trace_files={0: sys.argv[1]}).get_comm_comp_overlap(visualize=False)
print(json.dumps({"overlap_percent": float(found["comp_comm_overlap_pctg"].iloc[0])}))
"""

FLOOR_SCRIPT = """
import sys, zlib, msgspec
from slipstream.trace.events import Event
class Trace(msgspec.Struct):
    traceEvents: list[Event]
data = open(sys.argv[1], "rb").read()
if data[:2] == b"\\x1f\\x8b":
    data = zlib.decompressobj(31).decompress(data)
print(len(msgspec.json.decode(data, type=Trace).traceEvents))
"""


@dataclass
class Contender:
    """A command and what its runs cost."""

    name: str
    command: list[str]
    seconds: list[float]
    peaks: list[int]
    said: str = ""


def main(arguments: Sequence[str]) -> int:
    """Make the trace, run the contenders in turn, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE, help="a real Kineto trace to repeat")
    parser.add_argument("--megabytes", type=int, default=250, help="size of the JSON to make")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    if not options.trace.exists():
        print(f"{options.trace} is not here; name a real trace with --trace", file=sys.stderr)
        return 2
    OUT.mkdir(parents=True, exist_ok=True)
    plain = OUT / f"{options.trace.name.split('.')[0]}-{options.megabytes}MB.json"
    if not plain.exists():
        repeat(options.trace, plain, options.megabytes * 1_000_000)
    packed = plain.with_suffix(".json.gz")
    if not packed.exists():
        packed.write_bytes(gzip.compress(plain.read_bytes(), 6))
    hta = _hta_python()
    for path in (packed, plain):
        contenders = [
            Contender(
                "slipstream analyze", [sys.executable, "-m", "slipstream", "analyze", str(path), "--json"], [], []
            ),
            Contender("floor", [sys.executable, "-c", FLOOR_SCRIPT, str(path)], [], []),
            Contender(HTA, [str(hta), "-c", HTA_SCRIPT, str(path)], [], []),
        ]
        for _ in range(options.rounds):
            for contender in contenders:
                _run(contender)
        _report(path, contenders)
    return 0


def repeat(trace: Path, target: Path, size: int) -> None:
    """Write copies of a trace's events one after the other in time, until the file has about `size` bytes."""
    raw = trace.read_bytes()
    text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
    start = text.index("[", text.index('"traceEvents"')) + 1
    end = text.rindex("]")
    events = text[start:end].rstrip().rstrip(",")
    times = [int(t) for t in re.findall(r'"ts": (\d+)', events)]
    ids = [int(i) for i in re.findall(r'"correlation": (\d+)', events)]
    steps = [int(s) for s in re.findall(r"ProfilerStep#(\d+)", events)]
    apart, more_ids = max(times) - min(times) + 100_000, max(ids) + 1
    more_steps = max(steps) - min(steps) + 1 if steps else 0
    with target.open("w") as file:
        file.write(text[:start])
        for copy in range(max(size // len(events), 1)):
            file.write("," if copy else "")
            file.write(_shifted(events, copy * apart, copy * more_ids, copy * more_steps))
        file.write(text[end:])


def _shifted(events: str, ts: int, ids: int, steps: int) -> str:
    def add(amount: int) -> object:
        return lambda found: f"{found[1]}{int(found[2]) + amount}"

    events = re.sub(r'("ts": )(\d+)', add(ts), events)  # type: ignore[call-overload]
    events = re.sub(r'("(?:correlation|External id|id)": )(\d+)', add(ids), events)  # type: ignore[call-overload]
    return re.sub(r"(ProfilerStep#)(\d+)", add(steps), events)  # type: ignore[call-overload,no-any-return]


def _hta_python() -> Path:
    folder = OUT / "hta"
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        print(f"installing {HTA} into {folder}")
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", HTA], check=True)
        (folder / "installed").touch()
    return python


def _run(contender: Contender) -> None:
    """Run once as a process; the kernel's own account of it gives the peak memory."""
    began = time.monotonic()
    process = subprocess.Popen(contender.command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    said = process.stdout.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{contender.name} failed: {' '.join(contender.command)[:200]}")
    contender.seconds.append(time.monotonic() - began)
    contender.peaks.append(_peak_bytes(usage))
    contender.said = said


def _peak_bytes(usage: resource.struct_rusage) -> int:
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _report(path: Path, contenders: Sequence[Contender]) -> None:
    ours = contenders[0]
    print(f"\n{path.name}: {path.stat().st_size / 1e6:.0f} MB on disk, {len(ours.seconds)} rounds")
    print(f"{'':24}{'median s':>10}{'min':>8}{'max':>8}{'peak MB':>9}{'time / ours':>13}{'memory / ours':>15}")
    for c in contenders:
        # Ratios are taken round by round: neighbours in time met the same machine.
        slower = statistics.median(a / b for a, b in zip(c.seconds, ours.seconds, strict=True))
        larger = statistics.median(c.peaks) / statistics.median(ours.peaks)
        median = statistics.median(c.seconds)
        print(
            f"{c.name:24}{median:>10.2f}{min(c.seconds):>8.2f}{max(c.seconds):>8.2f}"
            f"{statistics.median(c.peaks) / 1e6:>9.0f}{slower:>13.2f}{larger:>15.2f}"
        )
    account = json.loads(ours.said)["ranks"][0]
    percent = 100 * account["hidden_ns"] / max(account["comm_ns"], 1)
    theirs = json.loads(contenders[-1].said.strip().splitlines()[-1])["overlap_percent"]
    print(f"overlap of communication: ours {percent:.2f} %, {HTA} {theirs:.2f} %")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
