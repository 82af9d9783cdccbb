"""Voters' messages as frames, there and back, through the wire's own encoding."""

from __future__ import annotations

import pytest

from swarmnode.cluster.election_messages import Append, Appended, AskVote, Part, VoteAnswer, VoterMessage
from swarmnode.errors import ProtocolError
from swarmnode.ids import NodeId
from swarmnode.roles.vote_codec import from_frame, to_frame
from swarmnode.wire.frames import Frame, FrameDecoder, encode_bytes

VOTERS = (NodeId("a"), NodeId("b"), NodeId("c"))


@pytest.mark.parametrize(
    "message",
    [
        AskVote(4, (3, 9), pre=True),
        VoteAnswer(4, granted=False, pre=True),
        Append(3, (3, 9), (3, 8), number=2),
        Append(3, (3, 9), (3, 8), Part(VOTERS, 7, 19, b'{"joins":[]}'), 3),
        Append(3, (3, 9), (3, 8), Part((), 0, 0, b""), 4),
        Appended(3, (2, 7), 3, 19),
    ],
)
def test_a_message_comes_back_as_it_went(message: VoterMessage) -> None:
    (frame,) = FrameDecoder().feed(encode_bytes(to_frame(message)))
    assert from_frame(frame) == message


def test_anything_else_is_no_message() -> None:
    with pytest.raises(ProtocolError, match="bye"):
        from_frame(Frame("bye", {"reason": "x"}))
