"""Every ring message survives the wire."""

from __future__ import annotations

import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import MAX_MESSAGE_CHARS, ProtocolError
from swarmnode.ids import SessionId
from swarmnode.ring import messages as m
from swarmnode.ring.head_config import MAX_IN_FLIGHT
from swarmnode.ring.parking import MAX_PARKED
from swarmnode.ring.work import Activation, Continuation, Sampling
from swarmnode.wire import limits
from swarmnode.wire.frames import Frame, FrameDecoder, encode_bytes
from swarmnode.wire.ring_codec import from_frame, to_frame

sessions = st.integers(0, 2**63 - 1)
small = st.integers(0, 2**31 - 1)
numbers = st.floats(0, 1e9, allow_nan=False)
times = st.lists(numbers, max_size=4).map(tuple)


def hidden(rows: int) -> st.SearchStrategy[Activation]:
    def build(dtype: str, width: int) -> Activation:
        size = {"float32": 4, "bfloat16": 2}[dtype]
        return Activation(dtype, (rows, width), bytes(i % 251 for i in range(rows * width * size)))

    return st.builds(build, st.sampled_from(["float32", "bfloat16"]), st.integers(1, 9))


seeds = st.integers(-(2**63), 2**64 - 1)
samplings = st.builds(Sampling, numbers, st.floats(0, 1), small, st.floats(0, 1), seeds)
rows = st.lists(st.builds(m.Row, sessions, small, small), min_size=1, max_size=5).map(tuple)
ids = st.lists(small, min_size=1, max_size=9).map(tuple)


def piece(ids: tuple[int, ...]) -> st.SearchStrategy[m.Piece]:
    common = (st.just(ids), st.booleans(), hidden(len(ids)), st.none() | samplings, times, numbers)
    fresh = st.builds(m.Piece, sessions, small, small, *common)
    starts = st.builds(Continuation, sessions, st.integers(1, 2**31 - 1), st.booleans())
    continued = starts.flatmap(
        lambda start: st.builds(m.Piece, sessions, small, st.just(start.length), *common, st.just(start))
    )
    return fresh | continued


STRATEGIES: dict[type, st.SearchStrategy[typing.Any]] = {
    m.Piece: ids.flatmap(piece),
    m.PieceDone: st.builds(
        m.PieceDone, sessions, small, small, st.integers(1, 4096), st.none() | small, times, numbers
    ),
    m.Group: rows.flatmap(
        lambda r: st.builds(m.Group, st.just(r), hidden(len(r)), times, numbers, st.none() | numbers, st.booleans())
    ),
    m.Tokens: rows.flatmap(
        lambda r: st.builds(
            m.Tokens, st.just(r), st.lists(small, min_size=len(r), max_size=len(r)).map(tuple), times, numbers
        )
    ),
    m.End: st.builds(m.End, sessions, small),
    m.Drop: st.builds(m.Drop, sessions, small),
    m.Ended: st.builds(m.Ended, sessions, st.none() | small),
    m.Reset: st.builds(m.Reset, sessions, st.lists(sessions, max_size=9).map(tuple)),
    m.Failed: st.builds(m.Failed, sessions, small, st.text(max_size=20), st.text(max_size=200)),
    m.Probe: st.builds(m.Probe, st.integers(0, 2**63 - 1), st.sampled_from(["act", "pre"]), st.integers(0, 9)),
    m.Broken: st.builds(m.Broken, st.integers(0, 9)),
}


def test_every_message_class_is_tested() -> None:
    assert set(STRATEGIES) == set(typing.get_args(m.RingMessage))


@pytest.mark.parametrize("message_class", STRATEGIES, ids=lambda c: c.__name__)
def test_messages_survive_the_wire(message_class: type) -> None:
    @given(STRATEGIES[message_class])
    def check(message: typing.Any) -> None:
        (frame,) = FrameDecoder().feed(encode_bytes(to_frame(message)))
        assert from_frame(frame) == message

    check()


ACT = Activation("float32", (2, 1), bytes(8))
CONTINUED = to_frame(
    m.Piece(SessionId(1), 0, 4, (7, 8), True, ACT, start=Continuation(SessionId(2), length=4, move=True))
)
GROUP = to_frame(m.Group((m.Row(1, 0, 0), m.Row(2, 0, 0)), ACT))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("frame", "changes"),
    [
        (GROUP, {"gens": [0]}),
        (GROUP, {"sessions": [1, 2, 3]}),
        (GROUP, {"ns": [1, 2]}),
        (to_frame(m.Tokens((m.Row(1, 0, 0),), (5,))), {"tokens": [5, 6]}),  # type: ignore[arg-type]
        (to_frame(m.Piece(1, 0, 0, (7, 8), True, ACT)), {"ids": [7]}),  # type: ignore[arg-type]
        (CONTINUED, {"pos": 5}),
        (CONTINUED, {"from": [2, 4, 2]}),
        (CONTINUED, {"pos": 0, "from": [2, 0, 1]}),
    ],
)
def test_lists_that_do_not_fit_together_are_refused(frame: Frame, changes: dict[str, object]) -> None:
    from_frame(frame)
    with pytest.raises(ProtocolError):
        from_frame(Frame(frame.kind, {**frame.header, **changes}, frame.body))


def test_other_kinds_are_no_ring_messages() -> None:
    with pytest.raises(ProtocolError, match="bye frame is no ring message"):
        from_frame(Frame("bye", {"reason": ""}))


def test_the_reason_of_a_failure_is_cut_to_what_a_frame_takes() -> None:
    frame = to_frame(m.Failed(SessionId(1), 0, "stage_failed", "x" * 10_000))
    assert len(FrameDecoder().feed(encode_bytes(frame))[0].header["message"]) == MAX_MESSAGE_CHARS


def test_all_that_may_be_parked_fits_a_reset() -> None:
    keep = tuple(SessionId(2**62 + i) for i in range(MAX_PARKED))
    (frame,) = FrameDecoder().feed(encode_bytes(to_frame(m.Reset(SessionId(2**63 - 1), keep))))
    assert from_frame(frame) == m.Reset(SessionId(2**63 - 1), keep)
    assert MAX_PARKED <= limits.MAX_ROWS


def test_all_that_may_run_at_once_fits_a_group() -> None:
    rows = tuple(m.Row(SessionId(2**62 + i), 2**30, 2**30) for i in range(MAX_IN_FLIGHT))
    group = m.Group(rows, Activation("float32", (len(rows), 1), bytes(4 * len(rows))))
    (frame,) = FrameDecoder().feed(encode_bytes(to_frame(group)))
    assert from_frame(frame) == group
