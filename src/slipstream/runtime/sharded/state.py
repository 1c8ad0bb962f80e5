"""State dicts: whole tensors for the plain model, DTensors for torch.distributed.checkpoint, and back.

A flat shard is no rectangle of a parameter, and a checkpoint of flat shards could only be read by the same number of
ranks. So parameters leave in whole, or as the DTensor sharded in dimension 0 that torch's own tools expect; to make
either, one layer at a time is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slipstream.core.errors import UsageError
from slipstream.runtime.collectives import Group
from slipstream.runtime.sharded.flat import Flat
from slipstream.runtime.sharded.unit import Unit

Form = Callable[[torch.Tensor], Any]
"""From a whole tensor to what the state dict holds in its place."""


def whole(cpu: bool) -> Form:
    """Keep whole tensors, on the CPU if asked for."""
    return lambda full: full.cpu() if cpu and full.device.type != "cpu" else full.clone()


def distributed(group: Group) -> Form:
    """Make DTensors over the group, sharded in dimension 0."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    some = group if group is not None else dist.group.WORLD
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)

    def form(full: torch.Tensor) -> Any:
        mesh = DeviceMesh.from_group(some, full.device.type)
        if not full.dim():
            return DTensor.from_local(full.clone(), mesh, [Replicate()], run_check=False)
        rows = -(-full.shape[0] // ranks)  # as torch.chunk cuts: the last ranks may have fewer rows, or none
        local = full[rank * rows : (rank + 1) * rows].clone()
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())

    return form


def full_state_dict(model: nn.Module, units: Sequence[Unit], *, cpu: bool) -> dict[str, Any]:
    """See FullySharded.full_state_dict."""
    return _state_dict(model, units, whole(cpu))


def sharded_state_dict(model: nn.Module, units: Sequence[Unit], group: Group) -> dict[str, Any]:
    """See FullySharded.state_dict."""
    return _state_dict(model, units, distributed(group))


def _state_dict(model: nn.Module, units: Sequence[Unit], form: Form) -> dict[str, Any]:
    found = dict(model.state_dict())  # pieces in the parameters' places, buffers, extra state, in the model's order
    for flat in _flats(units):
        for slot, full in zip(flat.slots, flat.whole(flat.shard), strict=True):
            value = form(full)
            found.update((name, value) for name in slot.names if name in found)
    return found


def load_state_dict(
    model: nn.Module, units: Sequence[Unit], state_dict: Mapping[str, Any], *, strict: bool
) -> tuple[list[str], list[str]]:
    """See FullySharded.load_state_dict; gives (missing, unexpected) names.

    Raises UsageError when names (strict) or shapes do not fit.
    """
    known = set(model.state_dict())
    missing, unexpected = sorted(known - set(state_dict)), sorted(set(state_dict) - known)
    if strict and (missing or unexpected):
        raise UsageError(f"the state dict lacks {missing} and has {unexpected} too much", do="or pass strict=False")
    parameters = {name for flat in _flats(units) for slot in flat.slots for name in slot.names}
    model.load_state_dict({k: v for k, v in state_dict.items() if k in known - parameters}, strict=False)
    for flat in _flats(units):
        for index, slot in enumerate(flat.slots):
            name = next((name for name in slot.names if name in state_dict), None)
            if name is not None:
                _write(flat, index, flat.shard, state_dict[name], name)
    return missing, unexpected


def optimizer_state_dict(units: Sequence[Unit], optimizer: torch.optim.Optimizer, form: Form) -> dict[str, Any]:
    """Give {"state": {name: {key: value}}, "param_groups": [...]}, the form of torch.distributed.checkpoint.

    State that is not there yet is made first, by a step without effect: a checkpoint is loaded into it.
    """
    _make_state(optimizer)
    names = _piece_names(units)
    groups = [{**group, "params": [names[id(piece)] for piece in group["params"]]} for group in optimizer.param_groups]
    state: dict[str, dict[str, Any]] = {}
    for flat in _flats(units):
        for name, key, value in _flat_state(flat, optimizer, form):
            state.setdefault(name, {})[key] = value
    return {"state": state, "param_groups": groups}


