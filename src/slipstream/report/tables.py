"""A Recording as a table with one row for each span: CSV for spreadsheets and shells, Parquet for data frames.

What spans do not carry (where the recording came from, the windows of steps, lanes on which nothing ran) stands in
the first line of the CSV, as a comment, and in the metadata of the Parquet schema, so that both read back to the same
analysis. Annotations are not written.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from slipstream.core.files import AnyPath, new_file
from slipstream.core.header import encode_header, header_of, without
from slipstream.core.named import NUMBERS, Named, blocks, named_columns
from slipstream.core.recording import Recording
from slipstream.core.timeline import Timeline
from slipstream.trace.exported import CSV_START, PARQUET_KEY, TABLE_TYPES, pyarrow


def write_csv(recording: Recording, file: IO[str]) -> None:
    """Write the table as CSV: CRLF line ends (RFC 4180), empty where unknown."""
    file.write(f"{CSV_START}{_metadata(recording).decode()}\r\n")
    writer = csv.writer(file)
    writer.writerow(TABLE_TYPES)
    for index, timeline in enumerate(recording.timelines):
        for block in blocks(timeline):
            named = [column.mapped(_csv_value) for column in _named(index, block)]
            writer.writerows(zip(*named, *_csv_numbers(block), strict=True))


def write_parquet(recording: Recording, path: AnyPath, *, force: bool = False) -> None:
    """Write the table as Parquet, at least one row group for each timeline that has spans. Needs pyarrow."""
    arrow, parquet = pyarrow()
    types = {str: arrow.dictionary(arrow.int32(), arrow.string()), int: arrow.int64(), bool: arrow.bool_()}
    columns = {column: types[kind] for column, kind in TABLE_TYPES.items()}
    schema = arrow.schema(list(columns.items()), metadata={PARQUET_KEY: _metadata(recording)})
    options = {"compression": "zstd", "write_page_checksum": True}
    with new_file(path, force=force) as file, parquet.ParquetWriter(file, schema, **options) as writer:
        for index, timeline in enumerate(recording.timelines):
            named = [_arrow_named(arrow, column) for column in _named(index, timeline)]
            table = arrow.Table.from_arrays([*named, *_arrow_numbers(arrow, timeline)], names=list(columns))
            writer.write_table(table.cast(schema))


def _metadata(recording: Recording) -> bytes:
    return encode_header(without(header_of(recording), "names", "collectives", "shapes"))


def _named(index: int, timeline: Timeline) -> tuple[Named, ...]:
    """All columns but the numbers, in the order of `TABLE_TYPES`."""
    first = np.zeros(len(timeline), np.int32)
    constants = (Named(first, (value, None)) for value in (index, timeline.rank, timeline.device))
    return (*constants, *named_columns(timeline).values())


def _csv_value(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else "" if value is None else value


def _csv_numbers(timeline: Timeline) -> Iterator[list[Any]]:
    for column, unknown in NUMBERS.items():
        yield ["" if value == unknown else value for value in getattr(timeline, column).tolist()]


def _arrow_named(arrow: Any, named: Named) -> Any:
    """Text stays a dictionary of its distinct values; the cast to the schema writes numbers out."""
    distinct = dict.fromkeys(value for value in named.values if value is not None)
    position = {value: index for index, value in enumerate(distinct)}
    codes = np.array([position.get(value, -1) for value in named.values], np.int32)[named.codes]
    return arrow.DictionaryArray.from_arrays(arrow.array(codes, mask=codes < 0), list(distinct))


def _arrow_numbers(arrow: Any, timeline: Timeline) -> Iterator[Any]:
    for column, unknown in NUMBERS.items():
        values = getattr(timeline, column)
        yield arrow.array(values, mask=np.zeros(len(values), bool) if unknown is None else values == unknown)
