"""The API tokens on disk: a `TokenBook` in a 0600 file, changed by temp file, fsync and rename."""

from __future__ import annotations

import json
import secrets
import time
from typing import TYPE_CHECKING

import trio

from swarmnode.cluster.token_book import SECRET_BYTES, TokenBook
from swarmnode.errors import InvalidRequest
from swarmnode.private_files import keep_private, read_bounded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from swarmnode.cluster.token_book import Scope, TokenRecord

VERSION = 1
MAX_FILE_BYTES = 1 << 20
"""A thousand tokens with the longest labels take about 600 KiB."""


class TokenStore:
    """Implements `api.auth.Tokens`. A change is on disk before it is answered, and takes effect only then: on that of
    the other voters, where it is shared, and then here. What cannot be written raises NoSpace."""

    def __init__(
        self,
        path: Path,
        *,
        required: bool,
        clock: Callable[[], float] = time.time,
        share: Callable[[TokenBook], Awaitable[None]] | None = None,
    ) -> None:
        """Read `path`; raises InvalidRequest where it is damaged: an unreadable list must not mean an open API.

        `required` enforces tokens even while there are none. `clock` gives Unix seconds. `share` brings a change to
        the other voters, before it is on this disk.
        """
        self._share = share
        self._path = path
        self._required = required
        self._clock = clock
        self._book = self._written = _read(path)
        self._changing = trio.Lock()
        self._watchers: list[Callable[[str], None]] = []

    def enforced(self) -> bool:
        return self._required or self._book.enforced(self._clock())

    def authenticate(self, token: str) -> TokenRecord | None:
        return self._book.authenticate(token, self._clock())

    def records(self) -> Sequence[TokenRecord]:
        return self._book.pruned(self._clock()).records

    def when_revoked(self, watcher: Callable[[str], None]) -> None:
        """Call `watcher` with the id of every token that is revoked from now on."""
        self._watchers.append(watcher)

    async def issue(self, label: str, scope: Scope, expires_in_s: float | None) -> tuple[TokenRecord, str]:
        """The new token's record, and the token, which is shown this once."""
        async with self._changing:
            secret = secrets.token_bytes(SECRET_BYTES)
            book, record, token = self._book.issue(label, scope, secret, self._clock(), expires_in_s)
            await self._keep(book)
        return record, token

    async def revoke(self, token_id: str) -> TokenRecord:
        async with self._changing:
            book, record = self._book.revoke(token_id, self._clock())
            try:
                await self._keep(book)
            finally:
                if self._book is book:
                    for watcher in self._watchers:
                        watcher(record.id)
        return record

    async def take(self, book: TokenBook) -> None:
        """Replace them all by what the swarm's voters agreed on."""
        async with self._changing:
            if book != self._written:
                await self._write(book)

    @property
    def book(self) -> TokenBook:
        return self._book

    async def _keep(self, book: TokenBook) -> None:
        """What the other voters agreed to counts, whatever this disk says to it, and whether somebody still waits for
        it or not: a share ends within a bound of its own."""
        if self._share is not None:
            with trio.CancelScope(shield=True):
                await self._share(book)
                self._book = book
        await self._write(book)

    async def _write(self, book: TokenBook) -> None:
        """In a thread: an fsync can take a disk's second. Once begun it is not abandoned."""
        text = json.dumps({"version": VERSION, "tokens": book.as_json()}, indent=1)
        await trio.to_thread.run_sync(keep_private, self._path, text.encode())
        self._book = self._written = book


def _read(path: Path) -> TokenBook:
    try:
        content = json.loads(read_bounded(path, MAX_FILE_BYTES))
        if not isinstance(content, dict) or content.get("version") != VERSION:
            raise ValueError(f"it is not a token file of version {VERSION}")
        return TokenBook.read(content.get("tokens"))
    except FileNotFoundError:
        return TokenBook()
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"the API tokens in {path} cannot be read ({error}); restore the file, or remove it to begin without tokens"
        ) from error
