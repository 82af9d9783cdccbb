"""Structured bodies: msgpack with text keys, bounded in size, depth and length before anything is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack

from swarmnode.errors import ProtocolError
from swarmnode.wire import limits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from swarmnode.wire.frames import Buffer


def pack_body(value: Mapping[str, Any]) -> bytes:
    """`value` as a body of rule `map`; raises ProtocolError where it would not be taken at the other end."""
    _check_depth(value, limits.MAX_BODY_DEPTH)
    try:
        packed: bytes = msgpack.packb(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"a body cannot be packed: {error}") from None
    if len(packed) > limits.MAX_MAP_BODY_BYTES:
        raise ProtocolError(f"a body has {len(packed)} bytes; allowed are {limits.MAX_MAP_BODY_BYTES}")
    return packed


def unpack_body(data: Buffer) -> dict[str, Any]:
    """The map in a body; lists come back as lists. Raises ProtocolError for anything else."""
    if len(data) > limits.MAX_MAP_BODY_BYTES:
        raise ProtocolError(f"a body has {len(data)} bytes; allowed are {limits.MAX_MAP_BODY_BYTES}")
    try:
        value = msgpack.unpackb(
            data,
            strict_map_key=True,
            max_array_len=min(limits.MAX_BODY_ITEMS, len(data)),
            max_map_len=min(limits.MAX_BODY_ITEMS, len(data)),
            max_ext_len=0,
            ext_hook=_refuse_extension,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a body is not msgpack within the limits: {error!r:.200}") from None
    if not isinstance(value, dict):
        raise ProtocolError(f"a body is {type(value).__name__}; it must be a map")
    _check_depth(value, limits.MAX_BODY_DEPTH)
    return value


def _refuse_extension(code: int, data: bytes) -> object:
    raise ValueError(f"msgpack extension type {code} is not allowed ({len(data)} bytes)")


def _check_depth(value: object, left: int) -> None:
    if left < 0:
        raise ProtocolError(f"a body nests deeper than {limits.MAX_BODY_DEPTH} levels")
    if isinstance(value, dict):
        _check_keys(value)
        for entry in value.values():
            _check_depth(entry, left - 1)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            _check_depth(entry, left - 1)
    elif value is not None and not isinstance(value, (str, bytes, bool, int, float)):
        raise ProtocolError(f"a body holds {type(value).__name__}; only JSON's types and bytes may travel")


def _check_keys(value: dict[object, object]) -> None:
    if any(type(key) is not str for key in value):
        raise ProtocolError("a body's map has a key that is not text")
