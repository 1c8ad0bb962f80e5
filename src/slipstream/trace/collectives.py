"""What a collective moves, from what the trace records beside it: operation, group, elements, type."""

from __future__ import annotations

import json
import math
from typing import Any

from msgspec import Raw
from msgspec.structs import astuple

from slipstream.core.timeline import UNKNOWN, Collective, Group
from slipstream.trace.classify import HOST_LAUNCH_ANNOTATION, operation
from slipstream.trace.events import Args, Scalar

DTYPE_BYTES = {
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "byte": 1,
    "unsigned char": 1,
    "char": 1,
    "signed char": 1,
    "bool": 1,
    "half": 2,
    "bfloat16": 2,
    "short": 2,
    "short int": 2,
    "uint16": 2,
    "float": 4,
    "int": 4,
    "uint32": 4,
    "double": 8,
    "long": 8,
    "long int": 8,
    "uint64": 8,
    "complexfloat": 8,
    "complexdouble": 16,
}
"""Bytes an element, by the names that torch gives its types in traces (lower case, without `c10::`)."""

_GROWS = frozenset({"all_gather", "gather"})
_SHRINKS = frozenset({"reduce_scatter", "scatter"})
_MOVES_NOTHING = frozenset({"wait", "barrier", "init", "coalesced"})


class Groups:
    """The process groups of one trace file, completed from its `distributedInfo` where an event says less."""

    def __init__(self, distributed_info: Any) -> None:
        info = distributed_info if isinstance(distributed_info, dict) else {}
        self.world_size = whole_number(info.get("world_size"))
        config = info.get("pg_config")
        entries = [entry for entry in config if isinstance(entry, dict)] if isinstance(config, list) else []
        self._known = {str(entry.get("pg_name", "")): _configured(entry) for entry in entries}

    def find(self, args: Args) -> Group:
        """The group that an event names; if it names none, the only one there is, unless the size is another."""
        name = "" if args.group_name is None else str(args.group_name)
        known = self._known.get(name, Group(name)) if name else self.default()
        told, size = parse_ranks(bytes(args.group_ranks)), whole_number(args.group_size)
        if not name and size and known.size not in (None, size):
            known = Group()
        ranks = told or known.ranks
        description = str(args.group_description or known.description)
        size = size or known.size or len(ranks) or None
        # The beginning of a list that was cut still tells groups of one name apart.
        return Group(known.name, description, size, ranks or parse_ranks(bytes(args.group_ranks), cut=True))

    def default(self) -> Group:
        """The group of a collective that names none: known only where the job has a single one."""
        return next(iter(self._known.values())) if len(self._known) == 1 else Group()


class Descriptions:
    """What events of one file say about collectives, each distinct saying kept once.

    Events come before the groups are known (`distributedInfo` may stand behind them), so `resolve` comes last.
    """

    def __init__(self) -> None:
        self._index: dict[tuple[Any, ...], int] = {}
        self._said: list[tuple[str, Args]] = []

    def add(self, name: str, args: Args | None) -> int:
        """Number of what this event says about a collective, -1 if nothing."""
        if args is None or (args.collective is None and not HOST_LAUNCH_ANNOTATION.match(name)):
            return UNKNOWN
        said = Args(
            input_dims=args.input_dims.copy(),
            input_type=args.input_type.copy(),
            collective=args.collective,
            elements_in=args.elements_in,
            elements_out=args.elements_out,
            group_size=args.group_size,
            dtype=args.dtype,
            group_name=args.group_name,
            group_description=args.group_description,
            group_ranks=args.group_ranks.copy(),
        )
        key = (name, *(bytes(v) if isinstance(v, Raw) else v for v in astuple(said)))
        if key not in self._index:
            self._index[key] = len(self._said)
            self._said.append((name, said))
        return self._index[key]

    def resolve(self, groups: Groups) -> list[Collective | None]:
        """The collective of each number."""
        return [describe(name, args, groups) for name, args in self._said]


