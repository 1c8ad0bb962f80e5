"""Bucketed data parallel: every rank holds the model, and gradients are averaged while backward runs."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from slipstream.core.errors import MachineError, UsageError
from slipstream.runtime.buckets import ByFinish, Planner, ddp_caps_mb
from slipstream.runtime.collectives import Group
from slipstream.runtime.failures import naming
from slipstream.runtime.reducer import Observer, PlanReport, Reducer, Unused


class DataParallel(torch.nn.Module):  # type: ignore[misc]  # torch is not followed, so Module is Any
    """Wraps a module so that `loss.backward()` leaves the mean of all ranks' gradients in `.grad`.

        model = DataParallel(module)
        loss_of(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    - `group`: the ranks to average over (None: all). The module's parameters and buffers start as on its rank 0.
    - `plan`: how gradients are bucketed: `ByFinish()`, `ByCap()` or `Fixed(...)` of `slipstream.runtime.buckets`.
    - `mean`: whether the sum is divided by the number of ranks.
    - `wire_dtype`: what travels, if not the gradient's own dtype; bfloat16 halves the bytes.
    - `reduce_dtype`: what sums are kept in. Never narrower than float32 unless you say so: equal to the wire's dtype,
      a plain all-reduce rounds at each hop, and on NVLink it may be faster.
    - `unused`: a backward that leaves parameters without a gradient is an error, or they count as `"zeros"` (one more
      small collective a bucket, and those no rank used keep `.grad` None).
    - `observe`: called with each event, for tests and tools.

    `.grad` becomes a view of the bucket's buffer, which the next backward fills anew: clone what you want to keep.
    Modules may be reused, parameters tied or frozen (before wrapping), and activations checkpointed. Higher-order and
    sparse gradients are not supported. Buffers, such as running statistics, stay local.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        group: Group = None,
        plan: Planner | None = None,
        mean: bool = True,
        wire_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        unused: Unused = "error",
        observe: Observer | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self._named = list(module.named_parameters())
        trainable = {name: p for name, p in self._named if p.requires_grad}
        self.reducer = Reducer(
            trainable,
            plan or ByFinish(),
            group=group,
            mean=mean,
            wire_dtype=wire_dtype,
            sum_dtype=reduce_dtype,
            unused=unused,
            observe=observe,
        )
        with naming("starting from the parameters of rank 0"):
            _check_same_everywhere(module, group, self.reducer.device)
            _copy_from_first_rank(module, group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, and watch its output for the start of backward."""
        self._check_ready_for_forward()
        output = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._output_has_gradient)
        return output

    def finish(self) -> None:
        """Wait until all gradients are in place: only needed where a tail reducer has taken over the waiting."""
        self.reducer.finish()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: backward calls in this context reduce nothing, the next one outside all."""
        before, self.reducer.syncing = self.reducer.syncing, False
        try:
            yield
        finally:
            self.reducer.syncing = before

    def reduce(self) -> None:
        """Reduce what is in `.grad` now, behind nothing: what accumulated in `no_sync`, or for comparison."""
        self.reducer.reduce()

    def measure_again(self) -> None:
        """Plan anew from the next backwards: the batch, the link or the machine has changed."""
        self.reducer.measure_again()

    def remove(self) -> None:
        """Take the hooks off the module, which can then be used or wrapped again."""
        self.reducer.remove()

    @property
    def report(self) -> PlanReport | None:
        """The plan in use and the measurements it was made from; None before the first synchronised backward."""
        return self.reducer.report

    def ddp_arguments(self) -> dict[str, Any]:
        """The plan as arguments of torch's DistributedDataParallel, which then closes the same buckets."""
        report = self.report
        if report is None:
            raise UsageError("there is no plan yet", do="run one backward first")
        if len({gradient.dtype for gradient in report.gradients}) > 1:
            raise UsageError("DDP has no list of caps for gradients of several dtypes", do="use one dtype")
        if "bucket_cap_mb_list" not in inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters:
            raise MachineError(f"the DDP of torch {torch.__version__} has no bucket_cap_mb_list", do="use torch 2.13")
        sizes = {name: p.numel() * p.element_size() for name, p in self.reducer.parameters.items()}
        return {"bucket_cap_mb_list": ddp_caps_mb(report.plan, sizes)}

    def _output_has_gradient(self, _gradient: torch.Tensor) -> None:
        self.reducer.begin()

    def _check_ready_for_forward(self) -> None:
        inside_backward = torch._C._current_graph_task_id() != -1  # recomputation of a checkpointed part
        if self.reducer.running and not inside_backward:
            raise UsageError(
                "the last backward ended with an error, and the other ranks may be waiting for its reductions",
                do="end this process; start again from a checkpoint",
            )
        for name, parameter in self._named:
            if parameter.requires_grad != (name in self.reducer.parameters):
                state = "unfrozen" if parameter.requires_grad else "frozen"
                raise UsageError(f"it was {state} after wrapping", where=name, do="remove() the wrapper and wrap again")


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested containers and dataclasses."""
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf):
            for field in dataclasses.fields(leaf):
                yield from _tensors(getattr(leaf, field.name))


def _check_same_everywhere(module: torch.nn.Module, group: Group, device: torch.device) -> None:
    """Compare with rank 0: buffers of different sizes would not fail but hang, or mix up their contents."""
    mine = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()]
    first: list[Any] = [mine]
    dist.broadcast_object_list(first, group=group, device=device, group_src=0)
    all_same = torch.tensor(int(mine == first[0]), device=device)
    dist.all_reduce(all_same, dist.ReduceOp.MIN, group=group)
    if not all_same.item():  # on every rank, so that none waits for the others
        odd = next((f"{a} is {b} there" for a, b in zip(mine, first[0], strict=False) if a != b), "in its length")
        raise UsageError(
            f"the model differs from rank 0's: {odd}" if mine != first[0] else "the model differs on another rank",
            do="build the same model on every rank",
        )


def _copy_from_first_rank(module: torch.nn.Module, group: Group) -> None:
    tensors = [*module.parameters(), *module.buffers()]
    works = [dist.broadcast(tensor.detach(), group=group, async_op=True, group_src=0) for tensor in tensors]
    for work in works:
        work.wait()
