"""The optimizer's state of ZeRO-1 as one process would have it, and back.

Shares are cut along a plan that was measured, so the next run cuts elsewhere: what is saved must not depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from slipstream.core.errors import UsageError
from slipstream.runtime.collectives import Group
from slipstream.runtime.reductions import view_like

State: TypeAlias = dict[str, Any]

Groups: TypeAlias = Sequence[Sequence[torch.Tensor]]
"""The parameters of each group of an optimizer, before it was sharded."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements [first, last) of a parameter, in order of memory: a tensor of one dimension that is stepped."""

    first: int
    last: int
    tensor: torch.Tensor


def gather_state(optimizer: torch.optim.Optimizer, groups: Groups, pieces: Mapping[int, Piece], group: Group) -> State:
    """The whole state in the form of `optimizer.state_dict()`, on the CPU of every rank. A collective call.

    `pieces` maps the id of a parameter to what this rank has of it.
    """
    states: dict[int, State] = {}
    for index, parameter in enumerate(_all(groups)):
        piece = pieces.get(id(parameter))
        mine = (piece.first, _on_cpu(optimizer.state.get(piece.tensor, {}))) if piece else (0, {})
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, mine, group=group)
        if any(state for _, state in parts):
            states[index] = _join([part for part in parts if part[1]], parameter)
    options = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
    return {"state": states, "param_groups": [o | p for o, p in zip(options, _numbers(groups), strict=True)]}


def load_state(state: State, optimizer: torch.optim.Optimizer, groups: Groups, pieces: Mapping[int, Piece]) -> None:
    """Give the optimizer its share of a whole state."""
    for index, parameter in enumerate(_all(groups)):
        piece = pieces.get(id(parameter))
        whole = state["state"].get(index)
        if piece and whole:
            optimizer.state[piece.tensor] = {key: _cut(key, whole[key], parameter, piece) for key in whole}


def load_options(state: State, optimizer: torch.optim.Optimizer, groups: Groups) -> None:
    """Take over learning rates and the like."""
    saved = state["param_groups"]
    if [len(g["params"]) for g in saved] != [len(parameters) for parameters in groups]:
        raise UsageError("the saved optimizer has other groups of parameters", do="group them as they were saved")
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})


def _all(groups: Groups) -> list[torch.Tensor]:
    return [parameter for parameters in groups for parameter in parameters]


def _numbers(groups: Groups) -> list[State]:
    """Number the parameters as `Optimizer.state_dict` does: through all groups."""
    numbered, start = [], 0
    for parameters in groups:
        numbered.append({"params": list(range(start, start + len(parameters)))})
        start += len(parameters)
    return numbered


def _on_cpu(state: State) -> State:
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def _join(parts: list[tuple[int, State]], parameter: torch.Tensor) -> State:
    """Put what the ranks have of one parameter together. Only what has one value an element has one dimension."""
    states = [state for _, state in sorted(parts, key=lambda part: part[0])]
    joined = {}
    for key, value in states[0].items():
        if isinstance(value, torch.Tensor) and value.dim() == 1:
            value = view_like(torch.cat([state[key] for state in states]), 0, parameter)
        joined[key] = value
    return joined


def _cut(key: str, value: Any, parameter: torch.Tensor, piece: Piece) -> Any:
    # `step` is a scalar, also where the parameter is one.
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or key == "step":
        return value.clone() if isinstance(value, torch.Tensor) else value
    memory = torch.empty(parameter.numel(), dtype=value.dtype)
    view_like(memory, 0, parameter).copy_(value)
    return memory[piece.first : piece.last].to(parameter.device, copy=True)
