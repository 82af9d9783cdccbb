"""Every failure as an OpenAI error body with a real HTTP status."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse

from swarmnode.errors import ContextTooLong, InternalError, ModelRestoring, Overloaded, SwarmError

if TYPE_CHECKING:
    from collections.abc import Mapping

RETRY_AFTER_S = 2
"""What a retryable 503 asks for: stages come back in seconds, and OpenAI's clients give up after two tries."""
OVERLOADED_RETRY_AFTER_S = 5
"""A full waiting room needs some replies to end first."""
RESTORING_RETRY_AFTER_S = 5
"""Weights have to be read again."""
_RETRY_AFTER_S = {Overloaded.code: OVERLOADED_RETRY_AFTER_S, ModelRestoring.code: RESTORING_RETRY_AFTER_S}

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}


@dataclass(eq=False)
class HttpError(Exception):
    """A refusal that the HTTP layer itself decides; `code` is stable, `param` names the field."""

    status: int
    code: str
    message: str
    param: str | None = None
    type: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message


def error_body(status: int, code: str, message: str, param: str | None, kind: str | None = None) -> dict[str, Any]:
    """The object that goes under `error` in a body or in an SSE event."""
    fallback = "server_error" if status >= 500 else "invalid_request_error"
    return {"message": message, "type": kind or _TYPES.get(status, fallback), "param": param, "code": code}


def describe(error: SwarmError | HttpError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, error object and extra headers of a failure."""
    if isinstance(error, HttpError):
        body = error_body(error.status, error.code, error.message, error.param, error.type)
        return error.status, body, dict(error.headers)
    code = "context_length_exceeded" if isinstance(error, ContextTooLong) else error.code
    headers = {}
    if error.status == 503:
        headers["retry-after"] = str(_RETRY_AFTER_S.get(error.code, RETRY_AFTER_S))
    return error.status, error_body(error.status, code, error.message, error.param), headers


def error_response(error: SwarmError | HttpError) -> JSONResponse:
    status, body, headers = describe(error)
    return JSONResponse({"error": body}, status_code=status, headers=headers)


def internal_error(request_id: str) -> InternalError:
    """What a client sees of a bug: no traceback, but the id under which the log holds it."""
    return InternalError(f"internal error; the server's log has the details under request id {request_id}")
