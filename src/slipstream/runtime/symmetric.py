"""torch's fused operators on symmetric memory (CUDA): used where they apply, and never given up in silence.

They overlap by copying peers' memory directly, without NCCL kernels on the SMs. They come without a promise: called
where they do not apply, some raise and some quietly do one transfer and then one GEMM. What is known of torch 2.9 to
2.13 (`torch/distributed/_symmetric_memory/__init__.py`) stands here as reasons.

A group takes part when symmetric memory is enabled for it, with `enable_symmetric_memory(group)`. torch 2.13 calls that
step deprecated and its operators work without it, but its compiler's `micro_pipeline_tp` pass still asks for it and
otherwise leaves every pattern unfused without a word; so the step is kept, and says what the user wants.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from slipstream.runtime.collectives import Group
from slipstream.runtime.rows import RowSplit

How = Literal["ring", "chunked", "symmetric"]
"""An exchange of this library, or torch's fused operators on symmetric memory."""

MULTICAST_ROWS = 2048
"""Up to so many gathered rows torch takes one multicast gather and one GEMM where the hardware has NVLink SHARP."""


def enable_symmetric_memory(group: Group = None) -> None:
    """Enable symmetric memory for the group, on all of its ranks, for this library and for torch's compiler."""
    from torch.distributed import _symmetric_memory

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        _symmetric_memory.enable_symm_mem_for_group(_name(group))


def is_enabled(group: Group) -> bool:
    """Whether symmetric memory was enabled for the group."""
    from torch.distributed import _symmetric_memory

    return bool(_symmetric_memory.is_symm_mem_enabled_for_group(_name(group)))


def or_portable(how: How, x: torch.Tensor, split: RowSplit, group: Group) -> How:
    """Replace "symmetric" by "ring" where the fused operators do not apply, and warn why; keep any other value."""
    if how != "symmetric":
        return how
    if reason := why_not(x, split, group):
        warnings.warn(f"symmetric memory is not used: {reason}; using the ring exchange", RuntimeWarning, stacklevel=3)
        return "ring"
    if reason := why_unfused(x, split, group):
        warnings.warn(f"torch's fused operator does not overlap here: {reason}", RuntimeWarning, stacklevel=3)
    return how


def why_not(x: torch.Tensor, split: RowSplit, group: Group) -> str | None:
    """Say why the fused operators cannot run on `x`; None when they can."""
    if x.device.type != "cuda":
        return f"the tensors are on {x.device.type}, and the operators exist for CUDA only"
    if not hasattr(_operators(), "fused_all_gather_matmul"):
        return f"torch {torch.__version__} has no torch.ops.symm_mem.fused_all_gather_matmul"
    if not is_enabled(group):
        return "it is not enabled for this group; call enable_symmetric_memory(group) on all of its ranks"
    if len(set(split.counts)) > 1:
        return f"the ranks have different numbers of rows, {split.counts}"
    return None


def why_unfused(x: torch.Tensor, split: RowSplit, group: Group) -> str | None:
    """Say why the operators would run one transfer and one GEMM in place of overlapping; None when they overlap."""
    from torch.distributed import _symmetric_memory

    if getattr(_symmetric_memory, "_is_test_mode", False):
        return "torch's symmetric memory is in its test mode"
    if split.total <= MULTICAST_ROWS and _has_multicast(x.device):
        return f"up to {MULTICAST_ROWS} gathered rows (here {split.total}) torch gathers by multicast, unsplit"
    return None


def all_gather_matmuls(
    shard: torch.Tensor, weights: Sequence[torch.Tensor], group: Group, keep: bool = False
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """Multiply the gathered rows by each weight: the products, and the gathered rows if they are to be kept."""
    fused = _operators().fused_all_gather_matmul
    whole, outputs = fused(shard.contiguous(), list(weights), 0, _name(group), return_A=keep)
    return tuple(outputs), whole


def matmul_reduce_scatter(x: torch.Tensor, weight: torch.Tensor, group: Group) -> torch.Tensor:
    """Multiply, sum over the ranks, and return this rank's rows."""
    output: torch.Tensor = _operators().fused_matmul_reduce_scatter(x, weight, "sum", 0, _name(group))
    return output


def _operators() -> Any:
    """Return torch.ops.symm_mem, which is empty until the module that defines it has been imported."""
    import torch.distributed._symmetric_memory

    return torch.ops.symm_mem


def _has_multicast(device: torch.device) -> bool:
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    return bool(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index or 0))


def _name(group: Group) -> str:
    return str((group or dist.group.WORLD).group_name)
