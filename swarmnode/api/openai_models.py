"""The OpenAI chat request: which fields are read, which are refused, and the errors that name them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from swarmnode.api.errors import HttpError
from swarmnode.cluster.quantization import read_quantization
from swarmnode.errors import LoadRefused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic_core import ErrorDetails

MAX_MESSAGES = 4096
"""Agents send some hundred turns; the context ends long before this does."""
MAX_STOP_STRINGS = 16
"""Everyone accepts more than OpenAI's four; each one costs the matcher a state."""
MAX_STOP_CHARS = 256
"""Text held back while a stop string may still come: longer ones would make a stream look dead."""
MAX_TOKENS_LIMIT = (1 << 31) - 1
"""What is larger is a mistake, and overflowed an int32 in others' engines."""
MAX_PARTS = 4096

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (None, {}),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "grammar": (None, ""),
    "guided_choice": (None, []),
    "guided_grammar": (None, ""),
    "guided_json": (None, {}),
    "guided_regex": (None, ""),
    "ignore_eos": (None, False),
    "json_schema": (None, {}),
    "length_penalty": (None, 1),
    "logit_bias": (None, {}, []),
    "logprobs": (None, False, 0),
    "min_tokens": (None, 0),
    "mirostat": (None, 0),
    "modalities": (None, [], ["text"]),
    "n": (None, 1),
    "prediction": (None, {}),
    "presence_penalty": (None, 0),
    "prompt_logprobs": (None, False, 0),
    "repeat_penalty": (None, 1),
    "repetition_penalty": (None, 1),
    "response_format": (None, {}, {"type": "text"}),
    "stop_token_ids": (None, []),
    "structured_outputs": (None, {}),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "typical_p": (None, 1),
    "use_beam_search": (None, False),
    "web_search_options": (None, {}),
}
"""Fields that change the reply and are not implemented, with the values that ask for nothing. All other unknown
fields (user, metadata, store …) do not change the reply and are ignored."""


Shape = TypeVar("Shape", bound=BaseModel)


class _Shape(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class TextPart(_Shape):
    type: Literal["text"]
    text: str


def _text_parts(value: Any) -> Any:
    """Refuse pictures and sound by name: a list of part types tells more than a failed union."""
    if not isinstance(value, list):
        return value
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"content parts of type {kind[:60]!r} are not supported; only 'text' is")
    return value


Content = Annotated[str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)] | None, BeforeValidator(_text_parts)]


def _known_role(value: Any) -> Any:
    if value in ("tool", "function"):
        raise ValueError(f"messages of role {value!r} are not supported: tools are not")
    return value


def _no_calls(value: Any) -> Any:
    if value:
        raise ValueError("tool calls are not supported")
    return None


class Message(_Shape):
    role: Annotated[Literal["system", "developer", "user", "assistant"], BeforeValidator(_known_role)]
    content: Content = None
    tool_calls: Annotated[None, BeforeValidator(_no_calls)] = None
    function_call: Annotated[None, BeforeValidator(_no_calls)] = None

    def text(self) -> str | None:
        """Parts are joined by a newline, as vLLM and llama.cpp do for templates that take strings."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content


class StreamOptions(_Shape):
    include_usage: bool | None = None


class TemplateKwargs(_Shape):
    enable_thinking: bool | None = None


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopStrings = Annotated[
    list[Annotated[str, Field(max_length=MAX_STOP_CHARS)]],
    Field(max_length=MAX_STOP_STRINGS),
    BeforeValidator(_as_list),
]
TokenCount = Annotated[int, Field(ge=1, le=MAX_TOKENS_LIMIT)]


class ChatBody(_Shape):
    """`POST /v1/chat/completions`. null means: not given."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 24)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: StopStrings | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    reasoning_effort: str | None = None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def template_kwargs(self) -> dict[str, bool]:
        """What the chat template is told; an explicit enable_thinking wins over reasoning_effort "none"."""
        if self.chat_template_kwargs and self.chat_template_kwargs.enable_thinking is not None:
            return {"enable_thinking": self.chat_template_kwargs.enable_thinking}
        return {"enable_thinking": False} if self.reasoning_effort == "none" else {}


def _quantization(value: Any) -> Any:
    try:
        return None if value is None else read_quantization(value)
    except LoadRefused as error:
        raise ValueError(error.message) from error


class LoadBody(_Shape):
    """`POST /api/v1/models/{id}/load`."""

    num_stages: Annotated[int, Field(ge=1, le=1024)] | None = None
    peer: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    peers: Annotated[list[Annotated[str, Field(min_length=1, max_length=128)]], Field(max_length=1024)] | None = None
    dtype: Literal["auto", "float32", "bfloat16"] | None = None
    quantization: Annotated[str | None, BeforeValidator(_quantization)] = None
    wait: bool | None = None
    plan: bool | None = None
    """Only say what the load would take."""


class UnloadBody(_Shape):
    """`POST /api/v1/models/{id}/unload` and `DELETE /api/v1/models/{id}`."""

    force: bool | None = None


def parse_chat(data: dict[str, Any]) -> ChatBody:
    """Validate; raises HttpError 400 that names the field."""
    for name, neutral in UNSUPPORTED.items():
        if name in data and not any(_same(data[name], value) for value in neutral):
            allowed = " or ".join(json.dumps(value) for value in neutral)
            text = f"{name!r} is not supported by this server: leave it out, or give {allowed}"
            raise HttpError(400, "unsupported_parameter", text, param=name)
    body = parse_shape(ChatBody, data)
    for index, message in enumerate(body.messages):
        if message.content is None and message.role != "assistant":
            raise HttpError(
                400,
                "invalid_value",
                f"messages[{index}].content: a {message.role} message needs content",
                param=f"messages[{index}].content",
            )
    if body.stream_options is not None and not body.stream:
        raise HttpError(
            400, "invalid_value", "'stream_options' is only allowed with stream: true", param="stream_options"
        )
    return body


def _same(value: Any, neutral: Any) -> bool:
    """Equal, and not merely because Python counts False as 0 and 1 as True."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def parse_shape(shape: type[Shape], data: dict[str, Any]) -> Shape:
    """`shape.model_validate`, with the most telling finding as an HttpError 400."""
    try:
        return shape.model_validate(data)
    except ValidationError as error:
        raise _most_telling(error.errors(include_url=False, include_context=False)) from None


_CODES = {
    "missing": "missing_required_parameter",
    "too_short": "empty_array",
    "too_long": "array_too_long",
    "string_too_long": "string_too_long",
    "string_too_short": "invalid_value",
    "value_error": "unsupported_value",
    "literal_error": "invalid_value",
    "greater_than_equal": "invalid_value",
    "less_than_equal": "invalid_value",
    "less_than": "invalid_value",
}


def _most_telling(findings: list[ErrorDetails]) -> HttpError:
    finding = max(findings, key=lambda found: len(found["loc"]))  # the branch of a union that got furthest
    param = _param(finding["loc"])
    code = _CODES.get(finding["type"], "invalid_type")
    message = finding["msg"].removeprefix("Value error, ").replace(" after validation", "")
    return HttpError(400, code, f"{param}: {message[:500]}", param=param)


def _param(loc: tuple[int | str, ...]) -> str:
    """`messages[0].content` from ("messages", 0, "content", "list[TextPart]"): union branches are left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in {"str", "float", "int", "bool", "none"}:
            path += f".{part}" if path else part
    return path or "body"
