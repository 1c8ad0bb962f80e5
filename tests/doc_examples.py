"""The examples in the documentation: every ```console block is run, and what it prints is compared.

A block holds commands after `$ ` and what each prints. A line `...` stands for any number of lines.
`python tests/doc_examples.py` writes what the commands print now into the documents (look at the diff).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """One command of a document with what the document says it prints."""

    document: Path
    command: str
    printed: str

    def matches(self, output: str) -> bool:
        """Whether the output is what the document shows."""
        parts = [re.escape(part) for part in re.split(r"^\.\.\.$\n?", self.printed, flags=re.MULTILINE)]
        return re.fullmatch("(?:.*\n)*?".join(parts), output) is not None


def examples(document: Path) -> Iterator[Example]:
    """All commands of one document."""
    for block in _BLOCK.finditer(document.read_text()):
        for part in re.split(r"^\$ ", block[1], flags=re.MULTILINE)[1:]:
            command, _, printed = part.partition("\n")
            yield Example(document, command, printed)


def run(command: str) -> str:
    """What a command prints, standard error included, started in the root of the repository."""
    bin_folder = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}", "NO_COLOR": "1"}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
        check=False,
    )
    return done.stdout.decode()


def rewrite(document: Path) -> None:
    """Put what the commands print now into the document; blocks with `...` are left alone."""

    def refreshed(block: re.Match[str]) -> str:
        if re.search(r"^\.\.\.$", block[1], re.MULTILINE):
            return block[0]
        parts = re.split(r"^\$ ", block[1], flags=re.MULTILINE)[1:]
        commands = [part.partition("\n")[0] for part in parts]
        return "```console\n" + "".join(f"$ {command}\n{run(command)}" for command in commands) + "```"

    document.write_text(_BLOCK.sub(refreshed, document.read_text()))


if __name__ == "__main__":
    for each in DOCUMENTS:
        rewrite(each)
