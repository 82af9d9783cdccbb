"""API tokens over HTTP (G5): make, list and revoke. A token is in one answer only: that of its making."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations at run time
from starlette.responses import JSONResponse, Response

from swarmnode.api.auth import needs
from swarmnode.api.exchange import exchange_of
from swarmnode.api.json_body import parse_json_object
from swarmnode.api.openai_models import parse_shape
from swarmnode.cluster.token_book import Scope, parse_scope

if TYPE_CHECKING:
    from swarmnode.api.auth import Tokens
    from swarmnode.cluster.token_book import TokenRecord


class TokenBody(BaseModel):
    """`POST /api/v1/api-tokens`. Unknown fields are refused: a misspelt expiry must not make a token for ever."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    label: str
    scopes: Annotated[list[str], Field(min_length=1, max_length=8)]
    expires_in_s: float | None = None


def tokens_router(tokens: Tokens) -> APIRouter:
    """`/api/v1/api-tokens`."""
    router = APIRouter(prefix="/api/v1/api-tokens")

    @router.post("", response_model=None)
    @needs(Scope.ADMIN)
    async def create(request: Request) -> Response:
        body = parse_shape(TokenBody, parse_json_object(await exchange_of(request.scope).body()))
        record, token = await tokens.issue(body.label, parse_scope(body.scopes), body.expires_in_s)
        headers = {"cache-control": "no-store"}
        return JSONResponse({**token_json(record), "token": token}, status_code=201, headers=headers)

    @router.get("", response_model=None)
    @needs(Scope.ADMIN)
    async def list_tokens() -> Response:
        return JSONResponse(
            {"enforced": tokens.enforced(), "tokens": [token_json(record) for record in tokens.records()]}
        )

    @router.delete("/{token_id}", response_model=None)
    @needs(Scope.ADMIN)
    async def revoke(token_id: str) -> Response:
        return JSONResponse({**token_json(await tokens.revoke(token_id)), "revoked": True})

    return router


def token_json(record: TokenRecord) -> dict[str, Any]:
    """What may be shown of a token: neither the token nor its hash."""
    return {
        "id": record.id,
        "label": record.label,
        "scopes": record.scope.included(),
        "created": int(record.created_unix),
        "expires": None if record.expires_unix is None else int(record.expires_unix),
    }
