"""The token file: private, whole, and refused when damaged."""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING, Any

import pytest

from swarmnode.cluster.token_book import Scope
from swarmnode.errors import InvalidRequest, TokenNotFound
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
    with pytest.raises(OSError):
        await store.revoke(record.id)
    with pytest.raises(OSError):
        await store.issue("second", Scope.READ, None)
    assert store.authenticate(token) == record
    assert list(store.records()) == [record]
    assert seen == []


async def test_changes_side_by_side_are_all_kept(tmp_path: Path) -> None:
    import trio

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
