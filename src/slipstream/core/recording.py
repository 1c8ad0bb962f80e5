"""The envelope that is saved, loaded and compared: Timelines with where they came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from slipstream.core.timeline import Timeline

SCHEMA = 1
"""Version of the saved form (docs/recording.md)."""


class Origin(StrEnum):
    """How a recording came to be. Analyses do not look at it."""

    PREDICTED = "predicted"
    MEASURED = "measured"
    REPLAYED = "replayed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Timelines of every rank (and device) of one job.

    `sources` says for each timeline which file it was read from, `ranks_from` how the rank numbers were found,
    `warnings` what was lost or doubtful on the way. `environment` holds what the traces tell about the machine
    and the software (device names, backend, versions), as text.
    """

    timelines: tuple[Timeline, ...]
    origin: Origin = Origin.MEASURED
    sources: tuple[str, ...] = ()
    ranks_from: str = "order"
    world_size: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
