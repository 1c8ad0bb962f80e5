"""The cases of bucketed data parallel on NCCL, one rank a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from data_parallel_cases import FEWER, PLACE, run_cases  # noqa: E402
from ranks import run_ranks  # noqa: E402

pytestmark = [
    pytest.mark.live,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


def run_on_gpu(names: list[str]) -> dict[str, Any]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS needs it in deterministic mode
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    PLACE.update(device=device, group=dist.new_group(backend="nccl"))
    return run_cases(names)


def test_every_rank_gets_what_one_process_gets() -> None:
    results = run_ranks(min(4, torch.cuda.device_count()), run_on_gpu, FEWER, timeout=300)
    for name in FEWER:
        assert [result[name]["wrong"] for result in results] == [[]] * len(results), name
