"""What a checkpoint says about sampling and about the tokens that end a reply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from swarmnode.catalog.checkpoint import CONFIG, GENERATION_CONFIG
from swarmnode.catalog.manifest import SamplingDefaults
from swarmnode.catalog.refusals import read_json_object
from swarmnode.errors import InvalidModel

if TYPE_CHECKING:
    from pathlib import Path

MAX_EOS_IDS = 64
"""The longest list known (tool-calling models) has five."""


def sampling_defaults(generation_config: dict[str, Any]) -> SamplingDefaults:
    """temperature, top_p, top_k and min_p where the checkpoint gives them, OpenAI's defaults elsewhere.

    do_sample false does not mean temperature 0 here: it is transformers' own default, not the author's choice, and
    OpenAI's clients expect 1.
    """
    given = {name: generation_config.get(name) for name in SamplingDefaults.model_fields}
    try:
        return SamplingDefaults.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidModel(f"{GENERATION_CONFIG}: {first['loc'][0]} is {first['input']!r}: {first['msg']}") from error


def eos_token_ids(folder: Path, config: dict[str, Any], generation_config: dict[str, Any]) -> tuple[int, ...]:
    """Every id that ends a reply: of generation_config.json, of config.json, and the tokenizer's own eos token.

    Chat models often list only one of <|im_end|> and <|endoftext|> in each place; a reply that misses one runs on.
    """
    ids = [*_ids(generation_config, GENERATION_CONFIG), *_ids(config, CONFIG)]
    tokenizer_eos = _tokenizer_eos(folder)
    if tokenizer_eos is not None:
        ids.append(tokenizer_eos)
    return tuple(dict.fromkeys(ids))


def _ids(source: dict[str, Any], where: str) -> list[int]:
    value = source.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > MAX_EOS_IDS or any(type(i) is not int or i < 0 for i in ids):
        raise InvalidModel(f"{where}: eos_token_id is {str(value)[:80]}, expected is an id or up to {MAX_EOS_IDS}")
    return ids


def _tokenizer_eos(folder: Path) -> int | None:
    """The id of the token that tokenizer_config.json names as eos, where tokenizer.json knows it."""
    config_path, tokenizer_path = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not config_path.is_file() or not tokenizer_path.is_file():
        return None
    token = read_json_object(config_path).get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    tokenizer = read_json_object(tokenizer_path)
    added = tokenizer.get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and entry.get("content") == content and type(entry.get("id")) is int:
            return int(entry["id"])
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    found = vocabulary.get(content) if isinstance(vocabulary, dict) and isinstance(content, str) else None
    return found if type(found) is int else None
