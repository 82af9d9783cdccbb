"""The fake at the API's seam: a `Backend` that replays given texts, delays and failures without a swarm.

Shipped with the product, for tests of the gateway and for measuring it alone.
"""

from __future__ import annotations

from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from swarmnode.api.backend import Accepted, Done, LoadOptions, ModelCard, Started, TextDelta
from swarmnode.cluster.performance import Performance
from swarmnode.errors import Conflict, ModelNotFound, ModelNotLoaded, PeerNotFound, TokenNotFound
from swarmnode.ids import parse_model_id
from swarmnode.ring.work import Sampling

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

    from swarmnode.api.backend import ChatEvent, ChatRequest
    from swarmnode.cluster.performance import ModelCounts

REPLAY_TIMING: Mapping[str, Any] = {"stage0_ms": 0.0, "link_ms": 0.0, "prefill_ms": 0.0, "route": "replay"}


@dataclass(frozen=True)
class Replay:
    """One reply: `texts` with one token each. Delays in seconds; `None` waits for ever.

    `error` is raised after `error_after` texts; `refuse` before the request is accepted.
    """

    texts: Sequence[str] = ("Hello", ", ", "world", "!")
    accept_s: float | None = 0.0
    queue_s: float | None = 0.0
    prefill_s: float | None = 0.0
    token_s: float | None = 0.0
    refuse: Exception | None = None
    error: Exception | None = None
    error_after: int = 0
    finish_reason: str = "stop"
    stop_sequence: str | None = None
    prompt_tokens: int = 7
    cached_tokens: int = 0


@dataclass
class ReplayBackend:
    """Answers every chat of every loaded model with `replay`; counts what is open, finished and cancelled."""

    replay: Replay = field(default_factory=Replay)
    names: Sequence[str] = ("replay-1",)
    loaded: set[str] = field(default_factory=lambda: {"replay-1"})
    defaults: Sampling = field(default_factory=lambda: Sampling(temperature=0.7, top_p=0.9, top_k=40))
    context_tokens: int = 2048
    archive_parts: Sequence[bytes] = (b"tar", b"ball")
    requests: list[ChatRequest] = field(default_factory=list)
    performance_counts: Performance = field(default_factory=Performance)
    loads: list[tuple[str, LoadOptions]] = field(default_factory=list)
    open: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    phase: str = "idle"
    """Where the latest request is: accept, queue, prefill, decode or idle."""

    def models(self) -> Sequence[ModelCard]:
        return [self._card(name) for name in self.names]

    def model(self, model: str) -> ModelCard:
        if model not in self.names:
            raise ModelNotFound(f"no model {model!r} here; known: {', '.join(self.names)}", param="model")
        return self._card(model)

    async def plan(self, model: str, options: LoadOptions) -> Mapping[str, Any]:
        return {"id": model, "state": "planned", "stages": []}

    def _card(self, name: str) -> ModelCard:
        return ModelCard(
            id=parse_model_id(name),
            created=1_700_000_000,
            state="ready" if name in self.loaded else "available",
            context_tokens=self.context_tokens,
            details={"layers": 0, "stages": []},
            defaults=self.defaults,
        )

    @asynccontextmanager
    async def open_chat(self, request: ChatRequest) -> AsyncIterator[AsyncIterator[ChatEvent]]:
        if request.model not in self.loaded:
            raise ModelNotLoaded(f"model {request.model!r} is not loaded", param="model")
        self.requests.append(request)
        self.open += 1
        try:
            async with aclosing(self._events()) as events:
                yield events
        except trio.Cancelled:
            self.cancelled += 1
            raise
        except Exception:
            self.failed += 1
            raise
        else:
            self.finished += 1
        finally:
            self.open -= 1
            self.phase = "idle"

    async def _events(self) -> AsyncGenerator[ChatEvent, None]:
        script = self.replay
        await self._wait("accept", script.accept_s)
        if script.refuse is not None:
            raise script.refuse
        yield Accepted(script.prompt_tokens)
        await self._wait("queue", script.queue_s)
        yield Started()
        await self._wait("prefill", script.prefill_s)
        for index, text in enumerate(script.texts):
            if script.error is not None and index == script.error_after:
                raise script.error
            await self._wait("decode", script.token_s)
            yield TextDelta(text, 1)
        if script.error is not None:
            raise script.error
        yield Done(
            script.finish_reason,
            script.prompt_tokens,
            len(script.texts),
            REPLAY_TIMING,
            script.stop_sequence,
            script.cached_tokens,
        )

    async def _wait(self, phase: str, seconds: float | None) -> None:
        self.phase = phase
        if seconds is None:
            await trio.sleep_forever()
        elif seconds:
            await trio.sleep(seconds)

    async def load(self, model: str, options: LoadOptions) -> Mapping[str, Any]:
        self.model(model)
        self.loads.append((model, options))
        await trio.lowlevel.checkpoint()
        self.loaded.add(model)
        return self.status(model)

    async def unload(self, model: str, *, force: bool = False) -> Mapping[str, Any]:
        if self.open and not force:
            raise Conflict(f"model {model!r} has {self.open} running replies; force unloads it all the same")
        await trio.lowlevel.checkpoint()
        self.loaded.discard(model)
        return self.status(model)

    async def remove(self, model: str, *, force: bool = False) -> Mapping[str, Any]:
        if self.model(model).state == "ready" and not force:
            raise Conflict(f"{model} is ready; unload it first, or remove it with force")
        await trio.lowlevel.checkpoint()
        self.loaded.discard(model)
        self.names = [name for name in self.names if name != model]
        return {"id": model, "removed": True}

    def status(self, model: str) -> Mapping[str, Any]:
        card = self.model(model)
        return {"id": card.id, "state": card.state, "stages": [], "sessions": self.open, "kv_tokens": 0}

    def nodes(self) -> Mapping[str, Any]:
        return {"nodes": [], "rings": [], "sessions": self.open}

    def counts(self) -> Sequence[ModelCounts]:
        return self.performance_counts.counts()

    def performance(self, model: str) -> Mapping[str, Any]:
        return {"id": model, **self.performance_counts.window(self.model(model).id, 0.0)}

    async def logs(self, worker: str) -> Mapping[str, Any]:
        await trio.lowlevel.checkpoint()
        raise PeerNotFound(f"no peer is called {worker!r}; a replay has none")

    async def new_join_token(self, ttl_s: float, uses: int) -> Mapping[str, Any]:
        await trio.lowlevel.checkpoint()
        return {"token": "swn1.replay", "expires": ttl_s, "uses": uses}

    def join_tokens(self) -> Sequence[Mapping[str, Any]]:
        return []

    async def withdraw_join_token(self, token_id: str) -> Mapping[str, Any]:
        await trio.lowlevel.checkpoint()
        raise TokenNotFound(f"no join token has the id {token_id!r}; a replay has none")

    async def remove_node(self, name: str) -> Mapping[str, Any]:
        await trio.lowlevel.checkpoint()
        raise PeerNotFound(f"no node is called {name!r}; a replay has none")

    @asynccontextmanager
    async def archive(self, model: str) -> AsyncIterator[AsyncIterator[bytes]]:
        self.model(model)
        async with aclosing(self._parts()) as parts:
            yield parts

    async def _parts(self) -> AsyncGenerator[bytes, None]:
        for part in self.archive_parts:
            await trio.lowlevel.checkpoint()
            yield part
