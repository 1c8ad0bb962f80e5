"""FullySharded in training: precision, clipping, odd uses of autograd, failures, and labels in traces."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from ranks import run_ranks
from sharded_cases import (
    Block,
    Case,
    Lstm,
    Net,
    Reused,
    batch,
    check,
    full_gradients,
    integers,
    loss_of,
    run,
    same_gradients,
    same_values,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from slipstream.core.errors import UsageError
from slipstream.runtime.collectives import scatter_sum
from slipstream.runtime.sharded import FullySharded, Groups

pytestmark = pytest.mark.live


class Seen(Block):
    """Remembers the dtype it computes in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dtypes = {x.dtype, self.up.weight.dtype}
        return super().forward(x)


def precision() -> None:
    net = integers(Net(Seen)).float()
    sharded = FullySharded(net, net.blocks, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    loss_of(sharded(batch(0).float())).backward()
    assert net.blocks[0].dtypes == {torch.bfloat16}
    for piece in sharded.parameters():
        assert (piece.dtype, piece.grad.dtype) == (torch.float32, torch.float32)
    half = sum(parameter.numel() for parameter in Net().parameters()) * 2
    assert half < sharded.memory.sharded_bytes * dist.get_world_size()


def sum_in_float32() -> None:
    """256 + 1 has no bfloat16; a sum in float32 keeps it. Nor has 4.5, the new weight, which float32 shards keep."""
    net = nn.Sequential(nn.Linear(1, 1, bias=False))
    net[0].weight.data.fill_(4.0)
    sharded = FullySharded(net, [net[0]], param_dtype=torch.bfloat16, reduce_dtype=torch.float32, mean=False)
    for _ in range(2):
        sharded.zero_grad()
        sharded(torch.tensor([[256.0 if dist.get_rank() == 0 else 1.0]])).sum().backward()
        assert full_gradients(sharded)["0.weight"].item() == 257
        with torch.no_grad():
            for piece in sharded.parameters():
                piece.add_(2.0**-12)
    assert sharded.full_state_dict()["0.weight"].item() == 4 + 2.0**-11


def test_gathers_in_bfloat16_and_reduces_in_float32() -> None:
    run_ranks(2, precision)
    run_ranks(2, sum_in_float32)


def clip() -> None:
    for norm_type in (2.0, 1.0, float("inf")):
        reference, net = integers(Net()), integers(Net())
        sharded = FullySharded(net, net.blocks, mean=False)
        loss_of(reference(batch(0))).backward()
        run(sharded, batch(0)[dist.get_rank() :: dist.get_world_size()])
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 10.0, norm_type)
        found = sharded.clip_grad_norm_(10.0, norm_type)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        gradients = full_gradients(sharded)
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=1e-12)


def test_clips_by_the_norm_over_all_shards() -> None:
    run_ranks(3, clip)


def mean_of_ranks() -> None:
    reference, net = integers(Net()), integers(Net())
    sharded = FullySharded(net, net.blocks)
    (loss_of(reference(batch(0))) / dist.get_world_size()).backward()
    run(sharded, batch(0)[dist.get_rank() :: dist.get_world_size()])
    same_gradients("mean", reference, sharded)


def test_the_mean_over_ranks_is_exact_for_powers_of_two() -> None:
    run_ranks(4, mean_of_ranks)


def one_start() -> None:
    net = integers(Net(), seed=dist.get_rank())
    net.scale.fill_(float(dist.get_rank()))
    sharded = FullySharded(net, net.blocks, groups=Groups.new(2))
    expected = integers(Net(), seed=0)
    expected.scale.fill_(0.0)
    same_values("start", expected.state_dict(), sharded.full_state_dict())


def test_starts_from_rank_0() -> None:
    run_ranks(4, one_start)


def lstm() -> None:
    torch.manual_seed(0)
    reference, net = Lstm().double(), Lstm().double()
    net.load_state_dict(reference.state_dict())
    sharded = FullySharded(net, net.blocks, mean=False, poison=True)
    optimizers = [torch.optim.AdamW(module.parameters()) for module in (reference, sharded)]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        # The rows are the LSTM's sequence here, so every rank takes all of them and a share of the loss.
        loss_of(reference(batch(step))).backward()
        (loss_of(sharded(batch(step))) / ranks).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, value in sharded.full_state_dict().items():
            torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-9, atol=1e-9, msg=f"{rank} {name}")


def test_lstm_with_adamw() -> None:
    run_ranks(2, lstm)


def compiled() -> None:
    for compile_layer in (compile_forward, torch.compile):
        reference, net = integers(Net()), integers(Net())
        net.blocks = nn.ModuleList(compile_layer(block, backend="aot_eager") for block in net.blocks)
        sharded = FullySharded(net, net.blocks, mean=False, poison=True)
        for step in range(2):
            loss_of(reference(batch(step))).backward()
            run(sharded, batch(step)[dist.get_rank() :: dist.get_world_size()])
        found = {name.replace("_orig_mod.", ""): value for name, value in full_gradients(sharded).items()}
        for name, parameter in reference.named_parameters():
            assert torch.equal(found[name], parameter.grad)


