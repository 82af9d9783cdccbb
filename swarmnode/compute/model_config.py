"""Read a servable's config.json. No torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from swarmnode.errors import LoadFailed

if TYPE_CHECKING:
    from pathlib import Path

MAX_CONFIG_BYTES = 4 << 20
"""The longest real ones (label maps, layer lists) have tens of kilobytes."""


def read_config(folder: Path) -> dict[str, Any]:
    """The servable's `tokenizer/config.json`."""
    path = folder / "tokenizer" / "config.json"
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError) as error:
        raise LoadFailed(f"{path.name} of the model cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise LoadFailed(f"{path.name} of the model is not a JSON object")
    return config
