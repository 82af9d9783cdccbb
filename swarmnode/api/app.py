"""The ASGI application of the API port: routes over a `Backend`, behind the middlewares every request passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations at run time
from starlette.responses import JSONResponse, Response

import swarmnode
from swarmnode.api.auth import AuthMiddleware, authorize, needs, open_to_all
from swarmnode.api.chat import chat_router
from swarmnode.api.errors import HttpError, error_response
from swarmnode.api.exchange import ExchangeMiddleware
from swarmnode.api.hosts import HostMiddleware
from swarmnode.api.limits import DEFAULT_LIMITS, ApiLimits
from swarmnode.api.metrics import metrics_router
from swarmnode.api.middleware import (
    ContentMiddleware,
    CorsMiddleware,
    ErrorMiddleware,
    HeadMiddleware,
    PathMiddleware,
    RequestIdMiddleware,
)
from swarmnode.api.models import admin_router, openai_models_router
from swarmnode.api.swarm import swarm_router
from swarmnode.api.tokens import tokens_router
from swarmnode.cluster.token_book import Scope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarmnode.api.auth import Credentials
    from swarmnode.api.backend import Backend
    from swarmnode.api.hosts import HostRules


def create_app(
    backend: Backend,
    *,
    limits: ApiLimits = DEFAULT_LIMITS,
    hosts: HostRules | None = None,
    credentials: Credentials | None = None,
    ahead: Sequence[Middleware] = (),
) -> FastAPI:
    """The application. Hosts and tokens are checked on every request but OPTIONS, before its body is read.

    None of either means no such check: for a port that nobody else can reach. `ahead`: calls of the node that are
    none of a `Backend`'s and need no token, since they prove by themselves who sends them.
    """
    guards = [Middleware(HostMiddleware, rules=hosts)] if hosts is not None else []
    guards += ahead
    guards += [Middleware(AuthMiddleware, credentials=credentials)] if credentials is not None else []
    app = FastAPI(
        title="swarmnode",
        version=swarmnode.__version__,
        dependencies=[Depends(authorize)] if credentials is not None else [],
        openapi_url=None,  # FastAPI's own route would have no dependencies
        docs_url=None,  # both pages load scripts from a CDN
        redoc_url=None,
        redirect_slashes=False,  # paths are normalised before routing
        middleware=[
            Middleware(ExchangeMiddleware, limits=limits),
            Middleware(RequestIdMiddleware),
            Middleware(CorsMiddleware, allowed_origins=hosts.origins if hosts is not None else ()),
            Middleware(ErrorMiddleware),
            Middleware(PathMiddleware),
            *guards,
            Middleware(HeadMiddleware),
            Middleware(ContentMiddleware),
        ],
    )
    app.include_router(chat_router(backend, limits))
    app.include_router(openai_models_router(backend))
    app.include_router(admin_router(backend))
    app.include_router(swarm_router(backend))
    app.include_router(metrics_router(backend))
    if credentials is not None:
        app.include_router(tokens_router(credentials.tokens))
    _add_plain_routes(app)
    app.add_exception_handler(HTTPException, _routing_error)
    return app


def _add_plain_routes(app: FastAPI) -> None:
    @app.get("/health", response_model=None)
    @open_to_all
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/", response_model=None)
    @needs(Scope.READ)
    async def root() -> Response:
        return JSONResponse({"name": "swarmnode", "version": swarmnode.__version__, "openai": "/v1"})

    @app.get("/openapi.json", response_model=None, include_in_schema=False)
    @needs(Scope.READ)
    async def schema() -> Response:
        return JSONResponse(app.openapi())


async def _routing_error(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405, in OpenAI's shape."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers: dict[str, str] = dict(getattr(error, "headers", None) or {})
    where = f"{request.method} {request.scope['path'][:200]}"
    if status == 405:
        allow = _with_head(headers.pop("Allow", headers.pop("allow", "")))
        return error_response(
            HttpError(405, "method_not_allowed", f"{where}: only {allow} is allowed here", headers={"allow": allow})
        )
    message = f"unknown URL: {where}" if status == 404 else str(getattr(error, "detail", ""))
    code = "unknown_url" if status == 404 else "invalid_request"
    return error_response(HttpError(status, code, message, type="invalid_request_error", headers=headers))


def _with_head(allow: str) -> str:
    methods = [method.strip() for method in allow.split(",") if method.strip()]
    if "GET" in methods and "HEAD" not in methods:
        methods.append("HEAD")
    return ", ".join([*methods, "OPTIONS"])
