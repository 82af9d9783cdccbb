"""Dequantize a GGUF file into a Hugging Face directory: `python -m swarmnode.compute.gguf_import GGUF TARGET`.

Runs as a process of its own. Progress and the one error go to stdout as JSON lines; it ends when its stdin closes, so
that it does not outlive an importer that was killed.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.catalog.kept_blocks import BLOCKS_FILE
from swarmnode.compute.gguf_keeping import write_blocks
from swarmnode.errors import InvalidModel, SwarmError

if TYPE_CHECKING:
    from collections.abc import Sequence

ROUND_TRIP_TEXTS = (
    "Hello, world! It's 12345 o'clock.",
    "def f(x):\n    return x + 1  # two  spaces\n",
    "Grüße aus Zürich; naïve café",
    "世界は広い、你好",
    "emoji 🙂🚀 and a family 👨‍👩‍👧",
)
_CONTROL_TOKEN = re.compile(r"<\|[a-z_]+\|>")
_END_OF_TURN = "<|im_end|>"
_LOCAL_KEYS = ("is_local", "local_files_only")
"""transformers notes in tokenizer_config.json how it found the files; that is not the model's business."""


def convert(gguf: Path, target: Path) -> None:
    """Write config, bfloat16 weights, kept blocks, tokenizer and chat template of `gguf` into `target`.

    bfloat16: the dequantized values of a 4-bit file carry a few percent of quantization error; rounding them to eight
    bits of mantissa adds 0.14 % (measured on the demo model, Q4_1), forty times less, and no value can overflow, which
    float16 (0.02 %) cannot promise for every model. Stages serve in it too, so nothing is converted twice.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _read_gguf_once()
    folder, name = str(gguf.parent), gguf.name
    total = gguf.stat().st_size
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    _emit({"done": 0, "total": total})
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    _emit({"done": total // 2, "total": total})
    _add_end_of_turn(model.generation_config, tokenizer)
    check_tokenizer(tokenizer, _as_list(model.generation_config.eos_token_id))
    model.save_pretrained(target)
    write_blocks(gguf, model, target / BLOCKS_FILE)
    tokenizer.save_pretrained(target)
    _forget_local_keys(target / "tokenizer_config.json")
    _emit({"done": total, "total": total})


def _read_gguf_once() -> None:
    """Keep what the gguf library read: transformers opens the file three times and makes the table of names once for
    each module of the model (397 times for the demo model), which took half of an import.

    Both are only read, and the files stay as they are while this process lives.
    """
    import gguf

    for name in ("GGUFReader", "get_tensor_name_map"):
        setattr(gguf, name, cache(getattr(gguf, name)))


def check_tokenizer(tokenizer: Any, eos_ids: Sequence[int]) -> None:
    """Raise InvalidModel unless the tokenizer made from the metadata does what a chat needs."""
    for text in ROUND_TRIP_TEXTS:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if back != text:
            raise InvalidModel(f"the tokenizer in its metadata turns {text!r} into {back!r}; it cannot be converted")
    if not tokenizer.chat_template:
        raise InvalidModel("its metadata has no chat template, so it cannot answer chats; use an instruct model")
    for token in sorted(set(_CONTROL_TOKEN.findall(tokenizer.chat_template))):
        if len(tokenizer(token, add_special_tokens=False).input_ids) != 1:
            raise InvalidModel(f"its chat template uses {token}, which its tokenizer splits into several ids")
    if _END_OF_TURN in tokenizer.chat_template and tokenizer.convert_tokens_to_ids(_END_OF_TURN) not in eos_ids:
        raise InvalidModel(f"its chat template ends turns with {_END_OF_TURN}, but {list(eos_ids)} end a reply")
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, tokenize=False
    )
    if "Hello" not in rendered:
        raise InvalidModel("its chat template drops the user's message")


def _add_end_of_turn(generation_config: Any, tokenizer: Any) -> None:
    """Let <|im_end|> end replies of a ChatML model even where the metadata's eos is another token."""
    eos = _as_list(generation_config.eos_token_id)
    end = tokenizer.convert_tokens_to_ids(_END_OF_TURN)
    if end is not None and end != tokenizer.unk_token_id and _END_OF_TURN in (tokenizer.chat_template or ""):
        generation_config.eos_token_id = list(dict.fromkeys([*eos, end]))


def _as_list(eos: int | list[int] | None) -> list[int]:
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def _forget_local_keys(path: Path) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    kept = {key: value for key, value in config.items() if key not in _LOCAL_KEYS}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False), encoding="utf-8")


def _emit(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _end_with_stdin() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)


def main(arguments: Sequence[str]) -> int:
    """Convert; any failure is one `error` line, because every exception here is about the file we were given."""
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        convert(Path(arguments[0]), Path(arguments[1]))
    except SwarmError as error:
        _emit({"error": error.message, "code": error.code})
        return 1
    except Exception as error:
        # transformers raises what it likes for a file that it cannot read; the importer maps it to InvalidModel.
        _emit({"error": f"transformers cannot read it: {type(error).__name__}: {str(error)[:500]}"})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
