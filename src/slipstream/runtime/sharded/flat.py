"""Parameters of one layer as one flat buffer, of which each rank keeps a shard.

Three things stand for one parameter, and its module holds the one that fits:

- the *piece*: the part of the parameter in this rank's shard, one-dimensional, maybe empty. What the optimizer sees.
- the *leaf*: the whole parameter in its own shape, a view of the gathered buffer. What forward and backward compute
  with, and where autograd leaves the gradient.
- its range in the gradient buffer, where the leaf's gradient is copied as soon as it is there.

The gathered buffer is allocated and freed under the leaves (`UntypedStorage.resize_`), so that tensors which autograd
saved in forward, views of it included, hold the right values again once backward has gathered it anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from slipstream.runtime.collectives import Group, all_gather
from slipstream.runtime.sharded.layout import Layout
from slipstream.runtime.sharded.memory import Ledger


@dataclass(frozen=True)
class Slot:
    """One parameter: all its names in the model and all places that hold it (more than one when it is tied)."""

    names: tuple[str, ...]
    places: tuple[tuple[nn.Module, str], ...]
    shape: torch.Size

    @property
    def name(self) -> str:
        """The name that stands for it: the first."""
        return self.names[0]

    @property
    def held(self) -> nn.Parameter:
        """What the modules hold now: the original at first, then the piece or the leaf."""
        module, attribute = self.places[0]
        return module._parameters[attribute]

    def put(self, tensor: nn.Parameter) -> None:
        """Let every module that has the parameter hold `tensor` in its place."""
        for module, attribute in self.places:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[attribute] = tensor  # four times faster than the assignment
            else:
                setattr(module, attribute, tensor)  # nn.LSTM keeps a second list of its weights


@dataclass(frozen=True)
class Numbers:
    """The dtypes to gather and to reduce in; None keeps the parameter's own."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


