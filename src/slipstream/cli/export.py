"""Write the timeline of traces for other tools: Chrome/Perfetto JSON, CSV, Parquet, or a recording."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from slipstream.cli import reading
from slipstream.core.errors import UsageError
from slipstream.core.files import new_file
from slipstream.core.recording import Recording
from slipstream.core.store import save
from slipstream.report.chrome import write_chrome
from slipstream.report.tables import write_csv, write_parquet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `slipstream export`."""
    reading.add_arguments(parser)
    parser.add_argument(
        "--to",
        required=True,
        metavar="FILE",
        help=f"file to write; its ending decides the format: {', '.join(FORMATS)}",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing file")


def run(arguments: argparse.Namespace) -> int:
    """Read, then write in the format that the file's ending asks for."""
    target = Path(arguments.to)
    write = FORMATS.get(target.suffix.lower())
    if write is None:
        raise UsageError(
            f"does not end in one of {', '.join(FORMATS)}",
            where=str(target),
            do="choose the format by the file's ending",
        )
    recording = reading.recording(arguments)
    write(recording, target, arguments.force)
    print(f"wrote {target}: {sum(map(len, recording.timelines)):,} spans of {len(recording.timelines)} timelines")
    return 0


def _chrome(recording: Recording, target: Path, force: bool) -> None:
    with new_file(target, force=force, binary=False) as file:
        write_chrome(recording, file)


def _csv(recording: Recording, target: Path, force: bool) -> None:
    with new_file(target, force=force, binary=False) as file:
        write_csv(recording, file)


def _parquet(recording: Recording, target: Path, force: bool) -> None:
    write_parquet(recording, target, force=force)


def _slip(recording: Recording, target: Path, force: bool) -> None:
    save(recording, target, force=force)


FORMATS: dict[str, Callable[[Recording, Path, bool], None]] = {
    ".json": _chrome,
    ".csv": _csv,
    ".parquet": _parquet,
    ".slip": _slip,
}
"""File endings and what writes each."""
