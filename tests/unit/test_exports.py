"""Chrome JSON, CSV and Parquet: write then read is identity up to the order of interning, whatever the names are."""

from __future__ import annotations

import csv
import io
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from slipstream.core.errors import MachineError, TraceError, UsageError
from slipstream.core.files import new_file
from slipstream.core.header import header_of
from slipstream.core.named import NAMED_TYPES, NUMBERS, named_columns, timeline_from_named
from slipstream.core.recording import Origin, Recording
from slipstream.core.timeline import Annotations, Collective, Group, Kind, Lane, Phase, Step, Timeline, build
from slipstream.report.chrome import write_chrome
from slipstream.report.tables import write_csv, write_parquet
from slipstream.trace import exported
from slipstream.trace.exported import TABLE_TYPES, read_chrome_export, read_csv, read_parquet
from strategies import SMALL_TIMES, WIDE_TIMES, recordings, timelines

pytest.importorskip("pyarrow")


def chrome(recording: Recording, path: Path) -> None:
    with new_file(path, force=True, binary=False) as file:
        write_chrome(recording, file)


def as_csv(recording: Recording, path: Path) -> None:
    with new_file(path, force=True, binary=False) as file:
        write_csv(recording, file)


def parquet(recording: Recording, path: Path) -> None:
    write_parquet(recording, path, force=True)


FORMATS = pytest.mark.parametrize(
    ("write", "read", "keeps_annotations"),
    [
        pytest.param(chrome, read_chrome_export, True, id="chrome"),
        pytest.param(as_csv, read_csv, False, id="csv"),
        pytest.param(parquet, read_parquet, False, id="parquet"),
    ],
)


def at(table: tuple[object, ...], index: int) -> object:
    return table[index] if index >= 0 else None


def rows_of(timeline: Timeline) -> list[str]:
    """Every span with what its indices point at, in an order that does not depend on the indices."""
    return sorted(
        repr(
            (
                *(int(getattr(timeline, column)[row]) for column in (*NUMBERS, "kind", "phase")),
                at(timeline.lanes, timeline.lane[row]),
                at(timeline.names, timeline.name[row]),
                at(timeline.collectives, timeline.collective[row]),
                at(timeline.shapes, timeline.shape[row]),
                at(timeline.steps, timeline.step[row]),
            )
        )
        for row in range(len(timeline))
    )


def annotations_of(timeline: Timeline) -> list[str]:
    notes = timeline.annotations
    return sorted(
        repr((int(start), int(end), at(timeline.lanes, lane), timeline.names[name]))
        for start, end, lane, name in zip(notes.start_ns, notes.end_ns, notes.lane, notes.name, strict=True)
    )


