"""The CLI's calls to an API: httpx, errors turned back into SwarmError, server-sent events as dicts."""

from __future__ import annotations

import json
import ssl
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmnode.config import read_settings
from swarmnode.errors import (
    ContextTooLong,
    InternalError,
    InvalidRequest,
    LinkBroken,
    SwarmError,
    Unauthorized,
    from_wire,
)
from swarmnode.ids import parse_model_id
from swarmnode.local_access import LocalAccess, read_local_access, trust_exactly
from swarmnode.wire.address import API_LISTEN

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import httpx

DEFAULT_API = f"http://{API_LISTEN}"
API_VARIABLE = "SWARM_API"
TOKEN_VARIABLE = "SWARM_API_TOKEN"
CONNECT_S = 5.0
SILENCE_S = 120.0
"""The API sends keep-alives far more often; silence beyond this is a dead connection."""

ApiOption = Annotated[
    str, typer.Option("--api", envvar=API_VARIABLE, help="Where the coordinator's API listens.", show_default=True)
]
TokenOption = Annotated[
    str | None,
    typer.Option("--token", envvar=TOKEN_VARIABLE, help="The API token. [none needed for this machine's own API]"),
]

DataDirOption = Annotated[Path | None, typer.Option("--data-dir", help="As for `up`; where this machine's secret is.")]


class ApiClient:
    """Blocking calls to one API. Every method raises SwarmError subclasses.

    Without `token` the secret in `data_dir` is used, if the API is the one of the node there.
    """

    def __init__(
        self, base_url: str, *, token: str | None = None, data_dir: Path | None = None, silence_s: float = SILENCE_S
    ) -> None:
        import httpx

        self.base_url = _checked_url(base_url)
        access = read_local_access(data_dir or read_settings().data_dir, self.base_url)
        secret = token or (access.secret if access is not None else None)
        self._client = httpx.Client(
            base_url=self.base_url,
            headers={} if secret is None else {"authorization": f"Bearer {_checked_token(secret)}"},
            timeout=httpx.Timeout(silence_s, connect=CONNECT_S),
            verify=_trust(self.base_url, access),
            trust_env=False,
        )

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

    def delete(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self._call("DELETE", path, body)

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
        except UnicodeEncodeError as error:
            raise InvalidRequest("what was given holds bytes that are no UTF-8; say it in UTF-8") from error
        except (httpx.HTTPError, ValueError) as error:
            raise LinkBroken(f"the API at {self.base_url} broke off: {error or type(error).__name__}") from error


def model_path(model: str, action: str = "") -> str:
    """The URL path of a model, or of what is done with it; raises InvalidRequest for an id that would change it."""
    try:
        return f"/api/v1/models/{parse_model_id(model)}" + (f"/{action}" if action else "")
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


def _trust(base_url: str, access: LocalAccess | None) -> ssl.SSLContext | bool:
    """The machine's CAs; for its own API exactly the certificate that its node was given."""
    if not base_url.startswith("https:"):
        return False  # there is no TLS, and loading CAs takes 30 ms
    if access is None or access.certificate is None:
        return ssl.create_default_context()
    try:
        return trust_exactly(Path(access.certificate).read_text("ascii"))
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise InvalidRequest(f"the API's certificate {access.certificate} cannot be read: {error}") from error


def _checked_token(token: str) -> str:
    if not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidRequest(f"--token (or {TOKEN_VARIABLE}) is not an API token: it holds blanks or other characters")
    return token


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
        error = _from_body(response.json(), response.status_code)
        if response.status_code == Unauthorized.status:
            return type(error)(f"{error.message}; give it here with --token or {TOKEN_VARIABLE}")
        return error
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
