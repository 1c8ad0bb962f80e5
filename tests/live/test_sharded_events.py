"""What FullySharded launches, in which order, how often, and what it holds: no clocks, only the order on the host."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from ranks import run_ranks
from sharded_cases import (
    Block,
    Checkpointed,
    Net,
    Reused,
    batch,
    full_gradients,
    integers,
    loss_of,
    run,
    same_gradients,
)
from torch import nn

from slipstream.core.errors import UsageError
from slipstream.runtime.sharded import FullySharded, Groups, MemoryUse

pytestmark = pytest.mark.live

LAYERS = 6
Event = tuple[str, str]


class Marker(torch.autograd.Function):
    """Writes down when forward and backward pass here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, log: list[Event], name: str, events: tuple[str, str]) -> torch.Tensor:
        ctx.log, ctx.name, ctx.event = log, name, events[1]
        log.append((events[0], name))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        ctx.log.append((ctx.event, ctx.name))
        return gradient, None, None, None


class Marked(Block):
    """Says when its compute starts and ends."""

    log: list[Event]
    name: str

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Marker.apply(x, self.log, self.name, ("forward", "backward end"))
        return Marker.apply(super().forward(x), self.log, self.name, ("forward end", "backward"))


class MarkedUnused(Marked):
    """Has a parameter that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))


def marked(model: nn.Module, log: list[Event]) -> nn.Module:
    for name, module in model.named_modules():
        if isinstance(module, Marked):
            module.log, module.name = log, name
    return model


def logged(model: Any, steps: int, options: dict[str, Any]) -> tuple[list[Event], FullySharded]:
    """Events of the last of some steps, after the order has been learned."""
    log: list[Event] = []
    net = marked(integers(model()), log)
    sharded = FullySharded(net, net.blocks, observe=lambda *event: log.append(event), **options)
    for step in range(steps):
        log.clear()
        run(sharded, batch(step))
        sharded.zero_grad()
    return log, sharded


DEPTHS, LIMITS = (0, 1, 2, 3), (1, 2, 3)
Measured = dict[tuple[str, int], tuple[list[Event], MemoryUse]]


@pytest.fixture(scope="module")
def measured() -> Measured:
    """Events and memory of rank 0 for all options that are looked at: ranks take seconds to start."""
    found: Measured = run_ranks(2, measure_all)[0]
    return found


def measure_all() -> Measured:
    found: Measured = {}
    options: dict[tuple[str, int], dict[str, Any]] = {
        **{("depth", depth): {"depth": depth} for depth in DEPTHS},
        **{("limit", limit): {"scatters_in_flight": limit} for limit in LIMITS},
        ("zero", 2): {"reshard_after_forward": False},
        ("keep", 1): {"keep_last": True},
    }
    for key, chosen in options.items():
        log, sharded = logged(partial(Net, Marked, LAYERS), 3, chosen)
        found[key] = log, sharded.memory
    return found


def layer(index: int) -> str:
    return f"blocks.{index}"


def halves(log: list[Event]) -> tuple[list[Event], list[Event]]:
    """Cut the log where backward starts."""
    start = log.index(("backward", layer(LAYERS - 1)))
    first = max(at for at, event in enumerate(log[:start]) if event[0] == "forward end") + 1
    while log[first][0] == "free":
        first += 1
    return log[:first], log[first:]


@pytest.mark.parametrize("depth", DEPTHS)
def test_gathers_run_ahead_by_depth(measured: Measured, depth: int) -> None:
    log, memory = measured["depth", depth]
    forward, backward = halves(log)
    ahead(forward, list(range(LAYERS)), "forward", depth)
    ahead(backward, list(range(LAYERS))[::-1], "backward", depth)
    assert memory.peak_layers == min(depth + 1, LAYERS)


def ahead(log: list[Event], order: list[int], compute: str, depth: int) -> None:
    """At the start of each layer's compute, exactly it and `depth` layers ahead have been asked for."""
    for place, index in enumerate(order):
        before = log[: log.index((compute, layer(index)))]
        asked = [name for event, name in before if event == "gather" and name != "root"]
        assert asked == [layer(i) for i in order[: place + 1 + depth]]
        assert ("gathered", layer(index)) in before, "compute starts on whole parameters"
        freed = [name for event, name in before if event == "free"]
        assert freed == [layer(i) for i in order[:place]], "and the layers behind it are freed"
    if depth:  # one at a time shares the link with no other
        assert log.index(("gathered", layer(order[0]))) < log.index(("gather", layer(order[depth])))


