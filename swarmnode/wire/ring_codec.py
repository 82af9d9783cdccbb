"""Ring messages as frames and back; every message class has one kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_never

from swarmnode.errors import MAX_MESSAGE_CHARS, ProtocolError
from swarmnode.ids import SessionId
from swarmnode.ring.messages import (
    Broken,
    Drop,
    End,
    Ended,
    Failed,
    Group,
    Piece,
    PieceDone,
    Probe,
    Reset,
    RingMessage,
    Row,
    Tokens,
)
from swarmnode.ring.work import Activation, Continuation, Sampling
from swarmnode.wire.frames import Frame

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Header = dict[str, Any]


def to_frame(message: RingMessage) -> Frame:
    """The frame that carries `message`; ring, epoch, lane and seq are added by whoever routes it."""
    match message:
        case Piece() | Group():
            return _with_hidden(message)
        case PieceDone(session, gen, pos, n, token, ms, wait):
            header = {"session": session, "gen": gen, "pos": pos, "n": n, **_times(ms, wait)}
            return Frame("piece_done", header if token is None else {**header, "token": token})
        case Tokens(rows, tokens, ms, wait):
            return Frame("tokens", {**_rows(rows), "tokens": list(tokens), **_times(ms, wait)})
        case End(session, park):
            return Frame("end", {"session": session, "park": park} if park else {"session": session})
        case Drop(session, gen):
            return Frame("drop", {"session": session, "gen": gen})
        case Ended(session, gen):
            return Frame("ended", {"session": session} if gen is None else {"session": session, "gen": gen})
        case Reset(below, keep):
            return Frame("reset", {"below": below, "keep": list(keep)})
        case Failed(session, gen, code, text):
            # an exception's text has any length, and a frame that is refused here would end the whole stage
            cut = text[:MAX_MESSAGE_CHARS]
            return Frame("failed", {"session": session, "gen": gen, "code": code, "message": cut})
        case Probe(nonce, lane, hops):
            return Frame("probe", {"nonce": nonce, "via": lane, "hops": hops})
        case Broken(stage):
            return Frame("broken", {"stage": stage})
        case _:
            assert_never(message)


def from_frame(frame: Frame) -> RingMessage:
    """The message in a frame; `Activation.data` is the frame's body, not a copy.

    Raises ProtocolError for a kind that is no ring message, and for lists that do not fit together.
    """
    read = _READERS.get(frame.kind)
    if read is None:
        raise ProtocolError(f"a {frame.kind} frame is no ring message; these are: {', '.join(_READERS)}")
    return read(frame.header, frame)


def _with_hidden(message: Piece | Group) -> Frame:
    hidden = message.hidden
    header = {
        "dtype": hidden.dtype,
        "shape": list(hidden.shape),
        "bytes": len(hidden.data),
        **_times(message.compute_ms, message.queue_ms),
    }
    if isinstance(message, Group):
        if message.round_ms is not None:
            header["round_ms"] = message.round_ms
        if not message.slot:
            header["slot"] = False
        return Frame("group", {**_rows(message.rows), **header}, hidden.data)
    header |= {
        "session": message.session,
        "gen": message.gen,
        "pos": message.pos,
        "ids": list(message.ids),
        "last": message.last,
    }
    if (sampling := message.sampling) is not None:
        header["sampling"] = [
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.top_k,
            sampling.seed,
        ]
    if (start := message.start) is not None:
        header["from"] = [start.source, start.length, int(start.move)]
    return Frame("piece", header, hidden.data)


def _times(compute_ms: tuple[float, ...], queue_ms: float) -> Header:
    return {"ms": list(compute_ms), "wait_ms": queue_ms}


def _rows(rows: tuple[Row, ...]) -> Header:
    return {
        "sessions": [row.session for row in rows],
        "gens": [row.gen for row in rows],
        "poss": [row.pos for row in rows],
        "ns": [row.n for row in rows],
    }


def _read_rows(header: Header) -> tuple[Row, ...]:
    columns = header["sessions"], header["gens"], header["poss"], header["ns"]
    if len(set(map(len, columns))) != 1:
        raise ProtocolError(f"a group's lists have {[len(c) for c in columns]} entries; they must be equally long")
    return tuple(Row(SessionId(session), gen, pos, n) for session, gen, pos, n in zip(*columns, strict=True))


def _read_times(header: Header) -> tuple[tuple[float, ...], float]:
    return tuple(header.get("ms", ())), header.get("wait_ms", 0.0)


def _read_hidden(header: Header, frame: Frame) -> Activation:
    return Activation(header["dtype"], tuple(header["shape"]), frame.body)


def _read_piece(header: Header, frame: Frame) -> Piece:
    hidden = _read_hidden(header, frame)
    ids = tuple(header["ids"])
    if hidden.shape[0] != len(ids):
        raise ProtocolError(f"a piece has {len(ids)} ids and hidden states of shape {hidden.shape}")
    sampling = None
    if (values := header.get("sampling")) is not None:
        temperature, top_p, min_p, top_k, seed = values
        sampling = Sampling(temperature, top_p, top_k, min_p, seed)
    start = None
    if (values := header.get("from")) is not None:
        start = _read_start(*values)
        if start.length != header["pos"]:
            raise ProtocolError(f"a piece at position {header['pos']} continues from {start.length} positions")
    session = SessionId(header["session"])
    times = _read_times(header)
    return Piece(session, header["gen"], header["pos"], ids, header["last"], hidden, sampling, *times, start)


def _read_start(source: int, length: int, move: int) -> Continuation:
    if move not in (0, 1) or not 0 < length < 2**31:
        raise ProtocolError(f"a piece continues from {length} positions with move={move}; it is 0 or 1")
    return Continuation(SessionId(source), length, bool(move))


def _read_piece_done(header: Header, _: Frame) -> PieceDone:
    session = SessionId(header["session"])
    times = _read_times(header)
    return PieceDone(session, header["gen"], header["pos"], header["n"], header.get("token"), *times)


def _read_group(header: Header, frame: Frame) -> Group:
    hidden = _read_hidden(header, frame)
    rows = _read_rows(header)
    if hidden.shape[0] != sum(row.n for row in rows):
        raise ProtocolError(f"a group of {len(rows)} rows has hidden states of shape {hidden.shape}")
    return Group(rows, hidden, *_read_times(header), header.get("round_ms"), header.get("slot", True))


def _read_tokens(header: Header, _: Frame) -> Tokens:
    rows = _read_rows(header)
    tokens = tuple(header["tokens"])
    if len(tokens) != len(rows):
        raise ProtocolError(f"{len(tokens)} tokens came for {len(rows)} rows")
    return Tokens(rows, tokens, *_read_times(header))


def _read_failed(header: Header, _: Frame) -> Failed:
    return Failed(SessionId(header["session"]), header["gen"], header["code"], header["message"])


def _read_probe(header: Header, _: Frame) -> Probe:
    return Probe(header["nonce"], header["via"], header["hops"])


_READERS: Mapping[str, Callable[[Header, Frame], RingMessage]] = {
    "piece": _read_piece,
    "piece_done": _read_piece_done,
    "group": _read_group,
    "tokens": _read_tokens,
    "end": lambda header, _: End(SessionId(header["session"]), header.get("park", 0)),
    "drop": lambda header, _: Drop(SessionId(header["session"]), header["gen"]),
    "ended": lambda header, _: Ended(SessionId(header["session"]), header.get("gen")),
    "reset": lambda header, _: Reset(SessionId(header["below"]), tuple(map(SessionId, header["keep"]))),
    "failed": _read_failed,
    "probe": _read_probe,
    "broken": lambda header, _: Broken(header["stage"]),
}
