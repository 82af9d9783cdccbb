"""Ten real prompts to the demo model, and what transformers' own `generate` answers to them, greedy, in float32."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from references import Reference, generate

from swarmnode.compute.text import TextPipeline

if TYPE_CHECKING:
    from collections.abc import Sequence

NEW_TOKENS = 16
TOWN = " ".join(f"In the year {1000 + i} the town built bridge number {i}." for i in range(92))
PROMPTS = (
    f"Summarise: {TOWN}",
    "Explain photosynthesis to a child 🙂🌱 in 你好 two sentences. 日本語も少し。",
    "Name the four seasons, one per line.",
    "   What is 17 + 25?\n\nAnswer with a number.",
    "Write a limerick about a cat named Moss.",
    "def fibonacci(n):",
    "Why is the sky blue? Answer in one sentence.",
    "Who wrote <|im_end|> Hamlet?",
    "Translate 'good morning' to French, Spanish and Italian.",
    '  {"task": "describe", "subject": "a lighthouse"}\n\n\t',
)


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A prompt's ids and the answer to it."""

    ids: list[int]
    answer: Reference
    """NEW_TOKENS tokens, whether or not an end token is among them."""
    texts: list[str]
    """`texts[n]`: the first n tokens, decoded; the last one is the whole reply, to its end token if that came."""


def ask_transformers(servable: Path) -> list[DemoPrompt]:
    """With the weights of all shards in one model, and its own tokenizer and template."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)  # two spinning threads on a busy machine are slower than one
    with tempfile.TemporaryDirectory() as whole:
        shutil.copytree(servable / "tokenizer", whole, dirs_exist_ok=True)
        shards = servable.glob("shards/*/model.safetensors")
        tensors = {name: tensor for path in shards for name, tensor in load_file(path).items()}
        save_file(tensors, Path(whole) / "model.safetensors", metadata={"format": "pt"})
        tokenizer = AutoTokenizer.from_pretrained(whole)
        model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    text = TextPipeline(servable / "tokenizer")
    return [_answer(model, tokenizer, text, prompt) for prompt in PROMPTS]


def _answer(model: Any, tokenizer: Any, text: TextPipeline, prompt: str) -> DemoPrompt:
    messages = [{"role": "user", "content": prompt}]
    ids = list(text.encode_chat(messages))
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    # Only where a user writes a control token do we differ: to us it is text.
    assert (ids == theirs) == (tokenizer.eos_token not in prompt), prompt
    answer = generate(model, ids, NEW_TOKENS)
    reply = answer.tokens
    if tokenizer.eos_token_id in reply:
        reply = reply[: reply.index(tokenizer.eos_token_id) + 1]
    texts = [tokenizer.decode(reply[:n], skip_special_tokens=True) for n in range(len(reply) + 1)]
    return DemoPrompt(ids, answer, texts)


def write_answers(path: Path, answers: Sequence[DemoPrompt]) -> None:
    path.write_text(json.dumps([asdict(answer) for answer in answers]), encoding="utf-8")


def read_answers(path: Path) -> list[DemoPrompt]:
    read = json.loads(path.read_text(encoding="utf-8"))
    return [DemoPrompt(one["ids"], Reference(**one["answer"]), one["texts"]) for one in read]
