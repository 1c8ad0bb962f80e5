"""Reduces gradients in buckets while backward runs.

Autograd calls a hook when a parameter's gradient is complete. The gradient is copied to its slot in the flat buffer
of its bucket; a bucket whose slots are all filled is launched, once all earlier ones have been: every rank launches
in the order of the plan, whatever order its own gradients come in, for a collective pairs with the same one on the
other ranks by its place in that order.

The first backward only learns: how often each gradient arrives (more than once, where reentrant checkpointing runs a
module in several pieces), in which order, and when. It is reduced at its end, by the plan that comes from it.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.profiler import record_function

from slipstream.core.errors import UsageError
from slipstream.core.units import format_bytes
from slipstream.runtime import collectives
from slipstream.runtime.buckets import BucketPlan, Gradient, Link, Planner, predict_finish
from slipstream.runtime.collectives import Group
from slipstream.runtime.failures import naming
from slipstream.runtime.measure import Clock, measure_link
from slipstream.runtime.reductions import AllReduce, Flat, Reduced, Reduction

Unused: TypeAlias = Literal["error", "zeros"]
"""What a backward without some gradient means: a mistake, or a zero in the sum of that gradient."""

Observer: TypeAlias = Callable[[str, str | int], None]
"""Told of events: `ready` with a name; `launch`, `wait`, `step`, `gather`, `receive` with the number of a bucket."""


class Bucket:
    """Gradients that are reduced together: one flat buffer a dtype."""

    def __init__(self, number: int, parameters: Mapping[str, torch.Tensor], wire: torch.dtype | None, ranks: int):
        self.number = number
        self.parameters = dict(parameters)
        by_dtype: dict[torch.dtype, dict[str, torch.Tensor]] = {}
        for name, parameter in parameters.items():
            by_dtype.setdefault(parameter.dtype, {})[name] = parameter
        self.flats = [Flat(members, wire or dtype, ranks) for dtype, members in by_dtype.items()]
        self.slots = {name: slot for flat in self.flats for name, slot in flat.slots.items()}
        self.size = sum(flat.size for flat in self.flats)
        self.missing = set(parameters)  # not yet put
        self.absent: set[str] = set()  # put as zeros
        self.unused: set[str] = set()  # absent on every rank
        self.pending: list[Reduced] = []
        self.results: list[torch.Tensor] = []

    def __str__(self) -> str:
        names = list(self.parameters)
        listed = ", ".join(names if len(names) <= 3 else [names[0], "...", names[-1]])
        return f"bucket {self.number} ({format_bytes(self.size)}, {len(names)} parameters: {listed})"

    def put(self, name: str, scale: float) -> None:
        """Copy a gradient to its slot, times `scale`; zeros where there is none."""
        gradient, slot = self.parameters[name].grad, self.slots[name]
        self.missing.discard(name)
        if gradient is None:
            self.absent.add(name)
            slot.zero_()
        elif gradient.layout is not torch.strided or gradient.requires_grad:
            kind = "sparse" if gradient.layout is not torch.strided else "itself differentiable"
            raise UsageError(f"its gradient is {kind}", where=name, do="no sparse=True, no create_graph=True")
        elif scale == 1:
            slot.copy_(gradient)
        else:
            torch.mul(gradient, scale, out=slot)

    def deliver(self, name: str) -> None:
        """Make the sum the parameter's gradient. Where the dtype is its own, the slot has been that from the start."""
        parameter, slot = self.parameters[name], self.slots[name]
        if name in self.absent:  # here, and not on every rank
            parameter.grad = slot.to(parameter.dtype)
        elif slot.dtype != parameter.dtype and parameter.grad is not None:  # it may have been forgotten since
            parameter.grad.copy_(slot)


