"""Rows that arrive block by block, kept as one numpy array a column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from slipstream.core.intervals import Int64Array
from slipstream.core.timeline import UNKNOWN
from slipstream.trace.events import Scalar

LONG = frozenset({"start", "end", "correlation", "external", "sequence"})
"""Columns that need 64 bits; the others hold small numbers of interned things, in 32."""


class Columns:
    """A growing table of integer columns."""

    def __init__(self, *names: str) -> None:
        self._parts: dict[str, list[Int64Array]] = {name: [] for name in names}

    def add(self, **block: Int64Array) -> None:
        """Append one block; every column must be given, all of one length."""
        assert block.keys() == self._parts.keys()
        assert len({len(values) for values in block.values()}) == 1
        for name, values in block.items():
            self._parts[name].append(values if name in LONG else values.astype(np.int32))

    def table(self) -> Table:
        """All blocks joined. Gives up its own blocks column by column, so that memory holds little twice."""
        columns: dict[str, Int64Array] = {}
        for name in list(self._parts):
            parts = self._parts.pop(name)
            columns[name] = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return Table(columns)


class Table:
    """Columns of equal length, by name."""

    def __init__(self, columns: Mapping[str, Int64Array]) -> None:
        self.columns = dict(columns)

    def __getitem__(self, name: str) -> Int64Array:
        return self.columns[name]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def where(self, rows: np.ndarray[tuple[int], np.dtype[np.bool_]] | Int64Array) -> Table:
        """Only these rows (a mask, or indices)."""
        return Table({name: values[rows] for name, values in self.columns.items()})


def whole_numbers(values: Sequence[Scalar]) -> Int64Array:
    """A column of ids. What is absent, no number, or beyond 64 bits becomes -1 and so matches nothing."""
    try:
        return np.array([UNKNOWN if value is None else value for value in values], np.int64)
    except (TypeError, ValueError, OverflowError):
        return np.array([_id(value) for value in values], np.int64)


def _id(value: Scalar) -> int:
    try:
        number = UNKNOWN if value is None else int(value)
    except (ValueError, OverflowError):
        return UNKNOWN
    return number if abs(number) < 1 << 63 else UNKNOWN


def lookup(keys: Int64Array, wanted: Int64Array) -> Int64Array:
    """For each wanted value, a row of `keys` that holds it (the first), or -1. -1 is never found."""
    if not len(keys):
        return np.full(len(wanted), UNKNOWN, np.int64)
    order = np.argsort(keys, kind="stable")
    at = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
    rows = order[at]
    return np.where((keys[rows] == wanted) & (wanted != UNKNOWN), rows, UNKNOWN)
