"""Layers and a small transformer, cut over ranks, against the same on one process."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from ranks import run_ranks  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from slipstream.bench import transformer  # noqa: E402
from slipstream.bench.text import batches, reference_text  # noqa: E402
from slipstream.bench.transformer import Shape, Transformer  # noqa: E402
from slipstream.core.errors import UsageError  # noqa: E402
from slipstream.runtime import collectives, linear  # noqa: E402
from slipstream.runtime.data_parallel import DataParallel  # noqa: E402
from slipstream.runtime.linear import ColumnParallelLinear, RowParallelLinear, column_parallel, share  # noqa: E402
from slipstream.runtime.measure_rates import measure_rates  # noqa: E402
from slipstream.runtime.rows import even_shares  # noqa: E402
from slipstream.runtime.sharded import FullySharded, Groups  # noqa: E402
from slipstream.runtime.split_choice import Link, Rates, Split  # noqa: E402
from slipstream.runtime.split_gemm import all_gather_matmuls  # noqa: E402

pytestmark = pytest.mark.live


def alone() -> Any:
    """A group of this rank only, for the reference."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def integers(module: nn.Module) -> None:
    """Round what was drawn to small integers, which floats add without error."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_((8 * parameter).round())


def pair(group: Any, split: Split) -> tuple[ColumnParallelLinear, ColumnParallelLinear, RowParallelLinear]:
    torch.manual_seed(0)
    first = [ColumnParallelLinear(4, width, group, split=split, bias=True) for width in (7, 5)]
    last = RowParallelLinear(7, 3, group, split=split, bias=True)
    for module in (*first, last):
        integers(module)
    return *first, last


SPLITS = (Split("chunked", 1), Split("chunked", 3), Split("ring", 2))


def layers_are_exact() -> None:
    for split in SPLITS:
        check_layers(split, 11)


def check_layers(split: Split, total: int) -> None:
    """Two column layers on one gather, one row layer, biases everywhere: as on one rank, gradients included."""
    size, single = dist.get_world_size(), alone()
    rows, mine, columns = even_shares(total, size), share(total, None), share(7, None)
    x = torch.randint(-3, 4, (total, 4), generator=torch.Generator().manual_seed(0)).float().requires_grad_()
    up, other, down = pair(single, split)
    a, b = column_parallel(x, [up, other])
    wanted = down(a)
    (wanted.sum() + b.sum()).backward()

    shard = x.detach()[mine].requires_grad_()
    up_part, other_part, down_part = pair(None, split)
    a_part, b_part = column_parallel(shard, [up_part, other_part], rows)
    y = down_part(a_part, rows)
    (y.sum() + b_part.sum()).backward()
    assert torch.equal(a_part, a[:, columns])
    assert torch.equal(y, wanted[mine])
    assert torch.equal(shard.grad, x.grad[mine])
    assert torch.equal(up_part.weight.grad, up.weight.grad[columns])
    assert torch.equal(up_part.bias.grad, up.bias.grad[columns])
    assert torch.equal(other_part.weight.grad, other.weight.grad[share(5, None)])
    assert torch.equal(down_part.weight.grad, down.weight.grad[:, columns])
    assert torch.equal(down_part.bias.grad, down.bias.grad)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_layers_give_the_bits_of_one_process(ranks: int) -> None:
    run_ranks(ranks, layers_are_exact)


def train(group: Any, split: Split, steps: int) -> tuple[list[float], Transformer]:
    """Losses of a training run; the same on all ranks of the group."""
    torch.manual_seed(0)
    model = Transformer(Shape(), group, split=split)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _, (tokens, targets) in zip(range(steps), batches(reference_text(), 4, 33, seed=1), strict=False):
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss, group=group)
        losses.append(loss.item())
    return losses, model


def whole(model: Transformer, group: Any) -> dict[str, torch.Tensor]:
    """All parameters as one process has them, put together from the ranks'."""
    split_along = {
        f"{name}.weight": 0 for name, module in model.named_modules() if isinstance(module, ColumnParallelLinear)
    }
    split_along |= {
        f"{name}.weight": 1 for name, module in model.named_modules() if isinstance(module, RowParallelLinear)
    }
    found = {}
    for name, parameter in model.state_dict().items():
        parts = [torch.empty_like(parameter) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, parameter.contiguous(), group=group)
        same = all(torch.equal(part, parameter) for part in parts)
        assert same or name in split_along, f"{name} has come apart"
        found[name] = torch.cat(parts, split_along[name]) if name in split_along else parameter
    return found


def same_curves(steps: int) -> list[float]:
    wanted, model = train(alone(), SPLITS[0], steps)
    for split in SPLITS:
        found, parts = train(None, split, steps)
        assert found == pytest.approx(wanted, rel=2e-4)
        for name, parameter in whole(parts, None).items():
            torch.testing.assert_close(parameter, model.state_dict()[name], rtol=2e-2, atol=2e-3)
    return wanted


