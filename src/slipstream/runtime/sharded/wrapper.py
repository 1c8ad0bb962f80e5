"""`FullySharded`: the wrapper that shards a model, and the hooks through which it follows forward and backward."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slipstream.core.errors import UsageError
from slipstream.runtime.collectives import Group
from slipstream.runtime.sharded import state
from slipstream.runtime.sharded.cut import ROOT, alike, named_layers, slots_by_unit
from slipstream.runtime.sharded.flat import Flat, Numbers
from slipstream.runtime.sharded.groups import Groups
from slipstream.runtime.sharded.lanes import Lane
from slipstream.runtime.sharded.memory import Ledger, MemoryUse
from slipstream.runtime.sharded.norms import norm_over_ranks
from slipstream.runtime.sharded.order import OnChange
from slipstream.runtime.sharded.scatter import Reductions
from slipstream.runtime.sharded.schedule import Policy, Schedule
from slipstream.runtime.sharded.tensors import differentiable, replaced
from slipstream.runtime.sharded.unit import Call, Observer, Unit


class FullySharded(nn.Module):  # type: ignore[misc]  # torch is not followed by mypy
    """Shards parameters, gradients and optimizer state over a group, and gathers each layer just before it is used.

        sharded = FullySharded(model, layers=model.blocks)
        optimizer = torch.optim.AdamW(sharded.parameters())
        sharded(batch).backward()
        sharded.clip_grad_norm_(1.0)
        optimizer.step()

    `parameters()` are this rank's pieces of the parameters: one-dimensional, some of them empty. Every optimizer that
    works element by element can be used as it is; one that looks at whole matrices or whole norms cannot.

    All ranks must run the same layers in the same order and leave gradients at the same parameters: collectives are
    matched by order. A parameter that gets no gradient, in a layer where another gets one, has a gradient of zeros.
    Freeze parameters before wrapping. Not supported: gradients of gradients, sparse gradients, a layer's parameters
    used outside of the layer's forward.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[nn.Module],
        *,
        depth: int = 1,
        groups: Groups | None = None,
        reshard_after_forward: bool = True,
        keep_last: bool = False,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        mean: bool = True,
        scatters_in_flight: int = 2,
        on_order_change: OnChange = "raise",
        poison: bool = False,
        observe: Observer | None = None,
    ) -> None:
        """Shard `model`, whose values are taken from rank 0; all ranks of the groups must call this.

        layers: what is gathered and freed together; modules of the model, none inside of another. Parameters outside
            of them form the root, which is unsharded from the start of forward to the end of backward.
        depth: how many layers ahead to gather, in forward and in backward; depth + 1 layers are unsharded at a time.
        groups: over whom to shard and replicate; default all ranks, with a communicator of its own for the scatters.
        reshard_after_forward: False keeps layers unsharded until their backward (ZeRO-2): one gather a layer, not two.
        keep_last: keep the last layer of forward for backward, which begins with it: its second gather has nothing to
            hide behind. It is live while the loss is computed, which is often the peak of activation memory.
        param_dtype, reduce_dtype: what is gathered and computed in, and what gradients are accumulated and reduced in.
            None: the parameters' own; with param_dtype alone, gradients are reduced in it too.
        mean: whether the gradients, summed over all ranks, are divided by their number.
        scatters_in_flight: how many reduce-scatters may be under way; each holds a layer's unsharded gradients. 0 waits
            for each at once: with depth 0, nothing overlaps.
        on_order_change: what to do when layers run in another order than in the first pass.
        poison: fill buffers with NaN before they are written and after they are freed (and keep them), to find misuse.
        observe: called with (event, layer) for gather, gathered, free, scatter, scattered, replicate.

        Raises UsageError for layers that cannot be cut out, options out of range, parameters tied across layers.
        """
        super().__init__()
        _check(depth, scatters_in_flight)
        self.module = model
        self._groups = groups or Groups.over(None)
        self._ledger, self._param_dtype = Ledger(), param_dtype
        self._observe = observe or _ignore
        self._units = self._cut(named_layers(model, layers), Numbers(param_dtype, reduce_dtype), poison)
        policy = Policy(depth, reshard_after_forward, keep_last, on_order_change)
        self._schedule = self._scheduled(policy, scatters_in_flight, mean)
        self._hook_all()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; floating inputs are cast to `param_dtype`."""
        return self.module(*args, **kwargs)

    # Training.

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within: backward keeps gradients unsharded and adds to them, so that the last micro-batch reduces them all.

        Saves a reduce-scatter a layer and micro-batch, and costs the whole model's gradients in reduce_dtype on every
        rank. Without it each micro-batch is reduced and only shards accumulate.
        """
        before, self._schedule.synchronize = self._schedule.synchronize, False
        try:
            yield
        finally:
            self._schedule.synchronize = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those that no_sync() holds included."""
        super().zero_grad(set_to_none)
        for unit in self._units:
            unit.drop_gradients()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, cut_over: Group = None, replicated: Collection[str] = ()
    ) -> torch.Tensor:
        """Scale the gradients so that the norm over all parameters and ranks is at most `max_norm`; gives that norm.

        cut_over: another group over which the model's parameters are cut (tensor parallelism), except for those whose
            names are in `replicated`: all its ranks hold these alike, and they count once.
        """
        pieces = {name: piece for name, piece in self.named_parameters() if piece.grad is not None}
        cut = [piece.grad for name, piece in pieces.items() if name not in replicated]
        alike = [piece.grad for name, piece in pieces.items() if name in replicated]
        total = norm_over_ranks(cut, alike, norm_type, self._groups.scatter, cut_over, _device(self._units))
        nn.utils.clip_grads_with_norm_(list(pieces.values()), max_norm, total)
        return total

    def communicate(self) -> None:
        """Run the collectives of one step with no compute between, to measure them alone; parameters stay as they are.

        Gradients that no_sync() holds are lost. All ranks must call this.
        """
        self._schedule.communicate()

    @property
    def memory(self) -> MemoryUse:
        """Bytes and layers held now, and at most since the start or `reset_peak_memory`."""
        return self._ledger.use()

    def reset_peak_memory(self) -> None:
        """Let the peaks of `memory` start anew."""
        self._ledger.reset_peaks()

    # Parameters and state.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Name this rank's pieces, as the model names its parameters."""
        for unit in self._units:
            for flat in unit.flats:
                for slot, piece in zip(flat.slots, flat.pieces, strict=True):
                    for name in slot.names[:1] if remove_duplicate else slot.names:
                        yield f"{prefix}.{name}" if prefix else name, piece

    def full_state_dict(self, *, cpu: bool = False) -> dict[str, Any]:
        """Gather whole tensors under the model's names, for `model.load_state_dict`; all ranks must call this."""
        return state.full_state_dict(self.module, self._units, cpu=cpu)

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Give DTensors sharded in dimension 0, for torch.distributed.checkpoint; all ranks must call this."""
        found = state.sharded_state_dict(self.module, self._units, self._groups.gather)
        result = {} if destination is None else destination
        result.update({f"{prefix}{name}": value for name, value in found.items()})
        return result

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load whole tensors or DTensors, as `full_state_dict` and `state_dict` give them; all ranks must call this."""
        return state.load_state_dict(self.module, self._units, state_dict, strict=strict)

    def full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, *, cpu: bool = False) -> dict[str, Any]:
        """Gather the optimizer's state as whole tensors under the model's names; all ranks must call this."""
        return state.optimizer_state_dict(self._units, optimizer, state.whole(cpu))

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Give the optimizer's state as DTensors, for torch.distributed.checkpoint; all ranks must call this."""
        return state.optimizer_state_dict(self._units, optimizer, state.distributed(self._groups.gather))

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Load what either of the two gives; all ranks must call this."""
        state.load_optimizer_state_dict(self._units, optimizer, state_dict)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise UsageError("a sharded model cannot be moved or cast", do="move or cast it before it is sharded")

    # Construction and hooks.

    def _cut(self, layers: Mapping[str, nn.Module], numbers: Numbers, poison: bool) -> list[Unit]:
        """Shard layer by layer; the root comes last."""
        parts = slots_by_unit(self.module, layers)
        _copy_from_first_rank(self.module, self._groups)
        modules = {**layers, ROOT: self.module}
        units = []
        for name, slots in parts.items():
            flats = [Flat(group, self._groups.gather, numbers, self._ledger, poison) for group in alike(slots)]
            units.append(Unit(name, modules[name], flats, self._ledger, self._observe, root=name == ROOT))
        return units

    def _scheduled(self, policy: Policy, scatters_in_flight: int, mean: bool) -> Schedule:
        device, groups = _device(self._units), self._groups
        divisor = _ranks(groups) if mean else 1
        reductions = Reductions(
            groups, device, self._ledger, limit=scatters_in_flight, divisor=divisor, observe=self._observe
        )
        root, layers = self._units[-1], self._units[:-1]
        return Schedule(root, layers, reductions, Lane(device), groups.gather, device, policy)

    def _hook_all(self) -> None:
        for unit in self._units:
            for which, flat in enumerate(unit.flats):
                for index, leaf in enumerate(flat.leaves):
                    if flat.trainable:
                        leaf.register_post_accumulate_grad_hook(partial(self._on_gradient, unit, which, index))
            if unit.root:
                unit.module.register_forward_pre_hook(self._before_root, with_kwargs=True, prepend=True)
                unit.module.register_forward_hook(self._after_root)
            elif unit.flats:
                hooks = LayerHooks(self._schedule, unit)
                unit.module.register_forward_pre_hook(hooks.before, with_kwargs=True, prepend=True)
                unit.module.register_forward_hook(hooks.after)

    def _on_gradient(self, unit: Unit, which: int, index: int, leaf: torch.Tensor) -> None:
        self._schedule.collect(unit, which, index)

    def _before_root(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._schedule.begin_forward()
        if self._param_dtype is None:
            return None
        return replaced((args, kwargs), partial(_cast, dtype=self._param_dtype))

    def _after_root(self, module: nn.Module, args: Any, output: Any) -> None:
        outputs = differentiable(output, "the model")
        for tensor in outputs:
            tensor.register_hook(self._on_root_gradient)
        self._schedule.end_forward(differentiable=bool(outputs))

    def _on_root_gradient(self, gradient: torch.Tensor) -> None:
        self._schedule.begin_backward()


class LayerHooks:
    """Tells the schedule when a layer runs, forward and backward."""

    def __init__(self, schedule: Schedule, unit: Unit) -> None:
        self._schedule, self._unit = schedule, unit
        self._call = Call(unit)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather, and mark the inputs: when all their gradients are there, backward is done with this call."""
        self._schedule.before_layer(self._unit)
        self._call = Call(self._unit)
        if not torch.is_grad_enabled():
            return None
        marked: list[torch.Tensor] = []
        inputs = replaced((args, kwargs), partial(_marked, into=marked))
        self._call.ends = bool(marked)
        if marked:
            torch.autograd.graph.register_multi_grad_hook(marked, partial(self._after_backward, self._call))
        return inputs

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Free, and mark the outputs: the first of their gradients starts the layer's backward."""
        outputs = differentiable(output, f"the layer {self._unit.name}")
        for tensor in outputs:
            tensor.register_hook(partial(self._before_backward, self._call))
        self._schedule.after_layer(self._unit, differentiable=bool(outputs))

    def _before_backward(self, call: Call, gradient: torch.Tensor) -> None:
        self._schedule.before_backward(call)

    def _after_backward(self, call: Call, gradients: Sequence[torch.Tensor | None]) -> None:
        self._schedule.after_backward(call)


