"""A stage's files over a *files* channel: whole, continued, refused, and never waited for without end."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest
import trio
from contexts import node_context
from load_specs import one_stage_load

from swarmnode.catalog.registry import Registry
from swarmnode.catalog.store import ShardStore
from swarmnode.compute.scripted_servable import write_scripted_servable
from swarmnode.config import read_settings
from swarmnode.errors import FetchFailed, InvalidRequest, ProtocolError
from swarmnode.ids import BootId, NodeId
from swarmnode.roles import file_client
from swarmnode.roles.fetching import fetch_files
from swarmnode.roles.file_server import serve_files
from swarmnode.wire.address import Address
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import Identity
from swarmnode.wire.memory import MemoryNetwork

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from swarmnode.catalog.manifest import FileEntry
    from swarmnode.wire.link import Channel, Hello

    Serve = Callable[[Channel], Awaitable[None]]

LARGE = "shards/stage-0/script.json"


class Transfer:
    """A coordinator with one model, a peer's empty store, and a link between them."""

    def __init__(self, folder: Path) -> None:
        filler = {"default": [7] * 800_000}
        self.model = write_scripted_servable(folder / "servable", "scripted", filler, layers=4, stages=1)
        self.registry = Registry(self.model.parent)
        self.files = self.registry.get("scripted").files
        self.store = ShardStore(folder / "store")
        self.partial = folder / "store" / "partial"
        self.reports: list[tuple[str, int, int]] = []
        self._settings = read_settings(folder, environ={})

    def entry(self, path: str) -> FileEntry:
        return next(entry for entry in self.files if entry.path == path)

    async def fetch(self, serve: Serve | None = None) -> None:
        """The peer fetches everything from a coordinator that answers as `serve` does; the real one by default."""
        network = MemoryNetwork()
        answer = serve or (lambda channel: serve_files(self.registry, channel))

        async def handler(kind: str, hello: Hello, channel: Channel) -> None:
            await answer(channel)

        async def listen(*, task_status: trio.TaskStatus[Address]) -> None:
            await network.listen(Address("127.0.0.1", 0), handler, identity("house"), task_status=task_status)

        async with trio.open_nursery() as nursery:
            address = await nursery.start(listen)
            context = node_context(identity("attic"), network, self._settings, [address])
            try:
                await fetch_files(context, one_stage_load(self.files, "attic"), self.store, self._report)
            except Exception as error:
                self.failure: Exception | None = error
            else:
                self.failure = None
            nursery.cancel_scope.cancel()
        if self.failure is not None:
            raise self.failure

    def _report(self, phase: str, done: int, total: int) -> None:
        self.reports.append((phase, done, total))


def identity(name: str) -> Identity:
    return Identity(NodeId(name), BootId(name), name, listen=("127.0.0.1:1",))


@pytest.fixture
def transfer(tmp_path: Path) -> Transfer:
    return Transfer(tmp_path)


async def test_every_file_arrives_whole_and_the_last_report_says_so(transfer: Transfer) -> None:
    await transfer.fetch()
    assert transfer.store.missing(transfer.files) == ()
    total = sum(entry.size for entry in {e.sha256: e for e in transfer.files}.values())
    assert transfer.reports[-1] == ("fetching", total, total)


async def test_what_is_there_is_not_fetched_again(transfer: Transfer) -> None:
    entry = transfer.entry(LARGE)
    content = (transfer.model / LARGE).read_bytes()
    (transfer.partial / entry.sha256).write_bytes(content[:-10])
    asked: list[Frame] = []

    async def watched(channel: Channel) -> None:
        receive = channel.receive

        async def noting() -> Frame:
            asked.append(await receive())
            return asked[-1]

        channel.receive = noting  # type: ignore[method-assign]
        await serve_files(transfer.registry, channel)

    await transfer.fetch(watched)
    offsets = {frame.header["path"]: frame.header["offset"] for frame in asked}
    assert offsets[LARGE] == len(content) - 10
    assert transfer.store.missing(transfer.files) == ()


async def test_hashing_what_is_there_counts_as_progress(transfer: Transfer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_client, "REPORT_S", 0.0)
    entry = transfer.entry(LARGE)
    (transfer.partial / entry.sha256).write_bytes((transfer.model / LARGE).read_bytes()[:-10])
    await transfer.fetch()
    unmoved = [
        done
        for (_, done, _), (_, before, _) in zip(transfer.reports[1:], transfer.reports, strict=False)
        if done == before
    ]
    assert unmoved, "a load that only hashes for a minute would be given up as silent"


async def test_a_wrong_beginning_is_found_and_removed(transfer: Transfer) -> None:
    entry = transfer.entry(LARGE)
    (transfer.partial / entry.sha256).write_bytes(b"not this file")
    with pytest.raises(FetchFailed, match="sha256"):
        await transfer.fetch()
    assert not (transfer.partial / entry.sha256).exists()
    await transfer.fetch()
    assert transfer.store.missing(transfer.files) == ()


async def test_a_silent_coordinator_fails_the_fetch(transfer: Transfer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_client, "FETCH_PROGRESS_S", 0.1)

    async def silent(channel: Channel) -> None:
        await trio.sleep_forever()

    with pytest.raises(FetchFailed, match="no bytes"):
        await transfer.fetch(silent)


async def one_answer(channel: Channel, *answers: Frame) -> None:
    await channel.receive()
    for answer in answers:
        await channel.send(answer)


@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        ((Frame("data", {"offset": 5}, b"x"),), FetchFailed, "expected 0"),
        ((Frame("fetched", {"size": 0}),), FetchFailed, "0 of"),
        ((Frame("error", {"code": "invalid_request", "message": "no such file"}),), InvalidRequest, "no such file"),
        ((Frame("end", {"session": 1}),), ProtocolError, "brought end"),
        ((Frame("data", {"offset": 0}),), ProtocolError, "data without a byte"),
        ((), FetchFailed, "ended the transfer"),
        (tuple(Frame("data", {"offset": i << 20}, bytes(1 << 20)) for i in range(3)), FetchFailed, "more than"),
    ],
)
async def test_a_coordinator_that_answers_wrongly(
    transfer: Transfer, answers: tuple[Frame, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await transfer.fetch(lambda channel: one_answer(channel, *answers))


@pytest.mark.parametrize(
    "wrong", [{"path": "../secret"}, {"sha256": hashlib.sha256(b"").hexdigest()}, {"size": 1}, {"offset": 1 << 40}]
)
async def test_only_files_of_the_manifest_are_served(transfer: Transfer, wrong: dict[str, object]) -> None:
    entry = transfer.entry(LARGE)
    right = {"model": "scripted", "path": entry.path, "size": entry.size, "sha256": entry.sha256, "offset": 0}
    network = MemoryNetwork()

    async def handler(kind: str, hello: Hello, channel: Channel) -> None:
        await serve_files(transfer.registry, channel)

    async def listen(*, task_status: trio.TaskStatus[Address]) -> None:
        await network.listen(Address("127.0.0.1", 0), handler, identity("house"), task_status=task_status)

    async with trio.open_nursery() as nursery:
        address = await nursery.start(listen)
        async with network.dial(address, "files", identity("attic")) as channel:
            await channel.send(Frame("fetch", {**right, **wrong}))
            answer = await channel.receive()
            assert (answer.kind, answer.header["code"]) == ("error", "invalid_request")
        nursery.cancel_scope.cancel()
