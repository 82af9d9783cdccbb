"""The frame table: for every kind its header keys with type, limit and whether they must be there, and its body.

docs/wire.md shows the same table for people; a test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from swarmnode.cluster.entry_parts import PART_BYTES
from swarmnode.cluster.voter_book import MAX_VOTERS
from swarmnode.errors import MAX_MESSAGE_CHARS, ProtocolError
from swarmnode.wire import limits
from swarmnode.wire.routes import ROUTES
from swarmnode.wire.types import Flag, Int, Ints, Number, Numbers, OneOf, SamplingList, Text, Texts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from swarmnode.wire.types import ValueType

KIND_KEY = "k"
"""The header key that names the kind; no kind may define a key of this name."""
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}
"""dtypes a tensor may have on the wire, with bytes per element."""

BodyRule = Literal["none", "map", "raw", "document", "tensor"]


@dataclass(frozen=True, slots=True)
class Key:
    name: str
    type: ValueType
    required: bool = True


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    group: str
    keys: Mapping[str, Key]
    body: BodyRule
    checks: tuple[tuple[str, Callable[[object], bool]], ...]
    """`keys` as every frame needs them: looked up once, not per frame."""

    def check_header(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """The header's known keys; raises ProtocolError that names the key and what it may be."""
        known = {}
        for name, accepts in self.checks:
            if name in header:
                value = header[name]
                if not accepts(value):
                    text = self.keys[name].type.text
                    raise ProtocolError(f"a {self.name} frame has {name}={value!r:.80}; it must be {text}")
                known[name] = value
            elif self.keys[name].required:
                raise ProtocolError(f"a {self.name} frame came without {name} ({self.keys[name].type.text})")
        return known

    def check_body(self, header: Mapping[str, Any], size: int) -> None:
        """Hold the body's size in bytes against the kind's rule and the header's own words."""
        if self.body == "tensor":
            _check_tensor(self.name, header, size)
        elif size > BODY_LIMITS[self.body]:
            raise ProtocolError(
                f"a {self.name} frame has a body of {size} bytes; allowed are {BODY_LIMITS[self.body]} ({self.body})"
            )


BODY_LIMITS: Mapping[BodyRule, int] = {
    "none": 0,
    "map": limits.MAX_MAP_BODY_BYTES,
    "raw": limits.MAX_CHUNK_BYTES,
    "document": PART_BYTES,
    "tensor": limits.MAX_BODY_BYTES,
}


def _check_tensor(kind: str, header: Mapping[str, Any], size: int) -> None:
    """`bytes` is the tensor's size; a compressed body is smaller, or it would not be."""
    expected = DTYPE_BYTES[header["dtype"]]
    for dimension in header["shape"]:
        expected *= dimension
    fits = 0 < size < expected if "zip" in header else size == expected
    if not (fits and header["bytes"] == expected):
        raise ProtocolError(
            f"a {kind} frame declares {header['dtype']} {header['shape']} ({expected} bytes) in {header['bytes']} "
            f"bytes and carries {size}; the three must be equal"
        )


_ID = Text(64)
_COUNT = Int(0, 2**63 - 1)
_SMALL = Int(0, 2**31 - 1)
_POS = Int(0, 2**31 - 1)
_MARK = Ints(2, 2, 0, 2**63 - 1)
_INCARNATION = Int(0, 2**53 - 1)
_EPOCH = Ints(2, 2, 0, 2**53 - 1)
_STAGE = Int(0, limits.MAX_STAGES - 1)
_MESSAGE = Text(MAX_MESSAGE_CHARS)
_CODE = Text(64)
_CAPABILITIES = Texts(64, 64)
_LANE = Text(16)


def _key(name: str, value_type: ValueType) -> Key:
    return Key(name, value_type)


def _maybe(name: str, value_type: ValueType) -> Key:
    return Key(name, value_type, required=False)


_ROUTE = (
    _maybe("ring", _ID),
    _maybe("epoch", _EPOCH),
    _maybe("lane", _LANE),
    _maybe("seq", _COUNT),
    _maybe("ack", Flag()),
)
"""Where a ring frame goes; a worker leaves out what its node adds."""
_SESSION = (_key("session", _COUNT), _key("gen", _SMALL))
_ROWS = (
    _key("sessions", Ints(1, limits.MAX_ROWS, 0, 2**63 - 1)),
    _key("gens", Ints(1, limits.MAX_ROWS, 0, 2**31 - 1)),
    _key("poss", Ints(1, limits.MAX_ROWS, 0, 2**31 - 1)),
    _key("ns", Ints(1, limits.MAX_ROWS, 1, limits.MAX_POSITIONS)),
)
_TENSOR = (
    _key("dtype", OneOf(tuple(DTYPE_BYTES))),
    _key("shape", Ints(1, limits.MAX_RANK, 1, limits.MAX_DIMENSION)),
    _key("bytes", Int(1, limits.MAX_BODY_BYTES)),
    _maybe("zip", OneOf(("split-zstd",))),
)
_TIMES = (_maybe("ms", Numbers(limits.MAX_STAGES)), _maybe("wait_ms", Number()))
_ERROR = (_key("code", _CODE), _key("message", _MESSAGE))
_RING_STAGE = (_key("ring", _ID), _key("stage", _STAGE))
_PROGRESS = (_key("phase", Text(32)), _key("done", _COUNT), _key("total", _COUNT))
_TERM = _maybe("term", _COUNT)
"""Of the coordinator that says it; without one, that of its WELCOME."""
_CHANNEL_PARAMETERS = (_maybe("ring", _ID), _maybe("epoch", _EPOCH), _maybe("lane", _LANE), _maybe("stage", _STAGE))


