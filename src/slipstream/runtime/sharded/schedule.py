"""When each layer is gathered, freed and reduced: one pass of forward and backward as the hooks see it.

    forward    gather the root; before a layer: wait for its gather, launch the next `depth`; after it: free
    backward   the same in reverse; when a layer's gradients are all there: launch its reduce-scatter, free
    the end    reduce what is left, wait for all, free all

At any time at most depth + 1 layers are live: the one that computes and `depth` ahead of it. Recomputation by
activation checkpointing happens within backward and finds the layer gathered by backward's own hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from slipstream.core.errors import UsageError
from slipstream.runtime.collectives import Group, all_gather
from slipstream.runtime.sharded.lanes import Lane
from slipstream.runtime.sharded.order import OnChange, Order
from slipstream.runtime.sharded.scatter import Reductions
from slipstream.runtime.sharded.unit import Call, Unit


@dataclass(frozen=True)
class Policy:
    """How far to gather ahead, and what to keep."""

    depth: int = 1
    reshard_after_forward: bool = True
    keep_last: bool = False
    on_order_change: OnChange = "raise"


@dataclass
class Orders:
    """The orders of forward and backward under one mode (training with gradients, evaluation without, ...)."""

    forward: Order
    backward: Order


class Schedule:
    """Owns the state of a pass; its methods are what the hooks call."""

    def __init__(
        self,
        root: Unit,
        layers: Sequence[Unit],
        reductions: Reductions,
        gathers: Lane,
        group: Group,
        device: torch.device,
        policy: Policy,
    ) -> None:
        self.synchronize = True
        self._device = device
        self._root, self._layers = root, {unit.name: unit for unit in layers}
        self._reductions, self._gathers, self._group, self._policy = reductions, gathers, group, policy
        self._modes: dict[tuple[bool, bool], Orders] = {}
        self._orders = self._orders_of(self._mode())
        self._in_forward = self._in_backward = False
        self._lingering: list[Unit] = []

    # Forward.

    def begin_forward(self) -> None:
        """The root is about to run: gather its parameters, and the first layers behind them."""
        if in_autograd():  # the whole model is recomputed
            self._root.ready(self._gathers)
            return
        self._abandon()
        self._gathers.after_compute()  # the optimizer has written the shards
        self._orders = self._orders_of(self._mode())
        self._in_forward = True
        self._orders.forward.start()
        self._root.ready(self._gathers)
        self._prefetch(self._orders.forward)

    def before_layer(self, unit: Unit) -> None:
        """A layer is about to run: wait for its parameters, then launch the gathers of those that follow.

        In this order, because two gathers at once would share the link and the one that is needed now would end later.
        """
        if self._in_forward and not in_autograd():
            self._visit(self._orders.forward, unit)
            unit.ready(self._gathers)
            self._prefetch(self._orders.forward)
        else:  # recomputed in backward, or called outside of a pass
            unit.ready(self._gathers)

    def after_layer(self, unit: Unit, *, differentiable: bool) -> None:
        """A layer has run: free it, unless it runs again soon or backward may keep it."""
        if in_autograd():
            kept, order = bool(unit.backward.calls), self._orders.backward
        else:
            kept, order = differentiable and self._keeps(unit), self._orders.forward
        if not kept:
            self._free(unit, order)

    def end_forward(self, *, differentiable: bool) -> None:
        """The root has run. Without a backward to come, nothing stays."""
        if in_autograd():
            return
        self._in_forward = False
        if self._orders.forward.finish():
            self._compare_across_ranks(self._orders.forward)
        if not differentiable:
            self._reshard_all()

    def _keeps(self, unit: Unit) -> bool:
        """Tell whether the layer, which has just run, stays unsharded for backward."""
        order = self._orders.forward
        last = order.learned is not None and order.learned[-1:] == (unit.name,) and not order.upcoming(1)
        return not self._policy.reshard_after_forward or (self._policy.keep_last and last)

    # Backward.

    def begin_backward(self) -> None:
        """The first gradient has reached the model: from here on the layers run in reverse."""
        if self._in_backward:
            return
        self._in_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self._orders.backward.start(guess=self._orders.forward.seen[::-1])
        self._root.ready(self._gathers)  # gone if this is the second backward of two forwards
        self._prefetch(self._orders.backward)

    def before_backward(self, call: Call) -> None:
        """A gradient has reached an output of the call: its parameters are needed again."""
        self.begin_backward()
        self._free_lingering()
        state = call.unit.backward
        if call in state.calls:  # through another output
            return
        state.calls.append(call)
        self._visit(self._orders.backward, call.unit)
        call.unit.ready(self._gathers)
        self._prefetch(self._orders.backward)

    def after_backward(self, call: Call) -> None:
        """All gradients of the call's inputs are there: this call needs no parameters any more."""
        if call in call.unit.backward.calls:
            call.unit.backward.calls.remove(call)
        self._settle(call.unit)

    def collect(self, unit: Unit, which: int, index: int) -> None:
        """The gradient of a parameter is complete."""
        self.begin_backward()
        unit.collect(which, index)
        self._reductions.pump()
        self._settle(unit)

    def _settle(self, unit: Unit) -> None:
        """Reduce and free the layer as soon as its backward is over."""
        if unit.backward.complete:
            self._lingering += [call.unit for call in unit.backward.calls]  # of which no input tells when it is over
            unit.backward.calls.clear()
            self._reduce(unit)
            if unit in self._lingering:
                return
        if not unit.root and not unit.backward.calls:
            self._free(unit, self._orders.backward)

    def _free_lingering(self) -> None:
        """Free the layers behind the one that is about to start.

        Autograd takes the gradients of parameters first. What has no trained parameter may come later: the gradient of
        an input that we cannot see, through a frozen weight. All of it comes before the next layer.
        """
        for unit in self._lingering:
            self._free(unit, self._orders.backward)
        self._lingering.clear()

    def _reduce(self, unit: Unit) -> None:
        if self.synchronize:
            for flat in unit.flats:
                if flat.has_gradient:
                    self._reductions.launch(unit.name, flat)

    def _end_backward(self) -> None:
        with torch.no_grad():
            self._finish_gradients()
        self._in_backward = False
        self._lingering.clear()
        for unit in self._units:
            unit.backward.finish()
        if self._orders.backward.finish():
            self._compare_across_ranks(self._orders.backward)

    def _finish_gradients(self) -> None:
        for unit in reversed(self._units):  # what is not complete: parameters without gradient, the first layers
            self._reduce(unit)
        self._reshard_all()
        self._reductions.drain()

    # Both.

    def communicate(self) -> None:
        """Run the collectives of one step, each waited for at once, and drop what the scatters bring."""
        self._abandon()
        order = self._orders.forward.learned or tuple(self._layers)
        forward = [self._root, *(self._layers[name] for name in order)]
        for unit in forward:
            unit.ready(self._gathers)
            if not unit.root and not self._keeps(unit):
                unit.reshard(self._gathers)
        for unit in reversed(forward):
            unit.ready(self._gathers)
            for flat in unit.flats:
                if flat.trainable:
                    self._reductions.launch(unit.name, flat)
                    self._reductions.abandon()
            unit.reshard(self._gathers)

    @property
    def _units(self) -> list[Unit]:
        return [self._root, *self._layers.values()]

    def _mode(self) -> tuple[bool, bool]:
        return torch.is_grad_enabled(), bool(self._root.module.training)

    def _orders_of(self, mode: tuple[bool, bool]) -> Orders:
        on_change = self._policy.on_order_change
        return self._modes.setdefault(mode, Orders(Order("forward", on_change), Order("backward", on_change)))

    def _visit(self, order: Order, unit: Unit) -> None:
        if not order.visit(unit.name):  # what was gathered ahead may never be used
            for other in self._layers.values():
                wrong = other.gathering or (self._policy.reshard_after_forward and not other.backward.calls)
                if other is not unit and wrong:
                    other.reshard(self._gathers)

    def _prefetch(self, order: Order) -> None:
        for name in order.upcoming(self._policy.depth):
            self._layers[name].launch(self._gathers)

    def _free(self, unit: Unit, order: Order) -> None:
        if unit.name not in order.upcoming(self._policy.depth):
            unit.reshard(self._gathers)

    def _reshard_all(self) -> None:
        for unit in self._units:
            unit.reshard(self._gathers)

    def _abandon(self) -> None:
        """Free what an earlier pass has left: it failed, or no backward followed."""
        self._reductions.abandon()
        for unit in self._units:
            if self._in_backward:
                unit.drop_gradients()
                unit.backward.finish()
        self._reshard_all()
        self._in_backward = False
        self._lingering.clear()

    def _compare_across_ranks(self, order: Order) -> None:
        mine = torch.tensor([order.fingerprint()], dtype=torch.int64, device=self._device)
        everyone = mine.new_empty(dist.get_world_size(self._group))
        all_gather(everyone, mine, self._group).wait()
        if (everyone != mine).any():
            raise UsageError(
                f"rank {dist.get_rank()} ran its layers in another order than its peers: {', '.join(order.seen)}",
                where=order.phase,
                do="let all ranks run the same layers in the same order: their collectives are matched by order",
            )


def in_autograd() -> bool:
    """Tell whether this code runs within a backward: in a hook, or recomputed by activation checkpointing."""
    return bool(torch._C._current_graph_task_id() != -1)
