"""How the flat buffer of a bucket is summed over the group: which collectives, in which precision, on which lane.

All sums end divided by `divide`. Buffers are padded to a multiple of the group's size, so that each rank can own an
equal share; what lies in the padding is never read.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from slipstream.runtime import collectives
from slipstream.runtime.collectives import Group

Reduced: TypeAlias = Callable[[], torch.Tensor]
"""Call it to wait for a reduction; gives what this rank gets of the sum: all of it, or its own share."""


CHUNK_BYTES = 2 * 1024 * 1024
"""On the CPU, adding takes time that the wire should not stand still for.

16 MiB of bfloat16 over 1 Gbit/s: 0.22 s in one piece, 0.16 s in pieces of 1 or 2 MiB, 0.14 s by plain all-reduce.
"""


class Flat:
    """One contiguous buffer for several tensors of one dtype, each in a slot with its own shape and memory layout."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, ranks: int) -> None:
        self.offsets: dict[str, int] = {}
        used = 0
        for name, tensor in tensors.items():
            self.offsets[name] = used
            used += tensor.numel()
        self.size = used * dtype.itemsize  # bytes, without padding
        self.share = max(1, -(-used // ranks))  # elements of each rank; empty messages are not worth a special case
        device = next(iter(tensors.values())).device
        self.buffer = torch.empty(self.share * ranks, dtype=dtype, device=device)
        self.slots = {name: view_like(self.buffer, self.offsets[name], tensor) for name, tensor in tensors.items()}


def view_like(buffer: torch.Tensor, offset: int, tensor: torch.Tensor) -> torch.Tensor:
    """Elements of `buffer` from `offset` on, in the shape and memory layout of `tensor` (channels last stays so)."""
    return buffer.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride(), offset)


def own_share(buffer: torch.Tensor, group: Group) -> torch.Tensor:
    """The part of a padded buffer that this rank owns."""
    return buffer.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def sibling(group: Group, device: torch.device) -> dist.ProcessGroup:
    """Make a new group of the same ranks, on the same backend. A collective call.

    It keeps the timeout, which torch would set to the default of 10 or 30 minutes.
    """
    existing = group or dist.group.WORLD
    options = getattr(existing._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)  # no public name, and not every backend has it
    ranks = dist.get_process_group_ranks(existing)
    backend = dist.get_backend_config(existing)
    return dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)