def _kind(name: str, group: str, keys: tuple[Key, ...], body: BodyRule = "none") -> Kind:
    checks = tuple((key.name, key.type.accepts) for key in keys)
    return Kind(name, group, {key.name: key for key in keys}, body, checks)


def _link_kinds() -> tuple[Kind, ...]:
    who = (_key("node", _ID), _key("boot", _ID), _key("name", _ID))
    about = (_key("caps", _CAPABILITIES), _key("term", _COUNT))
    hello = (
        _key("protocol", Ints(2, 2, 1, 2**31 - 1)),
        *who,
        _key("roles", Texts(8, 32)),
        *about,
        _key("listen", Texts(8, 128)),
        _maybe("incarnation", _INCARNATION),
        *_CHANNEL_PARAMETERS,
    )
    return (
        _kind("hello", "link", hello),
        _kind("welcome", "link", (_key("protocol", Int(1, 2**31 - 1)), *who, *about)),
        _kind("refuse", "link", _ERROR),
    )


def _ring_kinds() -> tuple[Kind, ...]:
    piece = (
        *_SESSION,
        _key("pos", _POS),
        _key("ids", Ints(1, limits.MAX_POSITIONS, 0, 2**31 - 1)),
        _key("last", Flag()),
        _maybe("sampling", SamplingList()),
        _maybe("from", Ints(3, 3, 0, 2**63 - 1)),
    )
    done = (
        *_SESSION,
        _key("pos", _POS),
        _key("n", Int(1, limits.MAX_POSITIONS)),
        _maybe("token", _SMALL),
    )
    group = (_maybe("round_ms", Number()), _maybe("slot", Flag()))
    tokens = (*_ROWS, _key("tokens", Ints(1, limits.MAX_ROWS * 16, 0, 2**31 - 1)))
    lane_at = (_key("seq", _COUNT), _key("worker", _COUNT), _maybe("route", OneOf(ROUTES)), _maybe("sign", Flag()))
    probe = (_key("nonce", _COUNT), _key("via", _LANE), _key("hops", Int(0, limits.MAX_STAGES)))
    return (
        _kind("piece", "ring", (*_ROUTE, *piece, *_TENSOR, *_TIMES), "tensor"),
        _kind("piece_done", "ring", (*_ROUTE, *done, *_TIMES)),
        _kind("group", "ring", (*_ROUTE, *_ROWS, *_TENSOR, *_TIMES, *group), "tensor"),
        _kind("tokens", "ring", (*_ROUTE, *tokens, *_TIMES)),
        _kind("end", "ring", (*_ROUTE, _key("session", _COUNT), _maybe("park", _POS))),
        _kind("ended", "ring", (*_ROUTE, _key("session", _COUNT), _maybe("gen", _SMALL))),
        _kind("failed", "ring", (*_ROUTE, *_SESSION, *_ERROR)),
        _kind("probe", "ring", (*_ROUTE, *probe)),
        _kind("drop", "ring", (*_ROUTE, *_SESSION)),
        _kind("reset", "ring", (*_ROUTE, _key("below", _COUNT), _key("keep", Ints(0, limits.MAX_ROWS, 0, 2**63 - 1)))),
        _kind("lane_at", "ring", lane_at),
        _kind("lane_sent", "ring", (_key("seq", _COUNT),)),
        _kind("broken", "ring", (*_ROUTE, _key("stage", _STAGE), _maybe("message", _MESSAGE))),
    )


def _request_kinds() -> tuple[Kind, ...]:
    request = _key("request", _ID)
    done = (
        request,
        _key("finish_reason", Text(32)),
        _key("completion_tokens", _COUNT),
        _key("prompt_tokens", _COUNT),
        _maybe("cached", _COUNT),
        _maybe("stop", Text(1024)),
    )
    return (
        _kind("open", "requests", (request, _key("ring", _ID)), "map"),
        _kind("cancel", "requests", (request,)),
        _kind("accepted", "requests", (request, _key("prompt_tokens", _COUNT))),
        _kind("started", "requests", (request,)),
        _kind("text", "requests", (request, _key("text", Text(limits.MAX_TEXT_CHARS)), _key("n", _COUNT))),
        _kind("done", "requests", done, "map"),
        _kind("error", "requests", (_maybe("request", _ID), *_ERROR, _maybe("param", Text(128)))),
        _kind("logs", "requests", (_key("ask", _ID),)),
        _kind("logs_tail", "requests", (_key("ask", _ID),), "map"),
    )


