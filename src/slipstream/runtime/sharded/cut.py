"""Cutting a model into units: which parameter belongs to which layer, and what is left for the root."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from torch import nn

from slipstream.core.errors import UsageError
from slipstream.runtime.sharded.flat import Slot

ROOT = "root"
"""Name of the unit that holds every parameter outside of the layers: embeddings, the last norm, the head."""


def named_layers(model: nn.Module, layers: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Find the layers in the model, in the order given; one that is given twice is one layer that runs twice.

    Raises UsageError for a module that is not in the model, the model itself, or one inside of another layer.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, nn.Module] = {}
    for layer in layers:
        name = names.get(id(layer), "")
        if not name:
            raise UsageError(f"the layer {type(layer).__name__} is no submodule of the model", do="pass modules of it")
        found[name] = layer
    _check_apart(found)
    return found


def _check_apart(layers: Mapping[str, nn.Module]) -> None:
    names = {id(layer): name for name, layer in layers.items()}
    for outer, layer in layers.items():
        for module in layer.modules():
            if module is not layer and id(module) in names:
                raise UsageError(
                    f"the layers '{outer}' and '{names[id(module)]}' lie inside of each other",
                    do="pass only one of them",
                )


def slots_by_unit(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, list[Slot]]:
    """Assign every parameter to the layer that contains it, or to the root.

    Raises UsageError for a parameter tied across units: it would be gathered and reduced twice.
    """
    owners = {id(module): name for name, layer in layers.items() for module in layer.modules()}
    units: dict[str, list[Slot]] = {name: [] for name in [*layers, ROOT]}
    for slot in _slots(model):
        owner = {owners.get(id(module), ROOT) for module, _ in slot.places}
        if len(owner) > 1:
            raise UsageError(
                f"the parameter {' = '.join(slot.names)} is tied across {', '.join(sorted(owner))}",
                do="leave all modules that share it outside of the layers",
            )
        units[owner.pop()].append(slot)
    return units


def _slots(model: nn.Module) -> list[Slot]:
    names: dict[int, list[str]] = {}
    places: dict[int, dict[tuple[int, str], tuple[nn.Module, str]]] = {}
    shapes = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            names.setdefault(id(parameter), []).append(f"{prefix}.{attribute}" if prefix else attribute)
            places.setdefault(id(parameter), {})[id(module), attribute] = (module, attribute)
            shapes[id(parameter)] = parameter.shape
            if hasattr(parameter, "device_mesh"):
                raise UsageError(
                    f"the parameter {names[id(parameter)][0]} is a DTensor already", do="pass plain tensors"
                )
    return [Slot(tuple(names[key]), tuple(places[key].values()), shapes[key]) for key in names]


def alike(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Group slots that can share a flat buffer: one dtype, and all trainable or all frozen.

    Frozen parameters lie apart so that no zeros are reduced for them; most layers give one group.
    """

    def kind(slot: Slot) -> tuple[str, bool]:
        return str(slot.held.dtype), bool(slot.held.requires_grad)

    return [list(group) for _, group in groupby(sorted(slots, key=kind), key=kind)]
