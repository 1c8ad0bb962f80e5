"""A user's own rules, on traces and on what was saved of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.analyze.analysis import analyze
from slipstream.cli.main import main
from slipstream.core.store import save
from slipstream.trace.classify import parse_user_rule
from slipstream.trace.read import read as read_paths

DATA = Path(__file__).resolve().parent.parent / "data" / "gloo_ddp"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "run.slip"
    save(read_paths([DATA]), path)
    return path


def test_a_rule_says_the_same_of_a_recording_as_of_its_traces(saved: Path) -> None:
    rules = [parse_user_rule("gloo:all_reduce=other")]
    for source in (DATA, saved):
        ranks = analyze(read_paths([source], rules)).ranks
        assert [rank.overlap.account.comm_ns for rank in ranks] == [0, 0]


def test_compute_of_a_recording_can_become_communication(saved: Path) -> None:
    found = analyze(read_paths([saved], [parse_user_rule("^aten::mm$=comm")]))
    assert "aten::mm" in {row.op for row in found.collectives}


def test_a_rule_that_matches_nothing_is_told(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(saved), "--kind", "no_such_kernel=comm", "--brief"]) == 0
    assert "'no_such_kernel' matches no name" in capsys.readouterr().out