def _load_kinds() -> tuple[Kind, ...]:
    ring = _key("ring", _ID)
    return (
        _kind("load", "load", (ring, _key("epoch", _EPOCH), _key("stage", _STAGE), _TERM), "map"),
        _kind("unload", "load", (ring, _TERM)),
        _kind("link", "load", (ring, _maybe("epoch", _EPOCH), _maybe("stage", _STAGE), _TERM), "map"),
        _kind("linked", "load", (*_RING_STAGE, _maybe("epoch", _EPOCH)), "map"),
        _kind("probe_ring", "load", (ring, _TERM), "map"),
        _kind("probed", "load", (ring, _key("ms", Number()))),
        _kind("progress", "load", (*_RING_STAGE, *_PROGRESS)),
        _kind("stage_ready", "load", _RING_STAGE, "map"),
        _kind("stage_failed", "load", (*_RING_STAGE, *_ERROR)),
        _kind("unloaded", "load", _RING_STAGE),
        _kind("gauges", "load", _RING_STAGE, "map"),
    )


def _votes_kinds() -> tuple[Kind, ...]:
    term, mark = _key("term", _COUNT), _key("mark", _MARK)
    number = _key("number", _COUNT)
    beat = (term, mark, _key("committed", _MARK), number)
    size = Int(0, limits.MAX_DOCUMENT_BYTES)
    part = (_key("voters", Texts(MAX_VOTERS, 64)), _key("start", size), _key("size", size))
    return (
        _kind("ask_vote", "votes", (term, _key("last", _MARK), _key("pre", Flag()))),
        _kind("vote", "votes", (term, _key("granted", Flag()), _key("pre", Flag()))),
        _kind("append", "votes", beat),
        _kind("append_part", "votes", (*beat, *part), "document"),
        _kind("appended", "votes", (term, mark, number, _key("have", size))),
    )


def _relay_kinds() -> tuple[Kind, ...]:
    call = _key("call", _ID)
    return (
        _kind("relay_call", "relay", (_key("to", _ID),)),
        _kind("relay_offer", "relay", (call, _key("source", _ID))),
        _kind("relay_answer", "relay", (call,)),
        _kind("tunnel", "relay", (_key("n", Int(0, 1 << 16)),), "raw"),
    )


def _join_kinds() -> tuple[Kind, ...]:
    return (
        _kind("ca", "join", (), "map"),
        _kind("join", "join", (), "map"),
        _kind("renew", "join", (), "map"),
        _kind("issued", "join", (), "map"),
        _kind("revoked", "join", (), "map"),
        _kind("places", "join", (), "map"),
        _kind("stand", "join", (), "map"),
        _kind("seat", "join", (), "map"),
        _kind("no_seat", "join", (_key("message", _MESSAGE),)),
    )


def _other_kinds() -> tuple[Kind, ...]:
    fetch = (
        _key("model", Text(96)),
        _key("path", Text(256)),
        _key("offset", _COUNT),
        _key("size", _COUNT),
        _key("sha256", Text(64)),
        _maybe("end", _COUNT),
        _maybe("list", Text(64)),
        _maybe("list_size", _COUNT),
    )
    ask = (
        _key("path", Text(256)),
        _key("size", _COUNT),
        _key("sha256", Text(64)),
        _key("list", Text(64)),
        _key("list_size", _COUNT),
    )
    who = (_key("node", _ID), _key("boot", _ID), _key("incarnation", _INCARNATION))
    beat = (*who, _key("seq", _COUNT), _key("table", _MARK))
    return (
        _kind("beat", "control", beat, "map"),
        _kind("heard", "control", (_key("seq", _COUNT), _maybe("above", _INCARNATION))),
        _kind("members", "control", (_key("mark", _MARK), _key("since", _COUNT)), "map"),
        _kind("dial_back", "control", ()),
        _kind("dialed_back", "control", (_key("ok", Flag()), _key("message", _MESSAGE), _key("time_s", Number()))),
        _kind("bye", "control", (_key("reason", _MESSAGE),)),
        _kind("fetch", "files", fetch),
        _kind("data", "files", (_key("offset", _COUNT),), "raw"),
        _kind("fetched", "files", (_key("size", _COUNT),)),
        _kind("ask", "files", ask),
        _kind("have", "files", (_key("sha256", Text(64)),), "raw"),
        _kind("http", "api", (), "raw"),
        _kind("init", "pipe", (), "map"),
        _kind("loading", "pipe", _PROGRESS),
        _kind("ready", "pipe", (), "map"),
        _kind("fatal", "pipe", _ERROR),
        _kind("shutdown", "pipe", ()),
        _kind("ping", "pipe", ()),
        _kind("pong", "pipe", ()),
        _kind("stats", "pipe", (), "map"),
    )


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kinds in (
        _link_kinds(),
        _votes_kinds(),
        _ring_kinds(),
        _request_kinds(),
        _load_kinds(),
        _join_kinds(),
        _relay_kinds(),
        _other_kinds(),
    )
    for kind in kinds
}


def kind_of(name: object) -> Kind:
    """The kind called `name`; raises ProtocolError that names it."""
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"unknown frame kind {name!r:.80}; known are {', '.join(KINDS)}")
    return kind
