"""The `.slip` file: a Recording in one zip, as `recording.json` and one `.npy` member for each column.

Times are stored as differences: of neighbouring starts, of end and start, of start and launch. On real traces that
makes the columns a third smaller (9.4 bytes for a span become 6.4). Deflate level 3 takes a third of the time of
level 6 for 2 to 4 % more bytes.

A file may come from anybody, so nothing in it is believed: no pickle is read, a checksum covers the whole file,
sizes are checked before memory is allocated, and every index before it is used.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import IO, Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.core.errors import TraceError
from slipstream.core.files import AnyPath, existing_file, new_file
from slipstream.core.header import (
    ANNOTATION_COLUMNS,
    Columns,
    Header,
    TimelineHeader,
    damaged,
    decode_header,
    encode_header,
    header_of,
    problem_of,
    recording_from,
    timeline_from,
)
from slipstream.core.recording import Recording
from slipstream.core.timeline import COLUMNS, NO_TIME, Timeline

HEADER_MEMBER = "recording.json"

_Types = Mapping[str, npt.DTypeLike]

FREE_BYTES = 256 << 20
FREE_HEADER_BYTES = 16 << 20
MOST_INFLATION = 100
"""Members may claim this many times their size in the file; up to the free bytes they may claim anything.

Deflate can claim 1000 times. Real columns inflate 5 to 10 times. Those of a large simulated timeline, in which
every step is the same, could exceed 100: `save` then writes them uncompressed, so that it never writes what
`load` refuses.
"""

_PACKED = {"start_ns": "start_delta_ns", "end_ns": "duration_ns", "launch_ns": "launch_delta_ns"}
_UNPACKED = {stored: column for column, stored in _PACKED.items()}
_SPAN_TYPES: _Types = {_PACKED.get(column, column): dtype for column, dtype in COLUMNS.items()}
_ANNOTATION_TYPES: _Types = {_PACKED.get(column, column): dtype for column, dtype in ANNOTATION_COLUMNS.items()}

_LEVEL = 3
_SEAL = b"slipstream crc32 "
_BLANK = b"00000000"
_BLOCK = 1 << 20
_READABLE = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)

_NPY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<|]i[148])', 'fortran_order': False, 'shape': \((\d{1,18}),\), \} *\n",
    re.DOTALL,
)
"""The only headers that columns have. numpy's own reader evaluates them as Python literals."""

_UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    KeyError,
    OverflowError,
    RuntimeError,
    ValueError,
)
"""What zipfile raises on bytes that it cannot read (RuntimeError: encrypted, or not implemented)."""


def save(recording: Recording, path: AnyPath, *, force: bool = False) -> None:
    """Write a recording to a `.slip` file; an existing file is replaced only with `force`."""
    header = _located(header_of(recording))
    for described, timeline in zip(header.timelines, recording.timelines, strict=True):
        problem = problem_of(described, *_tables(timeline))
        assert not problem, problem
    with new_file(path, force=force) as file:
        if _write(file, header, recording.timelines, zipfile.ZIP_DEFLATED):
            file.seek(0)
            file.truncate()
            _write(file, header, recording.timelines, zipfile.ZIP_STORED)


def load(path: AnyPath) -> Recording:
    """Read a `.slip` file. Anything but an intact one is a TraceError."""
    where = os.fspath(path)
    with existing_file(path) as file:
        size = _check_seal(file, where)
        try:
            with zipfile.ZipFile(file) as archive:
                return _read(archive, size, where)
        except _UNREADABLE as error:
            raise damaged(str(error), where) from error
        except OSError as error:
            if error.errno != errno.EINVAL:  # a seek to a negative position that the zip names
                raise
            raise damaged(str(error), where) from error


def is_slip(head: bytes) -> bool:
    """Whether a file that begins with these bytes (64 are enough) says that it is a `.slip` file."""
    return head.startswith(b"PK\x03\x04") and head[30:].startswith(HEADER_MEMBER.encode())


