"""GEMMs that are split so that communication hides behind them: gather rows and multiply, multiply and scatter sums.

    all_gather_matmul(x_shard, w)     = all_gather(x_shard) @ w        rows sharded -> all rows, this rank's columns
    matmul_reduce_scatter(x, w)       = reduce_scatter(x @ w)          all rows, this rank's share of k -> rows sharded

Each is the other's backward, so both directions overlap:

    all_gather_matmul       forward   GEMM of chunk k          beside  the gather of chunk k + 1
                            backward  input-gradient GEMMs     beside  the gather of x, once more, in one transfer
                                      the next GEMM            beside  the scatter of chunk k of the input gradient
                                      weight-gradient GEMM     beside  the last scatter
    matmul_reduce_scatter   forward   GEMM of chunk k + 1      beside  the scatter of chunk k
                            backward  input-gradient GEMM k    beside  the gather of chunk k + 1 of the gradient

A shard is saved for backward, never the gathered matrix: memory falls by the size of the group, and the price, a
second gather, is hidden. The weight gradient is one GEMM over all rows. Summed chunk by chunk it could start earlier,
but would be rounded to the weight's type c times, and nothing needs it earlier.

How many chunks, and which exchange: `slipstream.runtime.split_choice`. With integers that a float holds exactly, every
choice gives the same bits. With real numbers the scatter's sums are rounded in the type of `x` at each hop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, get_args

import torch
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from slipstream.core.errors import UsageError
from slipstream.runtime import symmetric
from slipstream.runtime.collectives import Group
from slipstream.runtime.exchange import Exchange, Part, gather_whole, gathered, rank_and_size, scattered
from slipstream.runtime.rows import RowSplit, even_shares
from slipstream.runtime.symmetric import How


def all_gather_matmul(
    x_shard: torch.Tensor,
    weight: torch.Tensor,
    group: Group = None,
    *,
    chunks: int = 1,
    exchange: How = "ring",
    rows: Sequence[int] | None = None,
) -> torch.Tensor:
    """Gather every rank's rows and multiply them: (M, n_out) from `x_shard` (rows[rank], k) and `weight` (k, n_out).

    `rows` are the rows that each rank holds, M in all; None: as many on each rank. `chunks`, `exchange` and `rows` must
    be the same on all ranks; n_out may differ. UsageError for shapes that do not fit together.
    """
    return all_gather_matmuls(x_shard, [weight], group, chunks=chunks, exchange=exchange, rows=rows)[0]


def all_gather_matmuls(
    x_shard: torch.Tensor,
    weights: Sequence[torch.Tensor],
    group: Group = None,
    *,
    chunks: int = 1,
    exchange: How = "ring",
    rows: Sequence[int] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Multiply one gathered matrix by several weights (k, n_i), as queries, keys and values: one (M, n_i) for each.

    The rows travel once. Otherwise as `all_gather_matmul`.
    """
    rank, size = rank_and_size(group)
    split = RowSplit.of(rows if rows is not None else [_rows(x_shard)] * size, chunks, size)
    _check(x_shard, weights, split.counts[rank], exchange)
    x_shard, *weights = _as_autocast([x_shard, *weights])
    if size == 1:
        return tuple(x_shard @ weight for weight in weights)
    exchange = symmetric.or_portable(exchange, x_shard, split, group)
    outputs: tuple[torch.Tensor, ...] = _AllGatherMatmul.apply(x_shard, split, group, exchange, *weights)
    return outputs


def matmul_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: Group = None,
    *,
    chunks: int = 1,
    exchange: How = "ring",
    rows: Sequence[int] | None = None,
) -> torch.Tensor:
    """Multiply `x` (M, k) by `weight` (k, n_out), sum over the ranks, and return this rank's rows: (rows[rank], n_out).

    k is this rank's share and may differ. `rows` are the rows that each rank gets; None: M / n of them, the first ranks
    one more if M does not divide (`even_shares`). `chunks`, `exchange`, `rows` and M must be the same on all ranks.
    UsageError for shapes that do not fit together.
    """
    _, size = rank_and_size(group)
    split = RowSplit.of(rows if rows is not None else even_shares(_rows(x), size), chunks, size)
    _check(x, [weight], split.total, exchange)
    x, weight = _as_autocast([x, weight])
    if size == 1:
        return x @ weight
    exchange = symmetric.or_portable(exchange, x, split, group)
    output: torch.Tensor = _MatmulReduceScatter.apply(x, weight, split, group, exchange)
    return output