def load_optimizer_state_dict(
    units: Sequence[Unit], optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Put state by name where the pieces' state is kept; groups keep their pieces and take over the other entries.

    Raises UsageError when the groups do not hold the same parameters.
    """
    _make_state(optimizer)
    names = _piece_names(units)
    for group, loaded in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        if [names[id(piece)] for piece in group["params"]] != list(loaded["params"]):
            raise UsageError("the optimizer's groups hold other parameters", do="build the same groups as when saved")
        group.update({key: value for key, value in loaded.items() if key != "params"})
    for flat in _flats(units):
        for index, (slot, piece) in enumerate(zip(flat.slots, flat.pieces, strict=True)):
            for key, value in state_dict["state"].get(slot.name, {}).items():
                _load_entry(flat, index, optimizer.state[piece], key, value)


def _load_entry(flat: Flat, index: int, state: dict[str, Any], key: str, value: Any) -> None:
    mine = state.get(key)
    if isinstance(mine, torch.Tensor) and mine.dim() == 1:
        first, last = flat.layout.part(index, flat.rank)
        mine.copy_(_full(value).reshape(-1)[first:last])
    elif isinstance(mine, torch.Tensor):
        mine.copy_(_full(value))
    else:
        state[key] = value


def _flat_state(flat: Flat, optimizer: torch.optim.Optimizer, form: Form) -> Iterator[tuple[str, str, Any]]:
    entries = [optimizer.state.get(piece, {}) for piece in flat.pieces]
    for key in sorted({key for entry in entries for key in entry}):
        shards = [key for entry in entries if _is_piece(entry.get(key))]
        if shards:
            joined = _joined(flat, [entry.get(key) for entry in entries])
            for slot, entry, full in zip(flat.slots, entries, flat.whole(joined), strict=True):
                if key in entry:
                    yield slot.name, key, form(full)
        else:
            for slot, entry in zip(flat.slots, entries, strict=True):
                if key in entry:
                    yield slot.name, key, entry[key]


def _is_piece(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1


def _joined(flat: Flat, pieces: Sequence[torch.Tensor | None]) -> torch.Tensor:
    like = next(piece for piece in pieces if piece is not None)
    shard = torch.zeros(flat.layout.shard, dtype=like.dtype, device=like.device)
    for index, piece in enumerate(pieces):
        if piece is not None:
            flat.piece_of(shard, index).copy_(piece)
    return shard


def _write(flat: Flat, index: int, shard: torch.Tensor, value: Any, name: str) -> None:
    full, shape = _full(value), flat.slots[index].shape
    if full.shape != shape:
        raise UsageError(
            f"{name} has shape {tuple(full.shape)}, the model {tuple(shape)}", do="load another state dict"
        )
    first, last = flat.layout.part(index, flat.rank)
    with torch.no_grad():
        flat.piece_of(shard, index).copy_(full.reshape(-1)[first:last])


def _full(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let a fresh optimizer make its state: a step on zero gradients with learning rate 0 changes no parameter."""
    if optimizer.state:
        return
    pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    gradients = [piece.grad for piece in pieces]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    for piece in pieces:
        piece.grad = torch.zeros_like(piece) if piece.requires_grad else None
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for piece, gradient in zip(pieces, gradients, strict=True):
        piece.grad = gradient


def _piece_names(units: Sequence[Unit]) -> dict[int, str]:
    return {id(piece): slot.name for flat in _flats(units) for slot, piece in zip(flat.slots, flat.pieces, strict=True)}


def _flats(units: Sequence[Unit]) -> Iterator[Flat]:
    for unit in units:
        yield from unit.flats
