"""The command: exit codes, errors of one line, files that are not overwritten, and the JSON that others rely on."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream import __version__
from slipstream.cli.main import VERBS, main
from traces import ALL_REDUCE, GEMM, Trace

US = 1_000
Run = tuple[int, str, str]
"""Exit code, standard output, standard error."""

ACCOUNT = (
    "span_ns",
    "compute_ns",
    "comm_ns",
    "hidden_ns",
    "exposed_ns",
    "head_ns",
    "stall_ns",
    "tail_ns",
    "copy_ns",
    "idle_ns",
)


def job(rank: int = 0, devices: int = 1) -> Trace:
    """Two steps: compute with an all-reduce of which half is hidden."""
    trace = Trace(rank=rank, world_size=2)
    for number in (1, 2):
        at = number * 1000 * US
        trace.step(number, at, at + 900 * US)
        for device in range(devices):
            said = {"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "Float"}
            group = {"Process Group Name": "0", "Process Group Description": "dp", "Group size": 2}
            trace.op("aten::mm", at, at + 50 * US, [[8, 8]])
            trace.launch(GEMM, at + 100 * US, at + 300 * US, at=at + 10 * US, device=device)
            where = {"device": device, "stream": 20}
            trace.launch(ALL_REDUCE, at + 200 * US, at + 400 * US, at=at + 60 * US, **where, **said, **group)
    return trace


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return job().write(tmp_path / "rank0.json")


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    folder = tmp_path / "ranks"
    folder.mkdir()
    for rank in (0, 1):
        job(rank).write(folder / f"rank{rank}.json")
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str | Path) -> Run:
        code = exit_code([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def exit_code(arguments: Sequence[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as left:  # argparse
        return int(left.code or 0)


def in_process(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slipstream", *map(str, arguments)]
    return subprocess.run(command, text=True, encoding="utf-8", timeout=60, check=False, **options)


# -- help


def test_alone_it_says_which_question_each_verb_answers(run: Any) -> None:
    code, out, err = run()
    assert (code, err) == (0, "")
    assert len(out.splitlines()) < 24
    assert all(f"slipstream {verb}" in out for verb in VERBS)
    assert "?" in out


@pytest.mark.parametrize("arguments", [["--help"], ["analyze", "--help"], ["export", "--help"]])
def test_help(run: Any, arguments: list[str]) -> None:
    code, out, _ = run(*arguments)
    assert code == 0 and "usage: slipstream" in out


def test_version(run: Any) -> None:
    assert run("--version") == (0, f"slipstream {__version__}\n", "")


# -- errors: one line that says what, where and what to do


def check_error(found: Run, code: int, *parts: str) -> None:
    exit_code, out, err = found
    assert (exit_code, out) == (code, ""), err
    assert err.startswith("slipstream: ") and err.count("\n") == 1 and err.endswith("\n")
    assert "; " in err and "Traceback" not in err
    for part in parts:
        assert part in err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["analyse", "x"], "analyse"),
        (["analyze"], "PATH"),
        (["analyze", "nope.json"], "nope.json"),
        (["analyze", "nope*.json"], "nope*.json"),
        (["analyze", "x", "--bogus"], "--bogus"),
        (["analyze", "x", "--kind", "comm"], "comm"),
        (["analyze", "x", "--kind", "(=comm"], "(=comm"),
        (["analyze", "x", "--kind", "a=many\nlines"], "a=many"),
        (["export", "x"], "--to"),
        (["export", "x", "--to", "y.doc"], "y.doc"),
    ],
)
def test_mistakes_of_the_user(run: Any, arguments: list[str], part: str) -> None:
    check_error(run(*arguments), 2, part)


@pytest.mark.parametrize("option", ["--output", "--to"])
def test_a_folder_that_does_not_exist(run: Any, one: Path, option: str) -> None:
    verb = "analyze" if option == "--output" else "export"
    check_error(run(verb, one, option, one.parent / "no" / "run.slip"), 2, "run.slip")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "empty"),
        (b"hello", "hello"),
        (b"{}", "traceEvents"),
        (b'{"traceEvents": []}', "no device work"),
        (b"SQLite format 3\0", "SQLite"),
        (b"/data/trace.json\n", "/data/trace.json"),
        (b"PK\x03\x04", "trace"),
        (gzip.compress(b'{"traceEvents": []}')[:-9], "trace"),
        (b"\x1f\x8b\x08\x00garbage", "trace"),
        (b'{"slipstream":{"schema":99}, "traceEvents": []}', "newer version"),
        (b'{"slipstream":{}', "Slipstream"),
        (b"# slipstream {", "damaged"),
        (b"PAR1garbage", "Slipstream"),
    ],
)
def test_files_that_are_no_usable_trace(run: Any, tmp_path: Path, content: bytes, part: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    check_error(run("analyze", path), 3, str(path), part)


def test_an_unusable_file_in_a_folder_is_a_warning(run: Any, ranks: Path) -> None:
    (ranks / "rank2.json").write_text("hello")
    code, out, err = run("analyze", ranks, "--json")
    assert (code, err) == (0, "")
    assert any("rank2.json" in warning for warning in json.loads(out)["warnings"])


def test_only_unusable_files_in_a_folder(run: Any, tmp_path: Path) -> None:
    (tmp_path / "rank2.json").write_text("hello")
    check_error(run("analyze", tmp_path), 3, "rank2.json")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk(one: Path) -> None:
    for arguments in (["--json"], ["--brief"]):
        with Path("/dev/full").open("w") as full:
            found = in_process("analyze", one, *arguments, stdout=full, stderr=subprocess.PIPE)
        check_error((found.returncode, "", found.stderr), 4, "space")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_permissions(run: Any, one: Path) -> None:
    one.chmod(0)
    check_error(run("analyze", one), 4, "Permission denied")


# -- what is written


def test_nothing_is_overwritten_without_force(run: Any, one: Path) -> None:
    for ending, arguments in (
        (".slip", ["analyze", one, "--output"]),
        *((e, ["export", one, "--to"]) for e in ENDINGS),
    ):
        target = one.with_name("run").with_suffix(ending)
        target.write_text("precious")
        check_error(run(*arguments, target), 2, "already exists", "--force")
        assert target.read_text() == "precious"
        assert run(*arguments, target, "--force")[0] == 0
        assert target.read_bytes() != b"precious"
    assert not [path for path in one.parent.iterdir() if path.name.startswith(".slipstream")]


ENDINGS = (".json", ".csv", ".parquet", ".slip")


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_was_written_gives_the_same_result(run: Any, ranks: Path, ending: str) -> None:
    target = ranks.with_name("run").with_suffix(ending)
    code, out, _ = run("export", ranks, "--to", target)
    assert code == 0 and str(target) in out
    first, again = (json.loads(run("analyze", path, "--json")[1]) for path in (ranks, target))
    assert again == first


def test_a_saved_recording(run: Any, ranks: Path) -> None:
    target = ranks.with_name("run.slip")
    code, out, _ = run("analyze", ranks, "--brief", "--output", target)
    assert code == 0 and f"saved {target}" in out
    first, again = (json.loads(run("analyze", path, "--json")[1]) for path in (ranks, target))
    assert again == first


def test_json_is_json_even_where_a_recording_is_saved(run: Any, one: Path) -> None:
    _, out, _ = run("analyze", one, "--json", "--output", one.with_name("run.slip"))
    json.loads(out)


# -- the JSON


def parsed(text: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return found


def check_account(row: dict[str, Any]) -> None:
    assert all(type(row[field]) is int for field in ACCOUNT)
    assert row["hidden_ns"] + row["exposed_ns"] == row["comm_ns"]
    assert row["head_ns"] + row["stall_ns"] + row["tail_ns"] == row["exposed_ns"]
    assert row["dilation_ns"] is None or type(row["dilation_ns"]) is int


def test_the_interface(run: Any, ranks: Path) -> None:
    code, out, err = run("analyze", ranks, "--json")
    assert (code, err) == (0, "")
    found = parsed(out)
    assert isinstance(found["schema"], str) and found["schema"].startswith("slipstream.analysis/")
    assert [row["rank"] for row in found["ranks"]] == [0, 1]
    assert [(row["rank"], row["step"], row["warmup"]) for row in found["steps"]] == [
        (rank, step, False) for rank in (0, 1) for step in (1, 2)
    ]
    for row in (*found["ranks"], *found["steps"]):
        check_account(row)
    (row,) = found["collectives"]
    assert (row["name"], row["group"], row["count"], row["bytes"]) == ("all_reduce", "dp", 4, 16_000)
    assert row["busbw_bytes_per_s"] == pytest.approx(4000 / 200e-6)
    assert (row["wait_ns"], row["transfer_ns"]) == (0, 400 * US)
    assert (row["hidden_ns"], row["exposed_ns"]) == (400 * US, 400 * US)
    assert all(isinstance(warning, str) for warning in found["warnings"])


def test_one_rank_gives_no_waits(run: Any, one: Path) -> None:
    (row,) = parsed(run("analyze", one, "--json")[1])["collectives"]
    assert (row["wait_ns"], row["transfer_ns"]) == (None, None)


def test_each_device_of_a_file_is_an_entry(run: Any, tmp_path: Path) -> None:
    path = job(devices=2).write(tmp_path / "both.json")
    rows = parsed(run("analyze", path, "--json")[1])["ranks"]
    assert [row["device"] for row in rows] == ["gpu 0", "gpu 1"]
    assert [row["comm_ns"] for row in rows] == [400 * US] * 2


def test_a_users_rule(run: Any, tmp_path: Path) -> None:
    trace = Trace()
    trace.kernel(GEMM, 0, 10 * US)
    trace.kernel("my_exchange", 10 * US, 15 * US)
    path = trace.write(tmp_path / "t.json")
    found = parsed(run("analyze", path, "--json")[1])
    assert found["ranks"][0]["comm_ns"] == 0
    assert any("my_exchange" in warning for warning in found["warnings"])
    found = parsed(run("analyze", path, "--json", "--kind", "exchange=comm")[1])
    assert found["ranks"][0]["comm_ns"] == 5 * US
    assert not any("my_exchange" in warning for warning in found["warnings"])


# -- the report


def test_the_report(run: Any, ranks: Path) -> None:
    code, out, err = run("analyze", ranks)
    assert (code, err) == (0, "")
    for part in ("50 % of the communication was hidden", "look at", "By rank", "By step", "By collective", "By lane"):
        assert part in out
    assert "\x1b" not in out
    brief = run("analyze", ranks, "--brief")[1]
    assert out.startswith(brief.rstrip("\n")) and "By rank" not in brief


@pytest.mark.parametrize(
    "name", ["[bold]k[/bold]", "[/x]", "</script>", "a\nb\x1b[31m", "k" * 5000, "\ud800", "漢字🚀", "%s{0}", ""]
)
def test_names_are_only_text(run: Any, tmp_path: Path, name: str) -> None:
    """Whatever a trace calls its kernels, groups and streams."""
    trace = Trace(rank=0)
    said = {"Collective name": name or "x", "Process Group Name": name, "Process Group Description": name}
    trace.kernel(GEMM, 0, 10 * US)
    trace.kernel("ncclKernel_" + name, 5 * US, 15 * US, stream=name, **said)
    path = tmp_path / "t.json"
    path.write_bytes(trace.text().encode("utf-8", "surrogatepass"))
    for options in ([], ["--json"], ["--output", tmp_path / "t.slip"]):
        code, out, err = run("analyze", path, *options)
        assert (code, err) == (0, "")
        assert "\x1b[31m" not in out


# -- where output goes


@pytest.mark.parametrize("arguments", [[], ["--help"], ["analyze", "{}", "--json"], ["analyze", "{}"]])
def test_a_reader_that_goes_away(one: Path, arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        found = in_process(*[text.format(one) for text in arguments], stdout=pipe, stderr=subprocess.PIPE)
    assert (found.returncode, found.stderr) == (0, "")


def test_a_terminal_that_knows_only_ascii(one: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    found = in_process("analyze", one, env=environment, capture_output=True)
    assert (found.returncode, found.stderr) == (0, "")
    assert "of the communication was hidden" in found.stdout
