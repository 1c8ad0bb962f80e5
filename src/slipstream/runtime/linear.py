"""Linear layers cut over a tensor-parallel group, with sequence parallelism: between them, each rank has its own rows.

    x_shard (rows[rank], h) ── ColumnParallelLinear ──> (M, n_out / n) ── ... ── RowParallelLinear ──> (rows[rank], h)
                               gathers the rows         all rows, a share of     sums over the ranks,
                                                        the columns              scatters the rows

What stands between two blocks (norms, residuals, dropout) works on a rank's own rows only. Its parameters are the same
on all ranks, but each rank sees the gradient of its rows: `summed_gradients` adds them up.

Parameters are ordinary local nn.Parameters, so that another wrapper can shard them over a second axis of the mesh.
Their values are cut out of one whole draw: after the same `torch.manual_seed`, a group of any size, 1 included, has the
same layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from slipstream.runtime import symmetric
from slipstream.runtime.collectives import Group
from slipstream.runtime.exchange import rank_and_size
from slipstream.runtime.rows import RowSplit, even_shares
from slipstream.runtime.split_choice import UNSPLIT, Problem, Rates, Split, choose_split
from slipstream.runtime.split_gemm import all_gather_matmuls, matmul_reduce_scatter


class ColumnParallelLinear(nn.Module):  # type: ignore[misc]
    """A linear layer of which each rank holds some outputs: `weight` (n_out share, k), `bias` (n_out share,) or None.

    `split` is a Split, or the machine's Rates to choose one for each shape (see `split_choice`).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Group = None,
        *,
        split: Split | Rates = UNSPLIT,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.group, self.split = in_features, out_features, group, split
        whole = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.owned = share(out_features, group)
        self.weight = nn.Parameter(whole.weight.detach()[self.owned].clone())
        self.bias = nn.Parameter(whole.bias.detach()[self.owned].clone()) if bias else None

    def forward(self, x_shard: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """(M, n_out share) from this rank's rows (rows[rank], k). `rows` as in `all_gather_matmul`."""
        return column_parallel(x_shard, [self], rows)[0]


def column_parallel(
    x_shard: torch.Tensor, layers: Sequence[ColumnParallelLinear], rows: Sequence[int] | None = None
) -> tuple[torch.Tensor, ...]:
    """Run several layers on the same input, such as queries, keys and values, with one gather for all."""
    first = layers[0]
    _, size = rank_and_size(first.group)
    total = sum(rows) if rows is not None else size * x_shard.shape[0]
    outputs = sum(-(-layer.out_features // size) for layer in layers)
    problem = Problem("gather", size, total, first.in_features, outputs, x_shard.element_size())
    split = _split(first.split, problem, x_shard, first.group)
    products = all_gather_matmuls(
        x_shard,
        [layer.weight.t() for layer in layers],
        first.group,
        chunks=split.chunks,
        exchange=split.exchange,
        rows=rows,
    )
    return tuple(
        product if layer.bias is None else product + layer.bias for product, layer in zip(products, layers, strict=True)
    )


class RowParallelLinear(nn.Module):  # type: ignore[misc]
    """A linear layer of which each rank holds some inputs: `weight` (n_out, k share), `bias` (n_out,) or None.

    The bias is added to the sum, by each rank to its own rows; it is the same parameter on all ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Group = None,
        *,
        split: Split | Rates = UNSPLIT,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.group, self.split = in_features, out_features, group, split
        whole = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.owned = share(in_features, group)
        self.weight = nn.Parameter(whole.weight.detach()[:, self.owned].clone())
        self.bias = whole.bias

    def forward(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """(rows[rank], n_out) from all rows of its columns (M, k share). `rows` as in `matmul_reduce_scatter`."""
        _, size = rank_and_size(self.group)
        inputs = -(-self.in_features // size)
        problem = Problem("scatter", size, x.shape[0], self.out_features, inputs, x.element_size())
        split = _split(self.split, problem, x, self.group)
        y = matmul_reduce_scatter(
            x, self.weight.t(), self.group, chunks=split.chunks, exchange=split.exchange, rows=rows
        )
        return y if self.bias is None else y + summed_gradients([self.bias], self.group)[0]


def share(total: int, group: Group) -> slice:
    """Return which of `total` rows, columns or heads belong to this rank: even shares, the first ranks one more."""
    rank, size = rank_and_size(group)
    return RowSplit(even_shares(total, size)).owned(rank)


def summed_gradients(parameters: Sequence[torch.Tensor], group: Group) -> tuple[torch.Tensor, ...]:
    """Return the parameters for use on this rank's rows; their gradients are summed over the group in backward.

    This is how a parameter that all ranks hold alike (a norm under sequence parallelism) gets the gradient of all rows.
    It is part of the graph, so whatever else hangs on the parameter (reducers, sharding, an optimizer that steps early)
    sees the sum. One all-reduce for all `parameters`, as soon as backward has the last of their gradients: give those
    of one block together. The ranks must use them in the same order.
    """
    if rank_and_size(group)[1] == 1:
        return tuple(parameters)
    summed: tuple[torch.Tensor, ...] = _SummedGradients.apply(group, *parameters)
    return summed


class _SummedGradients(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, group: Group, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        # Views, so that a wrapper which frees a parameter's memory and fills it again reaches these too.
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=ctx.group)
        parts = flat.split([gradient.numel() for gradient in gradients])
        return None, *(part.view(g.shape).to(g.dtype) for part, g in zip(parts, gradients, strict=True))


def _split(split: Split | Rates, problem: Problem, x: torch.Tensor, group: Group) -> Split:
    """Take the user's split, or choose; torch's fused operators go before a split of our own where they are enabled."""
    if isinstance(split, Split) or problem.ranks == 1:
        return split if isinstance(split, Split) else UNSPLIT
    chosen = choose_split(problem, split)
    if chosen != UNSPLIT and x.device.type == "cuda" and symmetric.is_enabled(group):
        return Split("symmetric", 1)
    return chosen
