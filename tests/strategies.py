"""Hypothesis strategies for random Timelines and Recordings.

Times are small by default, so that spans touch, nest and repeat often and a bitmap oracle stays cheap; pass
`times=WIDE_TIMES` for the nanoseconds of real traces. Spans of one lane may overlap: readers of traces count
such oddities and keep them.
"""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from slipstream.core.recording import Origin, Recording
from slipstream.core.timeline import (
    NO_TIME,
    UNKNOWN,
    Annotations,
    Collective,
    Group,
    Kind,
    Lane,
    Phase,
    Step,
    Timeline,
    build,
)

SMALL_TIMES = st.integers(-60, 240)
WIDE_TIMES = st.integers(-(2**40), 2**40) | st.integers(1_712_195_495_507_888_000, 1_712_195_495_507_999_999)

HOSTILE_NAMES = (
    "",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*, ulong, ncclWork*)",
    'a "quoted" name, with comma; semicolon\tand tab',
    "two\nlines",
    "two\r\nlines and \r alone",
    "</script><script>alert('&amp;')</script>",
    '{"ph": "X"}, ] \\ \\u0000 \\',
    "=1+1",
    "# slipstream {}",
    "ünïcode 漢字 🚀 \u2028 \u202e \x00 \x7f",
    "ProfilerStep#3",
    "None",
    "-1",
)

_ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
_DEVICE_KINDS = (Kind.COMPUTE, Kind.COMM, Kind.COPY, Kind.OTHER)


def texts(*, min_size: int = 0) -> st.SearchStrategy[str]:
    """Names as a hostile or careless trace writes them."""
    hostile = st.sampled_from([name for name in HOSTILE_NAMES if len(name) >= min_size])
    return hostile | _ANY_TEXT.filter(lambda text: len(text) >= min_size)


def groups() -> st.SearchStrategy[Group]:
    ranks = st.lists(st.integers(0, 9), max_size=5, unique=True).map(tuple)
    return st.builds(Group, texts(), texts(), st.none() | st.integers(1, 2048), ranks)


def collectives() -> st.SearchStrategy[Collective]:
    ops = st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "send"]) | texts(min_size=1)
    sizes = st.none() | st.integers(0, 2**40)
    return st.builds(Collective, ops, groups(), sizes, st.sampled_from(["", "bf16", "fp32"]) | texts())


def lanes() -> st.SearchStrategy[tuple[Lane, ...]]:
    """Two to five lanes, the first one a device lane."""
    more = st.lists(st.builds(Lane, texts(), st.booleans()), min_size=1, max_size=4, unique=True)
    return more.map(lambda rest: tuple(dict.fromkeys([Lane("stream 7"), *rest])))


@st.composite
def steps(draw: st.DrawFn, times: st.SearchStrategy[int] = SMALL_TIMES) -> tuple[Step, ...]:
    """Up to three steps with ascending numbers and host windows that do not overlap; some have no window."""
    numbers = sorted(draw(st.sets(st.integers(0, 1000), max_size=3)))
    ends = sorted(draw(st.lists(times, min_size=2 * len(numbers), max_size=2 * len(numbers))))
    windows = zip(ends[::2], ends[1::2], strict=True)
    return tuple(
        Step(number, *window) if draw(st.booleans()) else Step(number)
        for number, window in zip(numbers, windows, strict=True)
    )


@st.composite
def timelines(
    draw: st.DrawFn,
    *,
    max_spans: int = 12,
    times: st.SearchStrategy[int] = SMALL_TIMES,
    ranks: st.SearchStrategy[int] = st.integers(0, 7),  # noqa: B008 a strategy is immutable
) -> Timeline:
    """A small Timeline: empty and duplicate spans, unknown values, unused lanes and names, annotations."""
    the_lanes, the_steps = draw(lanes()), draw(steps(times))
    the_names = tuple(draw(st.lists(texts(), min_size=1, max_size=5, unique=True)))
    the_collectives = tuple(draw(st.lists(collectives(), max_size=4, unique=True)))
    the_shapes = tuple(draw(st.lists(texts(min_size=1), max_size=3, unique=True)))

    def index(table: tuple[object, ...], least: int = 0) -> int:
        return draw(st.integers(least, len(table) - 1))

    def span() -> dict[str, int]:
        lane = index(the_lanes)
        kind = draw(st.sampled_from([Kind.HOST, Kind.OTHER] if the_lanes[lane].is_host else _DEVICE_KINDS))
        start, is_comm = draw(times), kind == Kind.COMM
        return {
            "start_ns": start,
            "end_ns": start + draw(st.just(0) | st.integers(0, 60)),
            "lane": lane,
            "kind": kind,
            "name": index(the_names),
            "collective": index(the_collectives, UNKNOWN) if is_comm else UNKNOWN,
            "shape": index(the_shapes, UNKNOWN),
            "step": index(the_steps, UNKNOWN),
            "phase": draw(st.sampled_from(Phase)),
            "launch_ns": draw(st.just(NO_TIME) | st.integers(-5, 90).map(lambda ago: start - ago)),
            "sequence": draw(st.integers(UNKNOWN, 5)) if is_comm else UNKNOWN,
        }

    rows = [span() for _ in range(draw(st.integers(0, max_spans)))]
    if rows:
        rows += draw(st.lists(st.sampled_from(rows), max_size=2))
    return build(
        rank=draw(ranks),
        device=draw(st.sampled_from(["cuda:0", "cuda:1"]) | texts()),
        columns={column: [row[column] for row in rows] for column in (rows[0] if rows else ["start_ns"])},
        lanes=the_lanes,
        names=the_names,
        collectives=the_collectives,
        shapes=the_shapes,
        steps=the_steps,
        steps_from=draw(st.sampled_from(["none", "ProfilerStep", "user"])),
        phases_from=draw(st.sampled_from(["none", "autograd"])),
        annotations=draw(annotations(times, len(the_lanes), len(the_names))),
    )


@st.composite
def annotations(draw: st.DrawFn, times: st.SearchStrategy[int], lane_count: int, name_count: int) -> Annotations:
    count = draw(st.integers(0, 4))
    starts = sorted(draw(st.lists(times, min_size=count, max_size=count)))
    lengths, its_lanes, its_names = (
        draw(st.lists(st.integers(least, most), min_size=count, max_size=count))
        for least, most in ((0, 90), (UNKNOWN, lane_count - 1), (0, name_count - 1))
    )
    start_ns = np.array(starts, np.int64)
    return Annotations(
        start_ns,
        start_ns + np.array(lengths, np.int64),
        np.array(its_lanes, np.int32),
        np.array(its_names, np.int32),
    )


@st.composite
def recordings(
    draw: st.DrawFn,
    *,
    min_timelines: int = 1,
    max_timelines: int = 3,
    max_spans: int = 8,
    times: st.SearchStrategy[int] = SMALL_TIMES,
) -> Recording:
    """A Recording of a few timelines; several may be of one rank."""
    parts = draw(st.lists(timelines(max_spans=max_spans, times=times), min_size=min_timelines, max_size=max_timelines))
    return Recording(
        timelines=tuple(parts),
        origin=draw(st.sampled_from(Origin)),
        sources=tuple(draw(texts()) for _ in parts),
        ranks_from=draw(st.sampled_from(["order", "distributedInfo", "file name"])),
        world_size=draw(st.none() | st.integers(1, 2048)),
        environment=draw(st.dictionaries(texts(), texts(), max_size=3)),
        warnings=tuple(draw(st.lists(texts(), max_size=3))),
    )
