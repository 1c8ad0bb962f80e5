"""The reference traces, which lie outside of the repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TRACES = Path(__file__).parents[2] / "shared" / "traces"


def reference() -> dict[str, Any]:
    """Reference values by trace; empty where they are not there."""
    path = TRACES / "reference.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def trace(name: str) -> Path:
    """Path of a trace, or skip."""
    if not (path := TRACES / name).exists():
        pytest.skip(f"the reference trace {name} is not at {TRACES}")
    return path
