"""Writing a file so that it is either complete or absent, and opening one with errors that a user understands."""

from __future__ import annotations

import errno
import io
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from slipstream.core.errors import MachineError, SlipstreamError, UsageError

AnyPath = str | os.PathLike[str]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_SUCH_PLACE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


@contextmanager
def new_file(path: AnyPath, *, force: bool = False, binary: bool = True) -> Iterator[IO[Any]]:
    """Open a file to write: it appears under its name when the block ends well, and not at all otherwise.

    What is written goes to a temporary file in the same folder, which is flushed to the disk and then renamed.
    An existing file is replaced only with `force`. A device or a pipe (`/dev/stdout`) is written directly: to
    rename over it would remove it. Text is UTF-8 and keeps the line ends that are written.
    """
    target = Path(os.path.realpath(path))
    _refuse_existing(target, force)
    direct = target.exists() and not target.is_file()
    place = target if direct else target.with_name(f".slipstream-{secrets.token_hex(6)}.tmp")
    try:
        with _opened(place, target, "wb" if direct else "xb", binary) as file:
            yield file
            file.flush()
            if not direct:
                os.fsync(file.fileno())
        if not direct:
            _rename(place, target, force)
    except BaseException as error:
        if not direct:
            with suppress(OSError):
                place.unlink()
        if isinstance(error, OSError) and error.errno in _FULL:
            raise _cannot_write(target, error) from error
        raise


@contextmanager
def existing_file(path: AnyPath) -> Iterator[BinaryIO]:
    """Open a file to read; one that is not there is the user's mistake, one that cannot be read the machine's."""
    try:
        with Path(path).open("rb") as file:
            yield file
    except _NO_SUCH_PLACE as error:
        raise UsageError(f"cannot be read ({_reason(error)})", where=str(path), do="check the path") from error
    except OSError as error:
        raise MachineError(
            f"cannot be read ({_reason(error)})", where=str(path), do="check its permissions and the disk"
        ) from error


def _refuse_existing(target: Path, force: bool) -> None:
    if target.is_dir():
        raise UsageError("is a folder", where=str(target), do="name a file")
    if target.is_file() and not force:
        raise UsageError("already exists", where=str(target), do="pass --force to replace it, or name another file")


def _opened(place: Path, target: Path, mode: str, binary: bool) -> IO[Any]:
    try:
        file = place.open(mode)
    except OSError as error:
        raise _cannot_write(target, error) from error
    return file if binary else io.TextIOWrapper(file, encoding="utf-8", newline="")


def _rename(place: Path, target: Path, force: bool) -> None:
    _refuse_existing(target, force)
    try:
        place.replace(target)
    except OSError as error:
        raise _cannot_write(target, error) from error


def _cannot_write(target: Path, error: OSError) -> SlipstreamError:
    what = f"cannot be written ({_reason(error)})"
    if isinstance(error, _NO_SUCH_PLACE):
        return UsageError(what, where=str(target), do=f"create the folder {target.parent}, or name another one")
    do = "free some space" if error.errno in _FULL else "check the permissions of its folder"
    return MachineError(what, where=str(target), do=f"{do}, or write to another place")


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
