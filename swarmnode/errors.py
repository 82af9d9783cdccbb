"""Every failure swarmnode reports: a stable code, whether a retry can help, and the HTTP status it maps to.

Foreign exceptions are mapped to these once, at the boundary where they enter. An error crosses processes as
(code, message); `from_wire` brings it back.
"""

from __future__ import annotations

from typing import ClassVar

MAX_MESSAGE_CHARS = 2000
"""Longer messages are cut before they travel: a traceback from a peer must not fill a client's screen."""


class SwarmError(Exception):
    """Base of all expected failures. `str(error)` tells the user what happened and what to do."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message[:MAX_MESSAGE_CHARS]
        self.param = param


class InvalidRequest(SwarmError):
    """The caller sent something that is never allowed; `param` names the field."""

    code, status = "invalid_request", 400


class InvalidTemplate(SwarmError):
    """The model's chat template refused these messages."""

    code, status = "invalid_messages", 400


class ContextTooLong(SwarmError):
    """The conversation can never fit the ring's KV budget or the model's context."""

    code, status = "context_too_long", 413


class ModelNotFound(SwarmError):
    code, status = "model_not_found", 404


class ModelNotLoaded(SwarmError):
    """The model is known but no ring serves it now."""

    code, status, retryable = "model_not_loaded", 503, True


class ModelRestoring(SwarmError):
    """Its ring was lost, and it is being loaded again or waits for peers that can hold it."""

    code, status, retryable = "model_restoring", 503, True


class PeerNotFound(SwarmError):
    code, status = "peer_not_found", 404


class TokenNotFound(SwarmError):
    code, status = "token_not_found", 404


class Unauthorized(SwarmError):
    """No API token, or one that is unknown, expired or revoked."""

    code, status = "invalid_api_key", 401


class Forbidden(SwarmError):
    """The API token is good, but not for this; the message names the missing scope."""

    code, status = "insufficient_scope", 403


class JoinRefused(SwarmError):
    """A machine that may not join (any more)."""

    code, status = "join_refused", 403


class NodeRemoved(JoinRefused):
    """This node was taken out of the swarm for good: no coordinator will take over what it holds."""

    code, status = "node_removed", 403
    mend = (
        "to have this machine in the swarm again, run `swarmnode join-token` on the coordinator and start it with "
        "--join TOKEN and an empty --data-dir; its old identity is out for good"
    )


class TokenRevoked(SwarmError):
    """The API token was revoked while its reply was running."""

    code, status = "token_revoked", 401


class MembersAwaited(SwarmError):
    """What was asked for needs nodes that a coordinator, elected a moment ago, has not heard yet."""

    code, status, retryable = "members_awaited", 503, True


class Conflict(SwarmError):
    """The object is in a state that does not allow the call (already loading, still running)."""

    code, status = "conflict", 409


class Overloaded(SwarmError):
    """The waiting room is full."""

    code, status, retryable = "overloaded", 503, True


class Gone(SwarmError):
    """What the request is about has ended; whoever works for it can stop."""

    code, status = "gone", 410


class StaleTerm(SwarmError):
    """Said by a coordinator that has a successor."""

    code, status = "stale_term", 409


class LoadRefused(SwarmError):
    """A load that cannot work, found by arithmetic before anything was loaded; the message holds the numbers."""

    code, status = "load_refused", 400


class LoadFailed(SwarmError):
    """A load that was tried and did not come up."""

    code, status = "load_failed", 500


class OutOfMemory(LoadFailed):
    """A stage's machine did not have the memory that the plan counted on."""

    code = "out_of_memory"
    advice: ClassVar[str] = (
        "Its memory is given back. Close other programs on that machine or start its node with a smaller --memory, so "
        "that the plan gives it fewer layers; or load over more peers, or with a quantization"
    )


class KernelsFailed(LoadRefused):
    """A peer that declares the kernels of a quantization found as it loaded that they do not run there. The next load
    of the model counts that peer as one without them, and is served in another way."""

    code, status, retryable = "kernels_failed", 503, True


class StageLost(SwarmError):
    """A stage's process, node or link went away while it held sessions."""

    code, status, retryable = "stage_lost", 503, True


class StageFailed(SwarmError):
    """A stage's forward raised for this session only."""

    code, status = "stage_failed", 500


class CacheGap(StageFailed):
    """A stage holds less of the session's past than its work builds on: those positions have to be read again."""

    code, status, retryable = "cache_gap", 503, True


class ModelUnloading(SwarmError):
    code, status, retryable = "model_unloading", 503, True


class StreamClosed(SwarmError):
    """The client left before its reply was complete; nobody reads this error."""

    code, status = "client_left", 499


class Stalled(SwarmError):
    """No progress within the deadline."""

    code, status, retryable = "stalled", 504, True


class ProtocolError(SwarmError):
    """The other end broke the wire's rules; the link is closed."""

    code, status = "protocol_error", 502


class LinkBroken(SwarmError):
    """A connection ended, was refused or timed out."""

    code, status, retryable = "link_broken", 502, True


class NotCoordinator(LinkBroken):
    """Said by a node that could coordinate the swarm, and does not now."""

    code, status, retryable = "not_coordinator", 503, True


class NoCoordinator(SwarmError):
    """Said by the API port of a node that finds nobody who coordinates the swarm."""

    code, status, retryable = "no_coordinator", 503, True


class InvalidModel(SwarmError):
    """A model source or servable that is refused; the message says which file and why."""

    code, status = "invalid_model", 400


class FetchFailed(SwarmError):
    """A file could not be brought or did not match its checksum."""

    code, status, retryable = "fetch_failed", 502, True


class NoSpace(SwarmError):
    """The disk cannot hold what was asked for."""

    code, status = "no_space", 507


class InternalError(SwarmError):
    """A bug; the log of the process that met it holds the traceback."""


def _subclasses(cls: type[SwarmError]) -> list[type[SwarmError]]:
    return [cls, *(found for sub in cls.__subclasses__() for found in _subclasses(sub))]


def from_wire(code: str, message: str) -> SwarmError:
    """Rebuild an error that another process sent; an unknown code becomes InternalError and keeps its text."""
    for cls in _subclasses(SwarmError):
        if cls.code == code and cls is not SwarmError:
            return cls(message)
    return InternalError(f"{code}: {message}")
