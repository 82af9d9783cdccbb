"""The words of a ring's log: one short line for each message, work and event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarmnode.ring.head_messages import Accepted, Finished, HeadEvent, Probed, Refused, RingBroken, Sampled, Started
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
from swarmnode.ring.work import PieceWork

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from swarmnode.ids import SessionId
    from swarmnode.ring.work import DecodeRow, Failure, Work


def message_text(message: RingMessage) -> str:
    match message:
        case Piece(session=session, pos=pos, ids=ids, last=last, start=start):
            begin = f" {'moves' if start.move else 'copies'} {start.source}" if start is not None else ""
            return f"piece {session}@{pos}-{pos + len(ids) - 1}{' last' if last else ''}{begin}"
        case PieceDone(session=session, pos=pos, n=n, token=token):
            return f"piece_done {session}@{pos}-{pos + n - 1}" + ("" if token is None else f" token {token}")
        case Group(rows=rows):
            return f"group {_rows(rows)}"
        case Tokens(rows=rows, tokens=tokens):
            return f"tokens {_rows(rows)} = {' '.join(map(str, tokens))}"
        case End(session=session, park=park):
            return f"end {session}" + (f" park {park}" if park else "")
        case Drop(session=session, gen=gen):
            return f"drop {session} gen {gen}"
        case Ended(session=session, gen=gen):
            return f"ended {session}" + ("" if gen is None else f" gen {gen}")
        case Reset(below=below, keep=keep):
            return f"reset below {below} keep {' '.join(map(str, keep)) or 'none'}"
        case Failed(session=session, code=code, message=text):
            return f"failed {session} {code}: {text}"
        case Probe(nonce=nonce, lane=lane, hops=hops):
            return f"probe {nonce} {lane} hops {hops}"
        case Broken(stage=stage):
            return f"broken {stage}"


def work_text(work: Work, took_s: float, failed: Mapping[SessionId, Failure]) -> str:
    if isinstance(work, PieceWork):
        what = f"runs piece {work.session}@{work.pos}-{work.pos + len(work.ids) - 1}"
    else:
        what = f"runs group {_rows(work.rows)}"
    outcome = f", fails for {', '.join(map(str, failed))}" if failed else ""
    return f"{what} for {took_s * 1e3:.1f} ms{outcome}"


def event_text(event: HeadEvent) -> str:
    match event:
        case Accepted(request=request, prompt_tokens=count):
            return f"{request} accepted: {count} tokens"
        case Started(request=request):
            return f"{request} started"
        case Sampled(request=request, token=token):
            return f"{request} token {token}"
        case Finished(request=request, reason=reason, completion_tokens=count):
            return f"{request} finished: {reason} after {count} tokens"
        case Refused(request=request, code=code, message=text):
            return f"{request} refused: {code}: {text}"
        case RingBroken(why=why):
            return f"ring broken: {why}"
        case Probed(nonce=nonce, round_ms=round_ms):
            return f"probe {nonce} came back in {round_ms:.1f} ms"


def _rows(rows: Iterable[Row | DecodeRow]) -> str:
    return " ".join(f"{row.session}@{row.pos}" for row in rows)
