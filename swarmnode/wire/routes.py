"""The routes that a link can take between two nodes, best first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

DIRECT, RELAYED, POLLED = "direct", "relayed", "polled"
ROUTES = (DIRECT, RELAYED, POLLED)
"""A direct link is one trip, a relayed one two, a polled one two and the waiting of its requests."""


def worst(routes: Iterable[str]) -> str:
    """The route of a way made of several legs, or of a ring made of several links."""
    return max(routes, key=ROUTES.index, default=DIRECT)


def better(route: str, than: str) -> bool:
    return ROUTES.index(route) < ROUTES.index(than)
