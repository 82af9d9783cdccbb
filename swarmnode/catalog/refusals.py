"""What a model source may not hold: pickles, code of its own, quantized weights; each refused with the reason."""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from swarmnode.errors import InvalidModel

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
MAX_JSON_BYTES = 256 << 20
"""The largest tokenizer.json and weight indexes known are under 40 MB."""


def is_pickle(name: str) -> bool:
    """Whether a file's name is one that PyTorch's pickle formats use."""
    return PurePath(name).suffix.lower() in PICKLE_SUFFIXES


def refuse_pickles(names: Iterable[str], where: str) -> None:
    """Raise InvalidModel if any name is a pickle's."""
    pickles = sorted(name for name in names if is_pickle(name))
    if pickles:
        raise InvalidModel(
            f"{where}: {pickles[0]} is a pickle, and loading a pickle runs whatever code its author put in; only "
            "safetensors weights are taken. Convert it where you trust it: load the model with transformers and call "
            "model.save_pretrained(FOLDER), or use a repository that offers .safetensors"
        )


def refuse_own_code(config: dict[str, Any], where: str) -> None:
    """Raise InvalidModel if the config names Python code that a loader should run."""
    if "auto_map" in config:
        raise InvalidModel(
            f"{where}: has auto_map, so the model needs Python code from its own repository, and swarmnode never runs "
            "a model's code; use a checkpoint whose architecture transformers itself has"
        )


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of bounded size; raises InvalidModel naming the file."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_BYTES + 1)
        if len(raw) > MAX_JSON_BYTES:
            raise InvalidModel(f"{path.name}: more than {MAX_JSON_BYTES} bytes is not taken for a JSON file")
        content = json.loads(raw)
    except OSError as error:
        raise InvalidModel(f"{path.name}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"{path.name}: is not valid JSON: {str(error)[:200]}") from error
    if not isinstance(content, dict):
        raise InvalidModel(f"{path.name}: is not a JSON object")
    return content
