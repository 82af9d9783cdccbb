"""What a peer reports of itself, checked once as it enters: beats, gauges, ready stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarmnode.cluster.local_health import MAX_SCORE
from swarmnode.cluster.member_table import MAX_MEMBERS
from swarmnode.cluster.voter_book import MAX_VOTERS
from swarmnode.errors import ProtocolError
from swarmnode.wire.bodies import unpack_body

if TYPE_CHECKING:
    from swarmnode.wire.frames import Frame

MAX_REPORT_BYTES = 64 << 10
"""A beat with dozens of stages has a few KiB; a larger body is not walked on the coordinator's loop."""
MAX_TABLE_BYTES = 256 << 10
"""The rows of MAX_MEMBERS with long names and addresses."""
MAX_STAGES_HELD = 64
MAX_MODELS_KEPT = 128
MAX_TAILS, MAX_TAIL_LINES, MAX_LINE_CHARS = 4, 200, 2000
"""Of workers' logs."""
MAX_ADDRESSES = 8
"""As many as HELLO names."""
MAX_LANES = 4
"""A stage sends on two lanes, the last one on one."""
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
"""Exact in every JSON reader."""
Name = Annotated[str, Field(max_length=128)]
Size = Annotated[str, Field(pattern="^[1-9][0-9]{0,3}$")]
Milliseconds = Annotated[float, Field(gt=0, lt=1e7, allow_inf_nan=False)]
Measure = Annotated[float, Field(ge=0, lt=1e7, allow_inf_nan=False)]
CostTable = Annotated[dict[Size, Milliseconds], Field(max_length=16)]
Gauges = Annotated[dict[Name, Count], Field(max_length=64)]


class _Report(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class LaneLink(_Report):
    """A lane that a stage sends on: the way it takes, and what was measured of it."""

    lane: Name
    route: Literal["", "direct", "relayed", "polled"]
    """The worst of its legs; empty while it is not up yet."""
    round_trip_ms: Measure | None = None
    mbit_per_s: Measure | None = None
    compressed: bool = False
    frames: Count = 0
    bytes: Count = 0


Links = Annotated[list[LaneLink], Field(max_length=MAX_LANES)]


class Activity(_Report):
    """What a model's stage 0 did (`HeadActivity`)."""

    requests: Count
    running: Count
    tokens_per_s: float = Field(ge=0, lt=1e9, allow_inf_nan=False)
    last_ttft_s: float | None = Field(default=None, ge=0, lt=1e9, allow_inf_nan=False)
    idle_s: float = Field(ge=0, lt=1e9, allow_inf_nan=False)


class StageHeld(_Report):
    """One stage on its peer."""

    ring: Name
    model: Name
    stage: Count
    phase: Name
    pid: Count | None = None
    gauges: Gauges = {}
    links: Links = []
    activity: Activity | None = None
    """Of stage 0."""


class LinkedStage(_Report):
    """A stage whose outgoing lanes are up."""

    links: Links = []


class Beat(_Report):
    """What a peer offers and holds, and how it is; sent every two seconds."""

    memory_bytes: Count
    """What it offers of the memory that its stages compute in: a card's, where they compute on one."""
    vram_bytes: Count | None = None
    """What its card has."""
    vram_free_bytes: Count | None = None
    device: Name
    threads: Count
    stages: list[StageHeld] = Field(max_length=MAX_STAGES_HELD)
    models: list[Name] = Field(default=[], max_length=MAX_MODELS_KEPT)
    """Those whose files it can share."""
    round_trip_ms: Measure | None = None
    """Of its own beats, as it measured them."""
    health: int = Field(default=0, ge=0, le=MAX_SCORE)
    """`LocalHealth.score`: 0 while its loop runs in time."""


class MemberRow(_Report):
    """One member in a table that a coordinator sends."""

    node: Name
    name: Name
    address: Name
    state: Literal["alive", "suspect", "dead", "left"]


class MembersReport(_Report):
    """What changed in the table of members, or all of it."""

    coordinator: Name
    voters: Annotated[list[Name], Field(max_length=MAX_VOTERS)]
    open: bool
    revocations: Count = 0
    rows: Annotated[list[MemberRow], Field(max_length=MAX_MEMBERS)]
    gone: Annotated[list[Name], Field(max_length=MAX_MEMBERS)] = []


class StepCosts(_Report):
    """Milliseconds by rows of a group, and by positions of a prompt piece."""

    group_ms: CostTable
    piece_ms: CostTable


class ReadyStage(_Report):
    """A stage whose worker has loaded: where its lanes are dialled, what it can hold, its process on its machine, the
    device and threads it really uses, whose kernels multiply its weights, what its steps cost, where it
    measured them, and how many rows a group may have where it did not (0: any number)."""

    address: Name
    addresses: Annotated[list[Name], Field(max_length=MAX_ADDRESSES)] = []
    kv_tokens: Count
    pid: Count
    device: Name | None = None
    threads: Count | None = None
    kernels: Name | None = None
    costs: StepCosts | None = None
    max_group: Count = 0
    links: Count = 0


class WorkerTail(_Report):
    """The last lines of one worker's log, the newest last."""

    ring: Name
    model: Name
    stage: Count
    phase: Name
    pid: Count | None = None
    lines: Annotated[list[Annotated[str, Field(max_length=10 * MAX_LINE_CHARS)]], Field(max_length=MAX_TAIL_LINES)]


class LogTails(_Report):
    """What a peer answers when it is asked for its workers' logs."""

    workers: Annotated[list[WorkerTail], Field(max_length=MAX_TAILS)]


class _GaugesReport(_Report):
    gauges: Gauges


Report = TypeVar("Report", bound=_Report)


def read_report(shape: type[Report], frame: Frame, most_bytes: int = MAX_REPORT_BYTES) -> Report:
    """The report in a frame's body; raises ProtocolError that names the field."""
    return _validate(shape, _bounded_body(frame, most_bytes), frame.kind)


def read_gauges(frame: Frame) -> dict[str, int]:
    """Whole numbers by name, as a worker reports them."""
    return _validate(_GaugesReport, {"gauges": _bounded_body(frame)}, frame.kind).gauges


def _bounded_body(frame: Frame, most_bytes: int = MAX_REPORT_BYTES) -> dict[str, object]:
    if len(frame.body) > most_bytes:
        raise ProtocolError(f"a {frame.kind} has {len(frame.body)} bytes; allowed are {most_bytes}")
    return unpack_body(frame.body)


def _validate(shape: type[Report], values: dict[str, object], kind: str) -> Report:
    try:
        return shape.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ProtocolError(f"a {kind} has {where}={first['input']!r:.80}: {first['msg']}") from error
