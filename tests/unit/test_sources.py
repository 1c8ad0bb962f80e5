from __future__ import annotations

import contextlib
import gzip
import io
import os
import random
import struct
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.errors import MachineError, TraceError, UsageError
from slipstream.trace import compression, sources
from slipstream.trace.compression import CHUNK, zstd
from slipstream.trace.sources import Source, find, natural

TRACE = b'{"traceEvents": [' + b",".join(b'{"name": "op%d"}' % i for i in range(500)) + b"]}"
AS_ROOT = pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes that do not compress, so that a cut anywhere loses something."""
    return random.Random(seed).randbytes(size)


def checked_zstd(data: bytes) -> bytes:
    return zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1})


def content(source: Source) -> bytes:
    return b"".join(source.chunks())


def read(*paths: str | Path, warnings: list[str] | None = None) -> dict[str, bytes]:
    """Names (last component) and content of all sources, consumed in turn."""
    return {source.name.rpartition("/")[2]: content(source) for source in find(paths, warnings)}


def write(path: Path, data: bytes = TRACE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def tar_bytes(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def zip_bytes(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "slipstream-decompress"]


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    assert not helpers()


# One file


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.json.zst", "a"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd.compress])
def test_the_first_bytes_decide_not_the_name(tmp_path: Path, name: str, pack: Callable[[bytes], bytes]) -> None:
    file = write(tmp_path / name, pack(TRACE))
    (source,) = find([file])
    assert content(source) == TRACE
    assert (source.name, source.named, source.problem) == (str(file), True, None)
    assert source.size == source.consumed == file.stat().st_size
    assert source.path == (file if pack is bytes else None)


@pytest.mark.parametrize("start", [b"PAR1", b"SQLite format 3\0"])
def test_formats_with_random_access_are_given_raw_with_their_path(tmp_path: Path, start: bytes) -> None:
    file = write(tmp_path / "a.parquet", start + noise(1000))
    (source,) = find([file])
    assert source.path == file
    assert content(source) == file.read_bytes()


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd.compress])
def test_pieces_are_about_a_chunk_whatever_the_ratio(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    data = bytes(3 * CHUNK) + noise(3 * CHUNK)
    (source,) = find([write(tmp_path / "a.json", pack(data))])
    pieces = list(source.chunks())
    assert b"".join(pieces) == data
    assert all(CHUNK <= len(piece) < 2 * CHUNK for piece in pieces[:-1])


def test_head_does_not_disturb_chunks(tmp_path: Path) -> None:
    (source,) = find([write(tmp_path / "a", gzip.compress(TRACE))])
    assert source.head(20) == TRACE[:20]
    stream = source.chunks()
    assert source.head(6000) == TRACE[:6000]
    assert next(stream) == TRACE
    assert source.head(10 * len(TRACE)) == TRACE
    assert list(stream) == []
    assert content(source) == TRACE


@settings(max_examples=50, deadline=None)
@given(
    data=st.lists(st.binary(max_size=300), min_size=1, max_size=4),
    read_size=st.integers(1, 50),
    chunk=st.integers(1, 100),
    padding=st.integers(0, 20),
)
@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress, checked_zstd])
def test_packed_streams_come_back(
    pack: Callable[[bytes], bytes], data: list[bytes], read_size: int, chunk: int, padding: int
) -> None:
    packed = b"".join(pack(part) for part in data) + bytes(padding)
    progress = compression.Progress()
    pieces = list(compression.decompressed(Slow(packed, read_size), progress, chunk))
    assert b"".join(pieces) == b"".join(data)
    assert max(map(len, pieces), default=0) <= chunk
    assert progress == compression.Progress(len(packed), None)


@settings(max_examples=50, deadline=None)
@given(data=st.binary(max_size=2000), kind=st.sampled_from(["plain", "gzip", "zstd", "tar.gz", "zip"]))
def test_whatever_the_bytes_they_come_back(tmp_path_factory: pytest.TempPathFactory, data: bytes, kind: str) -> None:
    data = b"{" + data
    packed = {
        "plain": lambda: data,
        "gzip": lambda: gzip.compress(data),
        "zstd": lambda: zstd.compress(data),
        "tar.gz": lambda: gzip.compress(tar_bytes({"a.json": zstd.compress(data)})),
        "zip": lambda: zip_bytes({"a.json": gzip.compress(data)}),
    }[kind]()
    warnings: list[str] = []
    file = write(tmp_path_factory.mktemp("law") / "a", packed)
    assert list(read(file, warnings=warnings).values()) == [data]
    assert not warnings


class Slow:
    """A file that gives a few bytes at a time."""

    def __init__(self, data: bytes, most: int) -> None:
        self._file, self._most = io.BytesIO(data), most

    def read(self, size: int, /) -> bytes:
        return self._file.read(min(size, self._most))

    def close(self) -> None: ...


# Damage


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress])
@settings(max_examples=60, deadline=None)
@given(cut=st.floats(0, 1, exclude_max=True), chunk=st.sampled_from([7, 1000, 1 << 20]))
def test_a_stream_that_is_cut_gives_what_lies_before_the_cut(
    pack: Callable[[bytes], bytes], cut: float, chunk: int
) -> None:
    packed = pack(TRACE)
    stop = 5 + int(cut * (len(packed) - 5))
    progress = compression.Progress()
    got = b"".join(compression.decompressed(Slow(packed[:stop], 1 << 20), progress, chunk))
    assert TRACE.startswith(got)
    assert progress.problem is not None
    assert f"ends early, after {len(got):,} decompressed bytes" in progress.problem


def test_a_cut_file_gives_nearly_all_that_was_stored(tmp_path: Path) -> None:
    data = noise(3 * CHUNK)
    for name, pack in (("gzip", gzip.compress), ("zstd", zstd.compress)):
        (source,) = find([write(tmp_path / name, pack(data)[: 2 * CHUNK])])
        got = content(source)
        assert data.startswith(got)
        assert len(got) > 2 * CHUNK - (256 << 10)  # zstd gives whole blocks of 128 KiB
        assert source.problem == f"the {name} stream ends early, after {len(got):,} decompressed bytes"


def test_a_wrong_checksum_loses_nothing_in_gzip(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(TRACE))
    packed[-8] ^= 1
    (source,) = find([write(tmp_path / "a", bytes(packed))])
    assert content(source) == TRACE
    expected = f"the gzip stream is damaged after {len(TRACE):,} decompressed bytes (incorrect data check)"
    assert source.problem == expected


def test_a_wrong_checksum_is_told_in_zstd(tmp_path: Path) -> None:
    data = noise(3 * CHUNK)
    (source,) = find([write(tmp_path / "a", checked_zstd(data)[:-1] + b"?")])
    got = content(source)
    assert data.startswith(got)
    assert len(got) >= 2 * CHUNK
    assert source.problem is not None
    assert "doesn't match checksum" in source.problem


def test_damage_in_the_middle_of_gzip_gives_all_before_it(tmp_path: Path) -> None:
    data = noise(CHUNK)
    packed = bytearray(gzip.compress(data))  # stored blocks: the position in the file is the one in the data
    broken = len(packed) // 2
    packed[broken : broken + 70_000] = b"\xff" * 70_000  # covers at least one block header
    (source,) = find([write(tmp_path / "a", bytes(packed))])
    got = content(source)
    assert len(got) > broken - 1000
    assert got[: broken - 1000] == data[: broken - 1000]
    assert source.problem is not None
    assert "is damaged after" in source.problem


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress])
def test_what_follows_a_stream(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    def after(tail: bytes) -> tuple[bytes, str | None]:
        (source,) = find([write(tmp_path / "a", pack(TRACE) + tail)])
        return content(source), source.problem

    assert after(b"") == after(bytes(3)) == after(bytes(3_000_000)) == (TRACE, None)
    assert after(pack(b"more")) == after(bytes(2_000_001) + pack(b"more")) == (TRACE + b"more", None)
    name = "gzip" if pack is gzip.compress else "zstd"
    told = f"something else follows the {name} stream after {len(TRACE):,} decompressed bytes"
    assert after(b"<html>") == after(bytes(9) + b"x") == (TRACE, told)


def test_zstd_may_begin_with_a_skippable_frame(tmp_path: Path) -> None:
    skippable = struct.pack("<II", 0x184D2A50, 4) + b"abcd"
    assert read(write(tmp_path / "a", skippable + zstd.compress(TRACE))) == {"a": TRACE}


def test_thousands_of_gzip_members_give_whole_pieces(tmp_path: Path) -> None:
    part = noise(1000)
    (source,) = find([write(tmp_path / "a", gzip.compress(part, 1) * 10_000)])
    assert [len(piece) // CHUNK for piece in source.chunks()] == [1, 1, 0]


# The thread


def test_an_early_close_ends_the_thread(tmp_path: Path) -> None:
    (source,) = find([write(tmp_path / "a", gzip.compress(bytes(20 * CHUNK)))])
    stream = source.chunks()
    assert not helpers()  # nothing runs before the first piece is asked for
    next(stream)
    assert len(helpers()) == 1
    stream.close()
    assert not helpers()


def test_a_consumer_that_raises_ends_the_thread(tmp_path: Path) -> None:
    (source,) = find([write(tmp_path / "a", gzip.compress(bytes(20 * CHUNK)))])
    with pytest.raises(ZeroDivisionError):
        for _ in source.chunks():
            raise ZeroDivisionError
    assert not helpers()


def test_the_thread_stays_a_few_pieces_ahead() -> None:
    made: list[int] = []
    hurry = threading.Event()

    def pieces() -> Iterator[bytes]:
        for index in range(100):
            made.append(index)
            if index == compression.AHEAD:
                hurry.set()
            yield b"x"

    stream = compression.ahead(pieces())  # type: ignore[arg-type]
    next(stream)
    assert hurry.wait(5)
    assert len(made) == 1 + compression.AHEAD
    stream.close()
    assert len(made) == 1 + compression.AHEAD


def test_an_exception_in_the_thread_reaches_the_consumer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.json", bytes(3 * CHUNK))

    class Failing(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell() >= CHUNK:
                raise OSError(5, "Input/output error")
            return super().read(size)

    monkeypatch.setattr(sources, "FileIO", Failing)
    (source,) = find([file])
    stream = source.chunks()
    assert len(next(stream)) >= CHUNK
    with pytest.raises(MachineError, match=r"a\.json: cannot be read \(Input/output error\); check the disk"):
        next(stream)


def test_an_iteration_that_is_never_closed_does_not_keep_the_process(tmp_path: Path) -> None:
    file = write(tmp_path / "a", gzip.compress(bytes(20 * CHUNK)))
    script = f"from slipstream.trace.sources import find\ns = next(find([{str(file)!r}])).chunks()\nnext(s)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# Folders, patterns


def test_a_folder_is_taken_in_natural_order_without_what_is_no_trace(tmp_path: Path) -> None:
    for name in ("rank10.json", "rank2.json.gz", "Rank1.pt.trace.json", "b/rank3.slip", "a/x.zstd"):
        write(tmp_path / name)
    for name in ("train.log", "model.pt", ".hidden.json", ".cache/a.json", "notes.txt"):
        write(tmp_path / name)
    found = list(find([tmp_path]))
    names = [str(Path(source.name).relative_to(tmp_path)) for source in found]
    assert names == ["a/x.zstd", "b/rank3.slip", "Rank1.pt.trace.json", "rank2.json.gz", "rank10.json"]
    assert not any(source.named for source in found)


def test_natural_order() -> None:
    names = ["rank10", "rank2", "rank", "rank02", "Rank3", "rank2b", "10", "9", "rank" + "9" * 5000]
    order = ["9", "10", "rank", "rank02", "rank2", "rank2b", "Rank3", "rank10", "rank" + "9" * 5000]
    assert sorted(names, key=natural) == order


def test_links_that_loop_end(tmp_path: Path) -> None:
    write(tmp_path / "runs/a/rank0.json")
    (tmp_path / "runs/a/up").symlink_to(tmp_path / "runs")
    (tmp_path / "runs/self.json").symlink_to("self.json")
    (tmp_path / "runs/gone.json").symlink_to("nowhere.json")
    (tmp_path / "runs/latest").symlink_to("nowhere")
    warnings: list[str] = []
    assert read(tmp_path / "runs", warnings=warnings) == {"rank0.json": TRACE}
    assert [warning.partition(" (")[0] for warning in warnings] == [
        f"{tmp_path}/runs/gone.json: cannot be read",
        f"{tmp_path}/runs/self.json: cannot be read",
    ]


def test_a_file_reached_twice_is_given_once(tmp_path: Path) -> None:
    file = write(tmp_path / "runs/rank0.json")
    write(tmp_path / "runs/rank1.json")
    (tmp_path / "runs/again.json").symlink_to(file)
    (tmp_path / "other").symlink_to(tmp_path / "runs")
    found = list(find([tmp_path / "runs", tmp_path / "other", file]))
    assert [(Path(source.name).name, source.named) for source in found] == [
        ("again.json", True),  # the file was also named
        ("rank1.json", False),
    ]


def test_a_pattern_that_the_shell_left_alone(tmp_path: Path) -> None:
    for name in ("rank10.dat", "rank2.dat", "more/rank3.json", "x.json"):
        write(tmp_path / name)
    found = list(find([f"{tmp_path}/rank*.dat", f"{tmp_path}/mor?"]))
    assert [(Path(source.name).name, source.named) for source in found] == [
        ("rank2.dat", True),
        ("rank10.dat", True),
        ("rank3.json", False),
    ]


def test_a_name_with_brackets_is_a_name_first(tmp_path: Path) -> None:
    assert read(write(tmp_path / "worker-rank[0].json")) == {"worker-rank[0].json": TRACE}


def test_paths_that_lead_nowhere_say_so_at_once(tmp_path: Path) -> None:
    write(tmp_path / "runs/rank0.json.gz")
    (tmp_path / "empty").mkdir()
    write(tmp_path / "logs/train.log")
    (tmp_path / "link.json").symlink_to("gone.json")
    for path, message in {
        "runs/rank0.json": f"does not exist; did you mean '{tmp_path}/runs/rank0.json.gz'?",
        "run/rank0.json.gz": f"does not exist; did you mean '{tmp_path}/runs'?",
        "runs/rank0.json.gz/x": f"does not exist; did you mean '{tmp_path}/runs/rank0.json.gz'?",
        "zzzzz": "does not exist; check the path",
        "*.zip": "matches no file; check the path",
        "link.json": "is a link to 'gone.json', which does not exist; name the file",
        "empty": "holds no file that looks like a trace; looked for *.json, ",
        "logs": "holds no file that looks like a trace; looked for *.json, ",
    }.items():
        with pytest.raises(UsageError) as caught:
            find([tmp_path / path])
        assert str(caught.value).startswith(f"{tmp_path / path}: {message}")
    with pytest.raises(UsageError, match="the path '': does not exist"):
        find([""])


# Files that are no traces


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"is empty \(0 bytes as stored\); .*write or copy it again"),
        (gzip.compress(b""), r"is empty \(20 bytes as stored\)"),
        (TRACE[:0] + gzip.compress(TRACE)[:6], r"is empty \(6 bytes as stored\)"),
        (b"/data/my runs/rank0.json.gz", r"holds the path '/data/my runs/rank0.json.gz', not a trace; copy the"),
        (b"../store/0a1b\n", "holds the path '../store/0a1b'"),
        (b"rank[0].pt.trace.json.gz", r"holds the path 'rank\[0\].pt.trace.json.gz'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "LFS pointer.*; run `git lfs pull`"),
    ],
)
def test_placeholders_are_an_error_when_named_and_a_warning_when_found(
    tmp_path: Path, data: bytes, message: str
) -> None:
    file = write(tmp_path / "rank0.json.gz", data)
    write(tmp_path / "rank1.json")
    with pytest.raises(TraceError, match=message) as caught:
        list(find([file]))
    warnings: list[str] = []
    assert read(tmp_path, warnings=warnings) == {"rank1.json": TRACE}
    assert warnings == [str(caught.value)]
    assert str(caught.value).startswith(f"{file}: ")


@pytest.mark.parametrize("data", [b"name,a/b", b"{}", b"1/2 of a trace", b"/\0binary", b"x.txt"])
def test_short_texts_that_are_no_paths_pass(tmp_path: Path, data: bytes) -> None:
    assert read(write(tmp_path / "a", data)) == {"a": data}


def test_the_real_file_that_holds_a_path() -> None:
    file = Path(__file__).parents[3] / "shared/traces/EDGE_path_text_as_gz.json.gz"
    if not file.exists():
        pytest.skip("the shared traces are not here")
    with pytest.raises(TraceError, match=r"holds the path '/data/.*', not a trace; copy the file itself"):
        list(find([file]))


@AS_ROOT
def test_what_may_not_be_read(tmp_path: Path) -> None:
    file = write(tmp_path / "runs/rank0.json")
    write(tmp_path / "runs/rank1.json")
    write(tmp_path / "runs/closed/rank2.json").parent.chmod(0)
    file.chmod(0)
    with pytest.raises(MachineError, match=r"cannot be read \(Permission denied\); check its permissions"):
        list(find([file]))
    with pytest.raises(MachineError, match="Permission denied"):
        find([tmp_path / "runs/closed"])
    warnings: list[str] = []
    assert read(tmp_path / "runs", warnings=warnings) == {"rank1.json": TRACE}
    assert len(warnings) == 2
    (tmp_path / "runs/closed").chmod(0o700)


def test_what_may_not_be_read_without_being_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for root, whom nothing is denied."""
    file = write(tmp_path / "runs/rank0.json")
    write(tmp_path / "runs/rank1.json")
    folder = write(tmp_path / "runs/closed/rank2.json").parent
    real_iterdir = Path.iterdir

    def denied(path: Path) -> None:
        if path in (file, folder):
            raise PermissionError(13, "Permission denied")

    def opened(path: Path) -> io.FileIO:
        denied(path)
        return io.FileIO(path)

    def listed(path: Path) -> Iterator[Path]:
        denied(path)
        return real_iterdir(path)

    monkeypatch.setattr(sources, "FileIO", opened)
    monkeypatch.setattr(Path, "iterdir", listed)
    with pytest.raises(MachineError, match=r"cannot be read \(Permission denied\); check its permissions"):
        list(find([file]))
    with pytest.raises(MachineError, match="Permission denied"):
        find([folder])
    warnings: list[str] = []
    assert read(tmp_path / "runs", warnings=warnings) == {"rank1.json": TRACE}
    assert len(warnings) == 2


