"""Trains a small network with DDP on a few processes of this machine and records one trace for each rank.

    python examples/record_ddp.py out/demo && slipstream analyze out/demo

No GPU is needed: the ranks talk gloo over the loopback interface. The gradients leave in several buckets while
backward still computes, so part of the communication is hidden; the last bucket has nothing left to hide behind.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gloo_ranks import profile_steps, run_ranks, traces_folder


def train(rank: int, folder: Path, width: int, layers: int, batch: int, steps: int, with_stack: bool) -> None:
    """Train one rank and leave its trace in `folder`."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))
    # One layer a bucket: the all-reduce of a layer runs while the layers below it compute their gradients.
    ddp = DistributedDataParallel(model, bucket_cap_mb=4 * width * width / 2**20)
    optimizer = torch.optim.AdamW(ddp.parameters(), fused=True)
    inputs = torch.randn(batch, width, generator=torch.Generator().manual_seed(rank))

    def step() -> None:
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()

    if rank == 0:
        print(f"Training {steps} steps on {dist.get_world_size()} ranks", flush=True)
    profile_steps(step, folder, steps, with_stack)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Record a DDP job of a few gloo ranks with torch.profiler.")
    parser.add_argument("folder", type=traces_folder, help="where rank<r>.json.gz are written")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=768, help="each layer holds width x width weights")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=256, help="rows a rank and step")
    parser.add_argument("--steps", type=int, default=5, help="recorded steps, after two that are not")
    parser.add_argument("--with-stack", action="store_true", help="record Python functions too (larger traces)")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    options.folder.mkdir(parents=True, exist_ok=True)
    job = (options.folder, options.width, options.layers, options.batch, options.steps, options.with_stack)
    try:
        run_ranks(train, options.ranks, *job)
    except KeyboardInterrupt:
        return 130
    print(f"Recorded {options.ranks} ranks in {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
