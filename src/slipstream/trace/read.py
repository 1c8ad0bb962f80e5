"""Paths to a Recording: finds the files, tells each format from its first bytes, and puts the ranks together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.core.errors import SlipstreamError, TraceError
from slipstream.core.recording import Recording
from slipstream.core.store import is_slip, load
from slipstream.trace import ranks
from slipstream.trace.classify import Classifier, Rule
from slipstream.trace.collectives import whole_number
from slipstream.trace.exported import read_chrome_export, read_csv, read_parquet
from slipstream.trace.kineto import read_kineto
from slipstream.trace.overrule import overruled
from slipstream.trace.sources import Source, find

Progress = Callable[[str, int, int | None], None]
"""Called with the name of the file that is being read, the bytes taken in, and its size if known."""


@dataclass(frozen=True)
class Format:
    """A format that is read as a whole, told by the first bytes. Adding one is one row here and one reader."""

    name: str
    is_it: Callable[[bytes], bool]
    read: Callable[[str], Recording]


WHOLE_FORMATS: tuple[Format, ...] = (
    Format("recording", is_slip, load),
    Format("Chrome export", lambda head: head.lstrip()[:40].startswith(b'{"slipstream":'), read_chrome_export),
    Format("CSV export", lambda head: head.startswith(b"# slipstream "), read_csv),
    Format("Parquet export", lambda head: head.startswith(b"PAR1"), read_parquet),
)

NOT_YET: tuple[tuple[bytes, str, str], ...] = (
    (b"\xfd7zXZ\0", "is compressed with xz", "decompress it, or compress it with gzip or zstd"),
    (b"BZh", "is compressed with bzip2", "decompress it, or compress it with gzip or zstd"),
    (
        b"SQLite format 3\0",
        "is an SQLite database (Nsight Systems?)",
        "export a Chrome trace of it, or profile with torch",
    ),
)
"""Formats that are recognised and not read: first bytes, what it is, what to do."""


def read(
    paths: Sequence[str | os.PathLike[str]],
    rules: Sequence[Rule] = (),
    progress: Progress = lambda name, done, size: None,
) -> Recording:
    """Read traces of one job: files, folders, glob patterns, archives; Kineto traces, recordings and exports.

    `rules` extend the table of names (`slipstream.trace.classify`). Raises `UsageError` for paths that are not there,
    `TraceError` for a named file that cannot be used; a bad file that was only found in a folder becomes a warning,
    unless nothing else is left.
    """
    warnings: list[str] = []
    failures: list[SlipstreamError] = []
    recordings: list[Recording] = []
    candidates: list[ranks.Candidate] = []
    classifier = Classifier(rules)
    for source in find(paths, warnings):
        try:
            found = _read_one(source, classifier, progress)
        except TraceError as error:
            if source.named:
                raise
            failures.append(error)
            warnings.append(f"left out: {error}")
            continue
        if isinstance(found, Recording):
            timelines = tuple(overruled(timeline, rules) for timeline in found.timelines)
            names = found.sources or (source.name,) * len(timelines)
            recordings.append(replace(found, timelines=timelines, sources=names))
        else:
            candidate, lost = found
            candidates.append(candidate)
            warnings += [f"{source.name}: {warning}" for warning in lost]
    if candidates:
        recordings.append(_recording(candidates))
    warnings += _without_effect(rules, recordings)
    if not recordings:
        raise failures[0] if failures else _nothing(warnings)
    return _together(recordings, warnings)


def _read_one(
    source: Source, classifier: Classifier, progress: Progress
) -> Recording | tuple[ranks.Candidate, list[str]]:
    head = source.head()
    for start, what, do in NOT_YET:
        if head.startswith(start):
            raise TraceError(what, where=source.name, do=do)
    for form in WHOLE_FORMATS:
        if form.is_it(head):
            if source.path is None:
                raise TraceError(
                    f"is a {form.name} inside an archive or compressed", where=source.name, do="unpack it first"
                )
            return form.read(str(source.path))
    kineto = read_kineto(
        source.chunks(), source.name, classifier, lambda: progress(source.name, source.consumed, source.size)
    )
    problem = [source.problem] if source.problem else []
    return ranks.Candidate(source.name, kineto.metadata, tuple(kineto.timelines)), problem + kineto.warnings


def _without_effect(rules: Sequence[Rule], recordings: Sequence[Recording]) -> list[str]:
    """Rules of the user that match no name: probably misspelt."""
    names = {name for recording in recordings for timeline in recording.timelines for name in timeline.names}
    unused = [rule for rule in rules if not any(rule.regex.search(name) for name in names)]
    return [f"--kind {rule.pattern!r} matches no name in these traces" for rule in unused]


def _nothing(warnings: list[str]) -> TraceError:
    return TraceError("no trace could be read", do="; ".join(warnings) or "give at least one trace file")


def _recording(candidates: Sequence[ranks.Candidate]) -> Recording:
    timelines, sources, ranks_from, warnings = ranks.assign(candidates)
    return Recording(
        timelines=tuple(timelines),
        sources=tuple(sources),
        ranks_from=ranks_from,
        world_size=_world_size(candidates),
        environment=_environment(candidates[0].metadata),
        warnings=tuple(warnings),
    )


def _world_size(candidates: Sequence[ranks.Candidate]) -> int | None:
    infos = [candidate.metadata.get("distributedInfo") for candidate in candidates]
    sizes = [whole_number(info.get("world_size")) for info in infos if isinstance(info, dict)]
    return max((size for size in sizes if size is not None), default=None)


def _environment(metadata: dict[str, Any]) -> dict[str, str]:
    """What the first trace tells about machine and software, as text."""
    info = metadata.get("distributedInfo")
    told = {key: info.get(key) for key in ("backend", "nccl_version")} if isinstance(info, dict) else {}
    devices = metadata.get("deviceProperties")
    if isinstance(devices, list) and devices and isinstance(devices[0], dict):
        told["device"] = devices[0].get("name")
    versions = ("cuda_runtime_version", "cuda_driver_version", "hip_runtime_version", "roctracer_version")
    told.update({key: metadata.get(key) for key in (*versions, "record_shapes", "with_stack")})
    return {key: str(value)[:200] for key, value in told.items() if value not in (None, "")}


def _together(recordings: Sequence[Recording], warnings: Sequence[str]) -> Recording:
    """One recording out of several; the first tells what they have in common."""
    first = recordings[0]
    return replace(
        first,
        timelines=tuple(timeline for recording in recordings for timeline in recording.timelines),
        sources=tuple(_all(recording.sources for recording in recordings)),
        warnings=tuple(dict.fromkeys([*_all(recording.warnings for recording in recordings), *warnings])),
    )


def _all(parts: Iterator[tuple[str, ...]] | Any) -> list[str]:
    return [item for part in parts for item in part]