def compile_forward(block: nn.Module, backend: str) -> nn.Module:
    block.forward = torch.compile(block.forward, backend=backend)
    return block


def test_layers_may_be_compiled() -> None:
    run_ranks(2, compiled)


# Forward and backward that are not one after the other.


@contextmanager
def compared(model: type[Net] = Net) -> Iterator[tuple[nn.Module, FullySharded]]:
    """A reference and the sharded model to do the same with; then the gradients must be the same."""
    reference, net = integers(model()), integers(model())
    sharded = FullySharded(net, net.blocks, mean=False, poison=True)
    for step in range(2):  # learn the order
        loss_of(sharded(batch(step))).backward()
    sharded.zero_grad()
    yield reference, sharded
    same_gradients(model.__name__, reference, sharded)
    assert sharded.memory.unsharded_bytes == 0


def odd_uses() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, y = batch(0), batch(1)

    with compared() as (reference, sharded):  # two forwards, two backwards, first come last served
        losses = [loss_of(reference(x)), loss_of(reference(y))]
        losses[1].backward()
        losses[0].backward()
        losses = [loss_of(sharded(x[rank::ranks])), loss_of(sharded(y[rank::ranks]))]
        losses[1].backward()
        losses[0].backward()

    with compared() as (reference, sharded):  # a forward that no backward follows
        loss_of(reference(x)).backward()
        sharded(y)
        run(sharded, x[rank::ranks])

    with compared() as (reference, sharded):  # the graph is kept for a second backward
        loss = loss_of(reference(x))
        loss.backward(retain_graph=True)
        loss.backward()
        loss = loss_of(sharded(x[rank::ranks]))
        loss.backward(retain_graph=True)
        loss.backward()

    with compared() as (reference, sharded):  # all of it is recomputed
        loss_of(reference(x)).backward()
        loss_of(checkpoint(sharded, x[rank::ranks], use_reentrant=False)).backward()
        assert sharded.memory.peak_layers == 2

    with compared() as (reference, sharded):  # the model is called by itself, and a layer outside of a pass
        loss_of(reference(x)).backward()
        with torch.no_grad():
            ones = torch.ones(1, 5, dtype=torch.float64)
            assert torch.equal(sharded.module.blocks[1](ones), reference.blocks[1](ones))
        assert sharded.memory.unsharded_bytes == 0
        loss_of(sharded.module(x[rank::ranks])).backward()


def sums_of_two_forwards() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for model in (Net, Reused):
        reference, net = integers(model()), integers(model())
        sharded = FullySharded(net, net.blocks, mean=False, poison=True)
        for step in range(3):
            (loss_of(reference(batch(step))) + loss_of(reference(batch(step + 9)))).backward()
            (loss_of(sharded(batch(step)[rank::ranks])) + loss_of(sharded(batch(step + 9)[rank::ranks]))).backward()
            same_gradients("two forwards, one backward", reference, sharded)


def test_odd_uses_of_forward_and_backward() -> None:
    run_ranks(2, odd_uses)
    run_ranks(3, sums_of_two_forwards)


def evaluate() -> None:
    for keep in (True, False):
        reference, net = integers(Net()), integers(Net())
        sharded = FullySharded(net, net.blocks, reshard_after_forward=keep, poison=True).eval()
        for step in range(2):
            with torch.no_grad():
                assert torch.equal(sharded(batch(step)), reference(batch(step)))
            assert sharded.memory.unsharded_bytes == 0
        assert sharded.memory.peak_layers == 2, "nothing is kept for a backward that will not come"


def test_evaluation_without_gradients() -> None:
    run_ranks(2, evaluate)


class Fragile(Block):
    """Fails when told to, in forward or in backward."""

    fails = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails == "forward":
            raise ValueError("a bug in forward")
        y = super().forward(x)
        if self.fails == "backward":
            y.register_hook(fail)
        return y


def fail(gradient: torch.Tensor) -> None:
    raise ValueError("a bug in backward")


def survive() -> None:
    for where in ("forward", "backward"):
        reference, net = integers(Net()), integers(Net(Fragile))
        sharded = FullySharded(net, net.blocks, mean=False, poison=True)
        run(sharded, batch(0))
        sharded.zero_grad()
        net.blocks[2].fails = where
        with pytest.raises(ValueError, match="a bug in"):
            run(sharded, batch(0))
        net.blocks[2].fails = ""
        torch.optim.SGD(sharded.parameters()).zero_grad()  # which knows nothing of unsharded gradients
        loss_of(reference(batch(1))).backward()
        run(sharded, batch(1)[dist.get_rank() :: dist.get_world_size()])
        same_gradients(where, reference, sharded)


def test_goes_on_after_a_failed_pass() -> None:
    run_ranks(2, survive)


