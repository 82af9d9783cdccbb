"""Clients that ask a scripted model at random, know what is right, and leave when they feel like it."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
from local_swarms import REPLY

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

REQUEST_S = 120.0
"""No request takes this long on any machine: one that does hangs."""
SERVING_CODES = frozenset({"stage_lost", "model_not_loaded", "model_restoring", "model_unloading", "overloaded"})
"""What a client may be told, whatever it asked, while stages die and models are reloaded."""
ALPHABET = "abcdefghij"


@dataclass(frozen=True, slots=True)
class Ask:
    """One random request. `leave_after`: chunks of a stream, or seconds of a plain request, until its client leaves."""

    model: str
    text: str
    stream: bool
    max_tokens: int | None
    stop: tuple[str, ...]
    leave_after: float | None

    @classmethod
    def random(cls, rng: random.Random, models: Sequence[str]) -> Ask:
        stream = rng.random() < 0.6
        leaves = rng.random() < 0.3
        texts = ("hello", "a long one", "broken", "early", "x" * rng.randrange(3000), "a long one " + "y" * 1500)
        return cls(
            model=rng.choice(models),
            text=rng.choices(texts, (4, 4, 1, 1, 2, 2))[0],
            stream=stream,
            max_tokens=rng.choice((None, 1, 7, 60, 400, 3900)) if rng.random() < 0.7 else 100,
            stop=rng.choice(((), (), ("群れ",), ("never", "ij"))),
            leave_after=(rng.randrange(20) if stream else rng.uniform(0.01, 0.6)) if leaves else None,
        )

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "messages": [{"role": "user", "content": self.text}]}
        body |= {"stream": self.stream, "max_tokens": self.max_tokens, "stop": list(self.stop) or None}
        return {name: value for name, value in body.items() if value is not None}

    def is_right(self, text: str) -> bool:
        """Whether a complete reply is the script's, as far as max_tokens and stop strings let it go."""
        cut_by_context = self.max_tokens is None and "long" in self.text
        return text.rstrip("\ufffd") == self._expected() or (cut_by_context and bool(text) and self.begins_right(text))

    def begins_right(self, text: str) -> bool:
        """Whether the script's reply begins so: what a client saw that left."""
        return self._expected().startswith(text.rstrip("\ufffd"))

    def _expected(self) -> str:
        said = {"broken": "this will fail", "early": "never"}.get(self.text, REPLY)
        grown = ALPHABET * 400 if "long" in self.text else ALPHABET * 40 if "medium" in self.text else ""
        full = (grown or said).encode()
        whole = full[: self.max_tokens].decode(errors="ignore")
        cuts = [whole.index(stop) for stop in self.stop if stop in whole]
        return whole[: min(cuts)] if cuts else whole

    def may_fail_with(self, code: str) -> bool:
        expected = {"broken": "stage_failed", "early": "stage_failed"}.get(self.text)
        too_long = code == "context_length_exceeded" and len(self.text) + (self.max_tokens or 0) > 3500
        return code in SERVING_CODES or code == expected or too_long


@dataclass(slots=True)
class Tally:
    """What happened, from many threads; `wrong` must stay empty."""

    outcomes: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    anonymous_bytes: list[int] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def ended(self, ask: Ask, outcome: str, *, right: bool) -> None:
        self.outcomes[outcome] += 1
        if not right:
            self.wrong.append(f"{outcome}: {ask.body() | {'messages': ask.text[:30]}}, leaves {ask.leave_after}")

    def pause(self, seconds: float) -> bool:
        """Sleep; true while the run goes on."""
        return not self.stop.wait(seconds)


def answer(http: httpx.Client, ask: Ask, tally: Tally) -> None:
    """Send it, and tally how it ended."""
    try:
        (_stream if ask.stream else _post)(http, ask, tally)
    except Exception as error:  # whatever a client meets that is no answer is a finding
        tally.ended(ask, f"{type(error).__name__}: {error}", right=False)


def _post(http: httpx.Client, ask: Ask, tally: Tally) -> None:
    try:
        timeout = ask.leave_after or REQUEST_S
        response = http.post("/v1/chat/completions", json=ask.body(), timeout=timeout)
    except httpx.ReadTimeout:
        tally.ended(ask, "left" if ask.leave_after else "hung", right=ask.leave_after is not None)
        return
    answer = response.json()
    if response.status_code == 200:
        text = answer["choices"][0]["message"]["content"]
        tally.ended(ask, "replied" if ask.is_right(text) else f"wrong text {text[-60:]!r}", right=ask.is_right(text))
    else:
        code = answer["error"]["code"]
        tally.ended(ask, code, right=ask.may_fail_with(code))


def _stream(http: httpx.Client, ask: Ask, tally: Tally) -> None:
    started_s = time.monotonic()
    text, seen = "", 0
    with http.stream("POST", "/v1/chat/completions", json=ask.body()) as response:
        if response.status_code != 200:
            code = json.loads(response.read())["error"]["code"]
            tally.ended(ask, code, right=ask.may_fail_with(code))
            return
        for line in response.iter_lines():
            if ask.leave_after is not None and seen >= ask.leave_after:
                right = ask.begins_right(text)
                tally.ended(ask, "left" if right else f"wrong text {text[-60:]!r}", right=right)
                return
            if time.monotonic() - started_s > REQUEST_S:
                tally.ended(ask, "hung", right=False)
                return
            if line == "data: [DONE]":
                right = ask.is_right(text)
                tally.ended(ask, "streamed" if right else f"wrong text {text[-60:]!r}", right=right)
                return
            if line.startswith("data: "):
                seen += 1
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    code = chunk["error"]["code"]
                    tally.ended(ask, code, right=ask.may_fail_with(code))
                    return
                text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    tally.ended(ask, "a stream without an end", right=False)