def test_two_ranks_train_to_the_loss_curve_of_one_process() -> None:
    losses, again = run_ranks(2, same_curves, 40)
    assert losses == again
    assert losses[0] == pytest.approx(5.55, abs=0.1)  # ln 256: it knows nothing
    assert losses[-1] < 3.2  # the frequencies of bytes alone give 3.3


def train_on_mesh(steps: int) -> dict[str, list[float]]:
    """Losses of one process, and of 2 x 2: tensors split over `tp`, and what is left sharded or copied over `dp`."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"].get_group(), mesh["tp"].get_group()
    found = {"one process": train(alone(), SPLITS[0], steps)[0]}
    for mechanism in ("sharded", "buckets"):
        torch.manual_seed(0)
        model = Transformer(Shape(), tp, split=Split("ring", 2))
        if mechanism == "sharded":
            wrapped = FullySharded(model, layers=model.blocks, groups=Groups.over(dp), poison=True)
        else:
            wrapped = DataParallel(model, group=dp)
        found[mechanism] = train_half_batches(wrapped, dp, steps)
    return found


def train_half_batches(model: nn.Module, dp: Any, steps: int) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _, (tokens, targets) in zip(range(steps), batches(reference_text(), 4, 33, seed=1), strict=False):
        half = slice(2 * dist.get_rank(dp), 2 * dist.get_rank(dp) + 2)
        optimizer.zero_grad()
        loss = model(tokens[half], targets[half])
        loss.backward()
        optimizer.step()
        loss = loss.detach() / 2
        dist.all_reduce(loss)
        losses.append(loss.item())
    return losses


def test_composed_with_the_other_mechanisms_on_a_mesh_it_trains_to_the_same_curve() -> None:
    for found in run_ranks(4, train_on_mesh, 10):
        assert found["sharded"] == pytest.approx(found["one process"], rel=2e-4)
        assert found["buckets"] == pytest.approx(found["one process"], rel=2e-4)


def messages_of_a_step() -> dict[str, int]:
    names = ("all_gather", "reduce_scatter", "ring_exchange")
    torch.manual_seed(0)
    model = Transformer(Shape(layers=2), None, split=Split("chunked", 1))
    tokens = torch.zeros(2, 8, dtype=torch.long)
    with ExitStack() as stack:
        spies = {
            n: stack.enter_context(mock.patch.object(collectives, n, wraps=getattr(collectives, n))) for n in names
        }
        spies["all_reduce"] = stack.enter_context(mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce))
        model(tokens, tokens).backward()
    return {name: spy.call_count for name, spy in spies.items()}


def test_one_gather_serves_all_that_share_its_input() -> None:
    """A layer gathers twice and scatters twice, in backward the same, and gathers its two saved shards once more."""
    for found in run_ranks(2, messages_of_a_step):
        assert found == {"all_gather": 2 * 6, "reduce_scatter": 2 * 4, "ring_exchange": 0, "all_reduce": 2 + 2}


def chosen_from_rates() -> tuple[Any, list[str]]:
    """What is measured, and what a layer does with rates under which a ring pays for large inputs only."""
    rates = measure_rates(None, 64, 64, 64)
    wire = Link(1e5, 1e8)
    split_large = Rates(1e9, 1e5, ((1, 1.0),), gather=wire, scatter=wire, ring=wire)
    layer, used = ColumnParallelLinear(64, 64, split=split_large), []

    def spy(*args: Any, **how: Any) -> Any:
        used.append(f"{how['exchange']} {how['chunks']}")
        return all_gather_matmuls(*args, **how)

    with mock.patch.object(linear, "all_gather_matmuls", spy):
        for rows in (1, 512):
            layer(torch.zeros(rows, 64))
    return rates, used


def test_layers_choose_from_rates_that_all_ranks_share() -> None:
    (rates, used), (same, _) = run_ranks(2, chosen_from_rates)
    assert rates == same
    assert rates.flops_per_s > 1e6
    assert all(link.bytes_per_s > 1e5 and link.alpha_ns > 0 for link in (rates.gather, rates.scatter, rates.ring))
    assert [rows for rows, _ in rates.row_costs] == [1, 2, 4, 8, 16, 32, 64]
    assert used[0] == "chunked 1"
    assert used[1].startswith("ring")


def test_heads_must_be_dealt_evenly() -> None:
    with (
        mock.patch.object(transformer, "rank_and_size", return_value=(0, 3)),
        pytest.raises(UsageError, match="2 key-value heads cannot be dealt to 3 tensor-parallel ranks"),
    ):
        Transformer(Shape(kv_heads=2))
    with pytest.raises(UsageError, match="do not fit together"):
        Transformer(Shape(heads=3))
