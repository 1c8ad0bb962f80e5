"""The examples of docs/runtime.md run as they stand, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the mechanisms need torch")

from ranks import run_ranks

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "runtime.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def run_example(source: str) -> bool:
    exec(compile(source, str(PAGE), "exec"), {})
    return True


def test_the_page_has_an_example_of_each_mechanism() -> None:
    assert len(EXAMPLES) == 3


@pytest.mark.live
@pytest.mark.parametrize("source", EXAMPLES)
def test_an_example_runs(source: str) -> None:
    assert run_ranks(2, run_example, source) == [True, True]