class _Summing:
    """A pipe into a file that sums what passes. It cannot seek, so zipfile never changes what it has written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.crc = 0

    def write(self, data: bytes) -> int:
        self.crc = zlib.crc32(data, self.crc)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _packed(columns: Columns) -> Columns:
    """Times as differences. Sums that leave 64 bits wrap around, and wrap back in `_unpacked`."""
    packed = {_PACKED.get(column, column): values for column, values in columns.items()}
    start_ns = columns["start_ns"]
    packed["start_delta_ns"] = np.diff(start_ns, prepend=np.int64(0))
    packed["duration_ns"] = columns["end_ns"] - start_ns
    if "launch_ns" in columns:
        launch_ns = columns["launch_ns"]
        packed["launch_delta_ns"] = np.where(launch_ns == NO_TIME, NO_TIME, start_ns - launch_ns)
    return packed


def _unpacked(packed: Columns) -> Columns:
    columns = {_UNPACKED.get(column, column): values for column, values in packed.items()}
    columns["start_ns"] = start_ns = np.cumsum(packed["start_delta_ns"], dtype=np.int64)
    columns["end_ns"] = start_ns + packed["duration_ns"]
    if "launch_delta_ns" in packed:
        ago = packed["launch_delta_ns"]
        columns["launch_ns"] = np.where(ago == NO_TIME, NO_TIME, start_ns - ago)
    return columns


def _tables(timeline: Timeline) -> tuple[Columns, Columns]:
    spans = {column: getattr(timeline, column) for column in COLUMNS}
    return spans, {column: getattr(timeline.annotations, column) for column in ANNOTATION_COLUMNS}


def _located(header: Header) -> Header:
    """Name the member of each column."""
    return msgspec.structs.replace(
        header,
        timelines=tuple(
            msgspec.structs.replace(
                timeline,
                columns={column: f"{index}/{column}.npy" for column in _SPAN_TYPES},
                annotation_columns={column: f"{index}/annotations/{column}.npy" for column in _ANNOTATION_TYPES},
            )
            for index, timeline in enumerate(header.timelines)
        ),
    )


def _write(file: IO[bytes], header: Header, timelines: Sequence[Timeline], compression: int) -> bool:
    """Write the whole archive. Returns whether it claims more bytes than `load` would believe."""
    pipe = _Summing(file)
    with zipfile.ZipFile(pipe, "w", compression, compresslevel=_LEVEL) as archive:  # type: ignore[call-overload]
        archive.comment = _SEAL + _BLANK
        with archive.open(HEADER_MEMBER, "w") as member:
            member.write(encode_header(header))
        for described, timeline in zip(header.timelines, timelines, strict=True):
            spans, annotations = _tables(timeline)
            _write_columns(archive, described.columns, _packed(spans))
            _write_columns(archive, described.annotation_columns, _packed(annotations))
    file.seek(-len(_BLANK), os.SEEK_END)
    file.write(b"%08x" % pipe.crc)
    return bool(_unbelievable(archive, file.tell()))


def _write_columns(archive: zipfile.ZipFile, members: Mapping[str, str], columns: Columns) -> None:
    for column, member in members.items():
        values = columns[column]
        with archive.open(member, "w", force_zip64=values.nbytes > 1 << 30) as file:
            np.lib.format.write_array(file, values.astype(values.dtype.newbyteorder("<")), allow_pickle=False)


def _check_seal(file: BinaryIO, where: str) -> int:
    """Refuse a foreign, shortened or changed file, so that what follows reads what was written; returns the size."""
    if not is_slip(file.read(64)):
        raise TraceError("is not a Slipstream recording", where=where, do="give a .slip file")
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - len(_SEAL + _BLANK)))
    seal = file.read()
    if not seal.startswith(_SEAL):
        raise damaged("its end is missing", where)
    file.seek(0)
    crc, left = 0, size - len(_BLANK)
    while left > 0 and (block := file.read(min(left, _BLOCK))):
        crc, left = zlib.crc32(block, crc), left - len(block)
    if seal != _SEAL + b"%08x" % zlib.crc32(_BLANK, crc):
        raise damaged("its checksum does not fit", where)
    return size


def _unbelievable(archive: zipfile.ZipFile, size: int) -> str:
    """What makes an archive of this size too large to unpack, or ""."""
    members = archive.infolist()
    header = archive.getinfo(HEADER_MEMBER)
    if header.file_size > max(FREE_HEADER_BYTES, MOST_INFLATION * header.compress_size):
        return f"{HEADER_MEMBER} claims {header.file_size} bytes"
    claimed = sum(member.file_size for member in members)
    return f"it claims {claimed} bytes" if claimed > max(FREE_BYTES, MOST_INFLATION * size) else ""


def _read(archive: zipfile.ZipFile, size: int, where: str) -> Recording:
    problem = _unbelievable(archive, size)
    if problem:
        raise damaged(problem, where)
    header = decode_header(_member(archive, HEADER_MEMBER), where)
    members = [member for t in header.timelines for member in (*t.columns.values(), *t.annotation_columns.values())]
    if len(set(members)) != len(members):
        raise damaged("it uses a column more than once", where)
    return recording_from(header, [_timeline(archive, timeline, header, where) for timeline in header.timelines])


def _timeline(archive: zipfile.ZipFile, described: TimelineHeader, header: Header, where: str) -> Timeline:
    spans = _read_columns(archive, described.columns, _SPAN_TYPES)
    annotations = _read_columns(archive, described.annotation_columns, _ANNOTATION_TYPES)
    if any(len(values) != described.spans for values in spans.values()):
        raise damaged(f"its columns do not have {described.spans} rows", where)
    return timeline_from(described, header.groups, spans, annotations, where)


def _read_columns(archive: zipfile.ZipFile, members: Mapping[str, str], types: _Types) -> Columns:
    missing = types.keys() - members.keys()
    if missing:
        raise ValueError(f"column {min(missing)} is missing")
    packed = {column: _column(archive, members[column], np.dtype(dtype)) for column, dtype in types.items()}
    if len({len(values) for values in packed.values()}) > 1:
        raise ValueError("its columns do not have the same number of rows")
    return _unpacked(packed)


def _column(archive: zipfile.ZipFile, member: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    data = _member(archive, member)
    header = _NPY_HEADER.match(data)
    if not header:
        raise ValueError(f"{member} is not a column of whole numbers")
    values = np.frombuffer(data, header[1].decode(), offset=header.end())
    if values.dtype.newbyteorder("=") != dtype:
        raise ValueError(f"{member} holds {values.dtype}, not {dtype}")
    if len(values) != int(header[2]):
        raise ValueError(f"{member} does not have the length that it claims")
    return values.astype(dtype, copy=False)


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """The bytes of a member, and never more of them than it claims (`ZipFile.read` would unpack them all first)."""
    info = archive.getinfo(name)
    if info.compress_type not in _READABLE:
        raise ValueError(f"{name} is packed in another way than deflate")
    with archive.open(info) as file:
        return file.read(info.file_size)
