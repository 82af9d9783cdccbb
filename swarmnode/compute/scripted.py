"""An engine without torch that replays given tokens with given delays, and catches rows that went astray.

It is a full `swarmnode.ring.work.Engine`: sessions have caches with lengths, gaps raise, pieces overlap, forwards
fail where the script says. Every row between stages carries its position, its token and how many layers it passed
under a checksum; each stage checks what it can know and the last one all of it, so a frame that reached the wrong
stage, session or position raises instead of giving a plausible token.
"""

from __future__ import annotations

import mmap
import random
import struct
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swarmnode.compute.script import read_script
from swarmnode.compute.step_costs import MEASURED_POSITIONS, MEASURED_ROWS
from swarmnode.errors import CacheGap, StageFailed
from swarmnode.ring.cost_model import StageCosts
from swarmnode.ring.work import Activation, PieceWork, WorkResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from swarmnode.compute.script import Reply, Script
    from swarmnode.compute.spec import StageSpec
    from swarmnode.ids import SessionId
    from swarmnode.ring.work import Continuation, DecodeRow, GroupWork, Work

KV_BYTES_PER_TOKEN_LAYER = 64
_MODULUS = 65_521
"""The largest prime below 2^16: checksums stay exact in float32."""
_UNKNOWN = -1
MAX_PROMPTS = 256
LEAST_MS = 0.01


@dataclass(slots=True)
class _Session:
    """`tokens` by position; _UNKNOWN where a row has yet to tell what was sampled."""

    tokens: list[int] = field(default_factory=list)
    length: int = 0
    prompt_length: int | None = None
    reply: Reply | None = None


class ScriptedEngine:
    """One stage of a scripted model. `sleep` takes seconds; tests on virtual time give their own."""

    def __init__(self, script: Script, spec: StageSpec, sleep: Callable[[float], None] = time.sleep) -> None:
        self._script, self._spec, self._sleep = script, spec, sleep
        self._sessions: dict[SessionId, _Session] = {}
        self._prompts: dict[SessionId, tuple[int, ...]] = {}
        """Of the last sessions, also of those that were freed: one that was paused comes back under its id."""

    def run(self, work: Work) -> WorkResult:
        """Check, wait as long as the script says, and answer."""
        return self._run_piece(work) if isinstance(work, PieceWork) else self._run_group(work)

    def free(self, session: SessionId) -> None:
        self._sessions.pop(session, None)

    def kv_tokens(self) -> int:
        return sum(session.length for session in self._sessions.values())

    def kv_bytes(self) -> int:
        return self.kv_tokens() * (self._spec.end_layer - self._spec.first_layer) * KV_BYTES_PER_TOKEN_LAYER

    def costs(self) -> StageCosts:
        """What steps take by the script; a forward that takes no time still counts for something."""
        script = self._script
        groups = {rows: script.decode_ms + script.row_ms * rows for rows in MEASURED_ROWS}
        pieces = {n: script.prefill_ms_per_token * n for n in MEASURED_POSITIONS}
        return StageCosts(*({n: max(ms, LEAST_MS) for n, ms in table.items()} for table in (groups, pieces)))

    def _run_piece(self, work: PieceWork) -> WorkResult:
        end = work.pos + len(work.ids)
        if work.start is not None:
            self._sessions[work.session] = self._continued(work.start)
        elif work.pos == 0:
            self._sessions[work.session] = _Session()
        session = self._cropped(work.session, work.pos)
        session.tokens[work.pos :] = work.ids
        positions = range(work.pos, end)
        self._check(work.hidden, positions, work.ids)
        self._wait(self._script.prefill_ms_per_token * len(work.ids))
        session.length = end
        session.prompt_length = self._prompt_length(work.session, session.tokens) if work.last else None
        if work.last:
            session.reply = self._script.reply_to(session.tokens[: session.prompt_length])
            self._fail_if_told(session, end)
        if not self._spec.is_last:
            return WorkResult(hidden=self._rows(positions, work.ids))
        return WorkResult(tokens=(self._next_token(session, end),)) if work.last else WorkResult()

    def _run_group(self, work: GroupWork) -> WorkResult:
        sessions = [self._at_row(row) for row in work.rows]
        positions = [row.pos for row in work.rows]
        tokens = [session.tokens[row.pos] for session, row in zip(sessions, work.rows, strict=True)]
        self._check(work.hidden, positions, tokens)
        self._wait(self._script.decode_ms + self._script.row_ms * len(work.rows))
        for session, position in zip(sessions, positions, strict=True):
            session.length = position + 1
            self._fail_if_told(session, position + 1)
        if not self._spec.is_last:
            told = self._told(work, tokens)
            for session, token in zip(sessions, told, strict=True):
                session.tokens[-1] = token
            return WorkResult(hidden=self._rows(positions, told))
        pairs = zip(sessions, positions, strict=True)
        return WorkResult(tokens=tuple(self._next_token(session, position + 1) for session, position in pairs))

    def _continued(self, start: Continuation) -> _Session:
        source = self._sessions.get(start.source)
        if source is None or min(source.length, len(source.tokens)) < start.length:
            raise CacheGap(f"session {start.source} is not here with {start.length} positions")
        if start.move:
            del self._sessions[start.source]
        return _Session(source.tokens[: start.length], start.length)

    def _prompt_length(self, key: SessionId, tokens: list[int]) -> int:
        """The prompt's length; a session that was paused reads its reply so far with it, and goes on behind that."""
        prompt = self._prompts.pop(key, ())
        if not prompt or tuple(tokens[: len(prompt)]) != prompt:
            prompt = tuple(tokens)
        self._prompts[key] = prompt
        if len(self._prompts) > MAX_PROMPTS:
            del self._prompts[next(iter(self._prompts))]
        return len(prompt)

    def _cropped(self, key: SessionId, pos: int) -> _Session:
        session = self._sessions.get(key)
        if session is None or session.length < pos:
            held = 0 if session is None else session.length
            raise CacheGap(f"session {key}: the cache holds {held} positions, the work starts at position {pos}")
        session.length = pos
        return session

    def _at_row(self, row: DecodeRow) -> _Session:
        """The session cropped to the row; the row's own token stays known where it was sampled or is given."""
        session = self._cropped(row.session, row.pos)
        if session.prompt_length is None:
            raise StageFailed(f"session {row.session}: a decode row before the prompt's last piece")
        del session.tokens[row.pos + 1 :]
        if self._spec.is_first and not self._spec.is_last:
            if row.token is None:
                raise StageFailed(f"session {row.session}: stage 0 got a row without a token")
            session.tokens[row.pos :] = [row.token]
        elif not self._spec.is_last:
            session.tokens[row.pos :] = [_UNKNOWN]
        if len(session.tokens) != row.pos + 1:
            raise StageFailed(f"session {row.session}: no token is known for position {row.pos}")
        if self._spec.is_last and row.token not in (None, session.tokens[row.pos]):
            raise StageFailed(f"session {row.session}: token {row.token} was not sampled for position {row.pos}")
        return session

    def _fail_if_told(self, session: _Session, position: int) -> None:
        reply, prompt_length = session.reply, session.prompt_length
        if reply is None or prompt_length is None or reply.fail_at != position - prompt_length:
            return
        layer = self._spec.num_layers - 1 if reply.fail_layer is None else reply.fail_layer
        if self._spec.first_layer <= layer < self._spec.end_layer:
            raise StageFailed(f"the script fails token {reply.fail_at} of this reply")

    def _next_token(self, session: _Session, position: int) -> int:
        assert session.reply is not None
        assert session.prompt_length is not None
        token = self._script.token(session.reply, position - session.prompt_length)
        session.tokens[position:] = [token]
        return token

    def _told(self, work: GroupWork, known: Sequence[int]) -> list[int]:
        """Tokens to send on: a middle stage passes those that arrived in its rows."""
        if work.hidden is None:
            return list(known)
        return [row[1] for row in _unpack(work.hidden, self._script.hidden)]

    def _rows(self, positions: Sequence[int], tokens: Sequence[int]) -> Activation:
        return _pack(positions, tokens, self._spec.end_layer, self._script)

    def _check(self, arrived: Activation | None, positions: Sequence[int], tokens: Sequence[int]) -> None:
        spec = self._spec
        if spec.is_first:
            return
        if arrived is None:
            raise StageFailed("a later stage got work without hidden states")
        rows = _unpack(arrived, self._script.hidden)
        expected = [(position, token, spec.first_layer) for position, token in zip(positions, tokens, strict=True)]
        seen = [
            (position, _UNKNOWN if want[1] == _UNKNOWN else token, depth)
            for (position, token, depth), want in zip(rows, expected, strict=False)
        ]
        if len(rows) != len(expected) or seen != expected:
            raise StageFailed(
                f"rows went astray: layers {spec.first_layer} to {spec.end_layer} got (position, token, depth) "
                f"{rows[:8]}, expected are {expected[:8]}"
            )

    def _wait(self, ms: float) -> None:
        if ms > 0:
            self._sleep(ms / 1000)


