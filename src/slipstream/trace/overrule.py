"""A user's own rules on a timeline that was saved: the names in it are decided again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slipstream.core.timeline import UNKNOWN, Collective, Kind, Timeline
from slipstream.trace.classify import Rule, operation, own_name


def overruled(timeline: Timeline, rules: Sequence[Rule]) -> Timeline:
    """The timeline with the kind of every span whose name a rule matches; the first matching rule decides."""
    decided = [next((rule.kind for rule in rules if rule.regex.search(name)), None) for name in timeline.names]
    if not any(kind is not None for kind in decided) or not len(timeline):
        return timeline
    kinds = np.array([UNKNOWN if kind is None else int(kind) for kind in decided], np.int8)[timeline.name]
    kind = np.where(kinds == UNKNOWN, timeline.kind, kinds)
    collective = np.where(kind == Kind.COMM, timeline.collective, UNKNOWN)
    collectives = list(timeline.collectives)
    for name in np.unique(timeline.name[(kind == Kind.COMM) & (collective == UNKNOWN)]).tolist():
        collective[(timeline.name == name) & (kind == Kind.COMM) & (collective == UNKNOWN)] = len(collectives)
        text = timeline.names[name]
        collectives.append(Collective(operation(text) or own_name(text)))
    return replace(
        timeline,
        kind=kind.astype(np.int8),
        collective=collective.astype(np.int32),
        collectives=tuple(collectives),
    )
