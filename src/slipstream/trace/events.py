"""Chrome-trace JSON as a stream of typed events, in memory that does not grow with the file.

The array of events is cut at the text that stands between two events, events that no analysis needs (Python frames,
flow arrows) are dropped before they are decoded, and the rest is decoded by msgspec into structs that skip every
field not named here. A cut in the wrong place cannot pass: the pieces between two cuts would not be valid JSON. What
does not decode is read again piece by piece, then by a tolerant decoder; what remains is counted as lost.

Profilers have written invalid JSON in several ways (unescaped quotes and control characters, bad UTF-8, NaN,
duplicate keys, integers beyond 64 bits, files cut off by a full disk); all of them are read as far as they go.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from slipstream.core.errors import TraceError

Scalar = int | str | float | bool | None

_NOTHING = msgspec.Raw(b"")


class Args(msgspec.Struct, gc=False):
    """The fields of an event's `args` that some analysis reads. `Raw` where only the text matters."""

    external_id: Scalar = msgspec.field(name="External id", default=None)
    correlation: Scalar = None
    device: Scalar = None
    stream: Scalar = None
    input_dims: msgspec.Raw = msgspec.field(name="Input Dims", default=_NOTHING)
    input_type: msgspec.Raw = msgspec.field(name="Input type", default=_NOTHING)
    grid: msgspec.Raw = _NOTHING
    collective: Scalar = msgspec.field(name="Collective name", default=None)
    elements_in: Scalar = msgspec.field(name="In msg nelems", default=None)
    elements_out: Scalar = msgspec.field(name="Out msg nelems", default=None)
    group_size: Scalar = msgspec.field(name="Group size", default=None)
    dtype: Scalar = None
    group_name: Scalar = msgspec.field(name="Process Group Name", default=None)
    group_description: Scalar = msgspec.field(name="Process Group Description", default=None)
    group_ranks: msgspec.Raw = msgspec.field(name="Process Group Ranks", default=_NOTHING)
    sequence: Scalar = msgspec.field(name="Seq", default=None)
    name: Scalar = None
    labels: Scalar = None


