"""Ways to lay out the same conversation, from as it was sent to what strict chat templates take.

Templates differ: some know `developer`, some want one system message at the front, some none, some strict turns of
user and assistant. Each shape is tried in turn; the first that a template accepts is used (see `text.py`).
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Chat = list[dict[str, Any]]

_JOIN = "\n\n"


def chat_shapes(messages: Sequence[Mapping[str, Any]], *, keep_developer: bool) -> Iterator[Chat]:
    """Yield different shapes, the most faithful first. None contents become "": templates concatenate them."""
    plain = [_plain(message, keep_developer=keep_developer) for message in messages]
    merged = system_first(plain)
    folded = system_in_user(merged)
    shapes = (plain, turns_merged(plain), merged, turns_merged(merged), folded, turns_merged(folded))
    for index, shape in enumerate(shapes):
        if shape not in shapes[:index]:
            yield shape


def system_first(chat: Chat) -> Chat:
    """All system messages as one, at the front."""
    texts = [message["content"] for message in chat if message["role"] == "system"]
    if not texts:
        return chat
    return [
        {"role": "system", "content": _JOIN.join(texts)},
        *(message for message in chat if message["role"] != "system"),
    ]


def system_in_user(chat: Chat) -> Chat:
    """A leading system message becomes the beginning of the first user turn (a turn of its own if there is none)."""
    if not chat or chat[0]["role"] != "system":
        return chat
    text, rest = chat[0]["content"], chat[1:]
    for index, message in enumerate(rest):
        if message["role"] == "user":
            joined = {**message, "content": _joined(text, message["content"])}
            return [*rest[:index], joined, *rest[index + 1 :]]
    return [{"role": "user", "content": text}, *rest]


def turns_merged(chat: Chat) -> Chat:
    """Consecutive turns of one role as one turn. Each run is joined once: turn by turn, 4,096 of them took 23 s."""
    runs = [list(run) for _, run in groupby(chat, key=itemgetter("role"))]
    return [{**run[0], "content": _joined(*(message["content"] for message in run))} for run in runs]


def _plain(message: Mapping[str, Any], *, keep_developer: bool) -> dict[str, Any]:
    role = message["role"]
    if role == "developer" and not keep_developer:
        role = "system"
    return {**message, "role": role, "content": message.get("content") or ""}


def _joined(*texts: str) -> str:
    return _JOIN.join(text for text in texts if text)
