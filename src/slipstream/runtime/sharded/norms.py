"""The norm of gradients that are spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from slipstream.runtime.collectives import Group


def norm_over_ranks(
    cut: Sequence[torch.Tensor],
    alike: Sequence[torch.Tensor],
    norm_type: float,
    shards: Group,
    cut_over: Group,
    device: torch.device,
) -> torch.Tensor:
    """Give the norm over the ranks of both groups, a scalar. All of `cut_over` hold `alike`, which counts once."""
    parts = [nn.utils.get_total_norm(_not_empty(gradients), norm_type).to(device) for gradients in (cut, alike)]
    groups = [shards] if cut_over is None else [shards, cut_over]
    if math.isinf(norm_type):
        return _over(groups, torch.maximum(*parts), dist.ReduceOp.MAX)
    copies = 1 if cut_over is None else dist.get_world_size(cut_over)
    powers = [part**norm_type for part in parts]
    return _over(groups, powers[0] + powers[1] / copies, dist.ReduceOp.SUM) ** (1 / norm_type)


def _not_empty(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [gradient for gradient in gradients if gradient.numel()]  # the maximum of nothing is an error


def _over(groups: Sequence[Group], value: torch.Tensor, operation: dist.ReduceOp) -> torch.Tensor:
    for group in groups:
        dist.all_reduce(value, operation, group=group)
    return value
