"""From the bytes of a file to the bytes they stand for: gzip, zstd or as they are, in pieces of bounded size.

The first bytes decide, never the name. What is damaged gives what can be had of it, and then says what is wrong:
a trace whose job was killed is cut short more often than not, and most of it can still be read.
"""

from __future__ import annotations

import sys
import threading
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CHUNK = 4 << 20
"""Decompressed bytes in a piece, about: a thread hands over the GIL once a piece, so small ones are slow."""

READ = 1 << 20
"""Compressed bytes in one read; traces compress 10 to 20 times, so this is a few pieces."""

AHEAD = 2
"""Pieces that the background thread may be ahead of the consumer."""

KEEP = 1 << 20
"""Bytes at the start of a tar member or pipe that can be read again, and so the reach of `Source.head` there."""

_WINDOW = 16 + zlib.MAX_WBITS
"""Tells zlib to expect a gzip header and to check the checksum and length at the end."""


class Readable(Protocol):
    """What is needed of an open file. `read` may give less than asked, and gives b"" only at the end."""

    def read(self, size: int, /) -> bytes: ...

    def close(self) -> None: ...


@dataclass
class Progress:
    """How far a file was read, in its own (compressed) bytes, and the first thing found wrong with it."""

    consumed: int = 0
    problem: str | None = None

    def fail(self, problem: str) -> None:
        """Keep the first problem: later ones follow from it."""
        self.problem = self.problem or problem


class _Damaged(Exception):
    """The stream cannot be read on; `salvaged` is what came before the damage."""

    def __init__(self, error: Exception, salvaged: bytes = b"") -> None:
        super().__init__(str(error).rpartition(": ")[2])
        self.salvaged = salvaged


class _Decoder(Protocol):
    """One gzip member or one zstd frame."""

    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Gunzip:
    """zlib's decompressor with the interface of zstd's, and without loss before the damage."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(_WINDOW)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        data = self._zlib.unconsumed_tail + data
        before = self._zlib.copy()  # about 40 kB; zlib drops the output of a call that fails
        try:
            piece = self._zlib.decompress(data, max_length)
        except zlib.error as error:
            raise _Damaged(error, _byte_by_byte(before, data)) from error
        # A full piece may leave output inside zlib although all input is consumed.
        self.needs_input = not self._zlib.unconsumed_tail and len(piece) < max_length
        return piece


class _Unzstd:
    """zstd's decompressor. Damage costs the piece it lies in, because the state cannot be copied."""

    def __init__(self) -> None:
        self._zstd = zstd.ZstdDecompressor()

    @property
    def eof(self) -> bool:
        return self._zstd.eof

    @property
    def needs_input(self) -> bool:
        return self._zstd.needs_input

    @property
    def unused_data(self) -> bytes:
        return self._zstd.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        try:
            return self._zstd.decompress(data, max_length)
        except zstd.ZstdError as error:
            raise _Damaged(error) from error


@dataclass(frozen=True)
class _Format:
    name: str
    starts: Callable[[bytes], bool]
    decoder: Callable[[], _Decoder]


_FORMATS = (
    _Format("gzip", lambda data: data.startswith(b"\x1f\x8b"), _Gunzip),
    # The second is a skippable frame, with which pzstd begins its files.
    _Format("zstd", lambda data: data.startswith(b"\x28\xb5\x2f\xfd") or data[1:4] == b"\x2a\x4d\x18", _Unzstd),
)
_MAGIC = 4


def is_compressed(start: bytes) -> bool:
    """Whether these first bytes of a file begin a compressed stream."""
    return any(form.starts(start) for form in _FORMATS)


def decompressed(file: Readable, progress: Progress, chunk: int = CHUNK) -> Iterator[bytes]:
    """The content of an open file in pieces of at most about `chunk` bytes; `progress` is kept up to date."""
    size = min(READ, max(chunk, 4096))

    def more(size: int = size) -> bytes:
        data = file.read(size)
        progress.consumed += len(data)
        return data

    start = _at_least(_MAGIC, b"", more)
    form = next((form for form in _FORMATS if form.starts(start)), None)
    if form:
        yield from _streams(form, start, more, progress, chunk)
        return
    while start:
        yield start
        start = more(chunk)


def gathered(pieces: Iterator[bytes], chunk: int = CHUNK) -> Generator[bytes, None, None]:
    """The same bytes in pieces of at least `chunk`, but for the last: many small gzip members give small pieces."""
    held: list[bytes] = []
    length = 0
    for piece in pieces:
        held.append(piece)
        length += len(piece)
        if length >= chunk:
            yield b"".join(held)
            held, length = [], 0
    if held:
        yield b"".join(held)


