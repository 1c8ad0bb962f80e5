"""Where traces are found: files, folders, glob patterns and archives, as streams of decompressed bytes.

Nothing is held whole and nothing is written to disk: an archive is read in passing and the names of its members
are only labels. In folders and archives the name decides what is taken (`TRACE_NAMES`); what a file then is, its
first bytes decide.
"""

from __future__ import annotations

import difflib
import errno
import glob
import lzma
import os
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from io import FileIO
from pathlib import Path, PurePosixPath

from slipstream.core.errors import MachineError, TraceError, UsageError
from slipstream.trace.compression import (
    CHUNK,
    Passing,
    Progress,
    Readable,
    ahead,
    decompressed,
    gathered,
    is_compressed,
)

TRACE_NAMES = (
    "*.json",
    "*.pt.trace.*",
    "*.slip",
    "*.csv",
    "*.parquet",
    "*.tar",
    "*.tgz",
    "*.zip",
    "*.gz",
    "*.zst",
    "*.zstd",
)
"""Names that are taken from folders and archives. A file that the user names may be called anything."""

HEAD = 4096
"""Decompressed bytes that are looked at to tell what a source is, and kept."""

HEADERS = 8 << 20
"""Most bytes of headers before one tar member: tarfile holds them whole, and a bomb could make them any size."""

DEPTH = 4
"""Archives inside archives that are opened; there are archives that contain themselves."""

_DAMAGE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    ValueError,
    OverflowError,
    RecursionError,
)
"""What tarfile and zipfile raise for damaged archives: found by changing bytes at random."""


@dataclass
class Source:
    """One file or archive member that may be a trace.

    name    how messages call it; a member is `archive::member`
    size    bytes as they are stored, so that `consumed / size` is the progress; None for a pipe
    named   True where the user named this very file: what is wrong with it is an error, else a warning
    path    the file, where its bytes are on disk as they are (for readers that need random access)
    """

    name: str
    size: int | None
    named: bool
    path: Path | None = None
    _open: Callable[[], Readable] = field(kw_only=True, repr=False)
    _is_member: bool = field(default=False, kw_only=True, repr=False)
    _progress: Progress = field(default_factory=Progress, init=False, repr=False)
    _head: bytes = field(default=b"", init=False, repr=False)
    _head_asked: int = field(default=0, init=False, repr=False)

    def chunks(self) -> Generator[bytes, None, None]:
        """The decompressed content, in pieces of about `CHUNK` bytes.

        Each call begins anew, except for members of a tar archive and pipes, which pass by once: they are
        consumed before `find` goes on to the next source. Raises `MachineError` if the file cannot be read;
        damage ends the stream instead and is told by `problem`.
        """
        self._progress = progress = Progress()
        return ahead(gathered(self._pieces(progress, CHUNK)))

    def head(self, size: int = HEAD) -> bytes:
        """The first decompressed bytes, fewer only if there are no more. Does not disturb `chunks`."""
        if size > self._head_asked:
            with closing(self._pieces(Progress(), size)) as pieces:
                self._head = next(gathered(pieces, size), b"")[:size]
            self._head_asked = size
        return self._head[:size]

    @property
    def consumed(self) -> int:
        """Bytes of the stored form that the latest `chunks()` has read, a few pieces ahead of what it gave."""
        return self._progress.consumed

    @property
    def problem(self) -> str | None:
        """After `chunks()` is exhausted: what was wrong with the stored form, if anything."""
        return self._progress.problem

    def _pieces(self, progress: Progress, chunk: int) -> Generator[bytes, None, None]:
        """`decompressed`, bound to values: the generator must not hold `self`, or only the cycle collector ends it."""
        return _pieces(self.name, self._open, self.size if self._is_member else None, progress, chunk)


