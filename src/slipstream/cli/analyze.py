"""Tell from profiler traces what was hidden, what was exposed, and where."""

from __future__ import annotations

import argparse
import json
import sys

from slipstream.analyze.analysis import analyze
from slipstream.cli import reading
from slipstream.core.errors import MachineError, UsageError
from slipstream.core.store import save
from slipstream.report.json import to_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `slipstream analyze`."""
    reading.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object (docs/json.md)")
    parser.add_argument("--brief", action="store_true", help="print the answer only, without the tables")
    parser.add_argument("--output", metavar="RUN.slip", help="save the recording, to analyze or compare it later")
    parser.add_argument("--force", action="store_true", help="replace an existing output file")


def run(arguments: argparse.Namespace) -> int:
    """Read, analyze, report."""
    if arguments.output and not arguments.output.endswith(".slip"):
        raise UsageError(
            "is not called .slip; --output saves a recording",
            where=arguments.output,
            do="name it RUN.slip, or write another format with slipstream export --to",
        )
    if sys.stdout is None:
        raise MachineError("standard output is closed", do="run it with standard output open")
    recording = reading.recording(arguments)
    if arguments.output:
        save(recording, arguments.output, force=arguments.force)
    analysis = analyze(recording)
    if arguments.json:
        json.dump(to_json(analysis), sys.stdout, indent=1, allow_nan=False)
        sys.stdout.write("\n")
        return 0
    from slipstream.report.terminal import print_analysis  # rich takes a tenth of a second to import

    print_analysis(analysis, tables=not arguments.brief)
    if arguments.output:
        print(f"\nsaved {arguments.output}")
    return 0
