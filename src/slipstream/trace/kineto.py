"""Kineto (torch.profiler) traces: one file of Chrome JSON becomes Timelines, one for each device in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from slipstream.core.timeline import Timeline
from slipstream.trace import device, host
from slipstream.trace.classify import Classifier
from slipstream.trace.collectives import Groups
from slipstream.trace.events import EventStream
from slipstream.trace.rows import Rows
from slipstream.trace.tracefile import TraceFile


@dataclass
class KinetoFile:
    """What one trace file holds. The rank of its timelines is not known yet (`slipstream.trace.ranks`)."""

    timelines: list[Timeline]
    metadata: dict[str, Any]
    warnings: list[str] = field(default_factory=list)


def read_kineto(
    chunks: Iterator[bytes], name: str, classifier: Classifier, progress: Callable[[], None] = lambda: None
) -> KinetoFile:
    """Read one trace from its decompressed bytes. `name` is what messages call it.

    Raises `TraceError` if it is no trace, or holds neither device work nor communication on the host.
    """
    stream = EventStream(chunks, name)
    rows = Rows.read(stream, progress)
    file = TraceFile(rows, Groups(stream.metadata.get("distributedInfo")), classifier, name)
    timelines = device.timelines(file) if len(file.device) else [host.timeline(file)]
    return KinetoFile(timelines, stream.metadata, _losses(stream, rows) + file.warnings)


def _losses(stream: EventStream, rows: Rows) -> list[str]:
    warnings = []
    if not stream.complete:
        warnings.append(
            f"the file is cut off after {stream.total_bytes:,} bytes: {stream.lost_bytes:,} of them, and all that "
            "would have followed, could not be read; the numbers cover what was"
        )
    elif stream.lost_bytes:
        share = 100 * stream.lost_bytes / max(stream.total_bytes, 1)
        warnings.append(f"{stream.lost_bytes:,} bytes ({share:.2g} % of the file) are not valid JSON and were skipped")
    if stream.repaired:
        warnings.append(f"{stream.repaired:,} events with unescaped quotes in their names were mended")
    if rows.without_time:
        warnings.append(f"{rows.without_time:,} events without a usable time were left out")
    if rows.begin_end:
        warnings.append(f"{rows.begin_end:,} begin and end events (ph B, E) were left out; whole ones (ph X) are read")
    if rows.negative:
        warnings.append(f"{rows.negative:,} events have a negative duration; each counts as empty")
    return warnings