@pytest.mark.parametrize("limit", LIMITS)
def test_scatters_leave_at_once_and_are_waited_for_late(measured: Measured, limit: int) -> None:
    backward = halves(measured["limit", limit][0])[1]
    for index in range(LAYERS):
        at = backward.index(("scatter", layer(index)))
        assert backward.index(("backward end", layer(index))) < at
        if index >= 1:
            assert at < backward.index(("backward", layer(index - 1))), "before the next layer's compute"
        if index >= 2:
            assert at < backward.index(("gather", layer(index - 2))), "and before the gather after that"
    order = [*(layer(index) for index in range(LAYERS)[::-1]), "root"]
    for name, later in zip(order, [*order[limit:], *[None] * limit], strict=True):
        waited = backward.index(("scattered", name))
        if later:  # waited for when its place is needed, not sooner
            assert backward[waited + 1] == ("scatter", later)
        else:  # at the end of backward
            assert waited > backward.index(("scatter", "root"))


def unused() -> list[Event]:
    return logged(partial(Net, MarkedUnused, LAYERS), 3, {})[0]


def test_a_parameter_that_gets_no_gradient_delays_the_first_scatters_only() -> None:
    backward = halves(run_ranks(2, unused)[0])[1]
    for index in range(1, LAYERS):
        assert backward.index(("scatter", layer(index))) < backward.index(("backward", layer(index - 1)))


def test_counts_of_collectives(measured: Measured) -> None:
    for key, gathers in ((("depth", 1), 2), (("zero", 2), 1)):
        log, _ = measured[key]
        for index in range(LAYERS):
            assert log.count(("gather", layer(index))) == gathers
            assert log.count(("scatter", layer(index))) == 1
        assert log.count(("gather", "root")) == log.count(("scatter", "root")) == 1
    log, memory = measured["keep", 1]
    assert [log.count(("gather", layer(index))) for index in range(LAYERS)] == [2] * (LAYERS - 1) + [1]
    assert memory.peak_layers == 2


def test_counts_with_micro_batches() -> None:
    held, reduced, sizes = run_ranks(2, micro_batches)[0]
    assert (held.count(("scatter", layer(1))), held.count(("gather", layer(1)))) == (1, 6)
    assert (reduced.count(("scatter", layer(1))), reduced.count(("gather", layer(1)))) == (3, 6)
    # Held gradients cost the whole model's. Reduced ones: one layer collects and two are under way, on gloo with a
    # buffer each to receive in; the root's collect meanwhile.
    assert sizes["held"] > sizes["all"]
    assert sizes["reduced"] == (1 + 2 * 2) * sizes["layer"] + sizes["root"]


def micro_batches() -> tuple[list[Event], list[Event], dict[str, int]]:
    log, sharded = logged(partial(Net, Marked, LAYERS), 2, {})
    units = [sum(flat.full_bytes for flat in unit.flats) for unit in sharded._units]
    sizes = {"all": sum(units), "layer": units[0], "root": units[-1]}
    logs = []
    for name, hold in (("held", True), ("reduced", False)):
        log.clear()
        sharded.reset_peak_memory()
        for micro in range(3):
            run(sharded, batch(micro), hold=hold and micro < 2)
        logs.append(list(log))
        sizes[name] = sharded.memory.peak_gradient_bytes
        sharded.zero_grad()
    return logs[0], logs[1], sizes


def test_bytes_are_reported() -> None:
    for depth, memory, layer_bytes, root_bytes, total in run_ranks(3, held_bytes)[2]:
        assert memory.peak_unsharded_bytes == root_bytes + (depth + 1) * layer_bytes
        assert memory.sharded_bytes == total // 3
        assert (memory.unsharded_bytes, memory.gradient_bytes, memory.layers) == (0, 0, 0)


def held_bytes() -> list[tuple[int, MemoryUse, int, int, int]]:
    found = []
    for depth in (0, 1, 2):
        _, sharded = logged(partial(Net, Marked, LAYERS), 3, {"depth": depth})
        flats = [flat for unit in sharded._units for flat in unit.flats]
        assert all(flat._full.untyped_storage().nbytes() == 0 for flat in flats), "freed for real"
        sizes = [flat.full_bytes for flat in flats]  # one a unit here
        found.append((depth, sharded.memory, sizes[0], sizes[-1], sum(sizes)))
    return found


def test_recomputation_gathers_nothing_anew() -> None:
    model = partial(Checkpointed, Marked)
    log = run_ranks(2, recomputed, model)[0]
    assert [log.count(("gather", layer(index))) for index in range(4)] == [2] * 4
    assert log.count(("forward", layer(0))) == 2


def recomputed(model: Any) -> list[Event]:
    log, sharded = logged(model, 3, {})
    assert sharded.memory.peak_layers == 2
    return log


