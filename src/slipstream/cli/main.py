"""`slipstream VERB ...`: picks the verb, and turns errors into one line and an exit code in one place.

Exit codes: 0 done; 2 the request cannot be carried out as given; 3 an unusable trace; 4 the machine; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from slipstream import __version__
from slipstream.cli import analyze, export
from slipstream.core.errors import SlipstreamError

VERBS: dict[str, ModuleType] = {"analyze": analyze, "export": export}

_OVERVIEW = """\
Slipstream: hides communication behind compute in distributed training, and tells where that stops working.

  Did my communication hide? How much is exposed, which collective, why?
      slipstream analyze TRACES...      profiler traces of one or many ranks (files, folders, archives)
  Give me the same timeline for another tool.
      slipstream export TRACES... --to trace.json|spans.csv|spans.parquet|run.slip

slipstream VERB --help says more; the words are defined in docs/words.md."""


def run() -> None:
    """Entry point of the command."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    if not arguments:
        print(_OVERVIEW)
        return 0
    parsed = _parser().parse_args(arguments)
    try:
        return int(VERBS[parsed.verb].run(parsed))
    except SlipstreamError as error:
        print(f"slipstream: {_one_line(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("slipstream: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`| head`). Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slipstream", description=_OVERVIEW, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"slipstream {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, module in VERBS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        verb = verbs.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(verb)
    return parser


def _one_line(text: str) -> str:
    return " ".join(text.split())
