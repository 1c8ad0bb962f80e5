"""A small real transformer, LLaMA-shaped: RMSNorm, RoPE, grouped-query attention, SwiGLU; tensor and sequence parallel.

Rows are tokens, those of the first sequence first. Between the blocks each rank of the group has its own rows; inside
attention it has all rows of its own heads, inside the feed-forward all rows of its own hidden columns.

    a rank's rows        x ── norm ┐              ┌ + x ── norm ┐             ┌ + x
                                 gather        scatter        gather       scatter
    all rows                       └ q k v, heads, o ┘            └ gate up, down ┘

Embedding, norms and head are the same on all ranks and see a rank's rows only; `summed_gradients` adds their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.core.errors import UsageError
from slipstream.runtime.collectives import Group
from slipstream.runtime.exchange import rank_and_size
from slipstream.runtime.linear import ColumnParallelLinear, RowParallelLinear, column_parallel, share, summed_gradients
from slipstream.runtime.rows import even_shares
from slipstream.runtime.split_choice import UNSPLIT, Rates, Split


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer; the defaults train on two laptop cores. 256 tokens: the values of a byte."""

    width: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 176
    vocabulary: int = 256
    rope_base: float = 10_000.0
    epsilon: float = 1e-5

    @property
    def head_width(self) -> int:
        """Columns of one head."""
        return self.width // self.heads


class Transformer(nn.Module):  # type: ignore[misc]
    """A language model over tokens, cut over `group`; after the same `torch.manual_seed`, the same for any group.

    `split`: how its GEMMs are split. UsageError when key-value heads cannot be dealt evenly to the ranks.
    """

    def __init__(self, shape: Shape, group: Group = None, *, split: Split | Rates = UNSPLIT) -> None:
        super().__init__()
        self.shape, self.group = shape, group
        _check(shape, rank_and_size(group)[1])
        self.embedding = nn.Parameter(0.02 * torch.randn(shape.vocabulary, shape.width))
        self.blocks = nn.ModuleList(Block(shape, group, split) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.width))
        self.head = nn.Parameter(0.02 * torch.randn(shape.vocabulary, shape.width))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the mean cross-entropy, in nats; the parts of all ranks add up to it.

        `tokens` and `targets` are (batch, sequence), the same on all ranks of the group. Backward of the part, on all
        ranks, gives the gradient of the whole.
        """
        _, mine = self.rows(tokens)
        return F.cross_entropy(self.logits(tokens).float(), targets.flatten()[mine], reduction="sum") / targets.numel()

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Predict each next token: (rows of this rank, vocabulary) from tokens (batch, sequence)."""
        rows, mine = self.rows(tokens)
        (embedding,) = summed_gradients([self.embedding], self.group)
        x = F.embedding(tokens.flatten()[mine], embedding)
        rotation = rope(tokens.shape[1], self.shape.head_width, self.shape.rope_base, tokens.device)
        for block in self.blocks:
            x = block(x, rows, rotation)
        norm, head = summed_gradients([self.norm, self.head], self.group)
        return F.linear(F.rms_norm(x, norm.shape, norm, self.shape.epsilon), head)

    def rows(self, tokens: torch.Tensor) -> tuple[tuple[int, ...], slice]:
        """Return how many rows each rank has between the blocks, and which are this rank's."""
        _, size = rank_and_size(self.group)
        return even_shares(tokens.numel(), size), share(tokens.numel(), self.group)


class Block(nn.Module):  # type: ignore[misc]
    """Attention and feed-forward, each with a norm before it and a residual around it."""

    def __init__(self, shape: Shape, group: Group, split: Split | Rates) -> None:
        super().__init__()
        self.epsilon, self.group = shape.epsilon, group
        self.attention_norm = nn.Parameter(torch.ones(shape.width))
        self.attention = Attention(shape, group, split)
        self.feed_forward_norm = nn.Parameter(torch.ones(shape.width))
        self.feed_forward = FeedForward(shape, group, split)

    def forward(self, x: torch.Tensor, rows: Sequence[int], rotation: torch.Tensor) -> torch.Tensor:
        """(rows of this rank, width) to the same."""
        norms = summed_gradients([self.attention_norm, self.feed_forward_norm], self.group)
        x = x + self.attention(F.rms_norm(x, norms[0].shape, norms[0], self.epsilon), rows, rotation)
        return x + self.feed_forward(F.rms_norm(x, norms[1].shape, norms[1], self.epsilon), rows)


class Attention(nn.Module):  # type: ignore[misc]
    """Causal grouped-query attention over this rank's heads; one gather serves queries, keys and values."""

    def __init__(self, shape: Shape, group: Group, split: Split | Rates) -> None:
        super().__init__()
        self.head_width = shape.head_width
        kv_width = shape.kv_heads * shape.head_width
        self.query = ColumnParallelLinear(shape.width, shape.width, group, split=split)
        self.key = ColumnParallelLinear(shape.width, kv_width, group, split=split)
        self.value = ColumnParallelLinear(shape.width, kv_width, group, split=split)
        self.output = RowParallelLinear(shape.width, shape.width, group, split=split)

    def forward(self, x: torch.Tensor, rows: Sequence[int], rotation: torch.Tensor) -> torch.Tensor:
        """(rows of this rank, width) to the same; `rotation` (sequence, head width / 2) says the sequence's length."""
        projected = column_parallel(x, [self.query, self.key, self.value], rows)
        query, key, value = (self._heads(rows_of_heads, len(rotation)) for rows_of_heads in projected)
        query, key = rotated(query, rotation), rotated(key, rotation)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.output(seen.transpose(1, 2).flatten(2).flatten(0, 1), rows)

    def _heads(self, x: torch.Tensor, sequence: int) -> torch.Tensor:
        """(batch x sequence, heads x head width) to (batch, heads, sequence, head width)."""
        return x.view(-1, sequence, x.shape[1] // self.head_width, self.head_width).transpose(1, 2)


class FeedForward(nn.Module):  # type: ignore[misc]
    """SwiGLU; one gather serves gate and up."""

    def __init__(self, shape: Shape, group: Group, split: Split | Rates) -> None:
        super().__init__()
        self.gate = ColumnParallelLinear(shape.width, shape.hidden, group, split=split)
        self.up = ColumnParallelLinear(shape.width, shape.hidden, group, split=split)
        self.down = RowParallelLinear(shape.hidden, shape.width, group, split=split)

    def forward(self, x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """(rows of this rank, width) to the same."""
        gate, up = column_parallel(x, [self.gate, self.up], rows)
        return self.down(F.silu(gate) * up, rows)


def rope(sequence: int, head_width: int, base: float, device: torch.device) -> torch.Tensor:
    """Unit complex numbers (sequence, head width / 2): position p turns pair i by p x base^(-2i / head width)."""
    pairs = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    angles = torch.outer(torch.arange(sequence, device=device, dtype=torch.float32), base**-pairs)
    return torch.polar(torch.ones_like(angles), angles)


def rotated(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Turn neighbouring columns of (batch, heads, sequence, head width) as pairs, by position."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).type_as(x)


def _check(shape: Shape, ranks: int) -> None:
    if shape.width % shape.heads or shape.head_width % 2 or shape.heads % shape.kv_heads:
        what = f"width {shape.width}, heads {shape.heads}, key-value heads {shape.kv_heads} do not fit together"
        raise UsageError(what, do="width must be an even multiple of heads, and heads a multiple of key-value heads")
    if shape.kv_heads % ranks:
        what = f"{shape.kv_heads} key-value heads cannot be dealt to {ranks} tensor-parallel ranks"
        raise UsageError(what, do="give a number of ranks that divides them")
