"""The compute seam: what a ring machine asks a stage's engine to do, and what comes back.

A body is opaque to the rules: hidden states as raw bytes with the shape and dtype they have on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from swarmnode.ids import SessionId


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a session's tokens are drawn. temperature 0 is greedy; top_k 0, min_p 0 and top_p 1 are off.

    top_p 0 keeps only the most likely token. The noise of position p is a function of (seed, p) alone, so the same
    tokens come out whatever the stage count, the batch or a replay.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Activation:
    """Hidden states between stages: `shape` is (positions or rows, hidden), `dtype` "float32" or "bfloat16"."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview

    def take_rows(self, keep: Sequence[int]) -> Activation:
        """The rows `keep` of a (rows, …) activation, in that order; self when that is all of them."""
        rows = self.shape[0]
        if len(keep) == rows:
            return self
        view = memoryview(self.data)
        stride = len(view) // rows
        data = b"".join(view[i * stride : (i + 1) * stride] for i in keep)
        return Activation(self.dtype, (len(keep), *self.shape[1:]), data)


@dataclass(frozen=True, slots=True)
class Continuation:
    """Where a session begins instead of at nothing: the first `length` positions of the parked session `source`.

    With `move` the parked cache becomes the new session's, and `source` is gone; without, it is copied and stays.
    """

    source: SessionId
    length: int
    move: bool


@dataclass(frozen=True, slots=True)
class PieceWork:
    """Run one piece of a prompt: positions pos … pos+len(ids)-1 of one session.

    The session's cache is cropped to `pos` first (0 makes a new cache); a piece with `start` makes it from a parked
    one, and its `pos` is `start.length`. `hidden` is None on stage 0, which embeds `ids` itself. On the last stage
    `sampling` is set on the session's first piece, `ids` extend its history (which `start` carries over, too), and
    the next token is sampled when `last` is true.
    """

    session: SessionId
    pos: int
    ids: tuple[int, ...]
    last: bool
    hidden: Activation | None = None
    sampling: Sampling | None = None
    start: Continuation | None = None


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One session's next position: its cache is cropped to `pos`; `token` (stage 0 only) is embedded there."""

    session: SessionId
    pos: int
    token: int | None = None


@dataclass(frozen=True, slots=True)
class GroupWork:
    """Run one position of several sessions. `hidden` has one row per session, in order; None on stage 0."""

    rows: tuple[DecodeRow, ...]
    hidden: Activation | None = None


Work = PieceWork | GroupWork


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a session's work failed, in the wire's terms (`errors.from_wire`)."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class WorkResult:
    """What a stage made of a `Work`.

    `hidden` holds the rows that go on to the next stage (all but the last stage): every position of a piece, or one
    row for each session of a group that did not fail, in order. `tokens` (last stage) holds the sampled token of each
    such session; of a piece only when it was the prompt's last. `failed` names the sessions that ended here.
    """

    hidden: Activation | None = None
    tokens: tuple[int, ...] = ()
    failed: Mapping[SessionId, Failure] = field(default_factory=dict)
    compute_ms: float = 0.0

    def onward(self) -> Activation:
        """What goes on to the next stage. An engine that returns none is a bug, not a session's fault."""
        if self.hidden is None:
            raise RuntimeError("the engine of a stage that is not the last returned no hidden states")
        return self.hidden


class Engine(Protocol):
    """A stage's compute. Real ones live in `compute/`; `ScriptedEngine` replays given tokens.

    Single-threaded and synchronous. An exception of `run` means the whole work failed; the caller crops every session
    back to its `pos` (the next work does it) and decides what to try again.
    """

    def run(self, work: Work) -> WorkResult:
        """Do the forward; `failed` and `compute_ms` may be left for the caller to fill."""

    def free(self, session: SessionId) -> None:
        """Drop the session's cache and sampling state; unknown sessions are ignored.

        A parked session is one that nobody freed: its cache waits for a `Continuation`.
        """

    def kv_tokens(self) -> int:
        """Positions held in all caches now."""

    def kv_bytes(self) -> int:
        """Bytes held by all caches now."""
