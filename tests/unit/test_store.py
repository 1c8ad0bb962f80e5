"""The `.slip` file: write then read is identity, and nothing but an intact file is read."""

from __future__ import annotations

import errno
import io
import itertools
import os
import zipfile
from dataclasses import fields, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from slipstream.core import store
from slipstream.core.errors import MachineError, TraceError, UsageError
from slipstream.core.files import existing_file, new_file
from slipstream.core.header import ANNOTATION_COLUMNS, header_of
from slipstream.core.recording import Recording
from slipstream.core.store import load, save
from slipstream.core.timeline import (
    COLUMNS,
    Annotations,
    Collective,
    Group,
    Lane,
    Step,
    Timeline,
    build,
)
from strategies import SMALL_TIMES, WIDE_TIMES, recordings


def assert_identical(left: Recording, right: Recording) -> None:
    """Every field, every column with its type and order of rows, every interned table."""
    for field in fields(Recording):
        if field.name != "timelines":
            assert getattr(left, field.name) == getattr(right, field.name), field.name
    for one, other in itertools.zip_longest(left.timelines, right.timelines):
        for field in fields(Timeline):
            ours, theirs = getattr(one, field.name), getattr(other, field.name)
            if field.name in COLUMNS:
                assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs), field.name
            elif field.name != "annotations":
                assert ours == theirs, field.name
        for column in ANNOTATION_COLUMNS:
            ours, theirs = getattr(one.annotations, column), getattr(other.annotations, column)
            assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs), column


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slip")


@pytest.fixture
def example() -> Recording:
    timeline = build(
        rank=3,
        device="cuda:3",
        columns={"start_ns": [30, 10, 20], "end_ns": [35, 20, 60], "lane": [0, 0, 1], "kind": [0, 0, 1]},
        lanes=(Lane("stream 7"), Lane("stream 20")),
        names=("gemm",),
        collectives=(Collective("all_reduce", Group("0", "dp", 2, (0, 3)), 4096, "bf16"),),
        steps=(Step(7, 0, 100),),
        annotations=Annotations(*(np.array([value], dtype) for value, dtype in zip((1, 9, 0, 0), "qqii", strict=True))),
    )
    return Recording(timelines=(timeline,), sources=("rank3.json",), environment={"gpu": "H100"})


@settings(max_examples=60, deadline=None)
@given(recordings(min_timelines=0, times=SMALL_TIMES | WIDE_TIMES))
def test_write_then_read_is_identity(folder: Path, recording: Recording) -> None:
    save(recording, folder / "run.slip", force=True)
    assert_identical(load(folder / "run.slip"), recording)


def test_the_same_recording_gives_the_same_bytes(tmp_path: Path, example: Recording) -> None:
    save(example, tmp_path / "a.slip")
    save(example, tmp_path / "b.slip")
    assert (tmp_path / "a.slip").read_bytes() == (tmp_path / "b.slip").read_bytes()


def test_numpy_alone_can_open_the_columns(tmp_path: Path, example: Recording) -> None:
    save(example, tmp_path / "run.slip")
    with np.load(tmp_path / "run.slip") as archive:
        assert archive["0/start_delta_ns"].cumsum().tolist() == [10, 20, 30]
        assert archive["0/duration_ns"].tolist() == [10, 40, 5]
        assert archive["0/lane"].tolist() == [0, 1, 0]


def test_a_large_regular_recording_inflates_too_much_and_is_stored_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "FREE_BYTES", 1 << 16)
    times = np.arange(20_000) * 1000
    timeline = build(
        rank=0,
        device="",
        columns={"start_ns": times, "end_ns": times + 500},
        lanes=(Lane("a"),),
        names=("gemm",),
    )
    monkeypatch.setattr(store, "MOST_INFLATION", 2)
    save(Recording(timelines=(timeline,)), tmp_path / "run.slip")
    assert zipfile.ZipFile(tmp_path / "run.slip").infolist()[0].compress_type == zipfile.ZIP_STORED
    assert_identical(load(tmp_path / "run.slip"), Recording(timelines=(timeline,)))


# Damage


def test_any_changed_byte_is_noticed(tmp_path: Path, example: Recording) -> None:
    path = tmp_path / "run.slip"
    save(example, path)
    intact = path.read_bytes()
    for at in range(0, len(intact), 37):
        for flip in (0x01, 0x80, 0xFF):
            path.write_bytes(intact[:at] + bytes([intact[at] ^ flip]) + intact[at + 1 :])
            with pytest.raises(TraceError, match=r"run\.slip: is "):
                load(path)


def test_any_truncation_is_noticed(tmp_path: Path, example: Recording) -> None:
    path = tmp_path / "run.slip"
    save(example, path)
    intact = path.read_bytes()
    for length in range(0, len(intact), 37):
        path.write_bytes(intact[:length])
        with pytest.raises(TraceError, match=r"run\.slip: is "):
            load(path)


