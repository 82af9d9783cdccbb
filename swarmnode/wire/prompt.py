"""A trio stream that writes without waiting where it can: a small frame leaves in the step that queued it.

A hand-over to a writer task, and trio's own checkpoint after every write, each cost a pass of the scheduler; at one
frame a token they were a quarter of a hop's time. Only sockets can do this; every other stream leaves it to `send_all`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from swarmnode.wire.frames import Buffer


class PromptStream:
    """Reads and writes `stream`, which is still the caller's to close. One task reads; one at a time writes."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._socket = stream.socket if isinstance(stream, trio.SocketStream) else None
        self._unsent: Buffer = b""
        self._drained = False
        """The last read took all there was, so another would only be told to wait."""

    def send_now(self, data: Buffer) -> bool:
        """Take all of `data` and write what goes; False: `send_all` must write the rest, if only with b"".

        Not while a `send_all` runs. Raises BrokenResourceError, ClosedResourceError.
        """
        if self._socket is None or len(self._unsent):
            self._unsent = b"".join((self._unsent, data))
            return False
        try:
            done = os.write(_fd(self._socket), data)
        except BlockingIOError:
            done = 0
        except OSError as error:
            raise trio.BrokenResourceError(f"the socket is broken: {error}") from error
        self._unsent = memoryview(data)[done:] if done < len(data) else b""
        return not len(self._unsent)

    async def send_all(self, data: Buffer) -> None:
        """As a trio stream's, behind what `send_now` left."""
        if len(self._unsent):
            data, self._unsent = b"".join((self._unsent, data)), b""
        await self._stream.send_all(data)

    async def receive_some(self, most: int) -> bytes:
        """As a trio stream's."""
        if self._socket is None:
            return bytes(await self._stream.receive_some(most))
        waited = False
        while True:
            if self._drained:
                await trio.lowlevel.wait_readable(_fd(self._socket))
                waited, self._drained = True, False
            try:
                data = os.read(_fd(self._socket), most)
            except BlockingIOError:
                self._drained = True
                continue
            except OSError as error:
                raise trio.BrokenResourceError(f"the socket is broken: {error}") from error
            if not waited:
                await trio.lowlevel.cancel_shielded_checkpoint()
            self._drained = 0 < len(data) < most
            return data


def _fd(socket: trio.socket.SocketType) -> int:
    fd = socket.fileno()
    if fd < 0:
        raise trio.ClosedResourceError("the socket was closed")
    return fd
