"""TLS on any trio stream by whole reads and writes: all that one read brought is decrypted, all of a write encrypted.

`trio.SSLStream` hands out one record of 16 KiB at a time, and everything above it then runs once per record.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn, cast

import trio

from swarmnode.wire import limits
from swarmnode.wire.prompt import PromptStream

if TYPE_CHECKING:
    from swarmnode.wire.frames import Buffer

ENCRYPT_BYTES = 256 << 10
"""Encrypted and written at a time: the other end decrypts one part while the next is encrypted here."""
MAX_OWED_BYTES = 16 << 10
"""Answers to key updates that may wait for our next write; a peer that asks for more is not rotating its keys."""
ALERT_S = 1.0
"""For a last alert, should the socket be full."""


class TlsStream(trio.abc.Stream):
    """One end of a TLS connection; call `do_handshake` first. One task may receive while another one sends.

    The end of the bytes without a close alert counts as the end: what lies above knows whether it was whole. A
    cancelled send may have cut a record, so nothing can be sent after it.
    """

    def __init__(self, transport: trio.abc.Stream, context: ssl.SSLContext, *, server_side: bool = False) -> None:
        self.transport = transport
        self._ciphertext = PromptStream(transport)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._plain = memoryview(b"")
        """Where records are decrypted to; made after the handshake, so that a stranger costs no memory."""
        self._undecrypted = False
        """The last read stopped at the caller's limit, not at the end of what had come."""
        self._ended = False
        self._sending = False
        self._broken = False
        """By the other end's bytes, or by a send that did not finish."""
        self._closed = False

    def selected_alpn_protocol(self) -> str | None:
        return self._tls.selected_alpn_protocol()

    def peer_certificate(self) -> bytes | None:
        """The other end's certificate in DER; None where it presented none."""
        return self._tls.getpeercert(binary_form=True)

    async def do_handshake(self) -> None:
        """Agree with the other end; the caller bounds it. Raises BrokenResourceError, after telling the other end."""
        try:
            while not self._shaken():
                await self._flush()
                if not await self._fill():
                    raise trio.BrokenResourceError("the other end hung up during the TLS handshake")
        except ssl.SSLError as error:
            await self._give_up(error)
        await self._flush()
        self._plain = memoryview(bytearray(limits.READ_BYTES))

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """All that is at hand, up to `max_bytes`; b"" at the end. Raises BrokenResourceError for bad records."""
        self._check_open()
        most = min(max_bytes or limits.READ_BYTES, limits.READ_BYTES)
        if self._undecrypted or self._ended:
            await trio.lowlevel.checkpoint()
        data = b""
        try:
            while not data and not self._ended and (self._undecrypted or await self._fill()):
                data = self._decrypt(most)
        except ssl.SSLError as error:
            await self._give_up(error)
        return data

    def send_now(self, data: Buffer) -> bool:
        """See `PromptStream.send_now`."""
        self._check_sendable()
        self._encrypt(memoryview(data))
        return self._ciphertext.send_now(self._outgoing.read())

    async def send_all(self, data: Buffer) -> None:
        """Raises BrokenResourceError, also when an earlier send was cancelled."""
        self._check_sendable()
        await trio.lowlevel.checkpoint_if_cancelled()
        view = memoryview(data)
        self._encrypt(view[:ENCRYPT_BYTES])
        await self._flush()
        for start in range(ENCRYPT_BYTES, len(view), ENCRYPT_BYTES):
            self._encrypt(view[start : start + ENCRYPT_BYTES])
            await self._flush()

    async def wait_send_all_might_not_block(self) -> None:
        self._check_open()
        await self.transport.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """Send the close alert, if nothing is in its way, and close; the other end's alert is not waited for."""
        try:
            if not (self._closed or self._broken or self._sending):
                with suppress(ssl.SSLError):  # it would wait for the other end's alert, or there was no handshake
                    self._tls.unwrap()
                await self._send_alert()
        finally:
            self._closed = True
            await self.transport.aclose()

    # -- the transport's side

    async def _fill(self) -> bool:
        """Wait for more from the transport; False at its end."""
        data = await self._ciphertext.receive_some(limits.READ_BYTES)
        self._incoming.write(data)
        return bool(data)

    async def _flush(self) -> None:
        """Write all that is encrypted; one task at a time."""
        self._sending = True
        try:
            await self._ciphertext.send_all(self._outgoing.read())
            while self._outgoing.pending:
                await self._ciphertext.send_all(self._outgoing.read())
        except BaseException:
            self._broken = True
            raise
        finally:
            self._sending = False

    async def _send_alert(self) -> None:
        with trio.move_on_after(ALERT_S), suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self._flush()

    # -- OpenSSL's side

    def _shaken(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def _decrypt(self, most: int) -> bytes:
        """Every whole record of what came; b"" where none is whole yet."""
        done = 0
        self._undecrypted = False
        with suppress(ssl.SSLWantReadError):
            while self._incoming.pending or self._tls.pending():
                if done == most:
                    self._undecrypted = True
                    break
                # with a buffer it returns a count, whatever its stub says
                n_bytes = cast("int", self._tls.read(most - done, self._plain[done:most]))
                if not n_bytes:  # the close alert
                    self._ended = True
                    break
                done += n_bytes
        if self._outgoing.pending > MAX_OWED_BYTES:
            raise ssl.SSLError("the other end asks for new keys without end")
        return bytes(self._plain[:done])

    def _encrypt(self, view: memoryview) -> None:
        """OpenSSL takes one record at a time."""
        done = 0
        try:
            while done < len(view):
                done += self._tls.write(view[done:])
        except ssl.SSLError as error:
            self._broken = True
            raise trio.BrokenResourceError("the TLS connection is broken") from error

    async def _give_up(self, error: ssl.SSLError) -> NoReturn:
        """The other end broke TLS: tell it so, unless a send is in the way, and raise."""
        self._broken = True
        if not self._sending:
            await self._send_alert()
        raise trio.BrokenResourceError("the TLS connection is broken") from error

    def _check_sendable(self) -> None:
        self._check_open()
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this TLS stream")

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this TLS stream was closed")
        if self._broken:
            raise trio.BrokenResourceError("the TLS connection broke, or a send on it was cancelled")