def describe(name: str, args: Args, groups: Groups) -> Collective | None:
    """The collective that an event launches or runs, None if it is not about one.

    Kernels and `record_param_comms` carry named fields (since 2023-10); annotations such as `nccl:all_reduce` carry
    the dimensions of their inputs.
    """
    if args.collective is not None:
        if str(args.collective) in _MOVES_NOTHING - {"barrier"}:
            return None
        op = operation(str(args.collective)) or str(args.collective)
        group = groups.find(args)
        size = _message_bytes(op, _number(args.elements_in), _number(args.elements_out), str(args.dtype), group.size)
        return Collective(op, group, size, _plain_dtype(str(args.dtype)))
    if not (annotation := HOST_LAUNCH_ANNOTATION.match(name)):
        return None
    if annotation[2] in _MOVES_NOTHING - {"barrier"}:
        return None
    op = operation(annotation[2]) or annotation[2]
    group = groups.find(args)
    elements, dtype = _first_input(bytes(args.input_dims), bytes(args.input_type))
    return Collective(op, group, _message_bytes(op, elements, None, dtype, group.size), _plain_dtype(dtype))


def parse_ranks(raw: bytes, *, cut: bool = False) -> tuple[int, ...]:
    """Ranks from a list or from a quoted one; of a list that was cut with `...` only the beginning, and with `cut`."""
    text = raw.decode("utf-8", "replace").strip().strip('"')
    if cut:
        text = text.partition("...")[0].rstrip(", ").removesuffix("]") + "]"
    if "..." in text or not text.startswith("["):
        return ()
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    return tuple(value for value in values if type(value) is int and whole_number(value) is not None)


def whole_number(value: Scalar | list[Any] | dict[str, Any]) -> int | None:
    """An int of 64 bits from a number or its text, None from anything else."""
    if isinstance(value, bool) or not isinstance(value, int | str | float):
        return None
    try:
        number = int(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < 1 << 63 else None


def _configured(entry: dict[str, Any]) -> Group:
    ranks = entry.get("ranks")
    listed = parse_ranks(ranks.encode() if isinstance(ranks, str) else json.dumps(ranks).encode())
    description = str(entry.get("pg_desc") or "")
    return Group(str(entry.get("pg_name", "")), description, whole_number(entry.get("pg_size")) or None, listed)


def _message_bytes(op: str, given: int | None, taken: int | None, dtype: str, size: int | None) -> int | None:
    """Bytes of the unsharded buffer, the size on which bandwidth is conventionally counted."""
    if op == "barrier":
        return 0
    width = DTYPE_BYTES.get(_plain_dtype(dtype).lower())
    elements = None if given is None else _unsharded(op, given, taken, size)
    if width is None or elements is None or elements < 0:
        return None
    return whole_number(elements * width)


def _unsharded(op: str, given: int, taken: int | None, size: int | None) -> int | None:
    """Elements of the whole buffer from those that one rank gives and takes. Lists were counted by their parts."""
    if op in _GROWS and (taken is None or taken <= given):
        return given * size if size else None
    if op in _SHRINKS and taken is not None and taken > given and size:
        return taken * size
    return given if taken is None or op in _SHRINKS else max(given, taken)


def _first_input(dims: bytes, types: bytes) -> tuple[int | None, str]:
    """Elements and type of the first input; a list of tensors counts as one input."""
    try:
        shapes, kinds = json.loads(dims or b"[]"), json.loads(types or b"[]")
    except (ValueError, RecursionError):
        return None, ""
    if not isinstance(shapes, list) or not shapes or not isinstance(shapes[0], list):
        return None, ""
    dtype = str(kinds[0]) if isinstance(kinds, list) and kinds else ""
    first = shapes[0]
    if first and isinstance(first[0], list):
        return sum(_product(shape) for shape in first), dtype
    return _product(first), dtype


def _product(shape: list[Any]) -> int:
    return math.prod(side for side in shape if isinstance(side, int))


def _number(value: Scalar) -> int | None:
    return whole_number(value)


def _plain_dtype(dtype: str) -> str:
    return dtype.removeprefix("c10::")