def alone() -> tuple[list[Event], list[Event]]:
    logs = []
    for options in ({}, {"reshard_after_forward": False}):
        log, sharded = logged(partial(Net, Marked, LAYERS), 2, options)
        log.clear()
        run(sharded, batch(0))
        before = (sharded.full_state_dict(), full_gradients(sharded))
        step = [event for event in log if event[0] in ("gather", "scatter")]
        log.clear()
        sharded.communicate()
        logs.append((sorted(step), sorted(event for event in log if event[0] in ("gather", "scatter"))))
        assert sharded.memory.unsharded_bytes == sharded.memory.gradient_bytes == 0
        for one, other in zip(before, (sharded.full_state_dict(), full_gradients(sharded)), strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)
        run(sharded, batch(0))  # and training goes on
    return logs[0], logs[1]


def test_communication_alone_is_that_of_a_step() -> None:
    for step, communication in run_ranks(2, alone)[0]:
        assert step == communication


def reused() -> list[tuple[list[str], int]]:
    found = []
    for depth in (0, 1, 2):
        log, sharded = logged(partial(Reused, Marked), 3, {"depth": depth})
        gathers = [name.removeprefix("blocks.") for event, name in log if event == "gather" and name != "root"]
        found.append((gathers, sharded.memory.peak_layers))
    return found


def test_a_layer_that_runs_again_soon_is_kept() -> None:
    """The order is 0 1 0 2 2 and back: with depth 1 the layer 2 stays for its second run, with depth 2 the layer 0."""
    assert run_ranks(2, reused)[0] == [(list("0102222010"), 1), (list("01022010"), 2), (list("012201"), 3)]


# The order of layers.


class Wandering(Net):
    """Runs its layers in the order that it is told."""

    order: tuple[int, ...] = (0, 1, 2, 3)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


def test_a_changed_order_is_an_error_on_every_rank() -> None:
    for swapped, shorter in run_ranks(2, wander_and_raise):
        assert "'blocks.1' was to come after 'blocks.0', but 'blocks.2' ran" in swapped
        assert "'blocks.3' was to come after 'blocks.2', but the pass ended" in shorter


def wander_and_raise() -> list[str]:
    messages = []
    for order in ((0, 2, 1, 3), (0, 1, 2)):
        net = integers(Wandering())
        sharded = FullySharded(net, net.blocks)
        run(sharded, batch(0))
        net.order = order
        with pytest.raises(UsageError) as error:
            run(sharded, batch(1))
        messages.append(str(error.value))
        net.order = (0, 1, 2, 3)  # and it can go on in the old order
        run(sharded, batch(1))
    return messages


def test_with_gather_a_changed_order_costs_time_only() -> None:
    run_ranks(3, wander_and_gather)


def wander_and_gather() -> None:
    for depth in (0, 1, 2):
        reference, net = integers(Wandering()), integers(Wandering())
        sharded = FullySharded(net, net.blocks, depth=depth, on_order_change="gather", mean=False, poison=True)
        for step, order in enumerate([(0, 1, 2, 3), (0, 2, 1, 3), (3,), (3, 2, 1, 0), (3, 2, 2, 0, 3), (0, 1, 2, 3)]):
            net.order = reference.order = order
            loss_of(reference(batch(step))).backward()
            run(sharded, batch(step)[dist.get_rank() :: 3])
            same_gradients(f"depth {depth}, order {order}", reference, sharded)
            reference.zero_grad()
            sharded.zero_grad()
            assert sharded.memory.peak_layers <= depth + 1


def test_ranks_that_disagree_are_told() -> None:
    messages = run_ranks(2, disagree)
    assert "rank 1 ran its layers in another order than its peers: blocks.1, blocks.0" in messages[1]


def disagree() -> str:
    net = integers(Wandering())
    net.order = (0, 1, 2, 3) if dist.get_rank() == 0 else (1, 0, 2, 3)
    with pytest.raises(UsageError) as error:
        run(FullySharded(net, net.blocks), batch(0))
    return str(error.value)


def test_evaluation_may_run_other_layers_than_training() -> None:
    run_ranks(2, evaluate_less)


def evaluate_less() -> None:
    net = integers(Wandering())
    sharded = FullySharded(net, net.blocks)
    for step in range(3):
        net.order = (0, 1, 2, 3)
        run(sharded.train(), batch(step))
        net.order = (0, 1)
        with torch.no_grad():
            sharded.eval()(batch(step))
        assert sharded.memory.unsharded_bytes == 0
    assert full_gradients(sharded)


def test_hybrid_reduces_over_replicas_behind_the_scatter() -> None:
    log = run_ranks(4, hybrid)[0]
    scatters = [name for event, name in log if event == "scatter"]
    replicates = [name for event, name in log if event == "replicate"]
    assert scatters == replicates == [*(layer(i) for i in range(LAYERS)[::-1]), "root"]
    for name in scatters:
        assert log.index(("scatter", name)) < log.index(("replicate", name)) < log.index(("scattered", name))


def hybrid() -> list[Event]:
    return logged(partial(Net, Marked, LAYERS), 3, {"groups": Groups.new(2)})[0]