class _AllGatherMatmul(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, x_shard: torch.Tensor, split: RowSplit, group: Group, how: How, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(x_shard, *weights)
        ctx.place = split, group, how
        outputs, _ = _gather_products("all_gather_matmul", x_shard, weights, split, group, how)
        return outputs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_shard, *weights = ctx.saved_tensors
        split, group, how = ctx.place
        needs_x, needs_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        gradients = tuple(gradient.contiguous() for gradient in gradients)
        arriving = gather_whole(x_shard.contiguous(), split.counts, group) if any(needs_weights) else None
        x_gradient = torch.empty_like(x_shard, memory_format=torch.contiguous_format) if needs_x else None
        leaving = None
        if x_gradient is not None:
            transposed = [weight.t() for weight in weights]
            label = "all_gather_matmul input gradient"
            leaving = _scatter_products(label, gradients, transposed, x_gradient, split, group, how)
        x = arriving() if arriving else None
        weight_gradients = [
            _weight_gradient("all_gather_matmul", x, gradient, weight) if needed else None
            for gradient, weight, needed in zip(gradients, weights, needs_weights, strict=True)
        ]
        if leaving:
            leaving()
        return x_gradient, None, None, None, *weight_gradients


class _MatmulReduceScatter(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, split: RowSplit, group: Group, how: How
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.place = split, group, how
        rank, _ = rank_and_size(group)
        shard = x.new_empty(split.counts[rank], weight.shape[1])
        _scatter_products("matmul_reduce_scatter", [x.contiguous()], [weight], shard, split, group, how)()
        return shard

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        split, group, how = ctx.place
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        x_gradient = None
        if needs_x:
            label = "matmul_reduce_scatter input gradient"
            (x_gradient,), whole = _gather_products(label, gradient, [weight.t()], split, group, how, keep=needs_weight)
        elif needs_weight:
            whole = gather_whole(gradient.contiguous(), split.counts, group)()
        weight_gradient = _weight_gradient("matmul_reduce_scatter", x, whole, weight) if needs_weight else None
        return x_gradient, weight_gradient, None, None, None


def _gather_products(
    label: str,
    shard: torch.Tensor,
    weights: Sequence[torch.Tensor],
    split: RowSplit,
    group: Group,
    how: How,
    keep: bool = False,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """Gather `shard` and multiply it by each weight: the products, and the gathered rows if they are to be kept."""
    if how == "symmetric":
        return symmetric.all_gather_matmuls(shard, weights, group, keep)
    outputs = tuple(shard.new_empty(split.total, weight.shape[1]) for weight in weights)
    whole = shard.new_empty(split.total, shard.shape[1]) if keep else None
    for chunk, part in enumerate(gathered(shard.contiguous(), split, group, how)):
        with _chunk(label, chunk, split, how):
            for weight, output in zip(weights, outputs, strict=True):
                _multiply(part.data, weight, part.of(output))
        if whole is not None:
            for block, kept in zip(part.data, part.of(whole), strict=True):
                kept.copy_(block)
    return outputs, whole


def _scatter_products(
    label: str,
    lefts: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    shard: torch.Tensor,
    split: RowSplit,
    group: Group,
    how: How,
) -> Callable[[], None]:
    """Sum lefts[i] @ weights[i] over i and over the ranks into `shard`. It may be read once the result was called."""
    if how == "symmetric" and len(weights) == 1:
        shard.copy_(symmetric.matmul_reduce_scatter(lefts[0], weights[0], group))
        return lambda: None
    # torch has no fused operator for a sum of products.
    exchange: Exchange = "ring" if how == "symmetric" else how
    chunks = count()

    def produce(part: Part) -> None:
        with _chunk(label, next(chunks), split, exchange):
            for i, (left, weight) in enumerate(zip(lefts, weights, strict=True)):
                _multiply(part.of(left), weight, part.data, add=i > 0)

    return scattered(produce, split, shard, group, exchange)


def _multiply(lefts: list[torch.Tensor], weight: torch.Tensor, outputs: list[torch.Tensor], add: bool = False) -> None:
    """Write (or add) each block of rows times `weight` (k, n) to the output's block, in place."""
    for left, output in zip(lefts, outputs, strict=True):
        if len(left) == 1 and add:
            output[0].addmm_(left[0], weight)
        elif len(left) == 1:
            torch.mm(left[0], weight, out=output[0])
        elif left.device.type == "cpu":
            # Here bmm is one GEMM a batch, and few rows are slow: eight of 64 took 1.4 times as long as one of 512.
            product = (left.reshape(-1, left.shape[2]) @ weight).view(output.shape)
            _ = output.add_(product) if add else output.copy_(product)
        elif add:
            output.baddbmm_(left, weight.expand(len(left), -1, -1))
        else:
            torch.bmm(left, weight.expand(len(left), -1, -1), out=output)


def _weight_gradient(label: str, x: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """All rows of x, transposed, times all rows of the output's gradient, in the memory layout of the weight."""
    with record_function(f"slipstream::{label} weight gradient"):
        return torch.mm(x.t(), gradient, out=torch.empty_like(weight))


@contextmanager
def _chunk(label: str, chunk: int, split: RowSplit, how: Exchange) -> Iterator[None]:
    """The label that a profiler shows around the GEMMs of one chunk."""
    chunks = split.chunks * (len(split.counts) if how == "ring" else 1)
    with record_function(f"slipstream::{label} chunk {chunk + 1}/{chunks}"):
        yield


def _check(x: torch.Tensor, weights: Sequence[torch.Tensor], rows: int, exchange: How) -> None:
    if exchange not in get_args(How):
        raise UsageError(f"no exchange {exchange!r}", where="exchange", do=f"give one of {', '.join(get_args(How))}")
    if _rows(x) != rows:
        raise UsageError(f"x has {_rows(x)} rows where `rows` gives this rank {rows}", where="x")
    for weight in weights:
        if weight.ndim != 2 or weight.shape[0] != x.shape[1]:
            what = f"x of shape {tuple(x.shape)} cannot multiply a weight of shape {tuple(weight.shape)}"
            raise UsageError(what, do="weights are (k, n_out): give linear.weight.t()")


def _rows(x: torch.Tensor) -> int:
    if x.ndim != 2:
        what = f"x of shape {tuple(x.shape)} is not a matrix"
        raise UsageError(what, do="flatten its leading dimensions: x.flatten(0, -2)")
    return int(x.shape[0])


def _as_autocast(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Do what autocast does for a matmul; it cannot see through the operators that write into a given output."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return [tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors]
