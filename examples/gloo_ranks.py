"""Starts the ranks of a small gloo job on this machine, and writes what each of them profiled.

The other examples say what a rank does; this file is what they share.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn
from torch.profiler import ProfilerActivity, profile, schedule

HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=60)
"""A rank whose peer has gone must end by itself."""

RankMain = Callable[..., None]
"""Called in each rank's process with the rank number and the job's arguments; at module level, to be picklable."""


def run_ranks(rank_main: RankMain, world: int, *args: object) -> None:
    """Run `rank_main(rank, *args)` in `world` processes. None of them is left when this returns or raises."""
    _quiet_and_local()
    # This process serves the rendezvous on a port that the system picks, so no other program can take it between.
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    context = None
    try:
        with _interrupts_held():
            context = spawn(_run_rank, (rank_main, world, store.port, args), world, join=False, daemon=True)
        while not context.join():
            pass
    finally:
        for process in context.processes if context else ():
            process.kill()
            process.join()


def _quiet_and_local() -> None:
    """Set what the ranks inherit: no log lines, the loopback interface, one compute thread for each rank."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    os.environ["OMP_NUM_THREADS"] = "1"


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back while ranks start, so that none is half started; it is raised at the end.

    The ranks inherit the blocked signal: one that is interrupted while it imports torch prints no traceback. This
    process needs the handler as well, because the block holds for this thread only and torch has others.
    """
    held: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, before)
    if held:
        raise KeyboardInterrupt


def _run_rank(rank: int, rank_main: RankMain, world: int, port: int, args: tuple[object, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.manual_seed(0)
    store = dist.TCPStore(HOST, port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        rank_main(rank, *args)
    finally:
        dist.destroy_process_group()


def traces_folder(text: str) -> Path:
    """Read a folder from the command line. One with traces is refused: ranks of two jobs must not mix."""
    folder = Path(text)
    if any(folder.glob("**/rank*.json.gz")):
        raise argparse.ArgumentTypeError(f"{folder} holds traces already; name another folder or remove it")
    return folder


def profile_steps(step: Callable[[], object], folder: Path, steps: int, with_stack: bool = False) -> None:
    """Run `step` two times to settle, then `steps` times recorded into `folder/rank<r>.json.gz`."""
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=steps),
        record_shapes=True,
        with_stack=with_stack,
    ) as profiler:
        for _ in range(2 + steps):
            step()
            profiler.step()
    profiler.export_chrome_trace(str(folder / f"rank{dist.get_rank()}.json.gz"))
