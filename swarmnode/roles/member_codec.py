"""The table of members as a frame, which a coordinator sends where a beat's mark is not its own."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from swarmnode.cluster.member_table import Heading, Row, Update
from swarmnode.cluster.membership import NodeState
from swarmnode.ids import NodeId
from swarmnode.roles.reports import MAX_TABLE_BYTES, MembersReport, read_report
from swarmnode.wire.bodies import pack_body
from swarmnode.wire.frames import Frame

if TYPE_CHECKING:
    from swarmnode.cluster.member_table import Mark


def members_frame(update: Update) -> Frame:
    heading = update.heading
    body = {
        "coordinator": heading.coordinator,
        "voters": list(heading.voters),
        "open": heading.open,
        "revocations": heading.revocations,
        "rows": [{**asdict(row), "state": row.state.value} for row in update.rows],
        "gone": list(update.gone),
    }
    return Frame("members", {"mark": list(update.mark), "since": update.since}, pack_body(body))


def read_members(frame: Frame) -> Update:
    """Raises ProtocolError that names what does not fit."""
    report = read_report(MembersReport, frame, MAX_TABLE_BYTES)
    return Update(
        mark=read_mark(frame.header["mark"]),
        since=frame.header["since"],
        heading=Heading(report.coordinator, tuple(report.voters), report.open, report.revocations),
        rows=tuple(Row(NodeId(r.node), r.name, r.address, NodeState(r.state)) for r in report.rows),
        gone=tuple(NodeId(node) for node in report.gone),
    )


def read_mark(value: list[int]) -> Mark:
    """Of a header, whose table has checked it."""
    term, version = value
    return term, version
