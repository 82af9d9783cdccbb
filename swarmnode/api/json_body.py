"""Bounded JSON: bytes from outside become plain values, or a 400 that says what is wrong."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from swarmnode.api.errors import HttpError

MAX_JSON_DEPTH = 64
"""Chat bodies nest six deep; tool schemas of other servers stay under thirty."""
MAX_JSON_VALUES = 50_000
"""4,096 messages of two parts each; every value costs the event loop about two microseconds."""
MAX_SEPARATORS = 250_000
"""`[`, `{` and `,` of the raw body, in texts too (so many are more tokens than any context): bounds what the parser
allocates, and its time."""


def parse_json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; raises HttpError 400."""
    value = _loads(body)
    if not isinstance(value, dict):
        kind = {list: "an array", str: "a string", type(None): "null", bool: "a boolean"}.get(type(value), "a number")
        raise _invalid(f"the body must be a JSON object, not {kind}")
    _check(value)
    return value


def _loads(body: bytes) -> Any:
    if not body.strip():
        raise _invalid("the body is empty; a JSON object is expected")
    if sum(body.count(mark) for mark in (b"[", b"{", b",")) > MAX_SEPARATORS:
        raise _invalid(f"the body holds more than {MAX_SEPARATORS} brackets and commas")
    try:
        return json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _invalid(f"the body is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise _invalid(f"the body nests deeper than {MAX_JSON_DEPTH} levels") from None
    except ValueError as error:  # JSONDecodeError, and integers of more than 4,300 digits
        raise _invalid(f"the body is not valid JSON: {str(error)[:200]}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check(root: dict[str, Any]) -> None:
    """Depth, count and text of every value, without recursion."""
    todo: list[tuple[Any, int]] = [(root, 1)]
    count = 0
    while todo:
        value, depth = todo.pop()
        count += len(value) if isinstance(value, dict | list) else 0
        if depth > MAX_JSON_DEPTH:
            raise _invalid(f"the body nests deeper than {MAX_JSON_DEPTH} levels")
        if count > MAX_JSON_VALUES:  # before the values of this one are even listed
            raise _invalid(f"the body holds more than {MAX_JSON_VALUES} values")
        if isinstance(value, str):
            _check_text(value)
        elif isinstance(value, dict):
            for key in value:
                _check_text(key)
            todo.extend((child, depth + 1) for child in value.values())
        elif isinstance(value, list):
            todo.extend((child, depth + 1) for child in value)


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate would break every encoder further down
        raise _invalid("the body holds a string with a lone surrogate (\\ud800 to \\udfff)") from None


def _invalid(message: str) -> HttpError:
    return HttpError(400, "invalid_json", message)
