"""Models and nodes: the OpenAI list, and the administration routes that load, unload, describe and remove."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations at run time
from starlette.responses import JSONResponse, Response

from swarmnode.api.auth import needs
from swarmnode.api.backend import LoadOptions
from swarmnode.api.exchange import exchange_of
from swarmnode.api.json_body import parse_json_object
from swarmnode.api.middleware import HEAD_KEY
from swarmnode.api.openai_models import LoadBody, UnloadBody, parse_shape
from swarmnode.cluster.token_book import Scope
from swarmnode.errors import InvalidRequest

if TYPE_CHECKING:
    from starlette.types import Receive, Send
    from starlette.types import Scope as AsgiScope

    from swarmnode.api.backend import Backend, ModelCard

OWNER = "swarmnode"


def openai_models_router(backend: Backend) -> APIRouter:
    """`GET /v1/models` and `/v1/models/{id}`."""
    router = APIRouter()

    @router.get("/v1/models", response_model=None)
    @needs(Scope.READ)
    async def list_models() -> Response:
        return JSONResponse({"object": "list", "data": [openai_model(card) for card in backend.models()]})

    @router.get("/v1/models/{model}", response_model=None)
    @needs(Scope.READ)
    async def get_model(model: str) -> Response:
        return JSONResponse(openai_model(backend.model(model)))

    return router


def openai_model(card: ModelCard) -> dict[str, Any]:
    """OpenAI's four keys; the context length under the names that vLLM's and OpenRouter's clients read."""
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": OWNER,
        "context_length": card.context_tokens,
        "max_model_len": card.context_tokens,
        "state": card.state,
    }


def admin_router(backend: Backend) -> APIRouter:
    """The `/api/v1/models…` routes and `/api/v1/nodes`."""
    router = APIRouter(prefix="/api/v1")

    @router.get("/models", response_model=None)
    @needs(Scope.READ)
    async def list_models() -> Response:
        return JSONResponse({"models": [model_json(card) for card in backend.models()]})

    @router.get("/models/{model}", response_model=None)
    @needs(Scope.READ)
    async def get_model(model: str) -> Response:
        return JSONResponse(model_json(backend.model(model)))

    @router.delete("/models/{model}", response_model=None)
    @needs(Scope.ADMIN)
    async def remove(model: str, request: Request) -> Response:
        body = parse_shape(UnloadBody, await _optional_object(request))
        return JSONResponse(dict(await backend.remove(backend.model(model).id, force=bool(body.force))))

    @router.get("/models/{model}/status", response_model=None)
    @needs(Scope.READ)
    async def get_status(model: str) -> Response:
        return JSONResponse(dict(backend.status(model)))

    @router.get("/models/{model}/archive", response_model=None)
    @needs(Scope.OPERATE)
    async def get_archive(model: str) -> Response:
        return Archive(backend, backend.model(model))

    @router.post("/models/{model}/load", response_model=None)
    @needs(Scope.OPERATE)
    async def load(model: str, request: Request) -> Response:
        body = parse_shape(LoadBody, await _optional_object(request))
        options = load_options(body)
        if body.plan:
            return JSONResponse(dict(await backend.plan(backend.model(model).id, options)))
        with exchange_of(request.scope).generation():  # the load itself goes on
            status = dict(await backend.load(backend.model(model).id, options))
        return JSONResponse(status, status_code=200 if options.wait else 202)

    @router.post("/models/{model}/unload", response_model=None)
    @needs(Scope.OPERATE)
    async def unload(model: str, request: Request) -> Response:
        body = parse_shape(UnloadBody, await _optional_object(request))
        return JSONResponse(dict(await backend.unload(backend.model(model).id, force=bool(body.force))))

    @router.get("/nodes", response_model=None)
    @needs(Scope.READ)
    async def get_nodes() -> Response:
        return JSONResponse(dict(backend.nodes()))

    return router


def model_json(card: ModelCard) -> dict[str, Any]:
    return {
        **card.details,
        "id": card.id,
        "created": card.created,
        "state": card.state,
        "context_tokens": card.context_tokens,
    }


def load_options(body: LoadBody) -> LoadOptions:
    if body.peer is not None and body.peers:
        raise InvalidRequest("give either 'peer' or 'peers', not both", param="peer")
    peers = (body.peer,) if body.peer is not None else tuple(body.peers or ())
    num_stages = body.num_stages
    if body.peer is not None and num_stages is None:
        num_stages = 1  # one peer and no count: the whole model there
    return LoadOptions(
        num_stages=num_stages,
        peers=peers,
        dtype=body.dtype or "auto",
        quantization=body.quantization,
        wait=bool(body.wait),
    )


async def _optional_object(request: Request) -> dict[str, Any]:
    """The body's object; no body at all means no options."""
    body = await exchange_of(request.scope).body()
    return parse_json_object(body) if body.strip() else {}


class Archive(Response):
    """A servable as one tar, streamed; a failure on the way leaves the body without its end."""

    def __init__(self, backend: Backend, card: ModelCard) -> None:
        super().__init__()
        self._backend = backend
        self._card = card

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        start = {
            "type": "http.response.start",
            "status": 200,
            "headers": [
                (b"content-type", b"application/x-tar"),
                (b"content-disposition", f'attachment; filename="{self._card.id}.tar"'.encode("ascii")),
            ],
        }
        if scope.get(HEAD_KEY):
            await send(start)
            await send({"type": "http.response.body", "body": b""})
            return
        with exchange_of(scope).generation():
            async with self._backend.archive(self._card.id) as parts:
                await send(start)
                async for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