class Flat:
    """The parameters of a layer that share dtype and `requires_grad`; S elements a shard, n ranks, n x S in all."""

    def __init__(
        self, slots: Sequence[Slot], group: Group, numbers: Numbers, ledger: Ledger, poison: bool = False
    ) -> None:
        first = slots[0].held
        self.slots = tuple(slots)
        self.rank, self.group = dist.get_rank(group), group
        self.layout = Layout.of([slot.shape.numel() for slot in slots], dist.get_world_size(group))
        self.trainable = bool(first.requires_grad)
        self.reduce_dtype = numbers.reduce_dtype or numbers.param_dtype or first.dtype
        self._ledger, self._poison = ledger, poison
        self.shard = self._sharded(first)
        self.pieces = [self._piece(index) for index in range(len(slots))]
        self._full, self.leaves = self._unallocated(numbers.param_dtype or first.dtype, first.device)
        self._gradient: torch.Tensor | None = None
        self._filled: set[int] = set()
        self.allocated = False
        self.hold_pieces()

    # Construction: from whole parameters to shards.

    def _sharded(self, like: torch.Tensor) -> torch.Tensor:
        shard = torch.zeros(self.layout.shard, dtype=like.dtype, device=like.device)
        self._ledger.sharded += shard.nbytes
        with torch.no_grad():
            for index, slot in enumerate(self.slots):
                first, last = self.layout.part(index, self.rank)
                self.piece_of(shard, index).copy_(slot.held.reshape(-1)[first:last])
        return shard

    def piece_of(self, shard: torch.Tensor, index: int) -> torch.Tensor:
        """Cut the part that belongs to parameter `index` out of a tensor that is laid out as the shard, (S,)."""
        first, last = self.layout.place(index, self.rank)
        return shard[first:last]

    def _piece(self, index: int) -> nn.Parameter:
        piece = nn.Parameter(self.piece_of(self.shard, index), requires_grad=self.trainable)
        piece.__dict__.update(self.slots[index].held.__dict__)  # marks that the user's optimizer code looks at
        return piece

    def _unallocated(self, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, list[nn.Parameter]]:
        full = torch.empty(self.layout.total, dtype=dtype, device=device)
        leaves = []
        for slot, start, count in zip(self.slots, self.layout.starts, self.layout.counts, strict=True):
            # `.data`: a version counter of its own. A gather writes the values that autograd saved, and must not
            # look like a change of them.
            leaf = nn.Parameter(full.data[start : start + count].view(slot.shape), self.trainable)
            leaf.__dict__.update(slot.held.__dict__)
            leaves.append(leaf)
        full.untyped_storage().resize_(0)
        return full, leaves

    # The gathered buffer.

    @property
    def full_bytes(self) -> int:
        """Size of the gathered buffer."""
        return int(self._full.numel() * self._full.element_size())

    def gather(self) -> tuple[dist.Work, torch.Tensor]:
        """Allocate the buffer and start to gather all shards into it; gives the Work and the shard that is sent."""
        self._allocate()
        sent = self.shard if self.shard.dtype == self._full.dtype else self.shard.to(self._full.dtype)
        return all_gather(self._full, sent, self.group), sent

    def _allocate(self) -> None:
        assert not self.allocated
        self.allocated = True
        self._full.untyped_storage().resize_(self.full_bytes)
        self._ledger.unsharded.add(self.full_bytes)
        if self._poison:
            _poison(self._full)

    def free(self) -> None:
        """Give the gathered buffer back."""
        assert self.allocated
        self.allocated = False
        self._ledger.unsharded.add(-self.full_bytes)
        if self._poison:  # whoever still reads it shall see it in the numbers, where freed memory would crash
            _poison(self._full)
        else:
            self._full.untyped_storage().resize_(0)

    def hold_leaves(self) -> None:
        """Let the modules compute with the whole parameters."""
        for slot, leaf in zip(self.slots, self.leaves, strict=True):
            slot.put(leaf)

    def hold_pieces(self) -> None:
        """Let the modules show the shards, as the optimizer and `parameters()` see them."""
        for slot, piece in zip(self.slots, self.pieces, strict=True):
            slot.put(piece)

    # Gradients.

    def collect(self, index: int) -> None:
        """Move the gradient that autograd left at leaf `index` into the gradient buffer, or add it there."""
        leaf = self.leaves[index]
        start = self.layout.starts[index]
        place = self._gradients()[start : start + leaf.numel()].view(leaf.shape)
        if index in self._filled:
            place.add_(leaf.grad)
        else:
            place.copy_(leaf.grad)
            self._filled.add(index)
        leaf.grad = None

    def _gradients(self) -> torch.Tensor:
        if self._gradient is None:
            full = self._full
            self._gradient = torch.empty(full.shape, dtype=self.reduce_dtype, device=full.device)
            self._ledger.gradients.add(self._gradient.nbytes)
            if self._poison:
                _poison(self._gradient)
        return self._gradient

    @property
    def has_gradient(self) -> bool:
        """Gradients have been collected that are not reduced yet."""
        return bool(self._filled)

    def take_gradient(self) -> torch.Tensor:
        """Hand over the whole gradient, (n x S,), zero where no gradient came; pair it with `release_gradient`."""
        gradient = self._gradients()
        for start, end in self.layout.gaps(self._filled):
            gradient[start:end].zero_()
        self._gradient, self._filled = None, set()
        return gradient

    def release_gradient(self, gradient: torch.Tensor) -> None:
        """Count the buffer as freed; the caller drops it."""
        self._ledger.gradients.add(-gradient.nbytes)

    def accept(self, reduced: torch.Tensor) -> None:
        """Add the reduced gradient of the shard, (S,), to the pieces' `.grad`."""
        reduced = reduced.to(self.shard.dtype)
        for index, piece in enumerate(self.pieces):
            part = self.piece_of(reduced, index)
            if piece.grad is None:
                piece.grad = part
            else:
                piece.grad.add_(part)

    # Whole values, for checkpoints.

    def whole(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Gather a tensor that is laid out as the shard, (S,), and give each parameter's part in its own shape."""
        full = torch.empty(self.layout.total, dtype=shard.dtype, device=shard.device)
        all_gather(full, shard, self.group).wait()
        return [
            full[start : start + count].view(slot.shape)
            for slot, start, count in zip(self.slots, self.layout.starts, self.layout.counts, strict=True)
        ]


def _poison(buffer: torch.Tensor) -> None:
    buffer.fill_(torch.nan if buffer.is_floating_point() or buffer.is_complex() else 99)
