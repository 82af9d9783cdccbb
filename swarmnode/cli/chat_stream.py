"""One streamed chat as the CLI shows it: text as it comes, and what it cost."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from swarmnode.cli.client import ApiClient


@dataclass(slots=True)
class ChatResult:
    """A finished reply. Times are this process's own: seconds from the request to its first text, and in all."""

    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt: not read again, but continued from a conversation in memory."""
    ttft_s: float = 0.0
    total_s: float = 0.0
    timing: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Decode speed: tokens after the first over the time after the first."""
        decode_s = self.total_s - self.ttft_s
        return (self.completion_tokens - 1) / decode_s if self.completion_tokens > 1 and decode_s > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "reply": self.text,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "ttft_s": round(self.ttft_s, 4),
            "tokens_per_s": round(self.tokens_per_s, 2),
            "timing": self.timing,
        }

    def footer(self) -> str:
        """One line: TTFT, speed and where the time of a token went."""
        parts = [f"TTFT {self.ttft_s:.2f} s", f"{self.tokens_per_s:.1f} tokens/s", f"{self.completion_tokens} tokens"]
        if self.cached_tokens:
            parts.append(f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens from memory")
        stages = sorted(key for key in self.timing if key.startswith("stage") and key.endswith("_ms"))
        split = [f"{key.removesuffix('_ms')} {self.timing[key]:.1f}" for key in stages]
        split += [f"{key} {self.timing[f'{key}_ms']:.1f}" for key in ("link", "queue") if f"{key}_ms" in self.timing]
        if split:
            parts.append("ms a token: " + ", ".join(split))
        if "route" in self.timing:
            parts.append(f"route {self.timing['route']}")
        return " · ".join(parts)


def run_chat(client: ApiClient, body: Mapping[str, Any], show: Callable[[str], None]) -> ChatResult:
    """Stream one chat, giving text to `show` as it comes."""
    result = ChatResult()
    started_s = time.monotonic()
    options = {"stream_options": {"include_usage": True}}
    for chunk in client.stream_chat({**body, **options}):
        take_chunk(result, chunk, time.monotonic() - started_s, show)
    result.total_s = time.monotonic() - started_s
    return result


def take_chunk(result: ChatResult, chunk: Mapping[str, Any], after_s: float, show: Callable[[str], None]) -> None:
    """Add a chunk that came so many seconds after the request, and give its text to `show`."""
    if usage := chunk.get("usage"):
        result.prompt_tokens, result.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    result.timing = chunk.get("swarm", {}).get("timing", result.timing)
    for choice in chunk["choices"]:
        result.finish_reason = choice["finish_reason"] or result.finish_reason
        text = choice["delta"].get("content")
        if text:
            result.ttft_s = result.ttft_s or after_s
            result.text += text
            show(text)