@dataclass(frozen=True, slots=True)
class BucketFacts:
    """A bucket of the plan in use: its parameters, bytes on the wire, and when its last gradient was ready."""

    names: tuple[str, ...]
    size: int
    ready_ns: int


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The plan in use, and what it was made from; times are from the start of backward.

    `gradients` are in ready order, each as late as on the slowest rank. `link` and the predicted `finish_ns` of the
    last reduction are None where no link was measured or given.
    """

    buckets: tuple[BucketFacts, ...]
    gradients: tuple[Gradient, ...]
    link: Link | None
    finish_ns: int | None

    @property
    def plan(self) -> BucketPlan:
        """The names alone, to be used again with `Fixed`."""
        return tuple(bucket.names for bucket in self.buckets)


class _Backward:
    """What is known of the backward that is running."""

    def __init__(self, clock: Clock) -> None:
        self.start = clock.mark()
        self.arrivals: Counter[str] = Counter()
        self.marks: dict[str, Any] = {}  # when each gradient arrived last
        self.launched = 0


class Reducer:
    """Hooks on parameters that sum their gradients over a group, bucket by bucket.

    `finish` waits for what is on its way. With `deferred`, the end of a backward leaves that to whoever steps the
    optimizer; with `sharded`, each rank gets its share of the sums in `Bucket.results`, and no `.grad` is set.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        planner: Planner,
        *,
        group: Group = None,
        mean: bool = True,
        wire_dtype: torch.dtype | None = None,
        sum_dtype: torch.dtype | None = None,
        unused: Unused = "error",
        observe: Observer | None = None,
    ) -> None:
        self.parameters, self.planner, self.group = dict(parameters), planner, group
        self.wire_dtype, self.sum_dtype, self.unused = wire_dtype, sum_dtype, unused
        self.observe = observe or (lambda _event, _subject: None)
        self.device = _only_device(self.parameters)
        self.ranks = dist.get_world_size(group)
        # A power of two divides without rounding, so it costs nothing on the way into the buffer. Thirds would round
        # before the sum: there the sum is divided.
        exact = self.ranks & (self.ranks - 1) == 0
        self._scale = 1 / self.ranks if mean and exact else 1.0
        self.divide = self.ranks if mean and not exact else 1
        self.reduction: Reduction = AllReduce(group, self.divide, sum_dtype)
        self.syncing = True
        self.deferred = False
        self.sharded = False
        self.on_plan: Callable[[], None] = lambda: None
        self.buckets: list[Bucket] = []
        self.report: PlanReport | None = None
        self._bucket_of: dict[str, Bucket] = {}
        self._expected: dict[str, int] = {}
        self._clock = Clock(self.device)
        self._times: list[dict[str, int]] = []  # when gradients were ready, in each measured backward
        self._newer_times: dict[str, int] | None = None
        self._link: Link | None = None
        self._backward: _Backward | None = None
        self._outstanding: deque[Bucket] = deque()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._arrived, name))
            for name, parameter in self.parameters.items()
        ]

    @property
    def running(self) -> bool:
        """Whether a backward has begun and not ended."""
        return self._backward is not None

    def remove(self) -> None:
        """Wait for what is on its way and let go of the parameters."""
        self.finish()
        for hook in self._hooks:
            hook.remove()

    def finish(self) -> None:
        """Wait until all launched reductions have ended and their gradients are in place."""
        for _ in self.reduced():
            pass

    def reduced(self) -> Iterator[Bucket]:
        """Wait for the launched buckets one by one, in order, and give each as soon as it has been reduced."""
        while self._outstanding:
            bucket = self._outstanding.popleft()
            self._wait(bucket)
            yield bucket

    def begin(self) -> None:
        """A backward starts; called again, it does nothing until that backward has ended.

        The hook of the model's output calls it, and where no output was found the first gradient. The difference
        matters under reentrant checkpointing: the end that is awaited here is that of the innermost backward.
        """
        if self._backward is not None:
            return
        if not self.syncing:
            self.finish()  # or autograd would add to gradients that are on their way
            return
        self._open()
        torch.autograd.Variable._execution_engine.queue_callback(self._ended)

    def reduce(self) -> None:
        """Reduce what is in `.grad` now, outside of a backward and behind nothing."""
        if not self.buckets:
            raise UsageError("there is no plan yet", do="run one backward first")
        self._check_absent([name for name, parameter in self.parameters.items() if parameter.grad is None])
        self._open()
        self._reduce_rest()
        self._close()

    def measure_again(self) -> None:
        """Plan anew from the next backwards, as from the first ones."""
        if self.sharded:
            raise UsageError("the optimizer is sharded along the plan, which has to stand", do="plan before")
        self._times, self._link = [], None

    def _open(self) -> None:
        """Make the buckets ready to be filled."""
        if self.sharded and (self._outstanding or any(bucket.results for bucket in self.buckets)):
            raise UsageError("a second backward before step() would lose the first", do="accumulate within no_sync()")
        self.finish()
        if self._newer_times is not None:
            self._make_plan(self._newer_times)
            self._newer_times = None
        for bucket in self.buckets:
            bucket.missing, bucket.absent, bucket.unused = set(bucket.parameters), set(), set()
        self._backward = _Backward(self._clock)

    @property
    def _current(self) -> _Backward:
        assert self._backward is not None
        return self._backward

    def _arrived(self, name: str, _parameter: torch.Tensor) -> None:
        self.begin()
        backward = self._backward
        if backward is None:  # no_sync
            return
        backward.arrivals[name] += 1
        if self._measuring:
            backward.marks[name] = self._clock.mark()
        if not self.buckets:
            return
        times, expected = backward.arrivals[name], self._expected[name]
        if times == expected:
            self._ready(name)
        elif times > expected:  # it may have been sent already
            raise UsageError(
                f"its gradient arrived {times} times, and {expected} in the first backward",
                where=name,
                do="a module that is checkpointed in several pieces needs use_reentrant=False if their number changes",
            )

    def _ready(self, name: str) -> None:
        """Put a complete gradient in its bucket, and launch the buckets that waited for it."""
        backward, bucket, parameter = self._current, self._bucket_of[name], self.parameters[name]
        self.observe("ready", name)
        bucket.put(name, self._scale)
        if self.sharded:
            parameter.grad = None
        elif name not in bucket.absent and bucket.slots[name].dtype == parameter.dtype:
            parameter.grad = bucket.slots[name]  # frees the copy; holds the sum once the bucket is reduced
        while backward.launched < len(self.buckets) and not self.buckets[backward.launched].missing:
            self._launch(self.buckets[backward.launched])
            backward.launched += 1

    def _launch(self, bucket: Bucket) -> None:
        self.observe("launch", bucket.number)
        label = f"slipstream::bucket {bucket.number} launch {format_bytes(bucket.size)}"
        with record_function(label), naming(f"launching {bucket}"):
            usage = [self._start_usage(bucket)] if self.unused == "zeros" else []
            bucket.pending = usage + [self.reduction.start(flat.buffer) for flat in bucket.flats]
        self._outstanding.append(bucket)

    def _start_usage(self, bucket: Bucket) -> Reduced:
        """Count the ranks that have each gradient: what no rank has stays without one, as in a single process."""
        counts = torch.tensor([name not in bucket.absent for name in bucket.parameters], dtype=torch.int32)
        counts = counts.to(self.device)
        work = collectives.all_reduce(counts, self.group)

        def reduced() -> torch.Tensor:
            work.wait()
            bucket.unused = {name for name, count in zip(bucket.parameters, counts.tolist(), strict=True) if not count}
            return counts

        return reduced

    def _wait(self, bucket: Bucket) -> None:
        self.observe("wait", bucket.number)
        with record_function(f"slipstream::bucket {bucket.number} wait"), naming(f"reducing {bucket}"):
            results = [reduced() for reduced in bucket.pending]
        bucket.pending = []
        bucket.results = results[-len(bucket.flats) :]
        if not self.sharded:
            for name in bucket.parameters.keys() - bucket.unused:
                bucket.deliver(name)

    def _ended(self) -> None:
        """The backward has ended: reduce what has not been launched, which is everything in the first one."""
        # Without a single gradient it was a backward to something else, such as the inputs.
        if self._current.arrivals or self.unused == "zeros":
            self._check_absent([name for name in self.parameters if name not in self._current.arrivals])
            self._learn(self._current)
            self._reduce_rest()
        self._close()

    def _reduce_rest(self) -> None:
        for bucket in self.buckets:
            for name in bucket.parameters:
                if name in bucket.missing:
                    self._ready(name)

    def _close(self) -> None:
        self._backward = None  # an error leaves it: the ranks no longer agree on what was launched
        if not self.deferred:
            self.finish()

    def _check_absent(self, absent: list[str]) -> None:
        if absent and self.unused == "error":
            listed = ", ".join(absent[:5]) + (", ..." if len(absent) > 5 else "")
            raise UsageError(
                f"{len(absent)} of {len(self.parameters)} parameters have no gradient: {listed}",
                do="freeze them before wrapping (requires_grad_(False)), or pass unused='zeros'",
            )

    @property
    def _measuring(self) -> bool:
        # Shares of an optimizer are cut along the first plan, so there it has to stand.
        return len(self._times) < (1 if self.sharded else max(1, self.planner.backwards))

    def _learn(self, backward: _Backward) -> None:
        if not self._measuring:
            return
        end = self._clock.mark()
        marks = [backward.marks.get(name, end) for name in self.parameters]
        self._times.append(dict(zip(self.parameters, self._clock.since_ns(backward.start, marks), strict=True)))
        if not self.buckets:
            self._expected = {name: max(1, backward.arrivals[name]) for name in self.parameters}
            self._make_plan(self._times[0])
        elif not self._measuring:  # used by the next backward, for the buffers of this one are on their way
            warm = self._times[1:] or self._times
            self._newer_times = {name: round(statistics.median(t[name] for t in warm)) for name in self.parameters}

    def _make_plan(self, ready_ns: Mapping[str, int]) -> None:
        """Agree on a plan (a collective call). Every rank plans, for planning may measure; rank 0's plan counts."""
        with naming("agreeing on the bucket plan"):
            gradients = self._latest(ready_ns)
            plan: list[Any] = [self.planner.plan(gradients, self._measured_link)]
            dist.broadcast_object_list(plan, group=self.group, device=self.device, group_src=0)
        self._set_plan(plan[0], gradients)

    def _latest(self, ready_ns: Mapping[str, int]) -> list[Gradient]:
        """The gradients in ready order: a bucket cannot start before the slowest rank is ready."""
        latest = torch.tensor([ready_ns[name] for name in self.parameters], device=self.device)
        dist.all_reduce(latest, dist.ReduceOp.MAX, group=self.group)
        gradients = [
            Gradient(name, parameter.numel() * self._wire(parameter).itemsize, time, str(parameter.dtype))
            for (name, parameter), time in zip(self.parameters.items(), latest.tolist(), strict=True)
        ]
        return sorted(gradients, key=lambda gradient: gradient.ready_ns)

    def _wire(self, parameter: torch.Tensor) -> torch.dtype:
        dtype: torch.dtype = self.wire_dtype or parameter.dtype
        return dtype

    def _measured_link(self) -> Link:
        if self._link is None:
            sizes: Counter[torch.dtype] = Counter()
            for parameter in self.parameters.values():
                sizes[self._wire(parameter)] += parameter.numel() * self._wire(parameter).itemsize
            dtype, total = sizes.most_common(1)[0]
            self._link = measure_link(self.reduction, dtype, self.device, self.group, total)
        return self._link

    def _set_plan(self, plan: BucketPlan, gradients: Iterable[Gradient]) -> None:
        if sorted(itertools.chain.from_iterable(plan)) != sorted(self.parameters):
            raise UsageError("the bucket plan does not name each trainable parameter once", do="plan for this model")
        self.buckets = [
            Bucket(number, {name: self.parameters[name] for name in names}, self.wire_dtype, self.ranks)
            for number, names in enumerate(plan)
        ]
        self._bucket_of = {name: bucket for bucket in self.buckets for name in bucket.parameters}
        self.report = self._describe(tuple(gradients))
        self.on_plan()

    def _describe(self, gradients: tuple[Gradient, ...]) -> PlanReport:
        ready = {gradient.name: gradient.ready_ns for gradient in gradients}
        facts = [
            BucketFacts(tuple(bucket.parameters), bucket.size, max(ready[name] for name in bucket.parameters))
            for bucket in self.buckets
        ]
        link = getattr(self.planner, "link", None) or self._link
        plan = tuple(fact.names for fact in facts)
        finish = round(predict_finish(plan, gradients, link)) if link else None
        return PlanReport(tuple(facts), gradients, link, finish)


def _only_device(parameters: Mapping[str, torch.Tensor]) -> torch.device:
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) != 1:
        raise UsageError(
            f"trainable parameters on one device are needed, not on {sorted(map(str, devices)) or 'none'}",
            do="move the model to the device of this rank before wrapping it",
        )
    return devices.pop()