def drop_held() -> None:
    reference, net = integers(Net()), integers(Net())
    sharded = FullySharded(net, net.blocks, mean=False, poison=True)
    with sharded.no_sync():
        run(sharded, batch(5))
    assert sharded.memory.gradient_bytes > 0
    sharded.zero_grad()
    assert sharded.memory.gradient_bytes == 0
    loss_of(reference(batch(0))).backward()
    run(sharded, batch(0)[dist.get_rank() :: dist.get_world_size()])
    same_gradients("held gradients were dropped", reference, sharded)


def test_zero_grad_drops_what_no_sync_holds() -> None:
    run_ranks(2, drop_held)


# What cannot be sharded.


class Hidden:
    """Nobody can look into it."""


class Opaque(Block):
    """Returns an object."""

    def forward(self, x: torch.Tensor) -> Hidden:
        return Hidden()


def refuse() -> None:
    net = Net()
    group = Groups.over(None)
    with pytest.raises(UsageError, match="the layer Linear is no submodule of the model"):
        FullySharded(net, [nn.Linear(1, 1)], groups=group)
    with pytest.raises(UsageError, match=r"'blocks' and 'blocks.0' lie inside of each other"):
        FullySharded(net, [net.blocks, net.blocks[0]], groups=group)
    with pytest.raises(UsageError, match="depth is -1"):
        FullySharded(net, net.blocks, depth=-1, groups=group)
    with pytest.raises(UsageError, match="scatters_in_flight is -1"):
        FullySharded(net, net.blocks, scatters_in_flight=-1, groups=group)
    with pytest.raises(UsageError, match="2 ranks cannot be cut into shards over 3"):
        Groups.new(3)
    with pytest.raises(UsageError, match="the model has no parameters"):
        FullySharded(nn.Sequential(nn.ReLU()), [], groups=group)
    net.blocks[0].up.weight = net.blocks[2].up.weight
    with pytest.raises(UsageError, match=r"blocks.0.up.weight = blocks.2.up.weight is tied across blocks.0, blocks.2"):
        FullySharded(net, net.blocks, groups=group)
    net = Net(Opaque)
    with pytest.raises(UsageError, match=r"the layer blocks.0 returned Hidden, in which tensors cannot be found"):
        FullySharded(net, net.blocks, groups=group)(torch.ones(1, 3))
    sharded = FullySharded(Net(), [], groups=group)
    with pytest.raises(UsageError, match="cannot be moved or cast"):
        sharded.double()


def test_what_cannot_be_sharded_is_refused() -> None:
    run_ranks(2, refuse)


# Ranks that fail.


def meet_failure(kind: str) -> None:
    net = integers(Net(Fragile))
    sharded = FullySharded(net, net.blocks, groups=Groups.new(timeout=timedelta(seconds=4)))
    run(sharded, batch(0))
    if dist.get_rank() == 1:
        if kind == "dies":
            os._exit(7)
        if kind == "hangs":
            time.sleep(60)
        net.blocks[1].fails = "forward"
    run(sharded, batch(1))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("raises", "ValueError: a bug in forward"),
        ("dies", "ranks .1. died without a word"),
        ("hangs", "PeerError: gather .* failed: [^;]*; the cause is on the rank that stopped first"),
    ],
)
def test_a_rank_that_fails_ends_all(kind: str, told: str) -> None:
    """The first error that is heard of ends all: that of the rank itself, or of a peer that missed it."""
    started = time.monotonic()
    with pytest.raises(AssertionError, match=f"{told}|the cause is on the rank that stopped first"):
        run_ranks(3, meet_failure, kind, timeout=50)
    assert time.monotonic() - started < 40


# The collective behind it.


def sums() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for rows in (1, 3):
            everyone = [torch.arange(ranks * rows).to(dtype) * (other + 1) for other in range(ranks)]
            shard = torch.full((rows,), 99, dtype=dtype)
            scatter_sum(shard, everyone[rank].clone()).wait()
            assert torch.equal(shard, sum(everyone)[rank * rows : (rank + 1) * rows])


def test_scatter_sum_is_a_reduce_scatter() -> None:
    for ranks in (1, 3):
        run_ranks(ranks, sums)


# Traces.


def profiled() -> set[str]:
    net = integers(Net())
    sharded = FullySharded(net, net.blocks)
    run(sharded, batch(0))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(sharded, batch(0))
    return {event.name for event in profile.events() if event.name.startswith("slipstream::")}


def test_traces_name_the_layers() -> None:
    for names in run_ranks(2, profiled):
        for layer in ("blocks.0", "blocks.3", "root"):
            for label in ("gather", "wait gather", "scatter", "wait scatter"):
                assert f"slipstream::{label} {layer}" in names


def on_whole_groups() -> None:
    check(Case("the default group for all", Net), Groups())
    check(Case("a group of one's own", partial(Net, Block)), Groups.over(dist.new_group([0, 1])))


def test_groups_that_exist() -> None:
    run_ranks(2, on_whole_groups)
