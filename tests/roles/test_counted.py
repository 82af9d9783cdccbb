"""A request's end as the counters hear of it: every error under its own code, a bug never as a client that left."""

from __future__ import annotations

import pytest
import trio

from swarmnode.cluster.performance import Performance
from swarmnode.errors import ContextTooLong, StageLost
from swarmnode.ids import ModelId, RequestId
from swarmnode.roles.counted import counted

MODEL = ModelId("m")


@pytest.mark.parametrize(
    ("error", "aborted", "too_long", "failed"),
    [
        (ContextTooLong("5,000 tokens never fit"), {}, 1, 0),
        (StageLost("stage 1 is gone"), {"stage_lost": 1}, 0, 1),
        (KeyError("a bug"), {"internal_error": 1}, 0, 1),
        (GeneratorExit(), {"client_left": 1}, 0, 0),
    ],
)
async def test_an_end_counts_by_its_error(
    error: BaseException, aborted: dict[str, int], too_long: int, failed: int
) -> None:
    performance = Performance()
    with pytest.raises(type(error)), counted(performance, RequestId("r"), MODEL):
        raise error
    [counts] = performance.counts()
    window = performance.window(MODEL, trio.current_time())
    assert (dict(counts.aborted), window["too_long"], window["failed"]) == (aborted, too_long, failed)
