"""Chrome JSON as a stream of events: the fast path equals a slow oracle, and no damage costs more than what it hit."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.core.errors import SlipstreamError, TraceError
from slipstream.trace import events as module
from slipstream.trace.events import Args, Event, EventStream
from slipstream.trace.times import INVALID, nanoseconds
from traces import ALL_REDUCE, GEMM, LAYOUTS, Trace

Told = tuple[object, ...]

BLOCKS = (1, 7, 100, 4096)
QUICK = 5.0  # seconds; what takes longer on a slow machine grows faster than its input


@dataclass
class Read:
    """What a stream gave."""

    stream: EventStream
    events: list[Event]

    @property
    def told(self) -> list[Told]:
        return [told(event) for event in self.events if event.ph == "X" and not is_frame(event)]

    @property
    def names(self) -> list[str]:
        return [event.name for event in self.events if event.ph == "X" and not is_frame(event)]


def read(data: bytes | str, block: int = 4096) -> Read:
    """Read in blocks of this many bytes, which arrive in chunks of as many."""
    raw = data.encode() if isinstance(data, str) else data
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        stream = EventStream(iter([raw[at : at + block] for at in range(0, len(raw), block)]), "t.json")
        return Read(stream, [event for events in stream.blocks() for event in events])


def is_frame(event: Event) -> bool:
    return event.cat == "python_function" and not any(part in event.name for part in module.BLOCKING_PYTHON)


def told(event: Event) -> Told:
    """All that an event says, comparable."""
    start, length = nanoseconds([event.ts, event.dur or b"0"]).tolist()
    args = {} if event.args is None else msgspec.structs.asdict(event.args)
    said = tuple(
        sorted((key, plain(value)) for key, value in args.items() if value not in (None, b"") and plain(value))
    )
    return (event.ph, event.cat, event.name, plain(event.pid), plain(event.tid), start, length, said)


def plain(value: Any) -> str:
    if isinstance(value, msgspec.Raw):
        value = json.loads(bytes(value) or b'""', parse_float=str)
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


# -- the oracle


def oracle(text: str) -> list[Told]:
    """The same from the whole file at once, digits of numbers kept."""
    whole = json.loads(text, parse_float=Decimal, parse_int=Decimal, strict=False)
    events = whole if isinstance(whole, list) else whole["traceEvents"]
    return [oracle_told(event) for event in events if isinstance(event, dict) and oracle_wants(event)]


def oracle_wants(event: dict[str, Any]) -> bool:
    frame = event.get("cat") == "python_function" and not any(p in str(event["name"]) for p in module.BLOCKING_PYTHON)
    return event.get("ph") == "X" and not frame


def oracle_told(event: dict[str, Any]) -> Told:
    args = event.get("args") if isinstance(event.get("args"), dict) else {}
    assert isinstance(args, dict)
    said = {}
    for info in msgspec.structs.fields(Args):
        value = args.get(info.encode_name)
        scalar = value is None or isinstance(value, str | Decimal | bool)
        if info.type is msgspec.Raw or scalar:
            said[info.name] = "" if value is None else oracle_plain(value)
    times = (oracle_ns(event.get("ts", "")), oracle_ns(event.get("dur", 0)))
    texts = [oracle_text(event.get(key)) for key in ("ph", "cat", "name")]
    places = [oracle_place(event.get(key)) for key in ("pid", "tid")]
    return (*texts, *places, *times, tuple(sorted((key, value) for key, value in said.items() if value)))


def oracle_text(value: Any) -> str:
    return "" if value is None else str(value)


def oracle_place(value: Any) -> str:
    return oracle_plain(value) if isinstance(value, str | Decimal | bool) else ""


def oracle_plain(value: Any) -> str:
    def number(value: Any) -> Any:
        if isinstance(value, Decimal):
            return int(value) if value == value.to_integral_value() else str(value)
        return [number(item) for item in value] if isinstance(value, list) else value

    return value if isinstance(value, str) else json.dumps(number(value), default=str)


def oracle_ns(value: Any) -> int:
    try:
        exact = Decimal(value) * 1000
    except (ArithmeticError, TypeError, ValueError):
        return INVALID
    return int(exact.to_integral_value()) if exact.is_finite() and abs(exact) < 2**61 else INVALID


# -- a file with everything in it


def everything() -> Trace:
    """Metadata on both sides, flows and frames, a nested list of objects, and events that begin in several ways."""
    trace = Trace(rank=3, world_size=8, traceName="/data/rank3.json")
    trace.step(1, 0, 900_000)
    trace.raw(ph="X", cat="python_function", name="model.py(3): forward", pid=1, tid=1, ts=1000, dur=5000, args={})
    trace.raw(ph="X", cat="python_function", name="method wait of c10d.Work", pid=1, tid=1, ts=2000, dur=1000)
    trace.op("aten::mm", 3_000, 9_000, [[128, 64], [64, 32]], **{"External id": 7})
    trace.launch(GEMM, 20_000, 50_000, at=4_000, grid=[4, 2, 1])
    trace.raw(ph="s", id=1, pid=1, tid=1, ts=4_000, cat="ac2g", name="ac2g")
    trace.raw(ph="f", id=1, pid=0, tid=7, ts=20_000, cat="ac2g", name="ac2g", bp="e")
    trace.launch(ALL_REDUCE, 30_000, 90_000, at=6_000, stream=20, **{"Collective name": "allreduce", "Group size": 8})
    trace.raw(name="first key is another", ph="X", cat="cpu_op", pid=1, tid=1, ts=7000, dur=1000)
    trace.raw(ts=8000, dur=1000, ph="X", cat="cpu_op", name="times first", pid=1, tid=1)
    frames = [{"ph": "X", "name": "inner"}, {"name": "b"}, {"ph": "X"}, {"ph": 3}]
    trace.op("nested", 9_000, 10_000, stack=frames, more={"deep": [frames]})
    trace.op('"},\n  {\n    "ph": "X", "cat": "kernel"}, {"ph": "X"}, ] } [ {', 10_000, 11_000)
    trace.op("ünï \\ \u2028 \U0001f680 \t", 11_000, 12_000)
    trace.thread_name(1, "main")
    trace.raw(ph="i", s="g", name="Record Window End", pid="", tid="", ts=12_000)
    return trace


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block", BLOCKS)
def test_equals_the_oracle_in_every_layout_and_however_it_is_cut(layout: str, block: int) -> None:
    text = everything().text(layout)
    found = read(text, block)
    assert found.told == oracle(text)
    assert (found.stream.complete, found.stream.lost_bytes, found.stream.repaired) == (True, 0, 0)
    assert found.stream.total_bytes == len(text.encode())
    if layout not in ("array", "legacy"):
        assert found.stream.metadata["distributedInfo"] == {"backend": "nccl", "rank": 3, "world_size": 8}
        assert found.stream.metadata["traceName"] == "/data/rank3.json"


@pytest.mark.parametrize("layout", ["kineto", "compact", "array"])
def test_cut_off_anywhere_it_keeps_every_event_that_is_whole(layout: str) -> None:
    text = everything().text(layout)
    whole = oracle(text)
    raw = text.encode()
    array_starts = raw.index(b"[") + 1 if layout == "array" else raw.index(b'"traceEvents"') + 20
    for cut in range(len(raw)):
        try:
            found = read(raw[:cut])
        except TraceError:
            assert cut < array_starts
            continue
        got = [event for event in found.told if event[5] != INVALID]  # without objects nested in the last event
        assert got == whole[: len(got)]
        assert len(got) >= len(whole) - remaining_events(raw[cut:])
        assert found.stream.lost_bytes < 900, "more was lost than one event"


def remaining_events(text: bytes) -> int:
    """At most this many events end in here."""
    return text.count(b"}")


@pytest.mark.parametrize("layout", ["kineto", "compact"])
def test_a_file_that_was_cut_off_says_so(layout: str) -> None:
    text = everything().text(layout)
    cut = text.index("nested")
    found = read(text[:cut])
    assert not found.stream.complete
    assert found.stream.lost_bytes > 0
    assert "aten::mm" in found.names


# -- damage


def damaged(at: str, by: str) -> str:
    """The file with something put in the place of `at`."""
    text = everything().text()
    assert text.count(at) == 1
    return text.replace(at, by)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ('a "quoted" name', 'a "quoted" name'),
        ('"', '"'),
        ('"all"', '"all"'),
        ('<function f at "x", y>', '<function f at "x", y>'),
        ("tab\tand\nnewline\x01", "tab\tand\nnewline\x01"),
        ("C:\\new\\x\\users", None),
        ('C:\\py "q"', None),
    ],
)
def test_a_name_that_was_not_escaped_is_mended(name: str, expected: str | None, block: int) -> None:
    found = read(damaged("aten::mm", name), block)
    assert len(found.names) == len(oracle(everything().text()))
    assert found.stream.complete and found.stream.lost_bytes == 0
    if expected is not None:
        assert expected in found.names
    mended = next(event for event in found.events if event.args and bytes(event.args.input_dims))
    assert json.loads(bytes(mended.args.input_dims)) == [[128, 64], [64, 32]]  # type: ignore[union-attr]


@pytest.mark.parametrize("block", BLOCKS)
def test_bad_utf8_costs_nothing(block: int) -> None:
    raw = everything().text().encode().replace(b"aten::mm", b"aten\xff\xfe::mm\xc3")
    found = read(raw, block)
    assert "aten\ufffd\ufffd::mm\ufffd" in found.names
    assert len(found.names) == len(oracle(everything().text()))
    assert found.stream.lost_bytes == 0


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(
    ("at", "by"),
    [
        ('"Group size": 8', '"Group size": 10159970886766084423'),
        ('"Group size": 8', f'"Group size": {"9" * 40}'),
        ('"Group size": 8', f'"Group size": {"9" * 5000}'),
        ('"Group size": 8', f'"Group size": -{"9" * 5000}, "x": {"1" * 9999}'),
        ('"Group size": 8', '"Group size": 1e999'),
        ('"Group size": 8', '"Group size": NaN'),
        ('"Group size": 8', '"Group size": -Infinity'),
        ('"Group size": 8', '"Group size": [1, {"ph": 2}]'),
        ('"Group size": 8', '"Group size": {}'),
        ('"Group size": 8', '"x": NaN, "y": Infinity'),
        ('"Group size": 8', '"x": "\\ud800", "y": "\\udc00\\ud800"'),
        ('"Group size": 8', '"Group size": 8, "Group size": 9'),
        ('"Group size": 8', f'"x": {"[" * 400}{"]" * 400}'),
    ],
)
def test_odd_values_cost_no_event(at: str, by: str, block: int) -> None:
    text = damaged(at, by)
    found = read(text, block)
    assert found.names == [event[2] for event in oracle(everything().text())]
    assert found.stream.complete and found.stream.lost_bytes == 0


def test_the_last_of_duplicate_keys_counts() -> None:
    (event,) = read(
        '{"traceEvents": [{"ph": "B", "ph": "X", "ts": 1, "ts": 2, "args": {"stream": 1, "stream": 7}}]}'
    ).events
    assert (event.ph, bytes(event.ts), event.args and event.args.stream) == ("X", b"2", 7)


@pytest.mark.parametrize("block", BLOCKS)
def test_nesting_beyond_reason_costs_one_event(block: int) -> None:
    found = read(damaged('"Group size": 8', f'"x": {"[" * 200_000}{"]" * 200_000}'), max(block, 4096))
    names = [event[2] for event in oracle(everything().text())]
    names.remove(ALL_REDUCE)
    assert found.names == names
    assert found.stream.lost_bytes > 400_000
    assert found.stream.complete and found.stream.metadata["traceName"] == "/data/rank3.json"


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("args", ["[]", "null", "7", '"text"', '[{"ph": 1}]', "true", "{}"])
def test_args_of_any_type(args: str, block: int) -> None:
    text = f'{{"traceEvents": [{{"ph": "X", "name": "a", "args": {args}}},{{"ph": "X", "name": "b"}}]}}'
    assert read(text, block).names == ["a", "b"]


@pytest.mark.parametrize("field", ["ph", "cat", "name", "pid", "tid", "ts", "dur"])
@pytest.mark.parametrize("value", ["null", "7", "1.5", "true", "[]", '{"a": 1}', '"x"', "-1e5"])
def test_fields_of_any_type(field: str, value: str) -> None:
    others = {"ph": '"X"', "cat": '"kernel"', "name": '"k"', "pid": "0", "tid": "7", "ts": "5", "dur": "1"}
    odd = ", ".join(f'"{key}": {text}' for key, text in {**others, field: value}.items())
    fine = ", ".join(f'"{key}": {text}' for key, text in others.items())
    found = read(f'{{"traceEvents": [{{{fine}}}, {{{odd}}}, {{{fine}}}]}}')
    assert len(found.events) == 3
    assert found.stream.lost_bytes == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12", 12_000),
        ("12.5", 12_500),
        ("1712195495507888.958", 1712195495507888958),
        ("1.2e3", 1_200_000),
        ("12E-1", 1_200),
        ('"12.25"', 12_250),
        ("-5", -5_000),
        ("null", INVALID),
        ("[1, 2]", INVALID),
        ('"1,2"', INVALID),
        ('""', INVALID),
        ("NaN", INVALID),
        ("1e999999", INVALID),
        ('"1e999999999999"', INVALID),
        ("9" * 5000, INVALID),
    ],
)
@pytest.mark.parametrize("odd", ["", '"pid": NaN, '])
def test_times_in_any_notation_on_both_paths(text: str, expected: int, odd: str) -> None:
    """`odd` sends the event through the tolerant decoder."""
    (event,) = read(f'{{"traceEvents": [{{{odd}"ph": "X", "ts": {text}, "dur": {text}}}]}}').events
    assert nanoseconds([event.ts, event.dur]).tolist() == [expected, expected]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(
    "junk",
    [
        ",",
        ", ,,",
        ', {"ph": "X", "cat": "kernel", "name": "half", "args": {"a": [1, 2}}',
        ', {"ph": "X", "cat": "kernel", "name": "open',
        ", {",
        ", ]",
        ", }",
        ", }]}",
        ', null, 5, 1.5, "text", true, [], [[]], [1, {}]',
        "\nINFO:2024-05-22 17:15:23 1:1 CuptiActivityProfiler.cpp:297] Processed [1] {2} GPU records\n",
        ", " + "\x00" * 300,
        ", " + '\x00\x01\xff{["' * 50,
    ],
)
def test_junk_between_events_costs_at_most_the_event_behind_it(junk: str, block: int) -> None:
    events = [f'{{"ph": "X", "cat": "kernel", "name": "k{i}", "ts": {i}, "dur": 1}}' for i in range(9)]
    text = f'{{"traceEvents": [{", ".join(events[:4])}{junk}, {", ".join(events[4:])}], "traceName": "rank1"}}'
    found = read(text, block)
    assert found.names[:4] == ["k0", "k1", "k2", "k3"]
    assert found.names[-4:] == ["k5", "k6", "k7", "k8"]
    assert found.stream.complete and found.stream.metadata["traceName"] == "rank1"


@pytest.mark.parametrize(
    "tail", ['{"ph": "X", "name": "bad", "args": {"a": [1, 2}}', '{"ph": "X", "name": "a" b" c" d}']
)
@pytest.mark.parametrize("rest", ["]}", "\n  ]\n}", '\n  ],\n  "distributedInfo": {"rank": 4}\n}'])
def test_a_damaged_last_event_costs_nothing_behind_the_array(tail: str, rest: str) -> None:
    found = read(f'{{"traceEvents": [{{"ph": "X", "name": "good"}}, {tail}{rest}')
    assert found.names[0] == "good"
    assert found.stream.complete
    assert found.stream.metadata == ({"distributedInfo": {"rank": 4}} if "rank" in rest else {})


@pytest.mark.parametrize("first", ["ph", "name", "ts", "cat", "args", "other"])
@pytest.mark.parametrize("block", BLOCKS)
def test_objects_in_a_list_are_not_taken_for_events(first: str, block: int) -> None:
    """In events that begin with any key, of which the nested ones look exactly like them."""
    inner = [{first: "X" if first == "ph" else {} if first == "args" else 1, "n": i} for i in range(5)]
    events: list[dict[str, Any]] = []
    for number in range(12):
        whole = {"ph": "X", "name": f"k{number}", "cat": "kernel", "ts": number, "dur": 1, "args": {"list": inner}}
        whole["other"] = 1
        events.append({first: whole[first], **whole})
    for separators in ((", ", ": "), (",", ":")):
        text = json.dumps({"traceEvents": events}, separators=separators)
        found = read(text, block)
        assert found.told == oracle(text)
        assert found.stream.complete and found.stream.lost_bytes == 0


def test_more_nested_objects_than_any_event_may_have_cost_one_event() -> None:
    nested = json.dumps([{"ph": "q"}] * 3000)
    events = [f'{{"ph": "X", "name": "k{i}"}}' for i in range(6)]
    events[3] = f'{{"ph": "X", "name": "k3", "args": {{"list": {nested}}}}}'
    found = read(f'{{"traceEvents": [{", ".join(events)}]}}')
    assert [name for name in found.names if name != "k3"] == ["k0", "k1", "k2", "k4", "k5"]


# -- what is no trace


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "empty"),
        (b"   \n ", "empty|traceEvents"),
        (b"hello", "JSON was expected"),
        (b"\x00\x01", "JSON was expected"),
        (b'\xff\xfe{\x00"\x00', "JSON was expected"),
        (b"{}", "traceEvents"),
        (b'{"traceEvents": null}', "traceEvents"),
        (b'{"traceEvents": {"a": []}}', "traceEvents"),
        (b"{" * 1000, "traceEvents"),
    ],
)
def test_what_is_no_trace_is_an_error(data: bytes, what: str) -> None:
    with pytest.raises(TraceError, match=what):
        read(data)


@pytest.mark.parametrize(
    "data", [b"[]", b'{"traceEvents":[]}', b'\xef\xbb\xbf{"traceEvents" : [ ] }', b"[", b'{"traceEvents":[']
)
def test_no_events(data: bytes) -> None:
    assert read(data).events == []


def test_metadata_is_read_around_a_line_that_is_no_json() -> None:
    log = '"PROFILER_LOG": ["INFO: opened "quoted" file\n"], '
    text = f'{{{log}"schemaVersion": 1, {log}"traceEvents": [{{"ph": "X"}}], {log}"distributedInfo": {{"rank": 2}}}}'
    assert read(text).stream.metadata == {"schemaVersion": 1, "distributedInfo": {"rank": 2}}


def test_metadata_is_printable() -> None:
    found = read(
        '{"host_name": "a\\ud800b", "deviceProperties": [{"name": "\\udc00"}], "traceEvents": []}'
    ).stream.metadata
    assert found == {"host_name": "a\ufffdb", "deviceProperties": [{"name": "\ufffd"}]}


# -- random damage


@st.composite
def documents(draw: st.DrawFn) -> str:
    """Traces of random events in a random layout: keys in any order, values of any type."""
    odd = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
    values = st.recursive(
        odd, lambda more: st.lists(more, max_size=3) | st.dictionaries(st.text(max_size=3), more), max_leaves=4
    )
    texts = st.sampled_from(["X", "kernel", "}, {", '"ph": ', "]"]) | st.text(max_size=6)
    times = st.integers(0, 2**50) | st.decimals(0, 10**6, places=3).map(float)
    known = {info.encode_name: values for info in msgspec.structs.fields(Args)}
    args = st.fixed_dictionaries({}, optional={**known, "x": values})
    fields = {
        "cat": texts,
        "name": texts,
        "pid": texts | times,
        "tid": texts | times,
        "dur": times,
        "args": args | values,
    }
    event = st.fixed_dictionaries({"ph": st.just("X"), "ts": times}, optional=fields)
    events = draw(st.lists(event, max_size=6))
    keys = draw(st.permutations(["ph", "cat", "name", "pid", "tid", "ts", "dur", "args"]))
    ordered = [{key: event[key] for key in keys if key in event} for event in events]
    indent, ascii_only = draw(st.sampled_from([None, 1, 2])), draw(st.booleans())
    compact = (",", ":") if draw(st.booleans()) and indent is None else None
    return json.dumps(
        {"a": 1, "traceEvents": ordered, "b": 2}, indent=indent, ensure_ascii=ascii_only, separators=compact
    )


@given(documents(), st.sampled_from(BLOCKS))
def test_random_documents_equal_the_oracle(text: str, block: int) -> None:
    """NaN and half characters are no JSON, but writers write them."""
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        raw = text.encode("utf-8", "surrogatepass")
    found = read(raw, block)
    expected = oracle(raw.decode("utf-8", "replace"))
    assert [event[:3] for event in found.told] == [cleaned(event[:3]) for event in expected]
    assert [event[5:7] for event in found.told] == [event[5:7] for event in expected]
    assert found.stream.complete and found.stream.lost_bytes == 0


def cleaned(texts: Sequence[object]) -> Told:
    return tuple("".join("\ufffd" if 0xD800 <= ord(c) < 0xE000 else c for c in str(text)) for text in texts)


@given(st.data(), st.sampled_from(BLOCKS))
def test_random_damage_raises_nothing_and_loses_little(data: st.DataObject, block: int) -> None:
    """One hit of up to eight bytes among forty events: at most the events it touched are lost, and one more."""
    events = [f'{{"ph": "X", "cat": "kernel", "name": "k{i}", "ts": {i}.000, "dur": 1.500}}' for i in range(40)]
    raw = f'{{"traceEvents": [\n  {",".join(events)}\n  ], "traceName": "x"}}'.encode()
    at = data.draw(st.integers(raw.index(b"k0"), raw.index(b"k39")))
    junk = data.draw(
        st.binary(max_size=8) | st.sampled_from([b'"', b"]", b"}", b"{", b"\\", b'",', b'"}]', b"]}", b'],"'])
    )
    gone = data.draw(st.integers(0, 8))
    found = read(raw[:at] + junk + raw[at + gone :], block)
    kept = {name for name in found.names if name.startswith("k")}
    ended_early = junk in (b"]}", b'],"', b'"}]') or (found.stream.complete and b"]" in junk)
    assert ended_early or len(kept) >= 37


@given(
    st.binary(max_size=200), st.sampled_from([b"", b"[", b'{"traceEvents":[', b'{"traceEvents":[{"ph":"X","name":"'])
)
@example(b"\\", b'{"traceEvents":[{"ph":"X","name":"')
def test_garbage_raises_nothing_but_our_errors(garbage: bytes, head: bytes) -> None:
    try:
        read(head + garbage, 64)
    except SlipstreamError as error:
        assert "\n" not in str(error)


# -- time


def timed(data: bytes | str, block: int = 4 << 20) -> Iterator[Read]:
    """Read, and fail if it took long."""
    began = time.monotonic()
    yield read(data, block)
    assert time.monotonic() - began < QUICK


EVENT = (
    '{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1.000, "dur": 1.000, "args": {"device": 0}}'
)


@pytest.mark.parametrize(
    "bad",
    [
        EVENT.replace('"k"', '"a "b" c"'),
        EVENT.replace('"device": 0', '"device": [0'),
        EVENT.replace('"device": 0', '"device": {"x": ['),
        EVENT.replace("}}", ""),
        EVENT.replace('"k"', '"k'),
        EVENT.replace('"kernel"', "7"),
        EVENT.replace('{"device": 0}', "[]"),
        '{"ph": "X", "args": [',
        '{"name": "',
        "{",
        '"name": "',
        "]",
    ],
)
@pytest.mark.parametrize("between", [",\n", ", "])
def test_twenty_thousand_broken_events(bad: str, between: str) -> None:
    """A hundred thousand take five times as long; what grows with the square would take minutes."""
    text = f'{{"traceEvents": [{EVENT}, {EVENT}, {between.join([bad] * 20_000)}, {EVENT}]}}'
    for found in timed(text):
        assert "k" in found.names


@pytest.mark.parametrize("good_between", [1, 50])
def test_broken_events_among_good_ones(good_between: int) -> None:
    part = ",\n".join([EVENT] * good_between + [EVENT.replace('"device": 0', '"device": [{"ph": 0')])
    count = 20_000 // (good_between + 1)
    for found in timed('{"traceEvents": [' + ",\n".join([part] * count) + f", {EVENT}]}}"):
        assert len(found.names) >= count * good_between


GARBAGE = ("{", "[", "}", "]", '"', "\\", " ", ",", "{ ", "\x00", "1 ", "}, {", '"a", ', "é", "] }, ", '"name": "')


@pytest.mark.parametrize("garbage", [*GARBAGE, '{"ph": "X", "name": "'])
def test_megabytes_of_garbage(garbage: str) -> None:
    filler = garbage * (2_000_000 // len(garbage.encode()))
    for text in (f'{{"traceEvents": [{EVENT}, {filler}', f'{{"traceEvents": [{EVENT}, {EVENT}, {filler}, {EVENT}]}}'):
        for found in timed(text):
            assert found.names[:1] == ["k"]
    began = time.monotonic()
    with pytest.raises(TraceError):
        read("{" + filler, 4 << 20)
    assert time.monotonic() - began < QUICK


@pytest.mark.parametrize("where", ["name", "args", "before", "behind"])
def test_one_string_of_fifty_megabytes(where: str) -> None:
    long = "x" * 50_000_000
    name = long if where == "name" else "k"
    args = f'{{"text": "{long}"}}' if where == "args" else "{}"
    before = f'"note": "{long}", ' if where == "before" else ""
    behind = f', "note": "{long}", "traceName": "t"' if where == "behind" else ""
    event = f'{{"ph": "X", "name": "{name}", "args": {args}}}'
    text = f'{{{before}"traceEvents": [{EVENT}, {EVENT}, {event}, {EVENT}]{behind}}}'
    for found in timed(text):
        assert len(found.events) == 4
        assert where != "behind" or found.stream.metadata == {"traceName": "t"}


def test_an_event_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is longer than any event is lost, and memory does not grow with it."""
    monkeypatch.setattr(module, "_LONGEST_EVENT", 1 << 20)
    open_ended = '{"ph": "X", "name": "' + "x" * 8_000_000
    found = read(f'{{"traceEvents": [{EVENT}, {EVENT}, {open_ended}"}}, {EVENT}, {EVENT}]}}', 1 << 16)
    assert found.names == ["k"] * 4
    assert 7_900_000 < found.stream.lost_bytes < 8_100_000
    assert found.stream.complete
