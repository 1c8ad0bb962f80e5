"""Trains the same small network with each of Slipstream's three mechanisms and records one trace for each rank.

    python examples/record_mechanisms.py out/mechanisms && slipstream analyze out/mechanisms/fsdp

No GPU is needed: the ranks talk gloo over the loopback interface, where the transport takes its share of the cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from gloo_ranks import profile_steps, run_ranks, traces_folder
from slipstream.runtime import ByCap, ColumnParallelLinear, DataParallel, FullySharded, RowParallelLinear, Split

WIDTH, LAYERS, ROWS = 512, 6, 256


class Block(nn.Module):  # type: ignore[misc]
    """Two linear layers, the hidden one four times as wide."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def whole_blocks() -> nn.Sequential:
    return nn.Sequential(*(Block(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)))


def ddp() -> nn.Module:
    """Bucketed data parallel: one block a bucket, reduced while the blocks below it are in backward."""
    return DataParallel(whole_blocks(), plan=ByCap())


def fsdp() -> nn.Module:
    """Fully sharded: each block is gathered while the one before it computes."""
    model = whole_blocks()
    return FullySharded(model, layers=list(model), depth=1)


def tp() -> nn.Module:
    """Tensor parallel: each product runs while the rows for the next one travel around the ring."""
    ring = Split("ring", 1)
    blocks = [
        Block(
            ColumnParallelLinear(WIDTH, 4 * WIDTH, split=ring),
            RowParallelLinear(4 * WIDTH, WIDTH, split=ring),
        )
        for _ in range(LAYERS)
    ]
    return nn.Sequential(*blocks)


MECHANISMS: dict[str, Callable[[], nn.Module]] = {"ddp": ddp, "fsdp": fsdp, "tp": tp}


def train(rank: int, mechanism: str, folder: Path, steps: int) -> None:
    """Train one rank with one mechanism and leave its trace in `folder`."""
    torch.manual_seed(0)
    model = MECHANISMS[mechanism]()
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    for _ in range(6):
        step()  # plans are made from the first backwards
    profile_steps(step, folder, steps)


def main() -> int:
    parser = argparse.ArgumentParser(description="Record the three mechanisms on a few gloo ranks.")
    parser.add_argument("folder", type=traces_folder, help="where <mechanism>/rank<r>.json.gz are written")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="recorded steps")
    options = parser.parse_args()
    for mechanism in MECHANISMS:
        folder = options.folder / mechanism
        folder.mkdir(parents=True, exist_ok=True)
        try:
            run_ranks(train, options.ranks, mechanism, folder, options.steps)
        except KeyboardInterrupt:
            return 130
        print(f"Recorded {mechanism} on {options.ranks} ranks in {folder}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
