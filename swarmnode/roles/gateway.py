"""The coordinator behind the API: the `Backend` that turns HTTP's wishes into loads and requests."""

from __future__ import annotations

import uuid
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import trio

from swarmnode.api.backend import ChatEvent, ChatRequest, Done, LoadOptions, ModelCard
from swarmnode.cluster.membership import NodeState
from swarmnode.cluster.performance import Performance
from swarmnode.errors import (
    Conflict,
    LoadFailed,
    ModelNotFound,
    ModelNotLoaded,
    ModelRestoring,
    ModelUnloading,
    PeerNotFound,
    StageLost,
)
from swarmnode.ids import ModelId, NodeId, RequestId
from swarmnode.ring.work import Sampling
from swarmnode.roles.counted import counted
from swarmnode.roles.performance_report import performance_report
from swarmnode.roles.plan_report import left_out_report, plan_report
from swarmnode.wire.routes import RELAYED
from swarmnode.wire.traffic import Route

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence

    from swarmnode.catalog.manifest import Manifest
    from swarmnode.cluster.node_book import NodeRecord
    from swarmnode.cluster.performance import ModelCounts
    from swarmnode.roles.coordinator import Coordinator
    from swarmnode.roles.loaded_ring import LoadedRing
    from swarmnode.roles.reports import LaneLink
    from swarmnode.roles.requests import RequestStream


HEAD_GAUGES = ("running", "waiting", "paused", "pauses", "ending", "parked", "kv_reserved_tokens", "kv_parked_tokens")
"""Of stage 0, for the whole ring: sessions by what they do, conversations kept for later, and who holds KV."""
AWAITED = "awaited"
"""The state of a member that a coordinator elected a moment ago has not heard yet."""