def sum_dtype(wire: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """What sums are kept in: as asked for, else never narrower than float32."""
    return wanted or torch.promote_types(wire, torch.float32)


class Reduction(Protocol):
    """A way to sum buffers over a group."""

    def start(self, buffer: torch.Tensor) -> Reduced:
        """Start the sum. The buffer belongs to the reduction until the result has been waited for."""
        ...


class AllReduce:
    """Every rank gets the whole sum, in the buffer itself.

    An all-reduce adds in the dtype that it sends, rounding at every hop. Where sums are to be kept in a wider one, the
    same bytes travel as a reduce-scatter and an all-gather, and each rank adds its share in `sums`.
    """

    def __init__(self, group: Group, divide: int, sums: torch.dtype | None = None) -> None:
        self._group, self._divide, self._sums = group, divide, sums
        self._lane: Lane | None = None
        self._lane_group: Group = None

    def start(self, buffer: torch.Tensor) -> Reduced:
        """See `Reduction`."""
        if sum_dtype(buffer.dtype, self._sums) != buffer.dtype:
            return self._on_lane(buffer)
        work = collectives.all_reduce(buffer, self._group)

        def reduced() -> torch.Tensor:
            work.wait()
            return buffer if self._divide == 1 else buffer.div_(self._divide)

        return reduced

    def _on_lane(self, buffer: torch.Tensor) -> Reduced:
        if self._lane is None:
            # The lane gathers when the sums are there, so the order of that against the caller's collectives is left
            # to chance: it needs a group of its own. All ranks come here with their first bucket.
            self._lane = lane(buffer.device)
            self._lane_group = sibling(self._group, buffer.device)
        halves = [self._in_two_halves(chunk, self._lane) for chunk in self._chunks(buffer)]

        def reduced() -> torch.Tensor:
            for gathered in halves:
                gathered()
            return buffer

        return reduced

    def _chunks(self, buffer: torch.Tensor) -> Sequence[torch.Tensor]:
        if buffer.device.type != "cpu":
            return [buffer]
        ranks = dist.get_world_size(self._group)
        chunks: Sequence[torch.Tensor] = buffer.split(max(1, CHUNK_BYTES // buffer.dtype.itemsize // ranks) * ranks)
        return chunks

    def _in_two_halves(self, chunk: torch.Tensor, lane: Lane) -> Reduced:
        scattered = ReduceScatter(self._group, self._divide, self._sums).start(chunk)

        def gathered() -> torch.Tensor:
            share = own_share(chunk, self._lane_group)
            share.copy_(scattered())
            collectives.all_gather(chunk, share, self._lane_group).wait()
            return chunk

        return lane.run(gathered)


class ReduceScatter:
    """Every rank gets its own share of the sum, in the dtype of the sums. The buffer's content is lost."""

    def __init__(self, group: Group, divide: int, sums: torch.dtype | None = None) -> None:
        self._group, self._divide, self._sums = group, divide, sums

    def start(self, buffer: torch.Tensor) -> Reduced:
        """See `Reduction`."""
        dtype = sum_dtype(buffer.dtype, self._sums)
        # gloo's own reduce-scatter moves the bytes of an all-reduce, twice as many.
        if buffer.device.type == "cpu" or dtype != buffer.dtype:
            return self._exchanged(buffer, dtype)
        share = own_share(buffer, self._group)
        work = collectives.reduce_scatter(share, buffer, self._group)

        def reduced() -> torch.Tensor:
            work.wait()
            return share if self._divide == 1 else share.div_(self._divide)

        return reduced

    def _exchanged(self, buffer: torch.Tensor, dtype: torch.dtype) -> Reduced:
        """Each rank sends every other its share, and adds what it received, in order of rank."""
        received = torch.empty_like(buffer)
        work: Any = dist.all_to_all_single(received, buffer, group=self._group, async_op=True)

        def reduced() -> torch.Tensor:
            work.wait()
            first, *others = received.chunk(dist.get_world_size(self._group))
            total = first.to(dtype)
            for other in others:
                total += other
            if received.is_cuda:  # it may be read on a lane, and was made elsewhere
                received.record_stream(torch.cuda.current_stream())
            return total if self._divide == 1 else total.div_(self._divide)

        return reduced


class Lane(Protocol):
    """Runs jobs one after the other, beside the caller."""

    def run(self, job: Callable[[], torch.Tensor]) -> Reduced:
        """Start `job` once what was started before has ended."""
        ...


def lane(device: torch.device) -> Lane:
    """A host thread for tensors of the CPU, whose collectives block who waits for them; a stream for CUDA's."""
    return StreamLane(device) if device.type == "cuda" else ThreadLane()


class ThreadLane:
    """A daemon thread: a peer that hangs must not keep the process from ending."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=_run_jobs, args=(self._jobs,), name="slipstream lane", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def run(self, job: Callable[[], torch.Tensor]) -> Reduced:
        """See `Lane`."""
        future: Future[torch.Tensor] = Future()
        self._jobs.put((job, future))
        return future.result


def _run_jobs(jobs: queue.SimpleQueue[Any]) -> None:
    while (entry := jobs.get()) is not None:
        job, future = entry
        try:
            future.set_result(job())
        except BaseException as error:  # it belongs to whoever waits
            future.set_exception(error)
        del entry, job, future  # or the last buffer would live until the next job


class StreamLane:
    """A CUDA stream: on NCCL, waiting inside it holds up the stream and not the host."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def run(self, job: Callable[[], torch.Tensor]) -> Reduced:
        """See `Lane`."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = job()
            done = self._stream.record_event()

        def reduced() -> torch.Tensor:
            torch.cuda.current_stream().wait_event(done)
            return result

        return reduced
