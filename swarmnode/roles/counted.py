"""One request's way through the gateway, told to the counters."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

from swarmnode.api.backend import Accepted, ChatEvent, Done, Started, TextDelta
from swarmnode.errors import InternalError, StreamClosed, SwarmError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from swarmnode.cluster.performance import Performance
    from swarmnode.ids import ModelId, RequestId


@contextmanager
def counted(performance: Performance, request: RequestId, model: ModelId) -> Iterator[Callable[[ChatEvent], None]]:
    """The block is the request: give every event to what it yields. An end without Done counts by its
    error's code, and without an error as a client that left."""

    def note(event: ChatEvent) -> None:
        now = trio.current_time()
        match event:
            case Accepted(prompt_tokens=prompt_tokens):
                performance.accepted(request, prompt_tokens, now)
            case Started():
                performance.started(request, now)
            case TextDelta(n=n):
                performance.gave(request, n, now)
            case Done(finish_reason=reason, cached_tokens=cached, timing=timing):
                performance.finished(request, reason, cached, timing, now)

    performance.opened(request, model, trio.current_time())
    code = StreamClosed.code
    try:
        yield note
    except SwarmError as error:
        code = error.code
        raise
    except Exception:
        code = InternalError.code
        raise
    finally:
        performance.aborted(request, code, trio.current_time())
