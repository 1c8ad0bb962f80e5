"""A rank that raises, dies or hangs: all others end within the group's timeout, and their error says where."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.live

import torch.distributed as dist  # noqa: E402
from data_parallel_cases import build, scalar  # noqa: E402

from slipstream.runtime.buckets import ByCap  # noqa: E402
from slipstream.runtime.data_parallel import DataParallel  # noqa: E402
from slipstream.runtime.failures import PeerError  # noqa: E402
from slipstream.runtime.tail import StepByBucket  # noqa: E402
from slipstream.runtime.zero1 import Zero1  # noqa: E402

RANKS, CULPRIT, BAD_STEP = 3, 1, 2
GROUP_TIMEOUT_S, BOUND_S = 6, 30

OPTIONS: dict[str, dict[str, Any]] = {"": {}, "bf16": {"wire_dtype": torch.bfloat16}, "step": {}, "zero1": {}}


def misbehave(how: str) -> None:
    if how == "raises":
        raise ValueError("a bad sample")
    if how == "dies":
        os._exit(9)
    time.sleep(1000)


def train(how: str, variant: str) -> None:
    torch.manual_seed(0)
    model = DataParallel(build(), plan=ByCap((300,)), **OPTIONS[variant])
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    if variant in ("step", "zero1"):
        optimizer = {"step": StepByBucket, "zero1": Zero1}[variant](optimizer, model)
    for step in range(BAD_STEP + 2):
        loss = scalar(model(torch.ones(2, 6)))
        if (dist.get_rank(), step) == (CULPRIT, BAD_STEP):
            misbehave(how)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def one_rank(rank: int, store: str, how: str, variant: str, said: Any) -> None:
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=GROUP_TIMEOUT_S)
    )
    start = time.monotonic()
    try:
        train(how, variant)
    except PeerError as error:
        said.put((rank, str(error), time.monotonic() - start))
    except ValueError:
        os._exit(1)
    # Falls off its end: a lane that still waits must not hold up the exit.


@pytest.mark.parametrize(
    ("how", "variant"), [("raises", ""), ("dies", "step"), ("dies", "zero1"), ("hangs", ""), ("hangs", "bf16")]
)
def test_one_rank_ends_all_with_one_error_that_names_the_bucket(how: str, variant: str) -> None:
    context = multiprocessing.get_context("spawn")
    said: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        ranks = [context.Process(target=one_rank, args=(rank, store, how, variant, said)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        try:
            heard = {rank: (message, took) for rank, message, took in (said.get(timeout=60) for _ in range(2))}
            for rank in heard:
                ranks[rank].join(BOUND_S)
                assert ranks[rank].exitcode == 0, "the process ends by itself"
        finally:
            for process in ranks:
                process.kill()
                process.join()
    assert heard.keys() == {0, 2}
    for message, took in heard.values():
        assert took < BOUND_S
        assert "bucket 0 (" in message or "bucket 1 (" in message
        assert "parameters: layers." in message
        assert message.endswith("the cause is on the rank that stopped first: look for its error")
