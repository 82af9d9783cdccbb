"""The CLI's calls to an API: httpx, errors turned back into SwarmError, server-sent events as dicts."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmnode.errors import ContextTooLong, InternalError, InvalidRequest, LinkBroken, SwarmError, from_wire
from swarmnode.ids import parse_model_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import httpx

DEFAULT_API = "http://127.0.0.1:7701"
API_VARIABLE = "SWARM_API"
CONNECT_S = 5.0
SILENCE_S = 120.0
"""The API sends keep-alives far more often; silence beyond this is a dead connection."""

ApiOption = Annotated[
    str, typer.Option("--api", envvar=API_VARIABLE, help="Where the coordinator's API listens.", show_default=True)
]


class ApiClient:
    """Blocking calls to one API. Every method raises SwarmError subclasses."""

    def __init__(self, base_url: str, *, silence_s: float = SILENCE_S) -> None:
        import httpx

        self.base_url = _checked_url(base_url)
        timeout = httpx.Timeout(silence_s, connect=CONNECT_S)
        self._client = httpx.Client(base_url=self.base_url, timeout=timeout, trust_env=False)

    def close(self) -> None:
        self._client.close()

    def get(self, path: str) -> dict[str, Any]:
        return self._call("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self._call("POST", path, body or {})

    def stream_chat(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed chat; raises the error a stream ends with, and LinkBroken where it just ends."""
        import httpx

        with (
            self._errors(),
            self._client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response,
        ):
            if response.status_code != httpx.codes.OK:
                response.read()
                raise _error_of(response)
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise _from_body(chunk)
                    yield chunk
        raise LinkBroken("the reply ended without its end mark; the coordinator may have stopped")

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        with self._errors():
            response = self._client.request(method, path, json=body)
            if response.is_error:
                raise _error_of(response)
            answer: dict[str, Any] = response.json()
            return answer

    @contextmanager
    def _errors(self) -> Iterator[None]:
        import httpx

        try:
            yield
        except httpx.ConnectError as error:
            raise LinkBroken(
                f"no swarmnode API at {self.base_url} ({error}); start one with `swarmnode up --role coordinator`, "
                f"or say where it is with --api or {API_VARIABLE}"
            ) from error
        except (httpx.HTTPError, ValueError) as error:
            raise LinkBroken(f"the API at {self.base_url} broke off: {error or type(error).__name__}") from error


def model_path(model: str, action: str) -> str:
    """The URL path of a model's admin route; raises InvalidRequest for an id that would change the path."""
    try:
        return f"/api/v1/models/{parse_model_id(model)}/{action}"
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


def _checked_url(url: str) -> str:
    import httpx

    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidRequest(f"--api {url!r} is not an address like {DEFAULT_API}")
    return url.rstrip("/")


def _error_of(response: httpx.Response) -> SwarmError:
    try:
        return _from_body(response.json(), response.status_code)
    except ValueError:
        return LinkBroken(f"HTTP {response.status_code} without a JSON body; is this a swarmnode API?")


def _from_body(body: Mapping[str, Any], status: int | None = None) -> SwarmError:
    """The error of an OpenAI error body; codes that only the API knows are told by their status."""
    error = body.get("error")
    if not isinstance(error, dict):
        raise ValueError("no error object")
    code, message = str(error.get("code") or ""), str(error.get("message", ""))
    found = from_wire(code, message)
    if type(found) is not InternalError:
        return found
    if status == ContextTooLong.status or code == "context_length_exceeded":
        return ContextTooLong(message)
    return InvalidRequest(message) if status is not None and status < InternalError.status else InternalError(message)
