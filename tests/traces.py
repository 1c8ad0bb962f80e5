"""Builds small profiler traces, and writes them in the layouts that profilers have written over the years.

Times are int nanoseconds here and become whatever the layout writes. Host threads are small numbers, streams too.

    trace = Trace(rank=0, world_size=2)
    trace.step(1, 0, 100_000)
    trace.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 10_000, 30_000, at=5_000, stream=20)
    path = trace.write(tmp_path / "rank0.json")
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from slipstream.core.recording import Recording
from slipstream.core.timeline import Timeline
from slipstream.trace.classify import Classifier
from slipstream.trace.kineto import KinetoFile, read_kineto
from slipstream.trace.read import read

GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"
REDUCE_SCATTER = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"

PID = 4242

_LEGACY = {
    "kernel": "Kernel",
    "gpu_memcpy": "Memcpy",
    "gpu_memset": "Memset",
    "cpu_op": "Operator",
    "user_annotation": "Operator",
    "cuda_runtime": "Runtime",
}


class Number(str):
    """Text that is written into JSON as it stands."""


class Trace:
    """The events of one file, in the order in which they were added."""

    def __init__(self, rank: int | None = None, world_size: int | None = None, **metadata: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self.metadata: dict[str, Any] = {"schemaVersion": 1}
        if rank is not None:
            info = {"backend": "nccl", "rank": rank, "world_size": world_size or rank + 1}
            self.metadata["distributedInfo"] = info
        self.metadata |= metadata
        self._ids = count(1)

    # -- what happened

    def kernel(
        self,
        name: str,
        start: int,
        end: int,
        *,
        stream: int = 7,
        device: int = 0,
        correlation: int | None = None,
        cat: str = "kernel",
        **args: Any,
    ) -> None:
        """Device work. `args` are written as they are: `**{"Collective name": "allreduce"}`."""
        known: dict[str, Any] = {"device": device, "stream": stream}
        if correlation is not None:
            known["correlation"] = correlation
        self._span(cat, name, start, end, device, stream, known | args)

    def launch(
        self, name: str, start: int, end: int, *, at: int, thread: int = 1, lasts: int = 2_000, **more: Any
    ) -> None:
        """Device work, and the call on a host thread that launched it."""
        correlation = next(self._ids)
        call = "cudaMemcpyAsync" if str(more.get("cat", "")).startswith("gpu_mem") else "cudaLaunchKernel"
        self.call(call, at, at + lasts, correlation, thread=thread)
        self.kernel(name, start, end, correlation=correlation, **more)

    def call(self, name: str, start: int, end: int, correlation: int, *, thread: int = 1) -> None:
        """A call of the CUDA runtime."""
        self._span("cuda_runtime", name, start, end, PID, thread, {"correlation": correlation})

    def op(
        self, name: str, start: int, end: int, dims: Sequence[Any] | None = None, *, thread: int = 1, **args: Any
    ) -> None:
        """A host operator, with its input dimensions if they were recorded."""
        shape = {} if dims is None else {"Input Dims": dims, "Input type": ["c10::BFloat16"] * len(dims)}
        self._span("cpu_op", name, start, end, PID, thread, shape | args)

    def note(self, name: str, start: int, end: int, *, thread: int = 1, **args: Any) -> None:
        """A user annotation on the host."""
        self._span("user_annotation", name, start, end, PID, thread, args)

    def device_note(self, name: str, start: int, end: int, *, stream: int = 7, device: int = 0) -> None:
        """A user annotation that the profiler drew on a device."""
        self._span("gpu_user_annotation", name, start, end, device, stream, {"External id": next(self._ids)})

    def step(self, number: int, start: int, end: int) -> None:
        """A step mark of torch.profiler."""
        self.note(f"ProfilerStep#{number}", start, end)

    def thread_name(self, thread: int, name: str) -> None:
        """The name of a host thread."""
        self.events.append({"ph": "M", "name": "thread_name", "pid": PID, "tid": thread, "args": {"name": name}})

    def raw(self, **event: Any) -> None:
        """Any event, as it is."""
        self.events.append(event)

    def _span(self, cat: str, name: str, start: int, end: int, pid: int, tid: int, args: Mapping[str, Any]) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": end - start, "args": args}
        )

    # -- how it is written and read

    def text(self, layout: str = "kineto") -> str:
        """JSON in one of `LAYOUTS`."""
        return LAYOUTS[layout](self)

    def write(self, path: Path, layout: str = "kineto") -> Path:
        """Write it to a file."""
        path.write_text(self.text(layout))
        return path

    def file(self, layout: str = "kineto") -> KinetoFile:
        """Read it back, without a file."""
        return read_kineto(iter([self.text(layout).encode()]), "trace.json", Classifier())

    def timeline(self, layout: str = "kineto") -> Timeline:
        """The only timeline in it."""
        (timeline,) = self.file(layout).timelines
        return timeline


def recording(folder: Path, *traces: Trace) -> Recording:
    """Write traces as the files of one job, and read them."""
    for index, trace in enumerate(traces):
        trace.write(folder / f"trace-{index}.json")
    return read([folder])


def _whole(ns: int) -> Number:
    """Microseconds as releases until 2024 wrote them."""
    assert ns % 1000 == 0, f"{ns} ns are not whole microseconds"
    return Number(ns // 1000)


def _decimal(ns: int) -> Number:
    """Microseconds with three decimals, as releases since 2024 write them."""
    return Number(f"{'-' if ns < 0 else ''}{abs(ns) // 1000}.{abs(ns) % 1000:03d}")


def _timed(events: Sequence[Mapping[str, Any]], number: Callable[[int], Number]) -> Iterator[dict[str, Any]]:
    for event in events:
        times = {key: number(event[key]) for key in ("ts", "dur") if isinstance(event.get(key), int)}
        yield {**event, **times}


def dumps(value: Any, comma: str = ", ", colon: str = ": ") -> str:
    """JSON in which a `Number` keeps its digits."""
    if isinstance(value, Number):
        return str(value)
    if isinstance(value, Mapping):
        items = (json.dumps(key) + colon + dumps(item, comma, colon) for key, item in value.items())
        return "{" + comma.join(items) + "}"
    if isinstance(value, list | tuple):
        return "[" + comma.join(dumps(item, comma, colon) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def _kineto_event(event: Mapping[str, Any]) -> str:
    """Kineto breaks an event into lines, in the same place each time."""
    lead = {key: event[key] for key in ("ph", "cat") if key in event}
    place = {key: event[key] for key in ("name", "pid", "tid") if key in event}
    times = {key: event[key] for key in ("ts", "dur") if key in event}
    rest = {key: value for key, value in event.items() if key not in (*lead, *place, *times, "args")}
    lines = [", ".join(f'"{key}": {dumps(v)}' for key, v in part.items()) for part in (lead, place, times, rest)]
    args = [f'"args": {{\n      {dumps(event["args"])[1:-1]}\n    }}'] if "args" in event else []
    return "{\n    " + ",\n    ".join([line for line in lines if line] + args) + "\n  }"


def _kineto(trace: Trace, number: Callable[[int], Number]) -> str:
    """Some metadata stands before the events, some behind."""
    before = {key: value for key, value in trace.metadata.items() if key != "traceName"}
    behind = {"traceName": trace.metadata.get("traceName", "/tmp/trace.json"), "displayTimeUnit": "ms"}
    head = ",\n  ".join(f"{json.dumps(key)}: {dumps(value)}" for key, value in before.items())
    body = ",\n  ".join(map(_kineto_event, _timed(trace.events, number)))
    tail = ",\n  ".join(f"{json.dumps(key)}: {dumps(value)}" for key, value in behind.items())
    return f'\n{{\n  {head},\n  "traceEvents": [\n  \n  {body}\n  ],\n  {tail}\n}}'


def _compact(trace: Trace) -> str:
    """What `json.dump` of a decoded trace makes of it: one line, the metadata behind the events."""
    return dumps({"traceEvents": list(_timed(trace.events, _decimal)), **trace.metadata}, ",", ":")


def _spaced(trace: Trace) -> str:
    return dumps({**trace.metadata, "traceEvents": list(_timed(trace.events, _decimal))})


def _array(trace: Trace) -> str:
    return dumps(list(_timed(trace.events, _decimal)))


def _legacy(trace: Trace) -> str:
    """Kineto of 2021: capital categories, annotations among the operators, and threads as text."""
    events = [
        {**event, "cat": _LEGACY.get(event.get("cat", ""), event.get("cat", "")), "tid": str(event["tid"])}
        for event in _timed(trace.events, _whole)
    ]
    body = ",\n  ".join(map(_kineto_event, events))
    return f'\n{{\n  "schemaVersion": 1,\n  "traceEvents": [\n  \n  {body}\n  ]\n}}'


LAYOUTS: dict[str, Callable[[Trace], str]] = {
    "kineto": lambda trace: _kineto(trace, _decimal),
    "kineto 2022": lambda trace: _kineto(trace, _whole),
    "legacy": _legacy,
    "compact": _compact,
    "spaced": _spaced,
    "array": _array,
}
"""Every layout by name. The last ones are what other programs make of a trace."""
