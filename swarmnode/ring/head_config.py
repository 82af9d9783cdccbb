"""What a load decided for the head of a ring: its limits, and how it schedules."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.ring.kv_budget import TYPICAL_TOKENS
from swarmnode.ring.parking import MAX_PARKED

SCHEDULES = ("cost", "source")
"""`cost`: groups and pieces by what they cost on these stages and links. `source`: the source's fixed rules."""
MAX_IN_FLIGHT = 1024
"""Sessions that may run at once, whatever was configured: a decode group of them all is one frame."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """`max_group` 0: as large as the schedule makes it."""

    num_stages: int
    context_tokens: int
    """Longest conversation one session may reach: prompt and reply together."""
    kv_tokens: int
    """Tokens all sessions may hold together: the smallest budget of all stages."""
    max_in_flight: int
    max_waiting: int
    eos_token_ids: frozenset[int]
    prefill_chunk: int = 256
    """Most prompt positions per piece; 0 sends prompts whole."""
    max_group: int = 0
    typical_tokens: int = TYPICAL_TOKENS
    schedule: str = "cost"
    prefix_reuse: bool = True
    """Keep the caches of ended conversations while there is room, for requests that begin with the same tokens."""
    exact_prefix: bool = False
    """The model has layers with a recurrent state: a conversation can only be continued at exactly its end."""
    max_parked: int = MAX_PARKED
    """Conversations kept at once. The budget counts their tokens, not the recurrent states that each holds besides."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule {self.schedule!r} is not one of {', '.join(SCHEDULES)}")