def load_scripted(spec: StageSpec) -> ScriptedEngine:
    """The engine of a stage whose files hold a script; raises InvalidModel."""
    script = read_script(spec.files)
    time.sleep(script.load_ms / 1000)
    if script.load_bytes:
        mmap.mmap(-1, script.load_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    return ScriptedEngine(script, spec)


def _checksum(position: int, token: int, depth: int) -> int:
    return (position * 31 + token * 7 + depth * 1009 + 1) % _MODULUS


def _pack(positions: Sequence[int], tokens: Sequence[int], depth: int, script: Script) -> Activation:
    rest = random.Random(depth).randbytes if script.noise else bytes
    data = b"".join(
        struct.pack("<4f", position, token, depth, _checksum(position, token, depth)) + rest(4 * (script.hidden - 4))
        for position, token in zip(positions, tokens, strict=True)
    )
    return Activation("float32", (len(positions), script.hidden), data)


def _unpack(activation: Activation, hidden: int) -> list[tuple[int, int, int]]:
    """(position, token, depth) of each row; raises StageFailed if a row is not what `_pack` made."""
    data = memoryview(activation.data).cast("B")
    n = activation.shape[0] if activation.shape else 0
    if activation.dtype != "float32" or activation.shape != (n, hidden) or len(data) != n * hidden * 4:
        raise StageFailed(f"hidden states are {activation.dtype} {list(activation.shape)} in {len(data)} bytes")
    rows = []
    for index in range(n):
        numbers = struct.unpack_from("<4f", data, index * hidden * 4)
        whole = all(number.is_integer() for number in numbers)
        position, token, depth, check = map(int, numbers) if whole else (0, 0, 0, 0)
        if not whole or check != _checksum(position, token, depth):
            raise StageFailed(f"row {index} of the hidden states is damaged")
        rows.append((position, token, depth))
    return rows