def ahead(pieces: Generator[bytes, None, None]) -> Generator[bytes, None, None]:
    """The same pieces, made by a thread that is up to `AHEAD` pieces ahead (zlib and zstd release the GIL).

    The thread starts with the first piece that is asked for, and has ended when the generator is exhausted,
    closed or has raised. An exception in the thread is raised here.
    """
    places = threading.Semaphore(AHEAD)
    ready: SimpleQueue[bytes | BaseException | None] = SimpleQueue()
    stopped = threading.Event()

    def work() -> None:
        try:
            while places.acquire() and not stopped.is_set():
                piece = next(pieces, None)
                ready.put(piece)
                if piece is None:
                    return
        except BaseException as error:
            ready.put(error)

    # A daemon, so that an iteration that nobody closes does not keep the process alive.
    worker = threading.Thread(target=work, name="slipstream-decompress", daemon=True)
    worker.start()
    try:
        while (piece := ready.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            places.release()
            yield piece
    finally:
        stopped.set()
        places.release()
        if not sys.is_finalizing():  # a daemon no longer runs then, and joining it would never return
            worker.join()
            pieces.close()


class Passing:
    """A tar member or a pipe: bytes that pass by once, of which the first are kept to be read again."""

    def __init__(self, name: str, file: Readable) -> None:
        self.name = name
        self._file: Readable | None = file
        self._kept = b""
        self._passed = 0
        self._is_complete = False
        self._lock = threading.Lock()  # a thread may still read ahead when `find` goes on

    def open(self) -> _Cursor:
        """Read from the start."""
        return _Cursor(self)

    def end(self) -> None:
        """The archive goes on to the next member."""
        with self._lock:
            self._file = None

    def read_at(self, position: int, size: int) -> bytes:
        """Bytes from a position that is kept or is the one reached."""
        with self._lock:
            if position < len(self._kept):
                return self._kept[position : position + size]
            if position == self._passed and self._is_complete:
                return b""
            if position != self._passed or self._file is None:
                raise RuntimeError(f"{self.name} passes by once: consume it before the next source is asked for")
            data = self._file.read(size)
            self._passed += len(data)
            if self._passed <= KEEP:
                self._kept += data
            if not data:
                self._is_complete = True
                self._file.close()
            return data


class _Cursor:
    """One reading of a `Passing`."""

    def __init__(self, passing: Passing) -> None:
        self._passing = passing
        self._position = 0

    def read(self, size: int) -> bytes:
        data = self._passing.read_at(self._position, size)
        self._position += len(data)
        return data

    def close(self) -> None: ...


def _streams(form: _Format, data: bytes, more: Callable[[], bytes], progress: Progress, chunk: int) -> Iterator[bytes]:
    """One compressed stream after the other: gzip members and zstd frames may be concatenated."""
    given = 0
    while form.starts(data):
        decoder = form.decoder()
        while not decoder.eof:
            if decoder.needs_input and not data and not (data := more()):
                progress.fail(f"the {form.name} stream ends early, after {given:,} decompressed bytes")
                return
            try:
                piece, damage = decoder.decompress(data, chunk), None
            except _Damaged as error:
                piece, damage = error.salvaged, error
            data = b""
            given += len(piece)
            if piece:
                yield piece
            if damage:
                progress.fail(f"the {form.name} stream is damaged after {given:,} decompressed bytes ({damage})")
                return
        data = _at_least(_MAGIC, decoder.unused_data, more)
        while data and not data.strip(b"\0"):  # padding, as tapes and block devices leave it
            data = _at_least(_MAGIC, b"", more)
        if data.startswith(b"\0"):
            data = _at_least(_MAGIC, data.lstrip(b"\0"), more)
    if data:
        progress.fail(f"something else follows the {form.name} stream after {given:,} decompressed bytes")


def _at_least(count: int, data: bytes, more: Callable[[], bytes]) -> bytes:
    """`data` with as many further reads as it takes to hold `count` bytes, fewer only at the end."""
    while len(data) < count and (extra := more()):
        data += extra
    return data


def _byte_by_byte(decoder: zlib._Decompress, data: bytes) -> bytes:
    """What `data` gives before the byte that cannot be decoded. Slow (0.2 s a MB), and only for damaged files."""
    salvaged = bytearray()
    try:
        for index in range(len(data)):
            salvaged += decoder.decompress(data[index : index + 1])
    except zlib.error:
        pass
    return bytes(salvaged)
