"""The token file: private, whole, and refused when damaged."""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from swarmnode.cluster.token_book import Scope, TokenBook
from swarmnode.errors import InvalidRequest, NoSpace, TokenNotFound
from swarmnode.roles.token_store import MAX_FILE_BYTES, TokenStore

if TYPE_CHECKING:
    from pathlib import Path


async def test_tokens_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    store = TokenStore(path, required=False)
    assert not store.enforced()
    record, token = await store.issue("mine", Scope.OPERATE, None)
    again = TokenStore(path, required=False)
    assert again.enforced()
    assert again.authenticate(token) == record
    await again.revoke(record.id)
    assert not TokenStore(path, required=False).enforced()
    with pytest.raises(TokenNotFound):
        await again.revoke(record.id)


async def test_the_file_is_private_and_holds_no_token(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    os.umask(os.umask(0o022))
    (tmp_path / "tokens.json.tmp").write_text("left by a crash")
    _, token = await TokenStore(path, required=False).issue("mine", Scope.READ, None)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert token.removeprefix("sk-swarm-") not in path.read_text()
    assert os.listdir(tmp_path) == ["tokens.json"]


def damaged_files() -> list[bytes]:
    good = {"id": "a", "label": "x", "scope": "read", "sha256": "0" * 64, "created_unix": 1, "expires_unix": None}
    return [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"null",
        b'{"version": 1}',
        b'{"version": 2, "tokens": []}',
        json.dumps({"version": 1, "tokens": [good, good]}).encode(),
        json.dumps({"version": 1, "tokens": [{**good, "scope": "root"}]}).encode(),
        b" " * (MAX_FILE_BYTES + 1),
    ]


@pytest.mark.parametrize("content", damaged_files())
def test_a_damaged_file_is_refused_with_its_name(tmp_path: Path, content: bytes) -> None:
    """Never read as no tokens: that would open the API."""
    path = tmp_path / "tokens.json"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=str(path)):
        TokenStore(path, required=False)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokens.json").mkdir()
    with pytest.raises(InvalidRequest, match=r"tokens\.json"):
        TokenStore(tmp_path / "tokens.json", required=False)


async def test_a_failed_write_changes_nothing(tmp_path: Path) -> None:
    """What is not on disk has not happened: neither the token nor the revocation."""
    folder = tmp_path / "state"
    folder.mkdir()
    store = TokenStore(folder / "tokens.json", required=False)
    record, token = await store.issue("mine", Scope.READ, None)
    seen: list[str] = []
    store.when_revoked(seen.append)
    (folder / "tokens.json").unlink()
    folder.rmdir()
    with pytest.raises(NoSpace, match=r"tokens\.json cannot be written: No such file"):
        await store.revoke(record.id)
    with pytest.raises(NoSpace):
        await store.issue("second", Scope.READ, None)
    assert store.authenticate(token) == record
    assert list(store.records()) == [record]
    assert seen == []


async def test_what_the_other_voters_agreed_to_counts_although_this_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A revoked token opens nothing from then on, and whoever uses it is cut off."""
    shared: list[TokenBook] = []
    seen: list[str] = []

    async def share(book: TokenBook) -> None:
        shared.append(book)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = TokenStore(tmp_path / "tokens.json", required=False, share=share)
    record, token = await store.issue("mine", Scope.READ, None)
    store.when_revoked(seen.append)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(NoSpace, match=r"tokens\.json cannot be written: No space left"):
            await store.revoke(record.id)
        with pytest.raises(NoSpace):
            await store.take(shared[-1])
    assert (store.authenticate(token), store.book, seen) == (None, shared[-1], [record.id])
    await store.take(shared[-1])
    assert TokenStore(tmp_path / "tokens.json", required=False).authenticate(token) is None


async def test_a_change_that_is_shared_counts_although_its_caller_left(tmp_path: Path) -> None:
    agreed, scope = trio.Event(), trio.CancelScope()

    async def share(_: TokenBook) -> None:
        await agreed.wait()

    store = TokenStore(tmp_path / "tokens.json", required=False, share=share)

    async def issue() -> None:
        with scope:
            await store.issue("mine", Scope.READ, None)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(issue)
        await trio.testing.wait_all_tasks_blocked()
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        agreed.set()
    assert [record.label for record in store.records()] == ["mine"]


async def test_changes_side_by_side_are_all_kept(tmp_path: Path) -> None:
    store = TokenStore(tmp_path / "tokens.json", required=False)
    made: list[Any] = []

    async def issue(number: int) -> None:
        made.append((await store.issue(f"token {number}", Scope.READ, None))[0])

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(issue, number)
    again = TokenStore(tmp_path / "tokens.json", required=False)
    assert sorted(r.id for r in again.records()) == sorted(r.id for r in made)


async def test_watchers_hear_of_revocations(tmp_path: Path) -> None:
    store = TokenStore(tmp_path / "tokens.json", required=False)
    seen: list[str] = []
    store.when_revoked(seen.append)
    record, _ = await store.issue("mine", Scope.READ, None)
    await store.revoke(record.id)
    assert seen == [record.id]
