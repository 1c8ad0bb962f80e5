"""What the verbs that read traces have in common: their arguments, and progress while they read."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.core.recording import Recording
from slipstream.trace.classify import parse_user_rule
from slipstream.trace.read import Progress, read

_SILENT_SECONDS = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Paths and the options that decide how they are read."""
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="trace files, folders, glob patterns, .tar.gz/.zip archives, .slip files",
    )
    parser.add_argument(
        "--kind",
        action="append",
        default=[],
        metavar="REGEX=KIND",
        help="treat spans whose name matches as compute, comm, copy, host or other; may be repeated",
    )


def recording(arguments: argparse.Namespace) -> Recording:
    """Read what the arguments name."""
    rules = [parse_user_rule(text) for text in arguments.kind]
    with _progress() as progress:
        return read(arguments.paths, rules, progress)


@contextmanager
def _progress() -> Iterator[Progress]:
    """A line on standard error that shows how far reading is, once it has taken two seconds."""
    began = last = time.monotonic()
    shown = False

    def report(name: str, done: int, size: int | None) -> None:
        nonlocal last, shown
        now = time.monotonic()
        if now - began < _SILENT_SECONDS or now - last < 0.2 or not sys.stderr.isatty():
            return
        last, shown = now, True
        share = f"{100 * done / size:3.0f} %" if size else f"{done / 1e6:,.0f} MB"
        sys.stderr.write(f"\r\x1b[Kreading {share}  {name[-60:]}")
        sys.stderr.flush()

    try:
        yield report
    finally:
        if shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
