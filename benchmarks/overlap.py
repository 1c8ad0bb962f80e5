"""What the mechanisms hide over a real, rate-limited wire: ours beside compute alone, communication alone, and peers.

    python -m benchmarks.overlap [--wire 1gbit] [--tokens 64,256,512] [--rounds 7]

Two ranks, each on a host of its own (`slipstream.bench.lab`; needs root). For each number of tokens per rank all
variants are built in one process start and then run in turn, in rounds, so that a machine whose speed drifts slows
all of them; medians of the rounds with their spread (median absolute deviation) are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from slipstream.bench.lab import Host, lab

WIDTH, LAYERS = 1024, 8
ROOT = Path(__file__).resolve().parent.parent
PORT = 29611


def main(arguments: Sequence[str]) -> int:
    """Start both ranks in a lab and print what rank 0 measured; with --rank, be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wire", default="1gbit")
    parser.add_argument("--tokens", default="64,256,512", help="tokens a rank and step, separated by commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        return _rank(options.rank, [int(t) for t in options.tokens.split(",")], options.rounds)
    with lab(2, options.wire) as hosts:
        again = ["--tokens", options.tokens, "--rounds", str(options.rounds)]
        ranks = [_start(host, hosts[0], rank, again) for rank, host in enumerate(hosts)]
        said, _ = ranks[0].communicate(timeout=900)
        if ranks[0].wait() or ranks[1].wait(timeout=60):
            return 1
    _report(json.loads(said), options.wire)
    return 0


def _start(host: Host, first: Host, rank: int, again: list[str]) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": host.device,
        "MASTER_ADDR": first.address,
        "MASTER_PORT": str(PORT),
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    command = host.command([sys.executable, "-m", "benchmarks.overlap", "--rank", str(rank), *again])
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE)


def _rank(rank: int, tokens: list[int], rounds: int) -> int:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for count in tokens:
        variants = _variants(count)
        for run in variants.values():
            for _ in range(6):  # plans and orders are learned in the first steps
                run()
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for number in range(rounds):
            names = list(variants)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                dist.barrier()
                began = time.perf_counter()
                variants[name]()
                dist.barrier()
                seconds[name].append(time.perf_counter() - began)
        found[count] = seconds
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()
    return 0


def _variants(tokens: int) -> dict[str, Callable[[], object]]:
    """Every variant as a function that runs one step."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from slipstream.runtime import ByCap, DataParallel, FullySharded

    inputs = torch.randn(tokens, WIDTH)

    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def step(model: nn.Module) -> None:
        model(inputs).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None

    def without_overlap(model: DataParallel) -> None:
        with model.no_sync():
            model(inputs).square().mean().backward()
        model.reduce()
        for parameter in model.parameters():
            parameter.grad = None

    plain, peer = network(), DistributedDataParallel(network(), bucket_cap_mb=4)
    ours = DataParallel(network(), plan=ByCap((4 << 20, 4 << 20)))
    depths = {depth: network() for depth in (0, 1)}
    sharded = {
        depth: FullySharded(net, list(net), depth=depth, scatters_in_flight=2 * depth) for depth, net in depths.items()
    }
    fsdp2 = network()
    for layer in fsdp2:
        fully_shard(layer)
    fully_shard(fsdp2)
    step(ours)  # buckets and the order of layers are learned in a first step
    step(sharded[1])

    def communication_alone() -> None:
        for parameter in ours.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        ours.reduce()

    return {
        "compute alone": lambda: step(plain),
        "ddp: communication alone": communication_alone,
        "ddp: no overlap": lambda: without_overlap(ours),
        "ddp: ours": lambda: step(ours),
        "ddp: torch DDP": lambda: step(peer),
        "fsdp: communication alone": sharded[1].communicate,
        "fsdp: no overlap (depth 0)": lambda: step(sharded[0]),
        "fsdp: ours (depth 1)": lambda: step(sharded[1]),
        "fsdp: FSDP2": lambda: step(fsdp2),
    }


def _report(found: dict[str, dict[str, list[float]]], wire: str) -> None:
    print(f"{LAYERS} layers of {WIDTH} x {WIDTH} (fp32), 2 ranks, {wire} wire; ms a step, median ± MAD")
    names = list(next(iter(found.values())))
    print("| variant | " + " | ".join(f"{tokens} tokens" for tokens in found) + " |")
    print("|---" * (len(found) + 1) + "|")
    for name in names:
        cells = []
        for seconds in found.values():
            median = statistics.median(seconds[name])
            spread = statistics.median(abs(s - median) for s in seconds[name])
            cells.append(f"{1e3 * median:.0f} ± {1e3 * spread:.0f}")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