class Gateway:
    """Implements `api.backend.Backend` over a coordinator."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._rings = coordinator.rings
        self._performance = Performance()

    # models

    def models(self) -> Sequence[ModelCard]:
        return [self._card(manifest) for manifest in self._coordinator.registry.models()]

    def model(self, model: str) -> ModelCard:
        return self._card(self._coordinator.registry.get(model))

    def _card(self, manifest: Manifest) -> ModelCard:
        arch = manifest.architecture
        ring = self._rings.of_model(manifest.model_id)
        context = arch.context_tokens if ring is None else ring.context_tokens
        defaults = manifest.sampling
        return ModelCard(
            id=manifest.model_id,
            created=manifest.created,
            state=self._state(manifest.model_id),
            context_tokens=context,
            details={
                "architecture": arch.name,
                "layers": arch.num_layers,
                "parameters": sum(arch.layer_params) + arch.embed_params,
                "num_stages": manifest.num_stages,
                "boundaries": manifest.boundaries,
                "dtype": manifest.dtype,
                "base": manifest.base,
                "size_bytes": sum(entry.size for entry in manifest.files),
                "model_context_tokens": arch.context_tokens,
            },
            defaults=Sampling(defaults.temperature, defaults.top_p, defaults.top_k, defaults.min_p),
        )

    def _state(self, model: ModelId) -> str:
        ring = self._rings.of_model(model)
        if self._rings.restoring.error(model, ring) is not None:
            return "restoring"
        if ring is None:
            ended = self._rings.ended(model)
            return ended.state if ended is not None and ended.error is not None else "available"
        return ring.state

    @asynccontextmanager
    async def archive(self, model: str) -> AsyncIterator[AsyncIterator[bytes]]:
        async with aclosing(_read_in_thread(self._coordinator.registry.archive(model).chunks())) as parts:
            yield parts

    # loads

    async def load(self, model: str, options: LoadOptions) -> Mapping[str, Any]:
        model_id = self._coordinator.registry.get(model).model_id
        await self._rings.look(model_id)  # before anything is decided: two loads may come together
        ring = self._rings.of_model(model_id)
        again = ring is not None and ring.state == "loading" and self._state(model_id) == "restoring"
        if ring is not None and ring.state != "ready" and not again:
            raise Conflict(f"{model} is {ring.state} (ring epoch {ring.epoch}); wait until that is over")
        if ring is not None and not _same(ring, options):
            how = f"over {len(ring.specs)} stages in {ring.dtype} (ring epoch {ring.epoch})"
            raise Conflict(f"{model} is loaded {how}; unload it first")
        if ring is None:
            ring = await self._rings.load(model_id, options)
        self._rings.restoring.join(ring)
        if options.wait:
            await ring.settled.wait()
            if ring.error is not None:
                await ring.over.wait()
            await self._rings.keep()  # what is answered outlives this process
            if ring.error is not None:
                kind = type(ring.error) if isinstance(ring.error, LoadFailed) else LoadFailed
                raise kind(f"{model} did not load: {ring.error.message}")
        return self.status(model)

    async def plan(self, model: str, options: LoadOptions) -> Mapping[str, Any]:
        model_id = self._coordinator.registry.get(model).model_id
        await self._rings.look(model_id)
        planned, leaving = self._rings.plan(model_id, options)
        return plan_report(planned) | {"evicts": [ring.model for ring in leaving]}

    async def unload(self, model: str, *, force: bool = False) -> Mapping[str, Any]:
        """Its memory on every peer comes back; nor is it loaded again."""
        model_id = self._coordinator.registry.get(model).model_id
        self._rings.restoring.forget(model_id)
        if (ring := self._rings.of_model(model_id)) is not None:
            await ring.unload(force=force)
        self._rings.looked_after(model_id)
        await self._rings.keep()
        return self.status(model)

    async def remove(self, model: str, *, force: bool = False) -> Mapping[str, Any]:
        """Out of the catalogue, then unloaded, then its files deleted here: what a majority refuses changes nothing. Of
        a model that was removed before, what is left here is deleted."""
        coordinator = self._coordinator
        try:
            manifest = coordinator.registry.get(model)
        except ModelNotFound:
            if (left := coordinator.registry.left_over(model)) is None:
                raise
            await self._rings.delete_files(left)
            return {"id": left.id, "removed": True}
        ring, state = self._rings.of_model(manifest.model_id), self._state(manifest.model_id)
        if not force and (ring is not None or state == "restoring"):
            unload = f"`swarmnode model-unload {model}`"
            raise Conflict(f"{model} is {state}; unload it first with {unload}, or remove it all the same with --force")
        await self._rings.forget_model(manifest)
        return {"id": manifest.id, "removed": True}

    # what is going on

    def status(self, model: str) -> Mapping[str, Any]:
        model_id = self._coordinator.registry.get(model).model_id
        ring = self._rings.of_model(model_id)
        about: dict[str, Any] = {"stages": [], **self._condition(model_id)}
        if ring is not None:
            about |= self._ring_status(ring) | {"left_out": left_out_report(ring.plan)}
        return about

    def _condition(self, model: ModelId) -> dict[str, Any]:
        """Of a model that is loaded, was, or is to be again."""
        ring, restoring = self._rings.of_model(model), self._rings.restoring
        shown = ring or self._rings.ended(model)
        error = restoring.error(model, ring) or (shown.error if shown is not None else None)
        return {
            "id": model,
            "state": self._state(model),
            "error": None if error is None else {"code": error.code, "message": error.message},
            "restoring": restoring.status(model, ring),
        }

    def nodes(self) -> Mapping[str, Any]:
        coordinator = self._coordinator
        identity = coordinator.context.identity
        me: dict[str, Any] = {"node": identity.node, "name": identity.name, "roles": list(identity.roles)}
        me |= {"state": NodeState.ALIVE.value, "health": coordinator.health.score}
        peers = [
            {
                "node": member.node,
                "name": member.identity.name,
                "roles": list(member.identity.roles),
                "state": coordinator.state(member.node).value if member.usable else NodeState.SUSPECT.value,
                "address": member.identity.listen[0] if member.identity.listen else None,
                "route": member.route,
                "silence_s": round(coordinator.silence_s(member.node) or 0.0, 2),
                "straggles": coordinator.machines.straggles(member.node),
                **(member.beat.model_dump() if member.beat is not None else {}),
                **self._in_use(member.node),
            }
            for member in coordinator.members.values()
        ]
        peers += [
            {"node": row.node, "name": row.name, "state": AWAITED, "address": row.address or None}
            for row in coordinator.awaited
        ]
        present = list(self._rings.running.values())
        rings = [{**self._condition(ModelId(ring.model)), **self._ring_status(ring)} for ring in present]
        return {
            "coordinator": me,
            "term": coordinator.term,
            "voters": coordinator.voters(),
            "voter_links": coordinator.voter_links(),
            "peers": peers,
            "rings": rings,
            "lost": [self._condition(model) for model in self._lost()],
            "members": self._known(),
            "carried": self._carried(),
            "requests": self._performance.running(trio.current_time()),
            "events": coordinator.recent.newest(),
            "event_counts": dict(coordinator.recent.counts),
            "traffic": coordinator.context.traffic.snapshot(),
        }

    def _lost(self) -> list[ModelId]:
        """Models without a ring that nobody unloaded: those that failed, and those that are to be loaded again."""
        present = {ring.model for ring in self._rings.running.values()}
        return sorted({*self._rings.failed(), *self._rings.restoring.waiting(present)})

    def _carried(self) -> dict[str, int]:
        """Links that do not go straight."""
        polled = self._coordinator.polled
        return {"tunnels": self._coordinator.relay.count, "polled": 0 if polled is None else polled.count}

    def _ring_status(self, ring: LoadedRing) -> dict[str, Any]:
        """With what the relay counted of its lanes."""
        status = _ring_status(ring)
        now = trio.current_time()
        status["tokens_per_s"] = round(self._performance.tokens_per_s(ModelId(ring.model), now), 1)
        for index, stage in enumerate(status["stages"]):
            stage["links"] = [self._link_status(ring, index, link) for link in ring.links.get(index, ())]
        return status

    def _link_status(self, ring: LoadedRing, stage: int, link: LaneLink) -> dict[str, Any]:
        successor = ring.life.nodes[(stage + 1) % len(ring.specs)]
        counts = self._coordinator.context.traffic.find(Route(RELAYED, successor, ring.ring, link.lane))
        if counts is None:
            return link.model_dump()
        n_frames, n_bytes = counts.frames_in + counts.frames_out, counts.bytes_in + counts.bytes_out
        return {**link.model_dump(), "relayed_frames": n_frames, "relayed_bytes": n_bytes}

    def _in_use(self, node: NodeId) -> dict[str, Any]:
        """The device and threads of a stage that is loaded on a node; its beats only know what it was told."""
        for ring in self._rings.running.values():
            stage = ring.stage_of(node)
            ready = ring.ready.get(stage) if stage is not None else None
            if ready is not None and ready.device is not None:
                return {"device": ready.device, "threads": ready.threads}
        return {}

    def counts(self) -> Sequence[ModelCounts]:
        return self._performance.counts()

    def performance(self, model: str) -> Mapping[str, Any]:
        status = self.status(model)
        return performance_report(status, self._performance.window(status["id"], trio.current_time()))

    async def logs(self, worker: str) -> Mapping[str, Any]:
        members = self._coordinator.members.values()
        member = next((m for m in members if worker in (m.identity.name, m.node)), None)
        if member is None:
            known = ", ".join(sorted(m.identity.name for m in members)) or "none"
            raise PeerNotFound(f"no peer is called {worker[:64]!r}; connected peers: {known}", param="worker")
        tails = await self._coordinator.logs.ask(member.node)
        return {"node": member.node, "name": member.identity.name, "workers": tails}

    # who is in the swarm

    async def new_join_token(self, ttl_s: float, uses: int) -> Mapping[str, Any]:
        token, expires_s = await self._coordinator.enrolment.new_token(ttl_s, uses)
        return {"token": token, "expires": expires_s, "uses": uses}

    def join_tokens(self) -> Sequence[Mapping[str, Any]]:
        return [
            {"id": token.id, "uses_left": token.uses_left, "expires": token.expires_s}
            for token in self._coordinator.enrolment.open_tokens
        ]

    async def withdraw_join_token(self, token_id: str) -> Mapping[str, Any]:
        return {"id": (await self._coordinator.enrolment.withdraw(token_id)).id}

    async def remove_node(self, name: str) -> Mapping[str, Any]:
        return self._joined(await self._coordinator.remove(name))

    def _known(self) -> list[dict[str, Any]]:
        """Who joined, ever; and who founded the swarm, once another node coordinates. That one certifies itself."""
        enrolment, me = self._coordinator.enrolment, self._coordinator.context.identity.node
        founders = [self._about(seat.node, seat.name, None, None) for seat in enrolment.founders if seat.node != me]
        return [*map(self._joined, enrolment.nodes), *founders]

    def _joined(self, record: NodeRecord) -> dict[str, Any]:
        return self._about(record.node, record.name, record.expires_s, record.removed_s)

    def _about(self, node: NodeId, name: str, ends_s: float | None, removed_s: float | None) -> dict[str, Any]:
        state = "removed" if removed_s is not None else self._whereabouts(node)
        return {"node": node, "name": name, "state": state, "certificate_ends": ends_s, "removed": removed_s}

    def _whereabouts(self, node: NodeId) -> str:
        if node in self._coordinator.members:
            return self._coordinator.state(node).value
        if self._coordinator.awaits(node):
            return AWAITED
        left = self._coordinator.state(node) is NodeState.LEFT
        return NodeState.LEFT.value if left else "away"

    # requests

    @asynccontextmanager
    async def open_chat(self, request: ChatRequest) -> AsyncIterator[AsyncIterator[ChatEvent]]:
        number = RequestId(uuid.uuid4().hex)
        self._coordinator.registry.get(request.model)  # only known models are counted
        with counted(self._performance, number, request.model) as note:
            ring = self._serving_ring(request.model)
            with self._rings.lifecycle.in_use(ring):
                stream = ring.open(number, _open_body(request))
                try:
                    async with aclosing(_events(stream, ring, note)) as events:
                        yield events
                finally:
                    ring.close(stream)

    def _serving_ring(self, model: ModelId) -> LoadedRing:
        ring = self._rings.of_model(model)
        lost = self._rings.restoring.error(model, ring)
        if lost is not None:
            raise ModelRestoring(f"{model} was lost ({lost.message}) and is being loaded again; try again later")
        if ring is None:
            raise ModelNotLoaded(f"{model} is not loaded; load it with `swarmnode model-load {model}`")
        if ring.draining:
            raise ModelUnloading(f"{model} is being unloaded")
        if ring.state == "relinking":
            raise ModelNotLoaded(f"{model} is being linked anew after a lost connection; try again in a few seconds")
        if ring.head not in self._coordinator.members:
            raise StageLost(f"the connection to stage 0 of {model} broke; try again in a few seconds")
        if not ring.serving:
            raise ring.error or ModelNotLoaded(f"{model} is still loading; try again in a few seconds")
        return ring


async def _events(
    stream: RequestStream, ring: LoadedRing, note: Callable[[ChatEvent], None]
) -> AsyncGenerator[ChatEvent, None]:
    """The stream's events, each of them counted; Done gets the route its hidden states took."""
    while True:
        event = await stream.next()
        note(event)
        if isinstance(event, Done):
            if stream.alone:
                ring.measures.replied(event.completion_tokens, event.timing, trio.current_time())
            yield replace(event, timing={**event.timing, "route": ring.route})
            return
        yield event


