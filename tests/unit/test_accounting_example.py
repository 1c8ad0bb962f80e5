"""The step that docs/accounting.md draws gives the numbers that its table states."""

from __future__ import annotations

import numpy as np

from slipstream.analyze.overlap import measure
from slipstream.core.timeline import Collective, Kind, Lane, Phase, Step, build

DRAWN = [
    (1, 5, Kind.COMPUTE, Phase.FORWARD),
    (5, 9, Kind.COMPUTE, Phase.BACKWARD),
    (12, 13, Kind.COMPUTE, Phase.OPTIMIZER),
    (0, 2, Kind.COMM, Phase.FORWARD),
    (6, 8, Kind.COMM, Phase.BACKWARD),
    (8, 11, Kind.COMM, Phase.BACKWARD),
]
STATED = {
    "span_ns": 13,
    "compute_ns": 9,
    "comm_ns": 7,
    "hidden_ns": 4,
    "exposed_ns": 3,
    "head_ns": 1,
    "stall_ns": 0,
    "tail_ns": 2,
    "copy_ns": 0,
    "idle_ns": 1,
}


def test_the_drawn_step() -> None:
    start, end, kind, phase = zip(*DRAWN, strict=True)
    timeline = build(
        rank=0,
        device="gpu 0",
        lanes=(Lane("compute"), Lane("comm")),
        names=("k",),
        collectives=(Collective("all_gather"),),
        steps=(Step(0),),
        columns={
            "start_ns": np.array(start),
            "end_ns": np.array(end),
            "kind": np.array(kind),
            "phase": np.array(phase),
            "lane": np.array([int(k == Kind.COMM) for k in kind]),
            "collective": np.array([0 if k == Kind.COMM else -1 for k in kind]),
            "step": np.zeros(len(start), np.int64),
        },
    )
    account = measure(timeline).steps[0].account
    assert {name: getattr(account, name) for name in STATED} == STATED