def find(paths: Sequence[str | os.PathLike[str]], warnings: list[str] | None = None) -> Generator[Source, None, None]:
    """All sources under these paths, each real file once: in the order given, in a folder in natural order.

    Paths are checked at once (`UsageError`, `MachineError`), contents as the iteration reaches them. What is wrong
    with a file that the user named raises `TraceError`; what is wrong with one that was found in a folder or an
    archive is appended to `warnings` and the file left out, and so is an archive that is damaged after some members.
    """
    notes = [] if warnings is None else warnings
    files: dict[tuple[int, int], tuple[Path, bool]] = {}
    for given in paths:
        for path, named in _files(os.fspath(given), notes):
            status = _status(path)
            first, was_named = files.get(identity := (status.st_dev, status.st_ino), (path, False))
            files[identity] = (first, named or was_named)
    return _sources(files.values(), notes)


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key under which rank2 comes before rank10. Digits are compared as text: they may be very many."""
    parts = re.split(r"(\d+)", name.casefold())
    numbers = [(len(digits.lstrip("0")), digits.lstrip("0")) for digits in parts[1::2]]
    words = [(0, word) for word in parts[::2]]
    return [key for pair in zip(words, [*numbers, (0, "")], strict=True) for key in pair] + [(0, name)]


# Paths to files


def _files(given: str, notes: list[str]) -> Iterator[tuple[Path, bool]]:
    """The files that one argument stands for, and whether it names them."""
    path = Path(given)
    if given and _exists(path):
        matches = [path]
    else:
        found = glob.glob(given, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        matches = [Path(match) for match in sorted(found, key=natural)]
    if not matches:
        raise _missing(given)
    files = [
        (file, not match.is_dir()) for match in matches for file in (_walk(match, notes) if match.is_dir() else [match])
    ]
    if not files:
        raise UsageError(
            "holds no file that looks like a trace",
            where=given,
            do=f"looked for {', '.join(TRACE_NAMES)}; name a file to have it read whatever it is called",
        )
    yield from files


def _walk(folder: Path, notes: list[str]) -> Iterator[Path]:
    """Files below a folder that look like traces. A folder that links lead back to is entered once."""
    entered: set[tuple[int, int]] = set()
    stack = [folder]
    while stack:
        path = stack.pop()
        try:
            status = path.stat()
            if not path.is_dir():
                if path.is_file() and _looks_like_trace(path.name):
                    yield path
            elif (identity := (status.st_dev, status.st_ino)) not in entered:
                entered.add(identity)
                inside = [entry for entry in path.iterdir() if not entry.name.startswith(".")]
                stack += sorted(inside, key=lambda entry: natural(entry.name), reverse=True)
        except OSError as error:
            if path is folder:
                raise _unreadable(_label(str(path)), error) from error
            if _looks_like_trace(path.name) or not isinstance(error, FileNotFoundError):  # a link to nothing
                notes.append(str(_unreadable(_label(str(path)), error)))


def _looks_like_trace(name: str) -> bool:
    """Whether the name, with folders in front of it or not, is one to take: not hidden, and in `TRACE_NAMES`."""
    path = PurePosixPath(name)
    hidden = any(part.startswith(".") and part != ".." for part in path.parts)
    return not hidden and any(fnmatch(path.name.lower(), pattern) for pattern in TRACE_NAMES)


def _exists(path: Path) -> bool:
    try:
        _status(path)
    except UsageError:
        return False
    return True


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(str(path)) from None
    except OSError as error:
        raise _unreadable(str(path), error) from error


def _missing(given: str) -> UsageError:
    """A path or pattern that leads nowhere, with the name that was probably meant."""
    path = Path(given)
    if path.is_symlink():
        what = f"is a link to '{path.readlink()}', which does not exist"
        return UsageError(what, where=given, do="name the file that holds the trace")
    while not path.parent.is_dir() and path != path.parent:
        path = path.parent
    try:
        siblings = sorted(entry.name for entry in path.parent.iterdir())
    except OSError:
        siblings = []
    close = difflib.get_close_matches(path.name, siblings, n=1)
    what = "matches no file" if any(magic in given for magic in "*?[") else "does not exist"
    do = f"did you mean '{path.parent / close[0]}'?" if close else "check the path"
    return UsageError(what, where=given or "the path ''", do=do)


def _unreadable(name: str, error: OSError) -> MachineError:
    do = "check its permissions" if isinstance(error, PermissionError) else "check the disk and its mount"
    return MachineError(f"cannot be read ({error.strerror or error})", where=name, do=do)


# Files to sources


def _sources(files: Iterable[tuple[Path, bool]], notes: list[str]) -> Generator[Source, None, None]:
    for path, named in files:
        try:
            source = _file_source(path, named)
            head = source.head()
        except MachineError as error:
            if named:
                raise
            notes.append(str(error))
            continue
        yield from _expand(source, head, notes, DEPTH)


def _file_source(path: Path, named: bool) -> Source:
    name = _label(str(path))
    try:
        if not path.is_file():
            return Source(name, None, named, _open=Passing(name, FileIO(path)).open)
        with FileIO(path) as file:
            raw = None if is_compressed(file.read(4)) else path
        return Source(name, path.stat().st_size, named, raw, _open=partial(FileIO, path))
    except OSError as error:
        raise _unreadable(name, error) from error


def _expand(source: Source, head: bytes, notes: list[str], depth: int) -> Iterator[Source]:
    """The source itself, or the sources in it if it is an archive."""
    if trouble := _placeholder(source, head):
        _complain(source, *trouble, notes)
    elif depth and head[257:262] == b"ustar":
        yield from _tar_members(source, notes, depth - 1)
    elif depth and source.path and head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        yield from _zip_members(source, source.path, notes, depth - 1)
    else:
        yield source


def _placeholder(source: Source, head: bytes) -> tuple[str, str] | None:
    """What is wrong, and what to do, with a file that only stands for a trace."""
    if not head:
        size = "" if source.size is None else f" ({source.size:,} bytes as stored)"
        return f"is empty{size}", "the job or a copy did not finish writing it; write or copy it again"
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the trace", "run `git lfs pull` where it was cloned"
    text = head.decode("utf-8", "replace").strip()
    is_path = re.fullmatch(r"(/|~/|\.\.?/).*|\w[^\s{}\"<>,;]*", text) and text.isprintable()
    if is_path and len(head) < HEAD and ("/" in text or _looks_like_trace(text)):
        return f"holds the path '{_label(text)}', not a trace", "copy the file itself"
    return None


def _complain(source: Source, what: str, do: str, notes: list[str]) -> None:
    """An error for what the user named, a warning for what was found."""
    error = TraceError(what, where=source.name, do=do)
    if source.named:
        raise error
    notes.append(str(error))


# Archives


def _tar_members(archive: Source, notes: list[str], depth: int) -> Iterator[Source]:
    """The members of a tar archive as they pass by. One that is not consumed is skipped."""
    count, trouble = 0, ""
    with closing(archive.chunks()) as pieces:
        try:
            for member, file in _tar_files(_Forward(pieces)):
                count += 1
                passing = Passing(f"{archive.name}::{_label(member.name)}", file)
                source = Source(passing.name, member.size, False, _open=passing.open, _is_member=True)
                yield from _expand(source, source.head(), notes, depth)
                passing.end()
        except _DAMAGE as error:
            trouble = f"the tar archive is damaged ({error})"
    trouble = archive.problem or trouble
    if trouble and count:
        notes.append(f"{archive.name}: {trouble}; members that follow are missing, copy the archive again")
    elif trouble:
        _complain(archive, trouble, "copy the archive again", notes)
    elif not count:
        _complain(archive, *_NO_MEMBERS, notes)


def _tar_files(stream: _Forward) -> Iterator[tuple[tarfile.TarInfo, Readable]]:
    """Regular members that look like traces: links, devices and sparse files (of any claimed size) are not."""
    # typeshed asks for more methods than reading uses
    with tarfile.open(fileobj=stream, mode="r:") as tar:  # type: ignore[call-overload]
        while member := tar.next():
            if member.isreg() and not member.issparse() and _looks_like_trace(member.name):
                yield member, _Window(stream, member.size)
            stream.headers = 0
    while stream.some(CHUNK):  # the padding, and behind it the checksum of the compressed stream
        pass


def _zip_members(source: Source, path: Path, notes: list[str], depth: int) -> Iterator[Source]:
    """The members of a zip archive in natural order; a saved recording, which is a zip too, stays whole.

    The archive is open as long as one of its sources is referenced, so members can be read in any order.
    """
    try:
        archive = zipfile.ZipFile(path)
    except (*_DAMAGE, OSError, NotImplementedError) as error:
        what = f"is a zip archive that is cut short or damaged ({error})"
        return _complain(source, what, "copy it again", notes)
    if "recording.json" in archive.namelist():
        archive.close()
        yield source
        return None
    files = [info for info in archive.infolist() if not info.filename.endswith("/")]
    members = [info for info in files if _looks_like_trace(info.filename)]
    if not members:
        _complain(source, *_NO_MEMBERS, notes)
    for info in sorted(members, key=lambda info: natural(info.filename)):
        name = f"{source.name}::{_label(info.filename)}"
        member = Source(name, info.file_size, False, _open=partial(archive.open, info), _is_member=True)
        if info.flag_bits & 1:
            what = f"member '{_label(info.filename)}' is encrypted"
            _complain(source, what, "unpack it with its password and name the files", notes)
            continue
        try:
            head = member.head()
        except NotImplementedError as error:
            _complain(source, f"member '{_label(info.filename)}': {error}", "unpack it and name the files", notes)
            continue
        yield from _expand(member, head, notes, depth)
    return None


class _Forward:
    """Pieces as a file that only goes forward. `read` is for tarfile, which reads nothing but headers with it."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self.headers = 0
        self._pieces = pieces
        self._piece = memoryview(b"")
        self._position = 0

    def some(self, size: int) -> bytes:
        """The next bytes, at most `size`, none only at the end."""
        if not self._piece:
            self._piece = memoryview(next(self._pieces, b""))
        data = bytes(self._piece[:size])
        self._piece = self._piece[len(data) :]
        self._position += len(data)
        return data

    def read(self, size: int) -> bytes:
        self.headers += max(size, 0)
        if self.headers > HEADERS:
            raise tarfile.ReadError(f"headers of more than {HEADERS:,} bytes")
        data = b""
        while len(data) < size and (more := self.some(size - len(data))):
            data += more
        return data

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        while self._position < position and self.some(min(CHUNK, position - self._position)):
            pass