def test_a_pipe_passes_by_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    data = noise(3 * CHUNK)
    writer = threading.Thread(target=lambda: pipe.write_bytes(gzip.compress(data, 1)))
    writer.start()
    (source,) = find([pipe])
    assert source.size is None
    assert source.head(100) == data[:100]
    assert content(source) == data
    writer.join()
    with pytest.raises(RuntimeError, match="passes by once"):
        content(source)


# Archives

MEMBERS = {
    "run/rank10.json": TRACE + b"10",
    "run/rank2.json.gz": gzip.compress(TRACE + b"2"),
    "./run/rank1.json.zst": zstd.compress(TRACE + b"1"),
    "run/notes.txt": b"nothing",
    "run.pt.trace.d/notes.txt": b"nothing",
    "run/._rank1.json": b"resource fork",
}
CONTENT = {"rank10.json": TRACE + b"10", "rank2.json.gz": TRACE + b"2", "rank1.json.zst": TRACE + b"1"}


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd.compress])
def test_tar_members_come_in_turn(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    file = write(tmp_path / "a.bin", pack(tar_bytes(MEMBERS)))
    assert read(file) == CONTENT
    names = [source.name for source in find([file])]
    assert names[0] == f"{file}::run/rank10.json"
    assert not any(source.named or source.path for source in find([file]))


def test_zip_members_come_in_natural_order_and_at_any_time(tmp_path: Path) -> None:
    found = list(find([write(tmp_path / "a.bin", zip_bytes(MEMBERS))]))
    assert [source.name.rpartition("/")[2] for source in found] == sorted(CONTENT, key=natural)
    for _ in range(2):
        assert {source.name.rpartition("/")[2]: content(source) for source in reversed(found)} == CONTENT
    assert all(source.consumed == source.size for source in found)


def test_a_saved_recording_stays_whole(tmp_path: Path) -> None:
    file = write(tmp_path / "a.slip", zip_bytes({"recording.json": b"{}", "timeline.json": b"{}"}))
    (source,) = find([file])
    assert source.path == file
    assert content(source) == file.read_bytes()
    inside = write(tmp_path / "a.tar", tar_bytes({"x/a.slip": file.read_bytes()}))
    assert read(inside) == {"a.slip": file.read_bytes()}


def test_archives_in_archives(tmp_path: Path) -> None:
    inner = gzip.compress(tar_bytes({"rank0.json": TRACE}))
    file = write(tmp_path / "a.zip", zip_bytes({"inner.tgz": inner}))
    ((name, data),) = [(source.name, content(source)) for source in find([file])]
    assert (name, data) == (f"{file}::inner.tgz::rank0.json", TRACE)
    assert read(write(tmp_path / "b.tar", tar_bytes({"inner.tgz": inner, "b.json": b"{}"}))) == {
        "b.tar::inner.tgz::rank0.json": TRACE,
        "b.tar::b.json": b"{}",
    }


def test_archives_without_end_are_opened_a_few_times(tmp_path: Path) -> None:
    data = TRACE
    for _ in range(sources.DEPTH + 3):
        data = tar_bytes({"a.tar": data})
    (source,) = find([write(tmp_path / "a.tar", data)])
    assert source.name.count("::") == sources.DEPTH


def test_a_tar_member_can_be_looked_at_and_skipped_or_left_halfway(tmp_path: Path) -> None:
    members = {f"rank{i}.json": noise(2 * CHUNK, i) for i in range(4)}
    file = write(tmp_path / "a.tar.gz", gzip.compress(tar_bytes(members), 1))
    for index, source in enumerate(find([file])):
        data = members[f"rank{index}.json"]
        assert source.head(100_000) == data[:100_000]
        if index % 2:
            assert content(source) == data
        elif index:
            assert data.startswith(next(source.chunks()))


def test_a_tar_member_that_has_passed_says_so(tmp_path: Path) -> None:
    file = write(tmp_path / "a.tar", tar_bytes({"a.json": noise(20 * CHUNK), "b.json": TRACE}))
    found = find([file])
    first = next(found)
    stream = first.chunks()
    next(stream)
    second = next(found)
    with pytest.raises(RuntimeError, match=r"a\.tar::a\.json passes by once"):
        list(stream)
    assert content(second) == TRACE
    with pytest.raises(RuntimeError, match="passes by once"):
        content(first)
    assert list(found) == []


def test_closing_find_within_an_archive_ends_its_thread(tmp_path: Path) -> None:
    found = find([write(tmp_path / "a.tar.gz", gzip.compress(tar_bytes({"a.json": noise(20 * CHUNK)}), 1))])
    stream = next(found).chunks()
    next(stream)
    assert len(helpers()) == 2
    stream.close()
    found.close()


def test_links_and_devices_in_a_tar_are_left_out_and_names_are_only_labels(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind in (("a.json", tarfile.SYMTYPE), ("b.json", tarfile.LNKTYPE), ("c.json", tarfile.CHRTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        for name in ("/abs.json", "../up.json", "esc\x1b[2J.json", "bad\udc80.json"):
            info = tarfile.TarInfo(name)
            info.size = 2
            tar.addfile(info, io.BytesIO(b"{}"))
    before = sorted(tmp_path.rglob("*"))
    file = write(tmp_path / "a.tar", buffer.getvalue())
    names = [source.name.removeprefix(f"{file}::") for source in find([file]) if content(source) == b"{}"]
    assert names == ["/abs.json", "../up.json", r"esc\x1b[2J.json", r"bad\udc80.json"]
    assert sorted(tmp_path.rglob("*")) == [*before, file]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd.compress])
def test_a_cut_tar_gives_the_members_before_the_cut(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    members = {f"rank{i}.json": noise(1_000_000, i) for i in range(3)}
    file = write(tmp_path / "a.tar.gz", pack(tar_bytes(members))[:1_500_000])
    warnings: list[str] = []
    got = [(content(source), source.problem) for source in find([file], warnings)]
    assert got[0] == (members["rank0.json"], None)
    assert members["rank1.json"].startswith(got[1][0])
    assert 300_000 < len(got[1][0]) < 1_000_000
    assert got[1][1] == f"the archive gives only {len(got[1][0]):,} of the 1,000,000 bytes of this member"
    assert len(got) == 2
    (warning,) = warnings
    assert warning.startswith(f"{file}: ")
    assert "members that follow are missing" in warning


def test_a_checksum_behind_the_last_member_is_checked(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(tar_bytes({"a.json": TRACE})))
    packed[-8] ^= 1
    warnings: list[str] = []
    assert len(read(write(tmp_path / "a.tgz", bytes(packed)), warnings=warnings)) == 1
    assert len(warnings) == 1
    assert "incorrect data check" in warnings[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (tar_bytes({"notes.txt": b"x"}), "holds no file that looks like a trace; looked for "),
        (zip_bytes({"notes.txt": b"x"}), "holds no file that looks like a trace; looked for "),
        (zip_bytes({}), "holds no file that looks like a trace; looked for "),
        (zip_bytes({"a.json": TRACE})[:-30], r"zip archive that is cut short or damaged \(.*\); copy it again"),
        (tar_bytes({"a.json": TRACE})[:300], r"the tar archive is damaged \(.*\); copy the archive again"),
    ],
)
def test_archives_that_give_nothing(tmp_path: Path, data: bytes, message: str) -> None:
    file = write(tmp_path / "a.zip", data)
    with pytest.raises(TraceError, match=message) as caught:
        list(find([file]))
    warnings: list[str] = []
    assert read(tmp_path, warnings=warnings) == {}
    assert warnings == [str(caught.value)]


def test_a_damaged_zip_member_has_a_problem(tmp_path: Path) -> None:
    data = noise(5 * CHUNK)
    packed = bytearray(zip_bytes({"a.json": data}))
    packed[3 * CHUNK : 3 * CHUNK + 70_000] = b"\xff" * 70_000
    (source,) = find([write(tmp_path / "a.zip", bytes(packed))])
    got = content(source)
    assert got[: 2 * CHUNK - 1000] == data[: 2 * CHUNK - 1000]
    assert source.problem is not None
    assert source.problem.startswith("the archive gives only ")


def test_members_that_cannot_be_unpacked(tmp_path: Path) -> None:
    plain = zip_bytes({"a.json": TRACE, "b.json": TRACE})
    central = plain.index(b"PK\x01\x02")
    for offset, value, message in ((8, 1, "'a.json' is encrypted; unpack"), (10, 97, "'a.json': That compression")):
        packed = bytearray(plain)
        packed[central + offset] = value
        packed[offset - 2] = value
        file = write(tmp_path / "a.zip", bytes(packed))
        with pytest.raises(TraceError, match=message):
            list(find([file]))
        warnings: list[str] = []
        assert [name.rpartition("::")[2] for name in read(tmp_path, warnings=warnings)] == ["b.json"]
        assert len(warnings) == 1


def test_a_member_that_stands_for_a_trace_is_a_warning(tmp_path: Path) -> None:
    file = write(tmp_path / "a.tar", tar_bytes({"a.json": b"", "b.json": TRACE}))
    warnings: list[str] = []
    assert list(read(file, warnings=warnings).values()) == [TRACE]
    assert warnings[0].startswith(f"{file}::a.json: is empty (0 bytes as stored)")


def test_a_bomb_in_the_headers_of_a_tar_costs_little(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a.json")
    info.type, info.size = tarfile.XHDTYPE, 1 << 30
    bomb = gzip.compress(info.tobuf(tarfile.USTAR_FORMAT) + bytes(sources.HEADERS + CHUNK))
    with pytest.raises(TraceError, match="headers of more than 8,388,608 bytes"):
        list(find([write(tmp_path / "a.tgz", bomb)]))


@settings(max_examples=200, deadline=None)
@given(changes=st.dictionaries(st.integers(0, 1535), st.integers(0, 255), min_size=1, max_size=5))
@pytest.mark.parametrize("kind", ["tar", "zip", "gzip", "zstd"])
def test_whatever_is_changed_the_worst_is_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory, kind: str, changes: dict[int, int]
) -> None:
    packed = bytearray(
        {
            "tar": tar_bytes({"a.json": TRACE[:300], "b.json": TRACE[:300]}),
            "zip": zip_bytes({"a.json": TRACE[:300], "b.json": TRACE[:300]}),
            "gzip": gzip.compress(TRACE),
            "zstd": checked_zstd(TRACE),
        }[kind]
    )
    for index, value in changes.items():
        packed[index % len(packed)] = value
    file = tmp_path_factory.getbasetemp() / f"fuzz-{kind}"
    file.write_bytes(packed)
    with contextlib.suppress(TraceError):
        read(file)
