"""Lanes for collectives: a stream of their own on CUDA, the process group's worker threads on CPU.

On CPU, `Work.wait()` blocks the host until the bytes are there, so overlap comes from launching early and waiting late.

On CUDA nothing blocks the host. A lane's stream runs, in the order of launches: wait for the compute that is to come
before, allocate, cast, the collective. Two rules make it safe to free a buffer while the host runs ahead, without
`record_stream` (whose frees come at a time that nobody can foretell, and let memory grow with the host's lead):

- whoever consumes a result makes its stream wait for the event at the end of the launch (`Pending.wait`);
- whoever frees a buffer that a lane allocated lets the lane wait for the compute queued so far
  (`Lane.after_compute`) first, so that the next launch, which may get the same memory, starts after its last reader.

The second rule is the rate limiter too: a gather cannot start before the layer whose place it takes is done.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from slipstream.runtime.collectives import Handle
from slipstream.runtime.failures import naming

Launch = Callable[[], tuple[Handle | dist.Work, Any]]
"""Starts a collective; gives what to wait for, and what must stay alive until it ends."""


class Lane:
    """Where one kind of collective runs, beside compute."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def after_compute(self) -> None:
        """Let what is launched from here on wait for the compute that is queued now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def start(self, label: str, launch: Launch, after: Pending | None = None) -> Pending:
        """Run `launch` on this lane, behind `after`; `label` names it in traces and errors."""
        with torch.profiler.record_function(f"slipstream::{label}"), naming(label), self.entered():
            if after is not None:
                after.wait()
            work, kept = launch()
            return Pending(label, work, kept, self._stream)

    def entered(self) -> AbstractContextManager[Any]:
        """What is allocated within belongs to the lane's stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class Pending:
    """A collective that was launched; holds its buffers until it is waited for."""

    def __init__(self, label: str, work: Handle, kept: Any, stream: Any) -> None:
        self.label = label
        self.work = work
        self._kept = kept
        self._event: Any = None
        if stream is not None:
            work.wait()  # on NCCL this only makes the lane's stream wait
            self._event = stream.record_event()

    def done(self) -> bool:
        """Tell whether it has ended, without waiting."""
        return bool(self._event.query() if self._event is not None else self.work.is_completed())

    def wait(self) -> None:
        """Make the compute that follows wait for it: the current stream on CUDA, the host elsewhere.

        Raises PeerError when the collective failed, which mostly means that another rank has ended.
        """
        with torch.profiler.record_function(f"slipstream::wait {self.label}"), naming(self.label):
            if self._event is not None:
                self._event.wait(torch.cuda.current_stream())
            else:
                self.work.wait()
        self._kept = None
