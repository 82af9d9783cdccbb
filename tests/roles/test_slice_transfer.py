"""A stage's part of its shards: from the coordinator and from peers, continued after a cut, and never a wrong byte."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import trio
from contexts import node_context
from load_specs import one_stage_load
from safetensors.numpy import save_file

from swarmnode.catalog import chunk_pool, disk, shards
from swarmnode.catalog.adapter import SCALES_PATH
from swarmnode.catalog.chunks import parse_chunks
from swarmnode.catalog.importing import import_model
from swarmnode.catalog.kept_blocks import BLOCKS_FILE
from swarmnode.catalog.manifest import MANIFEST_NAME, FileEntry
from swarmnode.catalog.registry import Registry
from swarmnode.catalog.safetensors_header import read_header
from swarmnode.catalog.store import PartialFile, ShardStore
from swarmnode.config import read_settings
from swarmnode.errors import FetchFailed, InvalidModel, LinkBroken, NoSpace
from swarmnode.ids import BootId, NodeId
from swarmnode.roles import file_client, slice_client
from swarmnode.roles.fetching import fetch_files
from swarmnode.roles.file_server import serve_files, serve_shares
from swarmnode.wire.address import Address
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import Identity
from swarmnode.wire.memory import MemoryNetwork

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from swarmnode.roles.load_spec import LoadSpec
    from swarmnode.wire.link import Channel, Hello

    Serve = Callable[[Channel], Awaitable[None]]
    """What a peer does with its *shares* channels instead of serving its store."""
    Spoil = Callable[[Frame], Awaitable[Frame | None]]
    """What a server's frame becomes on its way out; None: it is not sent."""

SHARD = "shards/stage-0/model.safetensors"
BLOCKS = f"shards/stage-0/{BLOCKS_FILE}"
LAYERS, HIDDEN = 4, 32


