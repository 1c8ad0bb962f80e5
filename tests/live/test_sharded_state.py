"""Checkpoints of FullySharded: whole, and through torch.distributed.checkpoint to another number of ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from sharded_cases import Adapter, Net, Tied, batch, integers, loss_of, run, same_values
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from slipstream.core.errors import UsageError
from slipstream.runtime.sharded import FullySharded

pytestmark = pytest.mark.live

MODELS = {"plain": Net, "tied": Tied, "adapters": partial(Net, Adapter)}


def trained(model: Any, steps: int) -> tuple[FullySharded, torch.optim.Optimizer]:
    """Some AdamW steps; two groups, as weight decay is used."""
    net = integers(model())
    sharded = FullySharded(net, net.blocks, mean=False)
    optimizer = adamw(sharded)
    for step in range(steps):
        advance(sharded, optimizer, step)
    return sharded, optimizer


def adamw(module: Any) -> torch.optim.Optimizer:
    named = list(module.named_parameters())
    decayed = [parameter for name, parameter in named if name.endswith("weight") and parameter.requires_grad]
    rest = [parameter for name, parameter in named if not name.endswith("weight") and parameter.requires_grad]
    return torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], lr=1 / 8)


def advance(sharded: FullySharded, optimizer: torch.optim.Optimizer, step: int) -> None:
    run(sharded, batch(step)[dist.get_rank() :: dist.get_world_size()])
    optimizer.step()
    optimizer.zero_grad()


def continued_in_one_process(model: Any, steps: int) -> dict[str, torch.Tensor]:
    net = integers(model())
    optimizer = adamw(net)
    for step in range(steps):
        loss_of(net(batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


def close(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert list(expected) == list(found)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)


def whole() -> None:
    for name, model in MODELS.items():
        sharded, optimizer = trained(model, 2)
        state, optimizer_state = sharded.full_state_dict(), sharded.full_optimizer_state_dict(optimizer)
        close(continued_in_one_process(model, 2), state)

        plain = integers(model(), seed=1)
        plain.load_state_dict(state)
        plain_optimizer = adamw(plain)
        set_optimizer_state_dict(plain, plain_optimizer, optimizer_state)

        other, other_optimizer = trained(model, 0)
        other.load_state_dict(state)
        other.load_optimizer_state_dict(other_optimizer, optimizer_state)
        same_values(name, state, other.full_state_dict())

        advance(other, other_optimizer, 2)
        loss_of(plain(batch(2))).backward()
        plain_optimizer.step()
        close(plain.state_dict(), other.full_state_dict())
        close(continued_in_one_process(model, 3), other.full_state_dict())


@pytest.mark.parametrize("ranks", [1, 3])
def test_whole_state_goes_to_the_plain_model_and_back(ranks: int) -> None:
    run_ranks(ranks, whole)


def save(folder: Path) -> None:
    for name, model in MODELS.items():
        sharded, optimizer = trained(model, 2)
        state = {"model": sharded.state_dict(), "optimizer": sharded.optimizer_state_dict(optimizer)}
        assert state["model"]["blocks.0.down.weight"].placements[0].is_shard(0)
        dcp.save(state, checkpoint_id=folder / name)
        torch.save(sharded.full_state_dict(), folder / f"{name}.pt")
        torch.save(sharded.full_optimizer_state_dict(optimizer), folder / f"{name}.optimizer.pt")


def load(folder: Path) -> None:
    for name, model in MODELS.items():
        sharded, optimizer = trained(model, 0)
        state = {"model": sharded.state_dict(), "optimizer": sharded.optimizer_state_dict(optimizer)}
        dcp.load(state, checkpoint_id=folder / name)
        sharded.load_state_dict(state["model"])
        sharded.load_optimizer_state_dict(optimizer, state["optimizer"])
        same_values(name, torch.load(folder / f"{name}.pt"), sharded.full_state_dict())
        expected = torch.load(folder / f"{name}.optimizer.pt")
        found = sharded.full_optimizer_state_dict(optimizer)
        assert found["param_groups"] == expected["param_groups"]
        for parameter, entries in expected["state"].items():
            same_values(parameter, entries, found["state"][parameter])
        plain = integers(model(), seed=1).state_dict()
        dcp.load({"model": plain}, checkpoint_id=folder / name)
        same_values(name, torch.load(folder / f"{name}.pt"), plain)


def test_distributed_checkpoint_to_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(3, save, tmp_path)
    run_ranks(2, load, tmp_path)
    run_ranks(4, load, tmp_path)


def stateful(folder: Path) -> None:
    sharded, _ = trained(Net, 1)
    dcp.save({"model": sharded}, checkpoint_id=folder)
    other, _ = trained(Net, 0)
    dcp.load({"model": other}, checkpoint_id=folder)
    same_values("stateful", sharded.full_state_dict(), other.full_state_dict())


def test_the_model_itself_can_be_saved(tmp_path: Path) -> None:
    run_ranks(2, stateful, tmp_path)


def wrong() -> None:
    sharded, optimizer = trained(Net, 0)
    state = sharded.full_state_dict()
    short = {name: value for name, value in state.items() if name != "first.bias"}
    with pytest.raises(UsageError, match=r"lacks \['first.bias'\] and has \['extra'\] too much"):
        sharded.load_state_dict({**short, "extra": torch.ones(1)})
    assert sharded.load_state_dict(short, strict=False) == (["first.bias"], [])
    with pytest.raises(UsageError, match=r"first.bias has shape \(4,\), the model \(5,\)"):
        sharded.load_state_dict({**state, "first.bias": torch.ones(4)})
    saved = sharded.full_optimizer_state_dict(optimizer)
    saved["param_groups"].reverse()
    with pytest.raises(UsageError, match="the optimizer's groups hold other parameters"):
        sharded.load_optimizer_state_dict(optimizer, saved)
    same_values("unchanged", state, sharded.full_state_dict())


def test_what_does_not_fit_is_refused() -> None:
    run_ranks(2, wrong)