def assert_same(left: Recording, right: Recording, *, annotations: bool) -> None:
    assert replace(left, timelines=()) == replace(right, timelines=())
    for one, other in itertools.zip_longest(left.timelines, right.timelines):
        for field in ("rank", "device", "lanes", "steps", "steps_from", "phases_from"):
            assert getattr(one, field) == getattr(other, field), field
        assert rows_of(one) == rows_of(other)
        assert annotations_of(other) == (annotations_of(one) if annotations else [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture
def example() -> Recording:
    timeline = build(
        rank=3,
        device="cuda:3",
        columns={
            "start_ns": [1_712_195_495_507_888_958, 1_712_195_495_507_889_000],
            "end_ns": [1_712_195_495_507_888_999, 1_712_195_495_507_889_500],
            "lane": [0, 1],
            "kind": [Kind.COMPUTE, Kind.COMM],
            "name": [0, 1],
            "collective": [-1, 0],
            "shape": [0, -1],
            "step": [0, -1],
            "phase": [Phase.FORWARD, Phase.UNKNOWN],
            "launch_ns": [1_712_195_495_507_880_000, np.iinfo(np.int64).min],
            "sequence": [-1, 17],
        },
        lanes=(Lane("stream 7"), Lane("stream 20"), Lane("autograd", is_host=True)),
        names=('ge"mm', "ncclDevKernel", "step"),
        collectives=(Collective("all_reduce", Group("0", "dp", 4, (0, 1, 2, 8)), 4096, "bf16"),),
        shapes=("[[2, 3]]",),
        steps=(Step(7, 0, 100),),
        annotations=Annotations(*(np.array([value], dtype) for value, dtype in zip((1, 9, 2, 2), "qqii", strict=True))),
    )
    return Recording(timelines=(timeline,), origin=Origin.PREDICTED, environment={"gpu": "H100"})


@FORMATS
@settings(max_examples=50, deadline=None)
@given(recording=recordings(min_timelines=0, times=SMALL_TIMES | WIDE_TIMES))
def test_write_then_read_is_identity(
    folder: Path,
    write: Callable[[Recording, Path], None],
    read: Callable[[Path], Recording],
    keeps_annotations: bool,
    recording: Recording,
) -> None:
    write(recording, folder / "export")
    assert_same(recording, read(folder / "export"), annotations=keeps_annotations)


@given(timelines())
def test_named_columns_lead_back(timeline: Timeline) -> None:
    (header,) = header_of(Recording(timelines=(timeline,))).timelines
    numbers = {column: getattr(timeline, column) for column in NUMBERS}
    again = timeline_from_named(header, named_columns(timeline), numbers, "here")
    assert rows_of(again) == rows_of(timeline) and again.names == timeline.names


@given(timelines())
def test_only_keeps_rows_and_no_more_values_than_they_need(timeline: Timeline) -> None:
    rows = np.arange(0, len(timeline), 2)
    for named in named_columns(timeline).values():
        some = named.only(rows)
        assert some.mapped(repr) == named.mapped(repr)[::2]
        assert len(some.values) <= len(rows) + 1


# Chrome


def chrome_text(recording: Recording) -> str:
    file = io.StringIO()
    write_chrome(recording, file)
    return file.getvalue()


@settings(max_examples=50, deadline=None)
@given(recordings(min_timelines=0))
def test_chrome_json_is_what_viewers_expect(recording: Recording) -> None:
    text = chrome_text(recording)
    assert text.startswith('{"slipstream":{"schema":1,')
    trace = json.loads(text)
    names, sizes = {}, {"X": 0, "M": 0}
    for event in trace["traceEvents"]:
        sizes[event["ph"]] += 1
        if event["ph"] == "M":
            names[event["name"], event["pid"], event["tid"]] = event["args"]
        else:
            assert event["dur"] >= 0 and isinstance(event["ts"], float)
            assert ("thread_name", event["pid"], event["tid"]) in names
    expected = sum(len(timeline) + len(timeline.annotations) for timeline in recording.timelines)
    assert sizes["X"] == expected
    threads = [(pid, tid) for name, pid, tid in names if name == "thread_name"]
    numbers = [number for _, number in threads] + [pid for name, pid, _ in names if name == "process_name"]
    assert len(set(numbers)) == len(numbers) and 0 not in numbers


def test_chrome_times_are_exact_and_args_are_readable(example: Recording) -> None:
    trace = json.loads(chrome_text(example), parse_float=Decimal)
    gemm, comm, note = (event for event in trace["traceEvents"] if event["ph"] == "X")
    assert (gemm["ts"], gemm["dur"]) == (Decimal("1712195495507888.958"), Decimal("0.041"))
    assert gemm["name"] == 'ge"mm' and gemm["cat"] == comm["cat"] == "kernel" and note["cat"] == "annotation"
    assert gemm["args"] == {
        "kind": "compute",
        "shape": "[[2, 3]]",
        "step": 7,
        "phase": "forward",
        "launch_ns": 1_712_195_495_507_880_000,
    }
    assert comm["args"] == {
        "kind": "comm",
        "op": "all_reduce",
        "group": "0",
        "group_description": "dp",
        "group_size": 4,
        "group_ranks": "0..2 8",
        "bytes": 4096,
        "dtype": "bf16",
        "sequence": 17,
    }


def test_chrome_survives_another_programs_rewriting(example: Recording, tmp_path: Path) -> None:
    """Keys in another order, other spacing, ASCII escapes, times without trailing zeros."""
    trace = json.loads(chrome_text(example), parse_float=Decimal)
    trace["traceEvents"].reverse()
    text = json.dumps(dict(reversed(trace.items())), indent=1, default=lambda number: f"<{number.normalize():f}>")
    (tmp_path / "again.json").write_text(text.replace('"<', "").replace('>"', ""))
    assert_same(example, read_chrome_export(tmp_path / "again.json"), annotations=True)


def test_the_args_that_are_read_are_those_that_are_written() -> None:
    read = set(exported._Args.__struct_fields__)
    assert read == (NAMED_TYPES.keys() | {"launch_ns", "sequence"}) - {"lane", "lane_is_host", "name"}


# CSV


def test_csv_is_readable(example: Recording) -> None:
    file = io.StringIO()
    write_csv(example, file)
    comment, *rest = file.getvalue().splitlines()
    assert comment.startswith('# slipstream {"schema":1,"origin":"predicted"')
    gemm, comm = csv.DictReader(rest)
    assert list(gemm) == list(TABLE_TYPES)
    assert {key: value for key, value in gemm.items() if value} == {
        "timeline": "0",
        "rank": "3",
        "device": "cuda:3",
        "lane": "stream 7",
        "lane_is_host": "false",
        "kind": "compute",
        "name": 'ge"mm',
        "shape": "[[2, 3]]",
        "step": "7",
        "phase": "forward",
        "start_ns": "1712195495507888958",
        "end_ns": "1712195495507888999",
        "launch_ns": "1712195495507880000",
    }
    assert comm["group_ranks"] == "0..2 8" and comm["sequence"] == "17" and comm["launch_ns"] == ""


def test_csv_rows_may_be_sorted_and_filtered(example: Recording, tmp_path: Path) -> None:
    path = tmp_path / "spans.csv"
    as_csv(example, path)
    comment, titles, gemm, comm = path.read_text().splitlines()
    path.write_text("\n".join((comment, titles, comm, gemm)))
    assert_same(example, read_csv(path), annotations=False)
    path.write_text("\n".join((comment, titles, comm)))
    (timeline,) = read_csv(path).timelines
    assert len(timeline) == 1 and timeline.names == ("ncclDevKernel",)


def test_csv_reads_fields_beyond_pythons_limit(tmp_path: Path, example: Recording) -> None:
    before = csv.field_size_limit()
    timeline = replace(example.timelines[0], names=("x" * (before + 1), "b", "step"))
    as_csv(replace(example, timelines=(timeline,)), tmp_path / "spans.csv")
    assert read_csv(tmp_path / "spans.csv").timelines[0].names[0] == timeline.names[0]
    assert csv.field_size_limit() == before


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("# slipstream", "# something", "is no CSV export"),
        ('{"schema"', "{schema", "description"),
        ('"schema":1', '"schema":2', "newer version"),
        ("start_ns", "begin_ns", "no column start_ns"),
        ("1712195495507888958", "soon", "soon"),
        ("1712195495507888958", "9" * 30, "too large"),
        ("1712195495507888999", "1712195495507888000", "ends before it starts"),
        (",stream 7,", ",stream 8,", "lane holds .'stream 8', False"),
        (",compute,", ",thinking,", "kind holds 'thinking'"),
        (",7,forward", ",8,forward", "step holds 8"),
        ("forward", "sideways", "phase holds 'sideways'"),
        ("0..2 8", "0..99999999999", "group_ranks"),
        ("0..2 8", "all", "group_ranks"),
        (",false,", ",perhaps,", "perhaps"),
        ('"ge""mm"', '"ge"mm"', "expected"),
        ("\r\n0,3,", "\r\n1,3,", "none of its 1 timelines"),
        (",17\r\n", "\r\n", "values"),
    ],
)
def test_damaged_csv_is_a_trace_error(example: Recording, tmp_path: Path, old: str, new: str, problem: str) -> None:
    path = tmp_path / "spans.csv"
    as_csv(example, path)
    text = path.read_bytes().decode()
    assert old in text
    path.write_bytes(text.replace(old, new).encode())
    with pytest.raises(TraceError, match=problem):
        read_csv(path)