def write_checkpoint(folder: Path, blocks: bool) -> Path:
    """A Llama in name, its weights numbers that differ everywhere; with `blocks` as if from a GGUF file."""
    folder.mkdir()
    shapes = {"model.embed_tokens.weight": (64, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (64, HIDDEN)}
    for layer in range(LAYERS):
        shapes[f"model.layers.{layer}.mlp.up_proj.weight"] = (96, HIDDEN)
        shapes[f"model.layers.{layer}.norm.weight"] = (HIDDEN,)
    rng = np.random.default_rng(1)
    save_file({n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}, folder / "model.safetensors")
    if blocks:
        names = (f"model.layers.{layer}.mlp.up_proj.weight.q4_0" for layer in range(LAYERS))
        save_file({name: rng.integers(0, 256, (96, 18), np.uint8) for name in names}, folder / BLOCKS_FILE)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": LAYERS}
    config |= {"hidden_size": HIDDEN, "vocab_size": 64, "num_attention_heads": 2, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


class Swarm:
    """A coordinator with one model of one shard, and peers, each with a store, on one network."""

    def __init__(self, folder: Path, *, blocks: bool = False) -> None:
        manifest = import_model(str(write_checkpoint(folder / "tiny", blocks)), folder / "models", stages=1)
        self.quantization = "none"
        self.registry = Registry(folder / "models")
        self.files = manifest.files
        self.original = folder / "models" / "tiny" / SHARD
        self.network = MemoryNetwork()
        self.stores: dict[str, ShardStore] = {}
        self.addresses: dict[str, Address] = {}
        self.served: dict[str, int] = {}
        self.spoils: dict[str, Spoil] = {}
        self.liars: dict[str, Serve] = {}
        self.reports: list[tuple[int, int]] = []
        self._folder = folder
        self._settings = read_settings(folder, environ={})

    @property
    def shard(self) -> Any:
        return next(entry for entry in self.files if entry.path == SHARD)

    def store(self, name: str) -> ShardStore:
        return self.stores.setdefault(name, ShardStore(self._folder / f"store-{name}"))

    @property
    def chunk_list(self) -> Any:
        return next(entry for entry in self.files if entry.path == SHARD + ".chunks")

    def marks(self, name: str) -> bytes:
        return self.store(name).marks(self.shard, self.chunk_list)

    def missing_bytes(self, name: str) -> int:
        chunks = parse_chunks((self.original.parent / "model.safetensors.chunks").read_bytes(), self.shard)
        return sum(chunks.size(index) for index, mark in enumerate(self.marks(name)) if not mark)

    def spec(self, name: str, first: int, end: int, *sources: str) -> LoadSpec:
        load = one_stage_load(self.files, name)
        known = tuple((NodeId(source), str(self.addresses[source])) for source in sources)
        load = replace(load, model=self.registry.get("tiny").model_id, quantization=self.quantization)
        return replace(load, first_layer=first, end_layer=end, sources=known)

    def add_adapter_scales(self) -> None:
        """What tells a stage that the servable has an adapter."""
        path = self.original.parent.parent.parent / SCALES_PATH
        content = b"what is in it does not matter here"
        path.write_bytes(content)
        entry = FileEntry(path=SCALES_PATH, size=len(content), sha256=hashlib.sha256(content).hexdigest())
        self.files = (*self.files, entry)
        manifest = self.registry.get("tiny").model_copy(update={"files": self.files})
        (path.parent.parent / MANIFEST_NAME).write_text(manifest.model_dump_json(), encoding="utf-8")

    async def open(self, nursery: trio.Nursery, *peers: str) -> None:
        for name in ("house", *peers):
            self.addresses[name] = await nursery.start(self._listen, name)

    async def fetch(self, name: str, first: int, end: int, *sources: str) -> dict[str, Any]:
        """Fetch and place the slice; returns the bytes of its tensors, by name."""
        context = node_context(_identity(name), self.network, self._settings, [self.addresses["house"]])
        spec = self.spec(name, first, end, *sources)
        sliced = await fetch_files(context, spec, self.store(name), lambda _, *counts: self.reports.append(counts))
        folder = self.store(name).place(spec.model, spec.files, sliced)
        return tensors_of(folder / SHARD, first, end)

    def check(self, tensors: dict[str, Any], first: int, end: int) -> None:
        assert tensors == tensors_of(self.original, first, end)

    async def _listen(self, name: str, *, task_status: trio.TaskStatus[Address]) -> None:
        async def handler(kind: str, hello: Hello, channel: Channel) -> None:
            self._watch(name, channel)
            if kind == "files":
                await serve_files(self.registry, channel)
            elif name in self.liars:
                await self.liars[name](channel)
            else:
                await serve_shares(self.store(name), channel)

        await self.network.listen(Address("127.0.0.1", 0), handler, _identity(name), task_status=task_status)

    def _watch(self, name: str, channel: Channel) -> None:
        send = channel.send

        async def watched(frame: Frame) -> None:
            spoil = self.spoils.get(name)
            out = frame if spoil is None else await spoil(frame)
            if out is not None:
                self.served[name] = self.served.get(name, 0) + (len(out.body) if out.kind == "data" else 0)
                await send(out)

        channel.send = watched  # type: ignore[method-assign]


def _identity(name: str) -> Identity:
    return Identity(NodeId(name), BootId(name), name, listen=("127.0.0.1:1",))


def tensors_of(path: Path, first: int, end: int) -> dict[str, Any]:
    content = path.read_bytes()
    ours = {f"model.layers.{layer}." for layer in range(first, end)}
    ours |= {"model.embed"} if first == 0 else set()
    ours |= {"model.norm", "lm_head"} if end == LAYERS else set()
    chosen = {n: e for n, e in read_header(path).items() if any(n.startswith(prefix) for prefix in ours)}
    return {name: content[entry.begin : entry.end] for name, entry in chosen.items()}


def _size(tensors: dict[str, Any]) -> int:
    return sum(len(content) for content in tensors.values())


@pytest.fixture
def swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Swarm:
    monkeypatch.setattr(shards, "COPY_BYTES", 1000)
    monkeypatch.setattr(chunk_pool, "BATCH_BYTES", 4000)
    monkeypatch.setattr(slice_client, "ASK_AGAIN_S", 0.01)
    monkeypatch.setattr(slice_client, "FIRST_ANSWERS_S", 0.5)
    return Swarm(tmp_path)


async def test_a_stage_gets_the_bytes_of_its_tensors_and_no_others(swarm: Swarm) -> None:
    async with trio.open_nursery() as nursery:
        await swarm.open(nursery)
        for first, end in ((1, 2), (0, 1), (2, 4)):
            before = swarm.served.get("house", 0)
            tensors = await swarm.fetch(f"attic{first}", first, end)
            swarm.check(tensors, first, end)
            small = sum(entry.size for entry in swarm.files if entry.path != SHARD)
            header = min(entry.begin for entry in read_header(swarm.original).values())
            total = small + header + _size(tensors)
            assert swarm.served["house"] - before == total
            assert swarm.reports[-1] == (total, total)
        nursery.cancel_scope.cancel()


async def test_another_slice_takes_only_what_it_lacks_and_the_same_one_nothing(swarm: Swarm) -> None:
    async with trio.open_nursery() as nursery:
        await swarm.open(nursery)
        await swarm.fetch("attic", 0, 2)
        before = swarm.served["house"]
        swarm.check(await swarm.fetch("attic", 1, 3), 1, 3)
        assert swarm.served["house"] - before == _size(tensors_of(swarm.original, 2, 3))
        before = swarm.served["house"]
        swarm.check(await swarm.fetch("attic", 0, 3), 0, 3)
        assert swarm.served["house"] == before
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("adapted", [False, True])
async def test_int4_fast_gets_blocks_instead_of_the_weights_they_stand_for(adapted: bool, tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, blocks=True)
    if adapted:
        swarm.add_adapter_scales()
    headers = {path: read_header(swarm.original.parent.parent.parent / path) for path in (SHARD, BLOCKS)}
    always = sum(entry.size for entry in swarm.files if entry.path not in headers)
    always += sum(min(entry.begin for entry in header.values()) for header in headers.values())
    norms, dense, blocks = (2 * size for size in (HIDDEN * 4, 96 * HIDDEN * 4, 96 * 18))
    async with trio.open_nursery() as nursery:
        await swarm.open(nursery)
        for method in ("none", "int8", "int4-fast"):
            swarm.quantization = method
            before = swarm.served.get("house", 0)
            await swarm.fetch(f"attic-{method}", 1, 3)
            expected = blocks if method == "int4-fast" and not adapted else dense
            assert swarm.served["house"] - before == always + norms + expected
        nursery.cancel_scope.cancel()


def after(count: int, then: Spoil) -> Spoil:
    """Let `count` data frames pass."""
    left = [count]

    async def spoil(frame: Frame) -> Frame | None:
        left[0] -= frame.kind == "data"
        return frame if left[0] >= 0 else await then(frame)

    return spoil


async def altered(frame: Frame) -> Frame:
    body = bytes(frame.body)
    return Frame(frame.kind, frame.header, bytes([body[0] ^ 1]) + body[1:]) if frame.kind == "data" else frame


async def leaves(frame: Frame) -> Frame | None:
    raise LinkBroken("it left")


async def silent(frame: Frame) -> Frame | None:
    await trio.sleep_forever()
    raise AssertionError


async def ends_early(frame: Frame) -> Frame:
    return Frame("fetched", {"size": 5}) if frame.kind == "data" else frame


async def elsewhere(frame: Frame) -> Frame:
    return Frame("data", {"offset": 7}, frame.body) if frame.kind == "data" else frame


async def longer(frame: Frame) -> Frame:
    return Frame("data", frame.header, bytes(1 << 20)) if frame.kind == "data" else frame


async def more_marks(frame: Frame) -> Frame:
    return Frame("have", frame.header, b"\1" * 5000) if frame.kind == "have" else frame


async def test_a_fetch_that_was_cut_goes_on(swarm: Swarm) -> None:
    async with trio.open_nursery() as nursery:
        await swarm.open(nursery)
        swarm.spoils["house"] = after(6, leaves)
        with pytest.raises(LinkBroken):
            await swarm.fetch("attic", 0, 4)
        assert swarm.marks("attic").count(1) > 1
        missing = swarm.missing_bytes("attic")
        del swarm.spoils["house"]
        before = swarm.served["house"]
        swarm.check(await swarm.fetch("attic", 0, 4), 0, 4)
        assert swarm.served["house"] - before == missing
        nursery.cancel_scope.cancel()


async def test_a_cancelled_fetch_keeps_what_came(swarm: Swarm) -> None:
    async with trio.open_nursery() as nursery:
        await swarm.open(nursery)
        swarm.spoils["house"] = after(8, silent)
        with trio.move_on_after(0.3):
            await swarm.fetch("attic", 0, 4)
        assert swarm.marks("attic").count(1) > 1
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("lie", "message"),
    [(altered, "sha256"), (ends_early, "sent"), (elsewhere, "offset 7"), (longer, "expected is")],
)
async def test_a_coordinator_that_sends_something_else_fails_the_load_and_nothing_wrong_is_kept(
    swarm: Swarm, lie: Spoil, message: str
) -> None:
    whole = sum(entry.path != SHARD for entry in swarm.files)
    async with trio.open_nursery() as nursery:
        await swarm.open(nursery)
        swarm.spoils["house"] = after(whole + 1, lie)
        with pytest.raises(FetchFailed, match=f"model.safetensors: .*{message}"):
            await swarm.fetch("attic", 0, 4)
        if lie is not altered:  # what came unaltered with it is right
            assert sum(swarm.marks("attic")) == 1  # the header, before the lies began
        del swarm.spoils["house"]
        swarm.check(await swarm.fetch("attic", 0, 4), 0, 4)
        nursery.cancel_scope.cancel()


async def test_a_peer_gives_what_it_has(swarm: Swarm) -> None:
    async with trio.open_nursery() as nursery:
        await swarm.open(nursery, "attic")
        await swarm.fetch("attic", 0, 3)
        before = swarm.served["house"]
        swarm.check(await swarm.fetch("cellar", 1, 4, "attic"), 1, 4)
        assert swarm.served["attic"] == _size(tensors_of(swarm.original, 1, 3))
        small = sum(entry.size for entry in swarm.files if entry.path != SHARD)
        header = min(entry.begin for entry in read_header(swarm.original).values())
        last = _size(tensors_of(swarm.original, 3, 4))
        assert swarm.served["house"] - before == small + header + last
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "lie",
    [
        altered,
        ends_early,
        elsewhere,
        longer,
        leaves,
        silent,
        more_marks,
        after(2, altered),
        after(1, leaves),
        after(2, silent),
    ],
)
async def test_a_peer_that_lies_leaves_or_stalls_costs_time_and_nothing_else(
    swarm: Swarm, lie: Spoil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_client, "PEER_SILENCE_S", 0.2)
    async with trio.open_nursery() as nursery:
        await swarm.open(nursery, "attic")
        await swarm.fetch("attic", 0, 3)
        swarm.spoils["attic"] = lie
        with trio.fail_after(20):
            swarm.check(await swarm.fetch("cellar", 0, 4, "attic"), 0, 4)
        nursery.cancel_scope.cancel()