class Event(msgspec.Struct, gc=False):
    """One event. Times stay decimal text: as floats, microseconds since 1970 are wrong by tens of nanoseconds."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: Scalar = None
    tid: Scalar = None
    ts: msgspec.Raw = _NOTHING
    dur: msgspec.Raw = _NOTHING
    args: Args | None = None


METADATA_KEYS = (
    "schemaVersion",
    "distributedInfo",
    "deviceProperties",
    "traceName",
    "host_name",
    "baseTimeNanoseconds",
    "record_shapes",
    "with_stack",
    "cuda_runtime_version",
    "cuda_driver_version",
    "hip_runtime_version",
    "roctracer_version",
    "trace_id",
)
"""Top-level keys that are read, wherever they stand: before or after the events."""

_BLOCK = 4 << 20
_METADATA_LIMIT = 64 << 20
_LONGEST_EVENT = 64 << 20
_MOST_NESTED = 64
"""How many starts of events the text of one event may hold: objects nested in its `args` look like events too."""

_LONGEST_WORD = len(r"\ud83d\ude80")
"""A decoder names the beginning of a word, number or escape that is cut off."""

_ARRAY = re.compile(rb'"traceEvents"\s*:\s*\[')
_FIRST_KEY = re.compile(rb'\{\s*("(?:[^"\\]|\\.){1,40}")\s*:')
_NO_EVENTS = re.compile(r'(?:[\s,]++|null|true|false|-?\d[\d.eE+-]*+|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
_EVENT_START = re.compile(r'\{\s*"(?:ph|cat|name|pid|tid|ts|dur)"\s*:')
_ARRAY_END = re.compile(r'\]\s*(?:\Z|,\s*"|\}(?!\s*[,}\]]))')
_LAST_END = re.compile(r"\}\s*(?=" + _ARRAY_END.pattern + ")")
_ESCAPE = re.compile(r'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|)')
_QUOTE = re.compile(r'(?<!\\)"')
_NAME = re.compile(r'"name"\s*:\s*"')
_NAME_END = re.compile(r'"\s*(?:\}|,\s*"(?:pid|ph|cat|tid|ts|dur|args|id|s|bp)"\s*:)')
_LOSSLESS = "surrogateescape"
_SURROGATE = re.compile("[\ud800-\udfff]")

BLOCKING_PYTHON = ("method wait of", "method synchronize of")
"""Parts of the names of those Python frames that are of use: in them a thread is blocked."""

_IDLE_CALL = re.compile(
    rb'\w+"\s*,\s*"name"\s*:\s*"(?:cuda|hip)(?:Event(?:Query|Record|Create|Destroy|ElapsedTime)|Occupancy|Func|StreamIs'
    rb"|StreamGet|StreamWaitEvent|Pointer|Get|Peek|DeviceGet|SetDevice|ThreadExchange)"
)
"""Runtime calls that start no work and block on none: most of the calls of a training step."""

_NOT_ALL_NEEDED = frozenset({b"pyt", b"cud", b"hip", b"Run"})
"""Beginnings of the categories of which not every event is needed: Python frames and runtime calls."""

_FLOWS = frozenset({b"s", b"t", b"f"})

_decode_events = msgspec.json.Decoder(list[Event]).decode
_decode_event = msgspec.json.Decoder(Event).decode
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


class EventStream:
    """Events of one trace file, a block at a time.

    After `blocks` is exhausted: `metadata` holds the top-level keys, `lost_bytes` what could not be read, `repaired`
    how many events were mended, `complete` whether the array of events was closed, `total_bytes` what came in.
    """

    def __init__(self, chunks: Iterator[bytes], name: str) -> None:
        self._chunks = chunks
        self._name = name
        self.metadata: dict[str, Any] = {}
        self.total_bytes = 0
        self.lost_bytes = 0
        self.repaired = 0
        self.complete = False

    def blocks(self) -> Iterator[list[Event]]:
        """Lists of events in the order of the file; most Python frames and flow events are left out."""
        rest, at_end = self._find_array()
        cutter: _Cutter | None = None
        while not self.complete:
            cutter = cutter or _Cutter.learn(rest)
            if cutter is not None and (cut := rest.rfind(cutter.separator)) > 0:
                body, rest = rest[:cut], rest[cut + cutter.opening_at :]
                events, unread = self._decode(body, cutter)
                rest = unread + rest
                yield events
            elif cutter is None or len(rest) > _LONGEST_EVENT:
                events, rest = self._salvage(rest, final=False)
                yield events
            if at_end and not self.complete:
                events, rest = self._salvage(rest, final=True)
                yield events
            if at_end:
                break
            if not self.complete:
                rest, at_end = self._fill(rest)
        self._finish(rest)

    def _read(self) -> bytes:
        chunk = next(self._chunks, b"")
        self.total_bytes += len(chunk)
        return chunk

    def _fill(self, rest: bytes) -> tuple[bytes, bool]:
        """Read until `rest` has grown by a block. The flag says that the file has ended."""
        parts, size = [rest], 0
        while size < _BLOCK:
            chunk = self._read()
            if not chunk:
                return b"".join(parts), True
            parts.append(chunk)
            size += len(chunk)
        return b"".join(parts), False

    def _find_array(self) -> tuple[bytes, bool]:
        """Read up to the array of events; what stands before it is metadata. The flag says that the file has ended."""
        head, at_end = b"", False
        while not at_end and len(head) <= _METADATA_LIMIT:
            searched = max(len(head) - 64, 0)
            head, at_end = self._fill(head)
            start = head[:4096].lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
            if start == b"[":
                return head[head.index(b"[") + 1 :], at_end
            if start and start != b"{":
                raise TraceError(
                    f"is not a profiler trace: JSON was expected, it begins with {head[:24]!r}",
                    where=self._name,
                    do="give the file that torch.profiler's export_chrome_trace wrote",
                )
            if found := _ARRAY.search(head, searched):
                self._take_metadata(head[: found.start()])
                return head[found.end() :], at_end
        raise TraceError(
            'holds no "traceEvents"' + (f" ({self.total_bytes} bytes read)" if head else ": it is empty"),
            where=self._name,
            do="give a Chrome trace (torch.profiler, export_chrome_trace); record it again if it was cut off",
        )

    def _decode(self, body: bytes, cutter: _Cutter) -> tuple[list[Event], bytes]:
        """Decode whole events. Returns them and the text that belongs to none of them.

        That is an event that goes on in the next block after all, or what stands behind the array if it ended here.
        """
        kept = cutter.kept(body)
        try:
            return _decode_events(cutter.whole(kept)), b""
        except _UNREADABLE:
            return self._salvage(cutter.text(kept), final=False)

    def _salvage(self, raw: bytes, *, final: bool) -> tuple[list[Event], bytes]:
        """Read events one by one from text that may be damaged, may hold the end of the array, or may be cut off.

        Unless `final`, an event at the end that seems cut off is returned as the rest.
        """
        text = raw.decode("utf-8", _LOSSLESS)
        starts = [found.start() for found in _EVENT_START.finditer(text)]
        events: list[Event] = []
        at = 0
        event: Event | None = Event()
        while (at := _after_separators(text, at)) < len(text):
            if _ARRAY_END.match(text, at):
                if not final and len(text) - at < _LONGEST_WORD:
                    return events, text[at:].encode("utf-8", _LOSSLESS)  # what follows tells whether it is the end
                self.complete = True
                return events, text[at + 1 :].encode("utf-8", _LOSSLESS)
            following = bisect_right(starts, at)
            most = 1 if event is None else _MOST_NESTED  # one long search for the end is enough for a damaged stretch
            stops = [*starts[following : following + most], len(text)][:most]
            event, end, cut = _read_event(text, at, stops)
            goes_on = len(text) in (stops[0], stops[-1] if cut else -1)
            if event is None and goes_on and not final and len(text) - at < _LONGEST_EVENT:
                return events, text[at:].encode("utf-8", _LOSSLESS)
            if event is None:
                event, end = _mended(text, at, stops[0])
                self.repaired += event is not None
            if event is None:
                self.lost_bytes += len(text[at:end].encode("utf-8", _LOSSLESS))
            else:
                events.append(event)
            at = end
        return events, b""

    def _finish(self, rest: bytes) -> None:
        if not self.complete:
            return
        parts, size = [rest], len(rest)
        while size < _METADATA_LIMIT and (chunk := self._read()):
            parts.append(chunk)
            size += len(chunk)
        self._take_metadata(b"".join(parts))

    def _take_metadata(self, raw: bytes) -> None:
        """Find the known keys one by one: a log line with a bad quote in it must not cost the others."""
        text = raw.decode("utf-8", "replace")
        for key in METADATA_KEYS:
            if key in self.metadata or not (found := re.search(rf'"{key}"\s*:\s*', text)):
                continue
            try:
                self.metadata[key] = _printable(_plain_json.raw_decode(text, found.end())[0])
            except (ValueError, RecursionError):
                continue


class _Cutter:
    """Knows the exact text between two events of one file, which one program wrote in one way."""

    def __init__(self, separator: bytes, first_key: bytes, lead: bytes) -> None:
        self.separator = separator
        self.opening_at = separator.index(b"{")
        self.opening = separator[self.opening_at :]
        self._first_key = first_key
        self._phase_at = len(lead) - len(lead.lstrip()) + 1
        self._category_at = len(lead)

    @classmethod
    def learn(cls, text: bytes) -> _Cutter | None:
        """Look at the first events; None if there are no two that begin with the same key."""
        first = _FIRST_KEY.search(text)
        if first is None:
            return None
        keys = dict.fromkeys((b'"ph"', first[1]))
        for key in keys:
            between = re.compile(rb"\}\s*,\s*\{\s*" + re.escape(key) + rb"\s*:")
            seen = Counter(found[0] for found in between.finditer(text[: 1 << 20]))
            if seen:
                separator = seen.most_common(1)[0][0]
                lead = re.search(re.escape(separator) + rb'(\s*"X"\s*,\s*"cat"\s*:\s*")', text)
                return cls(separator, key, lead[1] if lead and key == b'"ph"' else b"")
        return None

    def kept(self, body: bytes) -> list[bytes]:
        """Cut whole events apart, without their opening and closing, and leave out those that nothing needs."""
        body = body.lstrip(b" \t\r\n,")
        if body.startswith(self.opening):
            body = body[len(self.opening) :]
            pieces = body.split(self.separator)
        else:
            # The first event begins otherwise (another key, other spacing): let it ride as it is.
            head, *pieces = body.split(self.separator)
            pieces = [self._as_piece(head), *pieces]
        if not self._category_at:
            return pieces
        # The common case first, and calls last: this is run for every event of the file.
        phase, category, key = self._phase_at, self._category_at, self._first_key
        needed, not_all, flows = self._needed, _NOT_ALL_NEEDED, _FLOWS
        return [
            piece
            for piece in pieces
            if ((ph := piece[phase : phase + 1]) == b"X" and piece[category : category + 3] not in not_all)
            or key in piece  # several events that the separator did not part
            or (ph not in flows and needed(piece))
        ]

    def _needed(self, piece: bytes) -> bool:
        """Whether a Python frame or runtime call may be needed: a frame that waits, a call that is not idle."""
        if piece.startswith(b"pyt", self._category_at):
            return any(call.encode() in piece for call in BLOCKING_PYTHON)
        return not _IDLE_CALL.match(piece, self._category_at)

    def whole(self, pieces: list[bytes]) -> bytes:
        """Pieces as a JSON array."""
        if not pieces:
            return b"[]"
        return b"[" + self.opening + self.separator.join(pieces) + b"}]"

    def text(self, pieces: list[bytes]) -> bytes:
        """Pieces as they stood in the file, up to where the next event opens."""
        return self.opening + self.separator.join(pieces) + self.separator[: self.opening_at]

    def _as_piece(self, event: bytes) -> bytes:
        """An event that opens in its own way, as a piece that follows an empty event of our opening."""
        return b'""}, ' + event


def _after_separators(text: str, at: int) -> int:
    """Where the next object, or something that is no JSON, begins."""
    found = _NO_EVENTS.match(text, at)
    return found.end() if found else at


def _read_event(text: str, at: int, stops: Sequence[int]) -> tuple[Event | None, int, bool]:
    """Read the event that begins at `at` and ends before one of `stops`.

    Returns it with its end, or None with True if it might be whole in a longer text. Only so much text is handed to
    a decoder at a time, because a failure costs time in proportion to it.
    """
    reach = 1
    while True:
        stop = stops[min(reach, len(stops)) - 1]
        piece = text[at:stop]
        try:
            return _decode_event(piece.rstrip(" \t\r\n,")), stop, False
        except _UNREADABLE:
            pass
        try:
            found, length = _tolerant.raw_decode(piece)
            return _event_from(found), at + length, False
        except json.JSONDecodeError as error:
            near_the_end = len(piece.rstrip(" \t\r\n,")) - error.pos < _LONGEST_WORD
            cut = near_the_end or error.msg.startswith("Unterminated")
        except RecursionError:
            cut = False
        if not cut or reach >= len(stops):
            return None, at, cut
        reach *= 4


def _event_from(found: Any) -> Event:
    """Make an event from decoded JSON of any shape; what has the wrong type is left out."""
    if not isinstance(found, dict):
        return Event()
    args = found.get("args")
    times: dict[str, Any] = {key: _raw(found[key]) for key in ("ts", "dur") if key in found}
    return Event(
        ph=_text(found.get("ph")),
        cat=_text(found.get("cat")),
        name=_text(found.get("name")),
        pid=_scalar(found.get("pid")),
        tid=_scalar(found.get("tid")),
        args=_args_from(args) if isinstance(args, dict) else None,
        **times,
    )


def _args_from(found: dict[str, Any]) -> Args:
    values: dict[str, Any] = {}
    for name, key, is_raw in _ARGS:
        value = found.get(key)
        if value is None:
            continue
        values[name] = _raw(value) if is_raw else _scalar(value)
    return Args(**values)


def _scalar(value: Any) -> Scalar:
    if isinstance(value, _Number):
        return float(value)
    return _printable(value) if isinstance(value, str | int | float) else None


def _text(value: Any) -> str:
    return "" if value is None else str(_printable(value))


def _raw(value: Any) -> msgspec.Raw:
    text = value if isinstance(value, _Number) else json.dumps(value, ensure_ascii=False)
    return msgspec.Raw(text.encode("utf-8", "replace"))


def _printable(value: Any) -> Any:
    """JSON without half characters (lone surrogates), which no file and no terminal takes."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list) else value


