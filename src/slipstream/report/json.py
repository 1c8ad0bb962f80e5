"""An analysis as one JSON object, schema 1 (docs/json.md). Times are integers in nanoseconds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from slipstream import __version__
from slipstream.analyze.analysis import Analysis, RankAnalysis
from slipstream.analyze.answer import answer
from slipstream.analyze.overlap import StepAccount
from slipstream.analyze.tables import CommRow
from slipstream.core.timeline import Group

SCHEMA = "slipstream.analysis/1"


def to_json(analysis: Analysis) -> dict[str, Any]:
    """The whole analysis as plain values."""
    recording = analysis.recording
    return {
        "schema": SCHEMA,
        "slipstream": __version__,
        "origin": str(recording.origin),
        "ranks_from": recording.ranks_from,
        "world_size": recording.world_size,
        "environment": dict(recording.environment),
        "answer": _answer(analysis),
        "ranks": [_rank(rank) for rank in analysis.ranks],
        "steps": [_step(rank, step) for rank in analysis.ranks for step in rank.overlap.steps],
        "collectives": [_comm(row) for row in analysis.collectives],
        "groups": [{**_comm(row), "name": row.group.label} for row in analysis.groups],
        "lanes": [_lane(row) for rank in analysis.ranks for row in rank.lanes],
        "worst": asdict(analysis.worst) if analysis.worst else None,
        "waits": _waits(analysis),
        "warnings": list(analysis.warnings),
    }


def _answer(analysis: Analysis) -> dict[str, Any]:
    found = answer(analysis)
    return {
        **asdict(found.account),
        "wall_ns": found.wall_ns,
        "per_step": found.per_step,
        "steps": found.steps,
        "warmup_steps": found.warmup,
        "dilation_ns": found.extra_ns,
        "net_hidden_ns": found.net_hidden_ns,
        "look_at": found.look_at,
    }


def _rank(rank: RankAnalysis) -> dict[str, Any]:
    timeline, dilation = rank.timeline, rank.dilation
    return {
        "rank": timeline.rank,
        "device": timeline.device,
        "source": rank.source,
        **asdict(rank.overlap.account),
        "dilation_ns": dilation.extra_ns,
        "net_hidden_ns": rank.net_hidden_ns,
        "dilation": {
            "ratio": dilation.ratio,
            "matched_kernels": dilation.matched,
            "kernels_beside_comm": dilation.beside,
            "reason": dilation.reason or None,
        },
        "outside_steps_comm_ns": rank.overlap.outside.comm_ns,
        "steps_from": timeline.steps_from,
        "phases_from": timeline.phases_from,
    }


def _step(rank: RankAnalysis, step: StepAccount) -> dict[str, Any]:
    return {
        "rank": rank.timeline.rank,
        "device": rank.timeline.device,
        "step": step.number,
        "warmup": step.warmup,
        **asdict(step.account),
        "dilation_ns": None,
        "wall_ns": step.wall_ns,
        "collectives": step.collectives,
        "phases": {phase.name.lower(): asdict(account) for phase, account in step.phases},
    }


def _comm(row: CommRow) -> dict[str, Any]:
    return {
        "name": row.op,
        "group": row.group.label,
        "process_group": _group(row.group),
        "count": row.count,
        "bytes": row.size_bytes,
        "duration_ns": row.duration_ns,
        "busbw_bytes_per_s": row.busbw,
        "busbw_includes_wait": row.busbw_includes_wait,
        "wait_ns": row.wait_ns,
        "transfer_ns": row.transfer_ns,
        "wait_at_least_ns": row.wait_at_least_ns,
        "partial": row.partial,
        "hidden_ns": row.hidden_ns,
        "exposed_ns": row.exposed_ns,
        "on_compute_lane": row.on_compute_lane,
    }


def _group(group: Group) -> dict[str, Any]:
    return {
        "name": group.name,
        "description": group.description,
        "size": group.size,
        "ranks": list(group.ranks),
    }


def _lane(row: Any) -> dict[str, Any]:
    return asdict(row)


def _waits(analysis: Analysis) -> dict[str, Any] | None:
    waits = analysis.waits
    if waits is None:
        return None
    return {
        "matched": waits.matched,
        "unmatched": waits.unmatched,
        "clock_offset_ns": list(waits.clock_offset_ns),
        "clock_error_ns": waits.clock_error_ns,
        "partial": waits.partial,
        "ranks": [asdict(rank) for rank in waits.ranks],
    }
