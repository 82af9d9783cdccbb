"""The tail of what a peer's stage workers wrote to stderr: bounded where it is kept, where it travels, and when asked.

Workers log steps, devices and failures, never a prompt or a reply.
"""

from __future__ import annotations

import uuid
from collections import deque
from typing import TYPE_CHECKING, Any

import trio

from swarmnode.errors import LinkBroken, ProtocolError
from swarmnode.roles.reports import MAX_TAILS, LogTails, read_report
from swarmnode.wire.bodies import pack_body
from swarmnode.wire.frames import Frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from swarmnode.ids import NodeId
    from swarmnode.roles.stage_host import StageHost

ANSWER_S = 5.0
MAX_CHARS = 12_000
"""Of one worker's tail; MAX_TAILS of them stay below what a report may have."""
ENDED_KEPT = 2
"""Workers that are gone and can still be asked about: why a load failed is read after it failed."""


class KeptLogs:
    """A peer's side: the workers that run, and the last ones that ended."""

    def __init__(self) -> None:
        self._ended: deque[dict[str, Any]] = deque(maxlen=ENDED_KEPT)

    def note_ended(self, host: StageHost) -> None:
        if host.worker is not None:
            self._ended.append(_tail(host))

    def answer(self, ask: Frame, hosts: Iterable[StageHost]) -> Frame:
        """The newest workers' tails, as many as fit."""
        tails = [*self._ended, *(_tail(host) for host in hosts)]
        return Frame("logs_tail", {"ask": ask.header["ask"]}, pack_body({"workers": tails[-MAX_TAILS:]}))


def _tail(host: StageHost) -> dict[str, Any]:
    lines: list[str] = []
    room = MAX_CHARS
    for line in reversed(host.worker.log if host.worker is not None else ()):
        shown = "".join(char if char.isprintable() else "?" for char in line)
        shown = shown.encode("ascii", "backslashreplace").decode("ascii")  # one byte a character, whatever it is
        room -= len(shown) + 1
        if room < 0:
            break
        lines.append(shown)
    return {
        "ring": host.spec.ring,
        "model": host.spec.model,
        "stage": host.spec.stage,
        "phase": host.phase,
        "pid": host.worker.pid if host.worker is not None else None,
        "lines": lines[::-1],
    }


class LogAsks:
    """The coordinator's side: `ask` a node, and `take` what it answers."""

    def __init__(self, post: Callable[[NodeId, Frame], None]) -> None:
        self._post = post
        self._waiting: dict[tuple[NodeId, str], trio.MemorySendChannel[LogTails]] = {}

    async def ask(self, node: NodeId) -> list[dict[str, Any]]:
        """The tails of its workers; raises LinkBroken where it does not answer in time."""
        number = uuid.uuid4().hex
        send, receive = trio.open_memory_channel[LogTails](1)
        self._waiting[node, number] = send
        try:
            with trio.fail_after(ANSWER_S):
                self._post(node, Frame("logs", {"ask": number}))
                tails = await receive.receive()
        except trio.TooSlowError:
            raise LinkBroken(f"node {node[:8]} did not answer within {ANSWER_S:g} s; is its swarmnode older?") from None
        finally:
            del self._waiting[node, number]
        return [tail.model_dump() for tail in tails.workers]

    def take(self, node: NodeId, frame: Frame) -> None:
        """An answer; one that nobody waits for any more, or that was not asked of this node, is dropped."""
        waiting = self._waiting.get((node, frame.header["ask"]))
        if waiting is None:
            return
        try:
            waiting.send_nowait(read_report(LogTails, frame))
        except trio.WouldBlock:
            raise ProtocolError(f"node {node[:8]} answered twice when it was asked for its workers' logs") from None