def delayed(seconds: float) -> Spoil:
    """Data comes so much later."""

    async def late(frame: Frame) -> Frame:
        await trio.sleep(seconds if frame.kind == "data" else 0)
        return frame

    return late


async def test_a_slow_peer_does_not_hold_the_load(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator takes over what it was to give."""

    monkeypatch.setattr(slice_client, "PATIENCE_S", 0.02)
    async with trio.open_nursery() as nursery:
        await swarm.open(nursery, "attic")
        await swarm.fetch("attic", 0, 4)
        before = swarm.served["house"]
        swarm.spoils["attic"] = delayed(0.3)
        swarm.check(await swarm.fetch("cellar", 0, 4, "attic"), 0, 4)
        assert swarm.served["house"] - before > swarm.shard.size // 2
        nursery.cancel_scope.cancel()


def alter_on_the_coordinators_disk(swarm: Swarm, tensor: str | None) -> None:
    """One bit of a tensor, or of the header."""
    at = 20 if tensor is None else read_header(swarm.original)[tensor].begin
    content = bytearray(swarm.original.read_bytes())
    content[at] ^= 1
    swarm.original.write_bytes(content)


@pytest.mark.parametrize("tensor", [None, "model.layers.1.mlp.up_proj.weight"], ids=["header", "tensor"])
async def test_a_chunk_that_is_altered_on_the_coordinators_disk_comes_from_a_peer(
    swarm: Swarm, tensor: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow one, so that the coordinator is asked for it too."""

    monkeypatch.setattr(slice_client, "PATIENCE_S", 0.02)
    async with trio.open_nursery() as nursery:
        await swarm.open(nursery, "attic")
        await swarm.fetch("attic", 0, 4)
        expected = tensors_of(swarm.original, 0, 4)
        alter_on_the_coordinators_disk(swarm, tensor)
        swarm.spoils["attic"] = delayed(0.3)
        with trio.fail_after(20):
            assert await swarm.fetch("cellar", 0, 4, "attic") == expected
        nursery.cancel_scope.cancel()


async def test_a_chunk_that_is_altered_everywhere_is_named_and_the_rest_is_kept(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_client, "PEER_SILENCE_S", 0.5)  # what is altered is looked for this long
    tensor = "model.layers.1.mlp.up_proj.weight"
    begin = read_header(swarm.original)[tensor].begin
    async with trio.open_nursery() as nursery:
        await swarm.open(nursery, "attic")
        await swarm.fetch("attic", 2, 4)
        alter_on_the_coordinators_disk(swarm, tensor)
        with trio.fail_after(20), pytest.raises(FetchFailed, match=f"model.safetensors: .*bytes {begin} to .*sha256"):
            await swarm.fetch("cellar", 0, 4, "attic")
        assert swarm.marks("cellar").count(0) == 1
        nursery.cancel_scope.cancel()


async def test_a_batch_that_takes_too_long_is_asked_of_others(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_client, "BATCH_S", 0.1)
    async with trio.open_nursery() as nursery:
        await swarm.open(nursery, "attic")
        await swarm.fetch("attic", 0, 4)
        swarm.spoils["attic"] = delayed(30)
        with trio.fail_after(8):
            swarm.check(await swarm.fetch("cellar", 0, 4, "attic"), 0, 4)
        nursery.cancel_scope.cancel()


async def test_a_source_that_nobody_answers_at_is_passed_over(swarm: Swarm) -> None:
    async with trio.open_nursery() as nursery:
        await swarm.open(nursery)
        swarm.addresses["ghost"] = Address("127.0.0.1", 9)
        swarm.check(await swarm.fetch("cellar", 0, 4, "ghost"), 0, 4)
        nursery.cancel_scope.cancel()


async def test_two_that_load_the_same_at_once_share(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """In many batches, as a real shard has: the coordinator gives little more than one copy."""

    async with trio.open_nursery() as nursery:
        await swarm.open(nursery, "attic", "cellar")
        swarm.spoils["house"] = delayed(0.03)
        monkeypatch.setattr(chunk_pool, "BATCH_BYTES", 1000)
        async with trio.open_nursery() as both:
            both.start_soon(swarm.fetch, "attic", 0, 4, "cellar")
            both.start_soon(swarm.fetch, "cellar", 0, 4, "attic")
        for name in ("attic", "cellar"):
            assert all(swarm.marks(name))
            assert swarm.served[name] > 0
        small = sum(entry.size for entry in swarm.files if entry.path != SHARD)
        header = min(entry.begin for entry in read_header(swarm.original).values())
        assert swarm.served["house"] - 2 * (small + header) < 1.3 * swarm.shard.size
        nursery.cancel_scope.cancel()


async def test_two_loads_of_one_peer_take_turns(swarm: Swarm) -> None:
    async with trio.open_nursery() as nursery:
        await swarm.open(nursery)
        async with trio.open_nursery() as both:
            both.start_soon(swarm.fetch, "attic", 0, 3)
            both.start_soon(swarm.fetch, "attic", 1, 4)
        small = sum(entry.size for entry in swarm.files if entry.path != SHARD)
        assert swarm.served["house"] <= 2 * small + swarm.shard.size
        assert all(swarm.marks("attic"))
        nursery.cancel_scope.cancel()


async def test_a_disk_too_small_for_the_slice_is_said_before_it_is_fetched(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trio.open_nursery() as nursery:
        await swarm.open(nursery)
        need = _size(tensors_of(swarm.original, 0, 1))
        monkeypatch.setattr(disk, "free_bytes", lambda _: disk.RESERVE_BYTES + need - 1)
        with pytest.raises(NoSpace, match="fetching the model's files needs"):
            await swarm.fetch("attic", 0, 1)
        assert sum(swarm.marks("attic")) == 1
        monkeypatch.setattr(disk, "free_bytes", lambda _: disk.RESERVE_BYTES + need)
        swarm.check(await swarm.fetch("attic", 0, 1), 0, 1)
        nursery.cancel_scope.cancel()


async def test_an_older_import_is_fetched_whole(swarm: Swarm) -> None:
    swarm.files = tuple(entry for entry in swarm.files if not entry.path.endswith(".chunks"))
    async with trio.open_nursery() as nursery:
        await swarm.open(nursery)
        swarm.check(await swarm.fetch("attic", 1, 2), 1, 2)
        assert swarm.store("attic").have(swarm.shard)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "wrong",
    [{"path": "../x.safetensors"}, {"sha256": "../../etc/passwd"}, {"list": "x"}, {"end": 1 << 40}, {"offset": 10**6}],
)
async def test_a_share_is_named_by_digests_and_within_the_file(swarm: Swarm, wrong: dict[str, object]) -> None:
    async with trio.open_nursery() as nursery:
        await swarm.open(nursery, "attic")
        await swarm.fetch("attic", 0, 4)
        lists = swarm.chunk_list
        right = {"path": SHARD, "size": swarm.shard.size, "sha256": swarm.shard.sha256, "model": "tiny", "offset": 0}
        right |= {"list": lists.sha256, "list_size": lists.size}
        async with swarm.network.dial(swarm.addresses["attic"], "shares", _identity("cellar")) as channel:
            await channel.send(Frame("fetch", {**right, **wrong}))
            answer = await channel.receive()
            assert (answer.kind, answer.header["code"]) == ("error", "invalid_request")
        nursery.cancel_scope.cancel()


def lose_the_coordinators_disk(swarm: Swarm, folder: Path) -> None:
    """Another node coordinates, which knows the model by the swarm's document alone."""
    manifest = swarm.registry.get("tiny")
    swarm.registry = Registry(folder / "another machine", lambda: {manifest.id: manifest})


async def test_without_the_coordinators_files_peers_give_all_they_have_between_them(
    swarm: Swarm, tmp_path: Path
) -> None:
    async with trio.open_nursery() as nursery:
        await swarm.open(nursery, "attic", "den")
        await swarm.fetch("attic", 0, 2)
        await swarm.fetch("den", 2, 4)
        lose_the_coordinators_disk(swarm, tmp_path)
        with trio.fail_after(10):
            swarm.check(await swarm.fetch("loft", 1, 3, "attic", "den"), 1, 3)
        nursery.cancel_scope.cancel()


def answering(answer: Frame) -> Serve:
    """Everything is answered alike."""

    async def serve(channel: Channel) -> None:
        async for _ in channel:
            await channel.send(answer)

    return serve


def refusing(code: str) -> Serve:
    return answering(Frame("error", {"code": code, "message": "not from here"}))


def dripping(body: bytes) -> Serve:
    """Of a file of some length always something in time, and not the file within 20 s."""

    async def serve(channel: Channel) -> None:
        while (await channel.receive()).header["size"] < 100:
            await channel.send(Frame("error", {"code": "fetch_failed", "message": "it is not here"}))
        sent = 0
        while True:
            await channel.send(Frame("data", {"offset": sent}, body))
            sent += len(body)
            await trio.sleep(0.2)

    return serve


@pytest.mark.parametrize(
    "liar",
    [
        *map(refusing, ("invalid_request", "protocol_error", "not_coordinator", "no_space", "model_not_found")),
        answering(Frame("have", {"sha256": "0" * 64}, b"")),
        dripping(b""),
        dripping(b"{"),
    ],
    ids=[
        *("invalid_request", "protocol_error", "not_coordinator", "no_space", "model_not_found"),
        *("another_frame", "empty", "a_byte_at_a_time"),
    ],
)
async def test_whatever_is_wrong_with_a_peer_the_next_is_asked_for_whole_files(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, liar: Serve
) -> None:
    monkeypatch.setattr(file_client, "PEER_SILENCE_S", 0.5)
    async with trio.open_nursery() as nursery:
        await swarm.open(nursery, "attic", "den")
        await swarm.fetch("den", 0, 4)
        swarm.liars["attic"] = liar
        lose_the_coordinators_disk(swarm, tmp_path)
        with trio.fail_after(10):
            swarm.check(await swarm.fetch("loft", 0, 4, "attic", "den"), 0, 4)
        nursery.cancel_scope.cancel()


async def test_a_full_disk_is_no_peers_fault(swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next peer's files would fit as little, and the load says what is wrong."""

    def full(*_: object) -> None:
        raise NoSpace("the disk is full")

    async with trio.open_nursery() as nursery:
        await swarm.open(nursery, "attic", "den")
        await swarm.fetch("attic", 0, 4)
        lose_the_coordinators_disk(swarm, tmp_path)
        monkeypatch.setattr(PartialFile, "write", full)
        with pytest.raises(NoSpace, match="the disk is full"):
            await swarm.fetch("loft", 0, 4, "attic", "den")
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("had", "missing"),
    [
        ((0, 2), rf"^{SHARD}: neither .*not on this machine"),
        (None, r"^tokenizer/\S+ and \d more: neither the coord"),
    ],
)
async def test_what_nobody_has_is_said_in_time(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, had: tuple[int, int] | None, missing: str
) -> None:
    monkeypatch.setattr(slice_client, "PEER_SILENCE_S", 0.5)
    async with trio.open_nursery() as nursery:
        await swarm.open(nursery, "attic")
        if had is not None:
            await swarm.fetch("attic", *had)
        lose_the_coordinators_disk(swarm, tmp_path)
        with trio.fail_after(10), pytest.raises(InvalidModel, match=missing):
            await swarm.fetch("loft", 1, 3, "attic")
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("lost", ["all of it", "the blocks alone"])
async def test_where_only_blocks_of_a_gguf_file_are_missing_the_load_says_so_and_what_to_do(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_client, "PEER_SILENCE_S", 0.5)
    swarm = Swarm(tmp_path, blocks=True)
    async with trio.open_nursery() as nursery:
        await swarm.open(nursery, "attic")
        await swarm.fetch("attic", 0, 4)
        manifest = swarm.registry.get("tiny")
        lose_the_coordinators_disk(swarm, tmp_path)
        if lost == "the blocks alone":
            (tmp_path / "models" / "tiny" / BLOCKS).unlink()
            swarm.registry = Registry(tmp_path / "models", lambda: {manifest.id: manifest})
        swarm.quantization = "int4-fast"
        told = rf"^{BLOCKS}: neither .*load it with another --quantization, start a machine that has"
        told += rf".*not whole.*{BLOCKS}: is listed" if lost == "the blocks alone" else ".*not on this machine"
        with trio.fail_after(10), pytest.raises(InvalidModel, match=told):
            await swarm.fetch("loft", 1, 3, "attic")
        swarm.quantization = "none"
        swarm.check(await swarm.fetch("loft", 1, 3, "attic"), 1, 3)
        nursery.cancel_scope.cancel()
