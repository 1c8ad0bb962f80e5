from __future__ import annotations

import pytest

from slipstream.core.errors import MachineError, SlipstreamError, TraceError, UsageError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TraceError("no device work"), "no device work"),
        (TraceError("no device work", where="a.json"), "a.json: no device work"),
        (UsageError("no such file", do="check the path"), "no such file; check the path"),
        (
            MachineError("pyarrow is missing", where="--parquet", do="pip install 'slipstream[parquet]'"),
            "--parquet: pyarrow is missing; pip install 'slipstream[parquet]'",
        ),
    ],
)
def test_a_message_says_what_where_and_what_to_do(error: SlipstreamError, text: str) -> None:
    assert str(error) == text
    assert "\n" not in str(error)


def test_parts_stay_readable() -> None:
    error = UsageError("bad value '5x'", where="--top", do="give a whole number")
    assert (error.what, error.where, error.do) == ("bad value '5x'", "--top", "give a whole number")


def test_three_roots_of_blame_have_their_own_exit_codes() -> None:
    roots = SlipstreamError.__subclasses__()
    assert set(roots) >= {UsageError, TraceError, MachineError}
    assert [UsageError.exit_code, TraceError.exit_code, MachineError.exit_code] == [2, 3, 4]
    assert SlipstreamError.exit_code == 1