class _Window:
    """The next `size` bytes of a stream. tarfile's own loses what was there if the end comes too early."""

    def __init__(self, stream: _Forward, size: int) -> None:
        self._stream = stream
        self._left = size

    def read(self, size: int, /) -> bytes:
        data = self._stream.some(min(size, self._left))
        self._left -= len(data)
        return data

    def close(self) -> None: ...


def _pieces(
    name: str, opener: Callable[[], Readable], expected: int | None, progress: Progress, chunk: int
) -> Generator[bytes, None, None]:
    """Open and decompress, with errors turned into ours and damage into a problem."""
    damage = ""
    try:
        with closing(opener()) as file:
            yield from decompressed(file, progress, chunk)
    except OSError as error:
        if error.errno not in (None, errno.EINVAL):  # bz2 raises the one, zipfile seeks before the start
            raise _unreadable(name, error) from error
        damage = f" ({error})"
    except _DAMAGE as error:
        damage = f" ({error})"
    if damage or (expected is not None and progress.consumed < expected):
        whole = "" if expected is None else f" of the {expected:,}"
        progress.fail(f"the archive gives only {progress.consumed:,}{whole} bytes of this member{damage}")


def _label(name: str) -> str:
    """A name that can be printed: names in archives can hold any bytes, terminal commands too."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


_NO_MEMBERS = (
    "is an archive that holds no file that looks like a trace",
    f"looked for {', '.join(TRACE_NAMES)}; unpack it and name the files if they are called otherwise",
)
