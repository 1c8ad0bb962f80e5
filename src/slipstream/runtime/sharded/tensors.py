"""The tensors that go into and come out of a layer, in whatever containers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from slipstream.core.errors import UsageError

PLAIN = (torch.Tensor, type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""What holds no other tensor than itself."""


def replaced(inputs: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change every tensor in tuples, lists, dictionaries and what else torch's pytree knows; leave other objects."""
    return pytree.tree_map_only(torch.Tensor, change, inputs)


def differentiable(output: Any, layer: str) -> list[torch.Tensor]:
    """Find the tensors that need a gradient, in dataclasses too.

    Raises UsageError when there are none but some object might hide one: nobody would know when backward gets there.
    """
    leaves = list(_leaves(output))
    found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    opaque = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, PLAIN)]
    if opaque and not found and torch.is_grad_enabled():
        raise UsageError(
            f"{layer} returned {opaque[0]}, in which tensors cannot be found",
            do="return tensors in tuples, lists, dictionaries or dataclasses",
        )
    return found


def _leaves(tree: Any) -> Iterator[Any]:
    for leaf in pytree.tree_leaves(tree):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from _leaves(getattr(leaf, field.name))
        else:
            yield leaf
