"""`slipstream VERB ...`: picks the verb, and turns errors into one line and an exit code in one place.

Exit codes: 0 done; 2 the request cannot be carried out as given; 3 an unusable trace; 4 the machine; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from slipstream import __version__
from slipstream.cli import analyze, export
from slipstream.core.errors import MachineError, SlipstreamError, UsageError

VERBS: dict[str, ModuleType] = {"analyze": analyze, "export": export}

_OVERVIEW = """\
Slipstream: hides communication behind compute in distributed training, and tells where that stops working.

  Did my communication hide? How much is exposed, which collective, why?
      slipstream analyze TRACES...      profiler traces of one or many ranks (files, folders, archives)
  Give me the same timeline for another tool.
      slipstream export TRACES... --to trace.json|spans.csv|spans.parquet|run.slip

slipstream VERB --help says more; the words are defined in docs/words.md."""


def run() -> None:
    """Entry point of the command. What a terminal cannot show becomes `?`; it must not cost the report."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    try:
        code = _run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except SlipstreamError as error:
        print(f"slipstream: {_one_line(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("slipstream: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()  # the reader of our output went away (`| head`)
        return 0
    except OSError as error:
        _drop_output()
        print(f"slipstream: {_one_line(str(error))}; check space and permissions", file=sys.stderr)
        return MachineError.exit_code


def _run(arguments: Sequence[str]) -> int:
    if not arguments:
        print(_OVERVIEW)
        return 0
    parsed = _parser().parse_args(arguments)
    return int(VERBS[parsed.verb].run(parsed))


def _drop_output() -> None:
    """Send what is still buffered nowhere, or Python would fail again when it flushes at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        print(f"slipstream: {_one_line(message)}; see {self.prog} --help", file=sys.stderr)
        sys.exit(UsageError.exit_code)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="slipstream", description=_OVERVIEW, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"slipstream {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, module in VERBS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        verb = verbs.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(verb)
    return parser


def _one_line(text: str) -> str:
    return " ".join(text.split())