def test_behind_a_right_checksum_damage_is_still_noticed_or_harmless(
    tmp_path: Path, example: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_check_seal", lambda file, where: os.fstat(file.fileno()).st_size)
    path = tmp_path / "run.slip"
    save(example, path)
    intact = path.read_bytes()
    noticed = 0
    for at in range(len(intact)):
        for changed in (intact[:at] + bytes([intact[at] ^ 0xFF]) + intact[at + 1 :], intact[:at]):
            path.write_bytes(changed)
            try:
                assert_identical(load(path), example)
            except TraceError:
                noticed += 1
    assert noticed > len(intact)


@pytest.mark.parametrize("content", [b"", b"PK", b"PK\x03\x04", b"{}", b"\x1f\x8b", b"SQLite format 3\0", b"\0" * 99])
def test_a_foreign_file_is_named_as_one(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.slip"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="is not a Slipstream recording"):
        load(path)


def test_another_zip_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("recording.json", "{}")
    with pytest.raises(TraceError, match="its end is missing"):
        load(tmp_path / "a.zip")


def rewritten(path: Path, changes: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    """The same file with some members changed and a right checksum: what a hostile writer can make."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()} | changes
    file = io.BytesIO()
    pipe = store._Summing(file)
    with zipfile.ZipFile(pipe, "w", compression) as archive:  # type: ignore[call-overload]
        archive.comment = store._SEAL + store._BLANK
        for name, content in members.items():
            archive.writestr(name, content)
    path.write_bytes(file.getvalue()[: -len(store._BLANK)] + b"%08x" % pipe.crc)
    return path


def header_with(recording: Recording, **changes: object) -> bytes:
    header = store._located(header_of(recording))
    timeline = {"timelines": (msgspec.structs.replace(header.timelines[0], **changes.pop("timeline", {})),)}
    return msgspec.json.encode(msgspec.structs.replace(header, **timeline, **changes))


def npy(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def test_a_newer_schema_says_upgrade(tmp_path: Path, example: Recording) -> None:
    path = tmp_path / "run.slip"
    save(example, path)
    newer = b'{"schema": 99, "origin": "dreamt", "unheard_of": [1]}'
    with pytest.raises(TraceError, match=r"newer version of Slipstream \(schema 99.*; upgrade"):
        load(rewritten(path, {"recording.json": newer}))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"recording.json": b"{"}, "description"),
        ({"recording.json": b"[" * 100_000}, "description"),
        ({"recording.json": b'{"schema": "1"}'}, "description"),
        ({"0/duration_ns.npy": npy(np.array([20, 60, -1], np.int64))}, "ends before it starts"),
        ({"0/duration_ns.npy": npy(np.array([20, 60, 2**63 - 1], np.int64))}, "ends before it starts"),
        ({"0/start_delta_ns.npy": npy(np.array([20, -10, 5], np.int64))}, "not sorted"),
        ({"0/duration_ns.npy": npy(np.array([20, 60], np.int64))}, "rows"),
        ({"0/duration_ns.npy": npy(np.array([20], np.int64))}, "rows"),
        ({"0/duration_ns.npy": npy(np.array([20, 60, 70], np.int32))}, "int32"),
        ({"0/duration_ns.npy": npy(np.array([20, 60, 70], np.float64))}, "not a column"),
        ({"0/duration_ns.npy": npy(np.array([[20, 60, 70]], np.int64))}, "not a column"),
        ({"0/duration_ns.npy": b""}, "not a column"),
        ({"0/duration_ns.npy": npy(np.array([20, 60, 70], np.int64))[:-8]}, "length"),
        ({"0/lane.npy": npy(np.array([0, 0, 2], np.int32))}, "lane points outside"),
        ({"0/lane.npy": npy(np.array([0, 0, -1], np.int32))}, "lane points outside"),
        ({"0/name.npy": npy(np.array([0, 0, 1], np.int32))}, "name points outside"),
        ({"0/collective.npy": npy(np.array([0, 0, -2], np.int32))}, "collective points outside"),
        ({"0/step.npy": npy(np.array([0, 0, 1], np.int32))}, "step points outside"),
        ({"0/kind.npy": npy(np.array([0, 0, 5], np.int8))}, "kind points outside"),
        ({"0/phase.npy": npy(np.array([0, 0, 4], np.int8))}, "phase points outside"),
        ({"0/annotations/name.npy": npy(np.array([1], np.int32))}, "name points outside"),
        ({"0/annotations/lane.npy": npy(np.array([], np.int32))}, "rows"),
    ],
)
def test_columns_that_do_not_fit_are_refused(
    tmp_path: Path, example: Recording, changes: dict[str, bytes], problem: str
) -> None:
    path = tmp_path / "run.slip"
    save(example, path)
    with pytest.raises(TraceError, match=problem):
        load(rewritten(path, changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"timeline": {"spans": 10**15}},
        {"timeline": {"spans": -1}},
        {"timeline": {"columns": {}}},
        {"timeline": {"columns": dict.fromkeys(COLUMNS, "0/start_ns.npy")}},
        {"timeline": {"columns": {column: f"elsewhere/{column}.npy" for column in store._SPAN_TYPES}}},
        {"timeline": {"annotation_columns": {"lane": "0/lane.npy"}}},
        {"groups": ()},
    ],
)
def test_a_header_that_does_not_fit_is_refused(tmp_path: Path, example: Recording, changes: dict[str, object]) -> None:
    path = tmp_path / "run.slip"
    save(example, path)
    with pytest.raises(TraceError, match="is damaged"):
        load(rewritten(path, {"recording.json": header_with(example, **dict(changes))}))


def test_one_column_is_not_read_for_many_timelines(tmp_path: Path, example: Recording) -> None:
    path = tmp_path / "run.slip"
    save(example, path)
    header = store._located(header_of(example))
    many = msgspec.structs.replace(header, timelines=header.timelines * 1000)
    with pytest.raises(TraceError, match="more than once"):
        load(rewritten(path, {"recording.json": msgspec.json.encode(many)}))


def test_columns_of_the_future_are_ignored(tmp_path: Path, example: Recording) -> None:
    path = tmp_path / "run.slip"
    save(example, path)
    columns = store._located(header_of(example)).timelines[0].columns | {"mood": "0/mood.npy"}
    assert_identical(
        load(rewritten(path, {"recording.json": header_with(example, timeline={"columns": columns})})), example
    )


@pytest.mark.parametrize("member", ["0/start_delta_ns.npy", "recording.json", "unused"])
def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, example: Recording, member: str) -> None:
    tracemalloc = pytest.importorskip("tracemalloc")
    path = tmp_path / "run.slip"
    save(example, path)
    rewritten(path, {member: bytes(300 << 20)})
    assert path.stat().st_size < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match="claims"):
            load(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_packings_are_refused(tmp_path: Path, example: Recording, compression: int) -> None:
    path = tmp_path / "run.slip"
    save(example, path)
    with pytest.raises(TraceError, match="another way than deflate"):
        load(rewritten(path, {}, compression))


def test_an_unfit_timeline_is_our_own_mistake(tmp_path: Path, example: Recording) -> None:
    timeline = replace(example.timelines[0], lanes=())
    with pytest.raises(AssertionError, match="lane points outside"):
        save(Recording(timelines=(timeline,)), tmp_path / "run.slip")
    assert not list(tmp_path.iterdir())


# Files


def test_an_existing_file_is_kept_without_force(tmp_path: Path, example: Recording) -> None:
    path = tmp_path / "run.slip"
    path.write_text("precious")
    with pytest.raises(UsageError, match=r"run\.slip: already exists; pass --force"):
        save(example, path)
    assert path.read_text() == "precious"
    save(example, path, force=True)
    assert_identical(load(path), example)


def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with pytest.raises(UsageError, match="already exists"), new_file(path) as file:
        file.write(b"ours")
        path.write_text("theirs")
    assert path.read_text() == "theirs" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_a_failure_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        with new_file(tmp_path / "out") as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        fail()
    assert not list(tmp_path.iterdir())


def test_a_failure_keeps_the_file_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old")
    with pytest.raises(KeyboardInterrupt), new_file(tmp_path / "out", force=True) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert (tmp_path / "out").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_is_the_machines_fault(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"No space left.*free some space"), new_file(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_real_full_device_is_the_machines_fault() -> None:
    with pytest.raises(MachineError, match="/dev/full: cannot be written"), new_file("/dev/full") as file:
        file.write(b"x" * 100_000)


def test_a_device_is_written_and_stays_a_device() -> None:
    with new_file("/dev/null") as file:
        file.write(b"x")
    assert not Path("/dev/null").is_file()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_missing_permission_is_the_machines_fault(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(MachineError, match="check the permissions"), new_file(tmp_path / "out"):
        pass


def test_a_refused_permission_is_the_machines_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(MachineError, match=r"Permission denied.*check the permissions"), new_file(tmp_path / "out"):
        pass
    with pytest.raises(MachineError, match="Permission denied"), existing_file(tmp_path / "in"):
        pass


def test_a_missing_folder_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="create the folder"), new_file(tmp_path / "none" / "out"):
        pass


def test_a_folder_is_no_file(tmp_path: Path, example: Recording) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        save(example, tmp_path, force=True)
    for missing in (tmp_path, tmp_path / "none.slip"):
        with pytest.raises(UsageError, match="check the path"):
            load(missing)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    with new_file(tmp_path / "link", force=True, binary=False) as file:
        file.write("new\n")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new\n"