# Parquet


def test_parquet_has_types(example: Recording, tmp_path: Path) -> None:
    import pyarrow.parquet

    parquet(example, tmp_path / "spans.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "spans.parquet")
    assert table.column_names == list(TABLE_TYPES)
    gemm, comm = table.to_pylist()
    assert gemm["start_ns"] == 1_712_195_495_507_888_958 and gemm["lane_is_host"] is False
    assert gemm["op"] is None and comm["bytes"] == 4096 and comm["launch_ns"] is None and comm["phase"] is None


def test_parquet_of_another_writer_is_refused(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "spans.parquet")
    with pytest.raises(TraceError, match="is no Parquet export"):
        read_parquet(tmp_path / "spans.parquet")


def test_parquet_with_plain_text_columns_reads_the_same(example: Recording, tmp_path: Path) -> None:
    """As a data frame library writes it that has no dictionaries."""
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "spans.parquet"
    parquet(example, path)
    table = pyarrow.parquet.read_table(path)
    plain = pyarrow.schema(
        [
            field.with_type(pyarrow.large_string()) if pyarrow.types.is_dictionary(field.type) else field
            for field in table.schema
        ],
        metadata=table.schema.metadata,
    )
    pyarrow.parquet.write_table(table.cast(plain), path)
    assert_same(example, read_parquet(path), annotations=False)
    pyarrow.parquet.write_table(table.drop_columns(["op"]), path)
    with pytest.raises(TraceError, match="op"):
        read_parquet(path)


def test_parquet_without_pyarrow_says_what_to_install(
    example: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for use in (lambda path: write_parquet(example, path), read_parquet):
        with pytest.raises(MachineError, match=r"pip install 'slipstream\[parquet\]'"):
            use(tmp_path / "spans.parquet")


def test_parquet_keeps_what_is_there_without_force(example: Recording, tmp_path: Path) -> None:
    (tmp_path / "spans.parquet").write_text("precious")
    with pytest.raises(UsageError, match="--force"):
        write_parquet(example, tmp_path / "spans.parquet")


# All


@FORMATS
def test_damage_is_a_trace_error_or_harmless(
    example: Recording,
    tmp_path: Path,
    write: Callable[[Recording, Path], None],
    read: Callable[[Path], Recording],
    keeps_annotations: bool,
) -> None:
    path = tmp_path / "export"
    write(example, path)
    intact = path.read_bytes()
    for at in range(0, len(intact), 7):
        for changed in (intact[:at] + bytes([intact[at] ^ 0x81]) + intact[at + 1 :], intact[:at]):
            path.write_bytes(changed)
            try:
                read(path)
            except TraceError as error:
                assert "export: is " in str(error)


@FORMATS
def test_a_missing_file_is_the_users_mistake(
    tmp_path: Path,
    write: Callable[[Recording, Path], None],
    read: Callable[[Path], Recording],
    keeps_annotations: bool,
) -> None:
    with pytest.raises(UsageError, match="check the path"):
        read(tmp_path / "none")
