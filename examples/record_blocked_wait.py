"""Records three jobs in which a thread sits in an operator and waits: what looks like compute in a trace is not.

    python examples/record_blocked_wait.py out/blocked && slipstream analyze out/blocked/a

In each of them the whole communication is exposed. An analysis that counts the enclosing operator as compute
calls it hidden.

    a   Work.wait() inside the backward of an autograd Function
    b   a functional collective, waited for by the operator _c10d_functional::wait_tensor
    c   a synchronous dist.all_reduce after backward
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from gloo_ranks import profile_steps, run_ranks, traces_folder

Step = Callable[[], object]
WIDTH, BATCH = 512, 256


def model() -> tuple[torch.Tensor, torch.Tensor]:
    """Make the inputs and the weights of one matrix product: the only compute of these jobs."""
    return torch.randn(BATCH, WIDTH), torch.randn(WIDTH, WIDTH, requires_grad=True)


class ReduceInBackward(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    """Passes its input on; its backward communicates and blocks until that is done."""

    @staticmethod
    def forward(context: Any, inputs: torch.Tensor, message: torch.Tensor) -> torch.Tensor:
        context.message = message
        return inputs.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        dist.all_reduce(context.message, async_op=True).wait()
        return gradient, None


def wait_in_backward(message: torch.Tensor) -> Step:
    inputs, weights = model()

    def step() -> None:
        ReduceInBackward.apply(inputs @ weights, message).square().mean().backward()

    return step


def functional_collective(message: torch.Tensor) -> Step:
    inputs, weights = model()

    def step() -> None:
        (inputs @ weights).square().mean().backward()
        functional.wait_tensor(functional.all_reduce(message, "sum", dist.group.WORLD))

    return step


def synchronous(message: torch.Tensor) -> Step:
    inputs, weights = model()

    def step() -> None:
        (inputs @ weights).square().mean().backward()
        dist.all_reduce(message)

    return step


JOBS: dict[str, Callable[[torch.Tensor], Step]] = {
    "a": wait_in_backward,
    "b": functional_collective,
    "c": synchronous,
}


def record(rank: int, folder: Path, size_mb: int, steps: int, with_stack: bool) -> None:
    """Run the three jobs after each other in this rank, each into a folder of its own."""
    for name, job in JOBS.items():
        profile_steps(job(torch.zeros(size_mb * 2**18)), folder / name, steps, with_stack)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Record operators that wait for communication.")
    parser.add_argument("folder", type=traces_folder, help="where a/, b/ and c/ with rank<r>.json.gz are written")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size-mb", type=int, default=32, help="MiB that are reduced in each step")
    parser.add_argument("--steps", type=int, default=3, help="recorded steps, after two that are not")
    parser.add_argument("--with-stack", action="store_true", help="record Python functions too (larger traces)")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    for name in JOBS:
        (options.folder / name).mkdir(parents=True, exist_ok=True)
    try:
        run_ranks(record, options.ranks, options.folder, options.size_mb, options.steps, options.with_stack)
    except KeyboardInterrupt:
        return 130
    print(f"Recorded {options.ranks} ranks in {', '.join(str(options.folder / name) for name in JOBS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