_ARGS = [(field.name, field.encode_name, field.type is msgspec.Raw) for field in msgspec.structs.fields(Args)]


class _Number(str):
    """The digits of a number that is not to be rounded."""


def _whole(digits: str) -> int | float:
    """Python refuses to read integers of more than some thousand digits; nothing here needs over twenty."""
    return int(digits) if len(digits) <= 20 else float(digits)


_tolerant = json.JSONDecoder(strict=False, parse_float=_Number, parse_int=_whole)
_plain_json = json.JSONDecoder(strict=False, parse_int=_whole)


def _mended(text: str, at: int, stop: int) -> tuple[Event | None, int]:
    """Read one damaged event after escaping quotes in its name and backslashes anywhere.

    Returns it with its end; or None, and where the next event or the end of the array is.
    """
    piece = _ESCAPE.sub(lambda found: found[0] if found[1] else r"\\", text[at:stop])
    if (name := _NAME.search(piece)) and (end := _NAME_END.search(piece, name.end())):
        inside = _QUOTE.sub(r"\"", piece[name.end() : end.start()])
        piece = piece[: name.end()] + inside + piece[end.start() :]
    if len(piece) != stop - at:
        with suppress(*_UNREADABLE):
            found, length = _tolerant.raw_decode(piece)
            return _event_from(found), stop - (len(piece) - length)
    closing = _LAST_END.search(text, at, stop) if stop == len(text) else None
    return None, closing.end() if closing else stop
