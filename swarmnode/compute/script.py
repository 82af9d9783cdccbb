"""The script that a scripted servable replays: `shards/stage-<i>/script.json`, its meaning and its limits.

Times are milliseconds on every stage that reads them; give stages different files to make one of them slow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarmnode.errors import InvalidModel

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

SCRIPT_NAME = "script.json"
MAX_SCRIPT_BYTES = 16 << 20
MIN_HIDDEN = 4
"""A row carries position, token, depth and a checksum."""
_TokenId = int


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Reply(_Part):
    """What follows a prompt that contains `when` as consecutive ids."""

    when: tuple[_TokenId, ...] = ()
    ids: tuple[_TokenId, ...] = ()
    fail_at: int | None = Field(default=None, ge=0)
    """The forward that would give this token of the reply (0: the prompt's last piece) raises, every time."""
    fail_layer: int | None = Field(default=None, ge=0)
    """On the stage that holds this layer; None: the last stage."""


class Script(_Part):
    """Replies by prompt, and how long everything takes."""

    replies: tuple[Reply, ...] = ()
    default: tuple[_TokenId, ...] = ()
    """The reply to a prompt that no entry of `replies` matches."""
    then: str = Field(default="eos", pattern="^(repeat|eos)$")
    """After the last id of a reply: `eos` for ever, or the reply again."""
    eos: _TokenId = Field(default=0, ge=0)
    prefill_ms_per_token: float = Field(default=0, ge=0)
    decode_ms: float = Field(default=0, ge=0)
    """Per group, whatever its size."""
    row_ms: float = Field(default=0, ge=0)
    """Per row of a group, on top."""
    hidden: int = Field(default=8, ge=MIN_HIDDEN, le=1 << 16)
    """float32 numbers per row between stages: the size of the frames."""
    noise: bool = False
    """Fill the rest of a row with noise, which no link can compress, instead of zeros."""
    load_ms: float = Field(default=0, ge=0)
    load_bytes: int = Field(default=0, ge=0, le=1 << 46)
    """Address space that loading takes for a moment, whatever the manifest says that the stage needs. None of it is
    touched: what refuses it is a limit of the process."""

    def reply_to(self, prompt: Sequence[int]) -> Reply:
        """The first reply whose `when` occurs in the prompt, else the default."""
        for reply in self.replies:
            if contains(prompt, reply.when):
                return reply
        return Reply(ids=self.default)

    def token(self, reply: Reply, index: int) -> int:
        """The reply's token number `index`."""
        if index < len(reply.ids):
            return reply.ids[index]
        return reply.ids[index % len(reply.ids)] if self.then == "repeat" and reply.ids else self.eos


def contains(ids: Sequence[int], part: Sequence[int]) -> bool:
    """True if `part` occurs in `ids` as consecutive items; an empty part occurs everywhere."""
    n = len(part)
    return any(tuple(ids[i : i + n]) == tuple(part) for i in range(len(ids) - n + 1))


def read_script(files: Iterable[Path]) -> Script:
    """The script among a stage's files; raises InvalidModel if there is none or it says something unknown."""
    path = next((file for file in files if file.name == SCRIPT_NAME), None)
    if path is None:
        raise InvalidModel(f"the stage's files hold no {SCRIPT_NAME}")
    try:
        with path.open("rb") as file:
            return Script.model_validate_json(file.read(MAX_SCRIPT_BYTES))
    except (OSError, ValidationError) as error:
        raise InvalidModel(f"{SCRIPT_NAME} cannot be used: {str(error)[:500]}") from error
