"""Run a function on real gloo ranks, one process each, and get back what each returned."""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any


def run_ranks(count: int, function: Callable[..., Any], *args: Any, timeout: float = 90.0) -> list[Any]:
    """Call `function(*args)` on `count` ranks of a fresh gloo group; results in order of rank.

    `function` must be importable (module level). A rank that raises, dies or hangs fails the call within `timeout`
    seconds, with that rank's traceback, and no process is left behind.
    """
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        ranks = [
            context.Process(target=_rank, args=(rank, count, store, timeout, results, function, args), daemon=True)
            for rank in range(count)
        ]
        for rank in ranks:
            rank.start()
        try:
            return _collect(ranks, results, time.monotonic() + timeout)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def _collect(ranks: list[Any], results: Any, deadline: float) -> list[Any]:
    found: dict[int, Any] = {}
    while len(found) < len(ranks):
        try:
            rank, value, error = results.get(timeout=0.2)
        except queue.Empty:
            dead = [i for i, rank in enumerate(ranks) if i not in found and rank.exitcode not in (None, 0)]
            assert not dead, f"ranks {dead} died without a word"
            assert time.monotonic() < deadline, f"ranks {sorted(set(range(len(ranks))) - set(found))} hang"
            continue
        assert error is None, f"rank {rank} raised\n{error}"
        found[rank] = value
    return [found[rank] for rank in range(len(ranks))]


def _rank(
    rank: int, count: int, store: str, timeout: float, results: Any, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=count, timeout=timedelta(seconds=timeout)
        )
        value = function(*args)
        results.put((rank, value, None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise
