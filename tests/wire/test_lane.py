"""Order on a lane: nothing lost, doubled or stale goes unseen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import LinkBroken, ProtocolError
from swarmnode.ids import RingId
from swarmnode.wire.frames import Frame
from swarmnode.wire.lane import ACK_BYTES, ACK_FRAMES, KEPT_BYTES, LaneAcks, LaneLog, LaneReceiver, LaneSender

if TYPE_CHECKING:
    from collections.abc import Mapping

RING = RingId("r1")


def end(session: int = 1) -> Frame:
    return Frame("end", {"session": session})


def sender(epoch: tuple[int, int] = (2, 0)) -> LaneSender:
    return LaneSender(RING, "act", epoch)


def receiver(epoch: tuple[int, int] = (2, 0)) -> LaneReceiver:
    return LaneReceiver(RING, "act", epoch)


def test_stamped_frames_are_accepted_in_order() -> None:
    lane, there = sender(), receiver()
    for number in range(5):
        frame = there.accept(lane.stamp(end(number)))
        assert frame is not None
        assert frame.header == {"session": number, "ring": "r1", "epoch": [2, 0], "lane": "act", "seq": number}


def test_the_body_is_not_touched() -> None:
    body = memoryview(b"abc")
    assert sender().stamp(Frame("data", {"offset": 0}, body)).body is body


@given(st.lists(st.integers(0, 6), max_size=30))
def test_duplicates_are_dropped_and_gaps_break_the_link(order: list[int]) -> None:
    lane = sender()
    frames = [lane.stamp(end(number)) for number in range(7)]
    there, expected = receiver(), 0
    for number in order:
        if number > expected:
            with pytest.raises(LinkBroken, match=f"lost frames {expected} to {number - 1}"):
                there.accept(frames[number])
            return
        accepted = there.accept(frames[number])
        assert (accepted is None) == (number < expected)
        expected += number == expected
    assert there.duplicates == len(order) - expected


@pytest.mark.parametrize("epoch", [(1, 9), (1, 0)])
def test_an_earlier_epoch_is_dropped(epoch: tuple[int, int]) -> None:
    there = receiver((2, 0))
    assert there.accept(sender(epoch).stamp(end())) is None
    assert (there.stale, there.next_seq) == (1, 0)


@pytest.mark.parametrize("epoch", [(2, 1), (3, 0)])
def test_a_later_epoch_is_refused_until_the_lane_got_there(epoch: tuple[int, int]) -> None:
    there = receiver((2, 0))
    frame = sender(epoch).stamp(end())
    with pytest.raises(ProtocolError, match="is at"):
        there.accept(frame)
    there.advance(epoch)
    assert there.accept(frame) == frame


def test_seq_starts_again_with_an_epoch_and_never_goes_back() -> None:
    lane = sender()
    lane.stamp(end())
    lane.advance((2, 1))
    assert lane.stamp(end()).header["seq"] == 0
    for machine in (lane, receiver((2, 1))):
        for epoch in ((2, 1), (2, 0), (1, 7)):
            with pytest.raises(ValueError, match="does not come after"):
                machine.advance(epoch)


@pytest.mark.parametrize("wrong", [{"ring": "r2"}, {"lane": "pre"}])
def test_another_ring_or_lane_is_a_protocol_error(wrong: Mapping[str, Any]) -> None:
    stamped = sender().stamp(end())
    with pytest.raises(ProtocolError, match="came on"):
        receiver().accept(Frame("end", {**stamped.header, **wrong}))


@pytest.mark.parametrize("missing", ["ring", "lane", "epoch", "seq"])
def test_a_frame_without_its_route_is_a_protocol_error(missing: str) -> None:
    header = sender().stamp(end()).header
    del header[missing]
    with pytest.raises(ProtocolError):
        receiver().accept(Frame("end", header))


def sent(count: int, body_bytes: int = 0) -> tuple[LaneLog, list[Frame]]:
    lane, log = sender(), LaneLog()
    frames = [lane.stamp(Frame("data", {"offset": n}, bytes(body_bytes))) for n in range(count)]
    for frame in frames:
        log.sent(frame)
    return log, frames


@given(st.integers(0, 20), st.lists(st.integers(0, 20), max_size=5), st.integers(0, 20))
def test_a_link_that_comes_back_gets_exactly_what_it_lacks(count: int, acknowledged: list[int], has: int) -> None:
    log, frames = sent(count)
    for next_seq in acknowledged:
        log.acknowledged(min(next_seq, has))
    assert log.since(min(has, count)) == frames[min(has, count) :]


def test_beyond_what_is_kept_the_link_is_broken() -> None:
    log, frames = sent(5, KEPT_BYTES // 4)
    assert log.since(1) == frames[1:]
    log, _ = sent(5, KEPT_BYTES // 4)
    with pytest.raises(LinkBroken, match="lacks frames from 0 on; kept are those from 1 on"):
        log.since(0)


def test_the_newest_frame_is_kept_whatever_its_size() -> None:
    log, frames = sent(2, KEPT_BYTES + 1)
    assert log.since(1) == frames[1:]


def test_what_was_acknowledged_cannot_be_asked_for_again() -> None:
    log, _ = sent(3)
    log.acknowledged(2)
    with pytest.raises(LinkBroken):
        log.since(1)


def test_a_receiver_acknowledges_after_so_many_frames_or_bytes() -> None:
    acks, small = LaneAcks(), Frame("end", {"session": 1})
    assert [acks.took(small) for _ in range(2 * ACK_FRAMES)] == ([False] * (ACK_FRAMES - 1) + [True]) * 2
    half = Frame("data", {"offset": 0}, bytes(ACK_BYTES // 2))
    assert [acks.took(half) for _ in range(4)] == [False, True, False, True]
