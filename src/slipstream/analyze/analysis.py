"""The whole analysis of a Recording: did the communication hide, what is exposed, and where."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from slipstream.analyze import dilation, overlap, tables, waits
from slipstream.core.recording import Recording
from slipstream.core.timeline import UNKNOWN, Collective, Kind, Timeline
from slipstream.core.units import format_ns
from slipstream.trace.classify import most_like_communication, sounds_like_communication

_LOUD = 0.05
"""Share of all communication from which a doubtful kernel is worth a word."""


@dataclass(frozen=True, slots=True)
class RankAnalysis:
    """What one timeline says."""

    timeline: Timeline
    source: str
    overlap: overlap.Overlap
    dilation: dilation.Dilation
    lanes: tuple[tables.LaneRow, ...]

    @property
    def net_hidden_ns(self) -> int | None:
        """What the overlap really bought: hidden time less what it cost compute. Can be negative."""
        extra = self.dilation.extra_ns
        return None if extra is None else self.overlap.account.hidden_ns - extra


@dataclass(frozen=True, slots=True)
class Worst:
    """The single comm span with the most exposed time."""

    rank: int
    step: int | None
    op: str
    group: str
    start_ns: int
    duration_ns: int
    exposed_ns: int


@dataclass(frozen=True, slots=True)
class Analysis:
    """Everything that `analyze` reports. Lists are sorted, the most exposed first."""

    recording: Recording
    ranks: tuple[RankAnalysis, ...]
    collectives: tuple[tables.CommRow, ...]
    groups: tuple[tables.CommRow, ...]
    waits: waits.Waits | None
    worst: Worst | None
    warnings: tuple[str, ...]


def analyze(recording: Recording) -> Analysis:
    """Analyze every timeline of a recording, and all of them together."""
    timelines = recording.timelines
    overlaps = [overlap.measure(timeline) for timeline in timelines]
    sources = recording.sources or ("",) * len(timelines)
    ranks = tuple(
        RankAnalysis(timeline, source, measured, dilation.measure(timeline), tuple(tables.lanes(timeline)))
        for timeline, source, measured in zip(timelines, sources, overlaps, strict=True)
    )
    waited = waits.measure(timelines, overlaps)
    return Analysis(
        recording,
        ranks,
        tuple(tables.collectives(timelines, overlaps, waited)),
        tuple(tables.groups(timelines, overlaps, waited)),
        waited,
        _worst(ranks),
        (*recording.warnings, *_doubts(ranks, waited)),
    )


def _worst(ranks: tuple[RankAnalysis, ...]) -> Worst | None:
    found: Worst | None = None
    for rank in ranks:
        shares, timeline = rank.overlap.shares, rank.timeline
        if not len(shares.rows) or not shares.exposed.max():
            continue
        at = int(shares.exposed.argmax())
        row, exposed = int(shares.rows[at]), int(shares.exposed[at])
        if found is None or exposed > found.exposed_ns:
            which = int(timeline.collective[row])
            collective = timeline.collectives[which] if which != UNKNOWN else Collective("unknown")
            step = int(timeline.step[row])
            found = Worst(
                timeline.rank,
                timeline.steps[step].number if step >= 0 else None,
                collective.op,
                collective.group.label,
                int(timeline.start_ns[row]),
                int(timeline.durations_ns[row]),
                exposed,
            )
    return found


def _doubts(ranks: tuple[RankAnalysis, ...], waited: waits.Waits | None) -> list[str]:
    """What the reader must know to judge the numbers."""
    doubts = []
    silent = [rank for rank in ranks if not len(rank.overlap.shares.rows)]
    for rank in silent[:3]:
        doubts.append(_no_communication(rank))
    if len(silent) > 3:
        doubts.append(f"no communication found on {len(silent) - 3} more ranks")
    unattributed = [rank for rank in ranks if rank.overlap.outside.comm_ns]
    if unattributed:
        ns = sum(rank.overlap.outside.comm_ns for rank in unattributed)
        doubts.append(
            f"{ns / 1e6:.3f} ms of communication belong to no step (launched before the first one, or between and "
            "after them)"
        )
    sources = dict.fromkeys(rank.timeline.steps_from for rank in ranks)
    doubts += [f"steps {source}" for source in sources if source.startswith(("inferred", "not marked"))]
    if any(rank.overlap.account.exposed_ns and not _phases_known(rank) for rank in ranks):
        doubts.append("phases not recorded (no autograd or optimizer ranges): tail starts at the last compute")
    doubts += _unrecognised(ranks)
    if waited is not None and (passed := _point_to_point(ranks)):
        doubts.append(f"{passed:,} sends and receives were not matched across ranks: waiting in them is not known")
    if waited is not None and waited.unmatched:
        doubts.append(
            f"{waited.unmatched} collectives could not be matched across ranks (different counts or operations)"
        )
    if waited is not None and waited.partial:
        doubts.append("some collectives were not recorded on all of their ranks: waiting is at least what is shown")
    return doubts


def _phases_known(rank: RankAnalysis) -> bool:
    return not rank.timeline.phases_from.startswith(("none", "not recorded"))


def _point_to_point(ranks: tuple[RankAnalysis, ...]) -> int:
    """How many spans are sends and receives."""
    count = 0
    for rank in ranks:
        timeline = rank.timeline
        is_pair = np.array([c.op in waits.POINT_TO_POINT for c in timeline.collectives] + [False], np.bool_)
        count += int(is_pair[timeline.collective[rank.overlap.shares.rows]].sum())
    return count


def _unrecognised(ranks: tuple[RankAnalysis, ...]) -> list[str]:
    """Compute that sounds like communication, where other communication was recognised and it is not negligible."""
    total: Counter[str] = Counter()
    comm = sum(rank.overlap.account.comm_ns for rank in ranks)
    for rank in ranks:
        timeline = rank.timeline
        if timeline.device == "cpu" or not len(rank.overlap.shares.rows):
            continue
        times = _time_by_name(timeline)
        total.update({name: ns for name, ns in times.items() if sounds_like_communication(name)})
    loud = [(name, ns) for name, ns in total.most_common(3) if ns > _LOUD * comm]
    if not loud:
        return []
    names = "; ".join(f"{_short(name)} ({format_ns(ns)})" for name, ns in loud)
    return [f"counted as compute, though they sound like communication: {names}. If they are: --kind 'REGEX=comm'"]


def _time_by_name(timeline: Timeline) -> dict[str, int]:
    """Time of the compute spans of each name."""
    kernels = timeline.kind == Kind.COMPUTE
    total = np.bincount(timeline.name[kernels], weights=timeline.durations_ns[kernels], minlength=len(timeline.names))
    return {timeline.names[index]: int(total[index]) for index in np.unique(timeline.name[kernels]).tolist()}


def _short(name: str) -> str:
    return name if len(name) <= 80 else name[:77] + "..."


def _no_communication(rank: RankAnalysis) -> str:
    timeline = rank.timeline
    alike = most_like_communication(_time_by_name(timeline).items())
    count = int((timeline.kind == Kind.COMPUTE).sum())
    what = f"rank {timeline.rank}: no communication found among {count:,} compute spans"
    if not alike:
        return f"{what}, and none has a name like it"
    names = "; ".join(map(_short, alike))
    return f"{what}. Most like it: {names}. If one of them communicates: --kind 'REGEX=comm'"
