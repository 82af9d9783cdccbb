"""A streamed chat whose client reads while it runs, and understands what it read at the end.

For studies whose users share the processors with the stages that they wait for: a token costs such a user one read.
"""

from __future__ import annotations

import http.client
import json
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from benchmarks.gateway import CONTENT_MARK, END_MARK
from swarmnode.cli.chat_stream import ChatResult, take_chunk
from swarmnode.cli.client import SILENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

READ_BYTES = 1 << 16


def light_chat(api: str, secret: str, body: Mapping[str, Any], times_s: list[float]) -> ChatResult:
    """One chat with the API at `api`; the clock at each piece of its text is added to `times_s` as it comes.

    Raises RuntimeError where the chat is refused, or ends without its end mark.
    """
    address = urlsplit(api)
    asked = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
    with closing(http.client.HTTPConnection(address.hostname or "", address.port, timeout=SILENCE_S)) as connection:
        begun_s = time.monotonic()
        connection.request("POST", "/v1/chat/completions", asked, headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise RuntimeError(f"a chat was refused with {response.status}: {response.read()[:500]!r}")
        written = bytearray()
        with suppress(http.client.IncompleteRead):  # it was cut, and lacks its end mark
            while piece := response.read1(READ_BYTES):  # what the server wrote in one go
                if CONTENT_MARK in piece:
                    times_s.append(time.monotonic())
                written += piece
    result = ChatResult(total_s=time.monotonic() - begun_s)
    after_s = times_s[0] - begun_s if times_s else result.total_s
    for chunk in chunks_of(bytes(written)):
        take_chunk(result, chunk, after_s, lambda _: None)
    return result


def chunks_of(written: bytes) -> Iterator[dict[str, Any]]:
    """The chunks of a whole reply; raises RuntimeError where the end mark is missing, as it is behind an error."""
    if not written.endswith(END_MARK):
        raise RuntimeError(f"a reply ended without its end mark: {written[-500:]!r}")
    for event in written.removesuffix(END_MARK).split(b"\n\n"):
        if event.startswith(b"data: "):
            yield json.loads(event.removeprefix(b"data: "))
