"""Who is in the swarm, over HTTP: a join token for a new machine, and an old one's removal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations at run time
from starlette.responses import JSONResponse, Response

from swarmnode.api.auth import needs
from swarmnode.api.exchange import exchange_of
from swarmnode.api.json_body import parse_json_object
from swarmnode.api.openai_models import parse_shape
from swarmnode.cluster.token_book import Scope

if TYPE_CHECKING:
    from swarmnode.api.backend import Backend

DEFAULT_TTL_S = 3600.0


class JoinTokenBody(BaseModel):
    """`POST /api/v1/join-tokens`. Unknown fields are refused: a misspelt lifetime must not make a longer one."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    ttl_s: float = DEFAULT_TTL_S
    uses: int = 1


def swarm_router(backend: Backend) -> APIRouter:
    """`/api/v1/join-tokens` and `DELETE /api/v1/nodes/{name}`."""
    router = APIRouter(prefix="/api/v1")

    @router.post("/join-tokens", response_model=None)
    @needs(Scope.ADMIN)
    async def new_join_token(request: Request) -> Response:
        body = await exchange_of(request.scope).body()
        asked = parse_shape(JoinTokenBody, parse_json_object(body) if body.strip() else {})
        made = await backend.new_join_token(asked.ttl_s, asked.uses)
        return JSONResponse(dict(made), status_code=201, headers={"cache-control": "no-store"})

    @router.get("/join-tokens", response_model=None)
    @needs(Scope.ADMIN)
    async def join_tokens() -> Response:
        return JSONResponse({"tokens": [dict(token) for token in backend.join_tokens()]})

    @router.delete("/join-tokens/{token_id}", response_model=None)
    @needs(Scope.ADMIN)
    async def withdraw_join_token(token_id: str) -> Response:
        return JSONResponse(dict(await backend.withdraw_join_token(token_id)))

    @router.delete("/nodes/{name}", response_model=None)
    @needs(Scope.ADMIN)
    async def remove_node(name: str) -> Response:
        return JSONResponse(dict(await backend.remove_node(name)))

    return router
