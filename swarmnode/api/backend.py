"""What the HTTP API needs from the swarm behind it; the coordinator role implements it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from swarmnode.cluster.performance import ModelCounts
    from swarmnode.ids import ModelId
    from swarmnode.ring.work import Sampling


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A validated chat request in the swarm's own terms.

    `messages` hold role and content (a string; None for an assistant turn without text). `max_tokens` None: as much
    as fits. `sampling` None fields were filled from the model's defaults by the gateway.
    """

    model: ModelId
    messages: tuple[Mapping[str, Any], ...]
    sampling: Sampling
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    template_kwargs: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Accepted:
    """Tokenized and can ever fit: the gateway may answer 200 now."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Started:
    """The request left the queue; its prompt is being read."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that is final: `text` continues the reply; `n` tokens were generated for it (0 for held-back text)."""

    text: str
    n: int


@dataclass(frozen=True, slots=True)
class Done:
    """The clean end; exactly one, last."""

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    timing: Mapping[str, Any]
    stop_sequence: str | None = None
    cached_tokens: int = 0
    """Of the prompt: tokens that were continued from a conversation kept in memory, not read again."""


ChatEvent = Accepted | Started | TextDelta | Done


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A servable as listed by `/v1/models` and `/api/v1/models`.

    `state`: "available", "loading", "ready", "relinking", "restoring", "unloading", "lost" or "failed". `details` is
    JSON for the administration routes (layers, stages, files, dtype, loaded stages …).
    """

    id: ModelId
    created: int
    state: str
    context_tokens: int
    details: Mapping[str, Any]
    defaults: Sampling


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """`POST /api/v1/models/{id}/load`. None: what the servable records, or the coordinator's own choice."""

    num_stages: int | None = None
    peers: tuple[str, ...] = ()
    """Names or ids, in stage order."""
    dtype: str = "auto"
    quantization: str | None = None
    """One of cluster.quantization.METHODS."""
    wait: bool = False
    """True: return only when the load is ready; raises LoadFailed."""
    prefer: tuple[str, ...] = ()
    """Ids of nodes, in stage order: each gets its stage where it can. Never asked for from outside."""


class Backend(Protocol):
    """All methods raise `SwarmError` subclasses; unknown models raise ModelNotFound that names the known ones."""

    def models(self) -> Sequence[ModelCard]: ...

    def model(self, model: str) -> ModelCard: ...

    def open_chat(self, request: ChatRequest) -> AbstractAsyncContextManager[AsyncIterator[ChatEvent]]:
        """Run one request. Leaving the block early cancels it on every stage.

        The iterator yields Accepted, Started, TextDelta…, and one Done; it raises SwarmError where the request fails.
        An iterator that is a generator is closed by the block (`aclosing`): a reader may stop in its middle.
        """

    async def load(self, model: str, options: LoadOptions) -> Mapping[str, Any]:
        """Start (or, with `wait`, finish) a load; returns the status as `status()` does.

        Cancelled while it waits (the client left), it leaves the load running.
        """

    async def plan(self, model: str, options: LoadOptions) -> Mapping[str, Any]:
        """What such a load would take on which peers; loads nothing."""

    async def unload(self, model: str, *, force: bool = False) -> Mapping[str, Any]: ...

    async def remove(self, model: str, *, force: bool = False) -> Mapping[str, Any]:
        """Take a model out of the catalogue and delete its files here; raises Conflict for one that is loaded, or is to
        be again, unless `force` unloads it at once."""

    def status(self, model: str) -> Mapping[str, Any]:
        """State, stages with peer, layers, progress and gauges (sessions, kv_tokens …), and the last error."""

    def nodes(self) -> Mapping[str, Any]:
        """Nodes, rings and sessions for `ps`."""

    def counts(self) -> Sequence[ModelCounts]:
        """Totals of each model since this backend started."""

    def performance(self, model: str) -> Mapping[str, Any]:
        """The last fifteen minutes of a model: throughput, where a token's time went, stages, links."""

    async def logs(self, worker: str) -> Mapping[str, Any]:
        """The tail of the logs of a peer's workers; raises PeerNotFound that lists the names."""

    async def new_join_token(self, ttl_s: float, uses: int) -> Mapping[str, Any]:
        """`token` (shown this once) and `expires`, in Unix seconds."""

    def join_tokens(self) -> Sequence[Mapping[str, Any]]:
        """Those that are still good: `id`, `uses_left`, `expires` in Unix seconds."""

    async def withdraw_join_token(self, token_id: str) -> Mapping[str, Any]:
        """Make one useless; raises TokenNotFound for an id that is none."""

    async def remove_node(self, name: str) -> Mapping[str, Any]:
        """Revoke a node by name or id; raises PeerNotFound that lists the names."""

    def archive(self, model: str) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The whole servable as one uncompressed tar, streamed (M6)."""
