"""What voters say to each other, as frames of a `votes` channel."""

from __future__ import annotations

from swarmnode.cluster.election_messages import Append, Appended, AskVote, Mark, Part, VoteAnswer, VoterMessage
from swarmnode.errors import ProtocolError
from swarmnode.ids import NodeId
from swarmnode.wire.frames import Frame


def to_frame(message: VoterMessage) -> Frame:
    match message:
        case AskVote():
            return Frame("ask_vote", {"term": message.term, "last": list(message.last), "pre": message.pre})
        case VoteAnswer():
            return Frame("vote", {"term": message.term, "granted": message.granted, "pre": message.pre})
        case Append():
            header = {"term": message.term, "mark": list(message.mark), "committed": list(message.committed)}
            header["number"] = message.number
            part = message.part
            if part is None:
                return Frame("append", header)
            place = {"voters": list(part.voters), "start": part.start, "size": part.size}
            return Frame("append_part", {**header, **place}, part.data)
        case Appended():
            return Frame(
                "appended",
                {
                    "term": message.term,
                    "mark": list(message.mark),
                    "number": message.number,
                    "have": message.have_bytes,
                },
            )


def from_frame(frame: Frame) -> VoterMessage:
    """Raises ProtocolError for a frame of another kind."""
    header = frame.header
    match frame.kind:
        case "ask_vote":
            return AskVote(header["term"], _mark(header["last"]), header["pre"])
        case "vote":
            return VoteAnswer(header["term"], header["granted"], header["pre"])
        case "append" | "append_part":
            part = None
            if frame.kind == "append_part":
                voters = tuple(map(NodeId, header["voters"]))
                part = Part(voters, header["start"], header["size"], bytes(frame.body))
            return Append(header["term"], _mark(header["mark"]), _mark(header["committed"]), part, header["number"])
        case "appended":
            return Appended(header["term"], _mark(header["mark"]), header["number"], header["have"])
        case _:
            raise ProtocolError(f"a votes channel brought {frame.kind}")


def _mark(pair: list[int]) -> Mark:
    return pair[0], pair[1]