async def _read_in_thread(chunks: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Chunks that come from a disk, read without holding up the node's loop."""
    while (chunk := await trio.to_thread.run_sync(next, chunks, None)) is not None:
        yield chunk


def _open_body(request: ChatRequest) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "messages": [dict(message) for message in request.messages],
        "sampling": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": sampling.seed,
        },
        "max_tokens": request.max_tokens,
        "stop": list(request.stop),
        "template_kwargs": dict(request.template_kwargs),
    }


def _same(ring: LoadedRing, options: LoadOptions) -> bool:
    """Whether a load that is asked for is the one that runs."""
    stages = options.num_stages or len(options.peers) or len(ring.specs)
    names = [(stage.peer.name, stage.peer.node) for stage in ring.plan.stages]
    on_peers = not options.peers or all(p in pair for p, pair in zip(options.peers, names, strict=False))
    methods = (None, ring.quantization, ring.asked_quantization)
    same_weights = options.dtype in ("auto", ring.dtype) and options.quantization in methods
    return stages == len(ring.specs) and on_peers and same_weights


def _ring_status(ring: LoadedRing) -> dict[str, Any]:
    head = ring.gauges.get(0, {})
    stages = [_stage_status(ring, index) for index in range(len(ring.specs))]
    return {
        "ring": ring.ring,
        "epoch": ring.epoch,
        "dtype": ring.dtype,
        "quantization": ring.quantization,
        "notice": ring.notice,
        "started": ring.started_unix,
        "context_tokens": ring.context_tokens,
        "max_in_flight": ring.specs[0].max_in_flight,
        "requests": len(ring.requests),
        **{name: head.get(name, 0) for name in HEAD_GAUGES},
        "kv_tokens": ring.kv_tokens,
        "kv_tokens_planned": ring.plan.kv_tokens,
        "stages": stages,
        "route": ring.route if ring.links or len(ring.specs) == 1 else None,
    }


def _stage_status(ring: LoadedRing, index: int) -> dict[str, Any]:
    plan = ring.plan.stages[index]
    progress = ring.progress(index)
    gauges = ring.gauges.get(index, {})
    ready = ring.ready.get(index)
    return {
        "stage": index,
        "peer": plan.peer.name,
        "node": plan.peer.node,
        "pid": ready.pid if ready else None,
        "device": ready.device if ready else None,
        "threads": ready.threads if ready else None,
        "kernels": ready.kernels if ready else None,
        "layers": [plan.first_layer, plan.end_layer - 1],
        "weight_bytes": plan.weight_bytes,
        "phase": ring.phase(index),
        "done": progress.done if progress else 0,
        "total": progress.total if progress else 0,
        "sessions": gauges.get("sessions", 0),
        "kv_tokens": gauges.get("kv_tokens", 0),
        "kv_bytes": gauges.get("kv_bytes", 0),
        "vram_bytes": gauges.get("vram_bytes"),
        "kv_budget_tokens": ready.kv_tokens if ready else None,
    }