def _marked(tensor: torch.Tensor, into: list[torch.Tensor]) -> torch.Tensor:
    """Give a view of a tensor that needs a gradient: the gradient of the view comes from this layer alone."""
    if not tensor.requires_grad:
        return tensor
    into.append(tensor.view_as(tensor))
    return into[-1]


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _check(depth: int, scatters_in_flight: int) -> None:
    if depth < 0:
        raise UsageError(f"depth is {depth}", do="choose 0 (no prefetch) or more")
    if scatters_in_flight < 0:
        raise UsageError(f"scatters_in_flight is {scatters_in_flight}", do="choose 0 (no overlap) or more")


def _copy_from_first_rank(model: nn.Module, groups: Groups) -> None:
    for tensor in [*model.parameters(), *model.buffers()]:
        value = tensor.detach().contiguous()
        for group in (groups.replicate, groups.gather) if groups.replicate is not None else (groups.gather,):
            dist.broadcast(value, group=group, group_src=0)
        tensor.detach().copy_(value)


def _ranks(groups: Groups) -> int:
    replicas = 1 if groups.replicate is None else dist.get_world_size(groups.replicate)
    return int(dist.get_world_size(groups.gather)) * replicas


def _device(units: Sequence[Unit]) -> torch.device:
    for unit in units:
        for flat in unit.flats:
            return flat.shard.device
    raise UsageError("the model has no parameters", do="there is nothing to shard")


def _ignore(event: str, layer: str) -> None:
    """Take no note of events."""
