"""Which rank each trace file is: from its metadata, else its file name, else its place in the order.

One way is used for all files of a job, the first that gives different files different ranks; the report says which.
Files of the same rank are fine where they hold different steps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from slipstream.core.timeline import Timeline
from slipstream.trace.collectives import whole_number

_IN_NAME = (
    re.compile(r"(?i)(?<![a-z])rank[-_ .=\[(]*(\d{1,7})(?!\d)"),
    re.compile(r"(?i)(?<![a-z])worker[-_ .=\[(]*(\d{1,7})(?!\d)"),
    re.compile(r"(?i)(?<![a-z])(?:gpu|device|proc|process|node\d+_local)[-_ .=\[(]*(\d{1,7})(?!\d)"),
    re.compile(r"^(\d{1,7})(?:\.|$)"),
)
"""Where people put the rank in a file name, the surest spelling first."""


@dataclass(frozen=True)
class Candidate:
    """One trace file with what may tell its rank."""

    name: str
    metadata: dict[str, Any]
    timelines: tuple[Timeline, ...]


def assign(files: Sequence[Candidate]) -> tuple[list[Timeline], list[str], str, list[str]]:
    """Give every timeline its rank.

    Returns the timelines in order of rank, the source of each, how the ranks were found, and warnings.
    """
    files, warnings = _without_copies(files)
    ways = (
        ("distributedInfo", [_from_info(file) for file in files]),
        ("trace metadata", [_from_metadata(file) for file in files]),
        ("file names", [_from_file_name(file) for file in files]),
    )
    for way, ranks in ways:
        if any(rank is None for rank in ranks):
            continue
        if clash := _clash(files, ranks):
            warnings.append(f"{way} cannot be right about ranks: {clash}; they were not used")
            continue
        return (*_ordered(files, [rank for rank in ranks if rank is not None]), way, warnings)
    mixed = [next((ranks[i] for _, ranks in ways if ranks[i] is not None), None) for i in range(len(files))]
    if len(files) > 1 and not warnings and all(rank is not None for rank in mixed) and not _clash(files, mixed):
        return (*_ordered(files, [r for r in mixed if r is not None]), "metadata and file names", warnings)
    if len(files) > 1:
        warnings.append("neither metadata nor file names tell the ranks apart: they are numbered in order of the files")
    return (*_ordered(files, list(range(len(files))), by_device=len(files) == 1), "order", warnings)


def _without_copies(files: Sequence[Candidate]) -> tuple[list[Candidate], list[str]]:
    """Leave out files that hold the same spans as one before them: copies of one trace are not more ranks.

    Files that say that they are of different ranks are no copies, however alike their spans.
    """
    seen: dict[tuple[object, ...], str] = {}
    kept, warnings = [], []
    for file in files:
        rank = _from_file_name(file) if (told := _from_info(file)) is None else told
        content = (rank, *(_fingerprint(timeline) for timeline in file.timelines))
        if (first := seen.setdefault(content, file.name)) == file.name or not any(map(len, file.timelines)):
            kept.append(file)
        else:
            warnings.append(f"{file.name} holds the same spans as {first} and was left out")
    return kept, warnings


def _fingerprint(timeline: Timeline) -> tuple[str, bytes, bytes]:
    return timeline.device, timeline.start_ns.tobytes(), timeline.end_ns.tobytes()


def _from_info(file: Candidate) -> int | None:
    info = file.metadata.get("distributedInfo")
    return whole_number(info.get("rank")) if isinstance(info, dict) else None


def _from_metadata(file: Candidate) -> int | None:
    name = file.metadata.get("traceName")
    return _rank_in(name) if isinstance(name, str) else None


def _from_file_name(file: Candidate) -> int | None:
    parts = PurePosixPath(file.name.replace("::", "/")).parts
    found = (_rank_in(part) for part in reversed(parts[-2:]))
    return next((rank for rank in found if rank is not None), None)


def _rank_in(path: str) -> int | None:
    name = PurePosixPath(path).name
    return next((int(found[1]) for pattern in _IN_NAME if (found := pattern.search(name))), None)


def _clash(files: Sequence[Candidate], ranks: Sequence[int | None]) -> str:
    """Two files that would be the same rank in the same steps; empty if there are none."""
    seen: dict[tuple[int | None, int], str] = {}
    for file, rank in zip(files, ranks, strict=True):
        for number in {step.number for timeline in file.timelines for step in timeline.steps}:
            other = seen.setdefault((rank, number), file.name)
            if other != file.name:
                return f"{other} and {file.name} are both rank {rank}"
    return ""


def _ordered(
    files: Sequence[Candidate], ranks: Sequence[int], *, by_device: bool = False
) -> tuple[list[Timeline], list[str]]:
    """Timelines in order of rank; `by_device` numbers the devices of a file instead."""
    pairs = [
        (replace(timeline, rank=index if by_device else rank), file.name)
        for file, rank in zip(files, ranks, strict=True)
        for index, timeline in enumerate(file.timelines)
    ]
    pairs.sort(key=lambda pair: (pair[0].rank, pair[0].steps[0].number if pair[0].steps else 0))
    return [timeline for timeline, _ in pairs], [name for _, name in pairs]
