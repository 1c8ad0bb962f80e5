"""FullySharded on NCCL, one rank a GPU: what is exact on gloo is exact here, with buffers of streams in the balance."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from ranks import run_ranks  # noqa: E402
from sharded_cases import PLACE, Case, Net, check  # noqa: E402
from test_sharded_exact import MODELS, POLICIES  # noqa: E402
from torch import nn  # noqa: E402

from slipstream.runtime.sharded import FullySharded, Groups  # noqa: E402

pytestmark = [
    pytest.mark.live,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
RANKS = min(4, torch.cuda.device_count())


def on_my_gpu() -> Groups:
    PLACE["device"] = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(PLACE["device"])
    return Groups(dist.new_group(backend="nccl"), dist.new_group(backend="nccl"))


def all_cases() -> None:
    groups = on_my_gpu()
    for name, model in MODELS.items():
        for options in POLICIES:
            for poison in (True, False):
                check(Case(f"{name} {options}", model, {**options, "poison": poison}), groups)
    check(Case("held", Net, {}, micro_batches=3, hold=True), groups)


def test_equals_one_process() -> None:
    run_ranks(RANKS, all_cases, timeout=600)


def freed_buffers_are_not_overwritten() -> None:
    """The host runs far ahead of large layers: memory that is used again too early would show in the loss."""
    groups = on_my_gpu()
    width, layers = 2048, 12
    model = nn.Sequential(*(nn.Linear(width, width, bias=False, device=PLACE["device"]) for _ in range(layers)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(2.0 * torch.eye(width))
    sharded = FullySharded(model, list(model), groups=groups, mean=False)
    x = torch.ones(4096, width, device=PLACE["device"])
    for _ in range(5):
        y = sharded(x)
        y.sum().backward()
        assert torch.all(y == 2.0**layers)
        ranks = dist.get_world_size()
        for piece in sharded.parameters():
            assert torch.all(piece.grad == ranks * 4096 * 2.0 ** (layers - 1))
        sharded.zero_grad()
    assert sharded.memory.peak_layers == 2


def test_freed_buffers_are_not_overwritten() -> None:
    run_ranks(RANKS, freed_buffers_are_not_overwritten, timeout=300)
