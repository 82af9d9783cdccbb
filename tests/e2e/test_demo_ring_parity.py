"""The demo model in real processes says what transformers' own `generate` says, whatever the number of stages.

Compared as a user sees it, through the endpoint: text and completion_tokens, greedy, in float32. What the engines do
with token ids alone is in `tests/compute/test_demo_parity.py`.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from local_swarms import Swarm, start_swarm, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.model]
MODEL = "smollm2-135m-instruct"
MAX_TOKENS = 16
NEAR_TIE = 1e-4
"""A first difference is excused only where the reference's two best logits are closer than this."""
DIARY = " ".join(f"Day {day}: the wind came from the {'NESW'[day % 4]}, {day * 7 % 31} degrees." for day in range(86))
PROMPTS = (
    f"Here is a diary. {DIARY} What is it about?",
    "How do bees find flowers? 🐝🌼 蜜蜂はどうやって花を見つけますか? 请用一句话回答。",
    "Name the four seasons, one per line.",
    "What is the boiling point of water at sea level?",
    "Write a limerick about a cat named Moss.",
    "Complete: for (int i = 0; i < 10;",
    "Why is the sky blue? Answer in one sentence.",
    "What is 12 times 12?",
    "Translate 'good morning' to French, Spanish and Italian.",
    '  {"task": "describe", "subject": "a lighthouse"}\n\n\t',
)
ASKED = {2: range(len(PROMPTS)), 1: (1, 2, 3), 3: (1, 2, 3), 5: (0, 1, 2)}
"""Which prompts each stage count gets. The long one costs a lot, and one of few stages says little about it."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What one process says: ids (with the end token, if it came), their text, and the gap of the two best logits."""

    ids: list[int]
    gaps: list[float]
    texts: list[str]
    """`texts[n]`: the first n tokens, decoded."""
    prompt_tokens: int


@dataclass(slots=True)
class Count:
    tokens: int = 0
    excused: int = 0


@pytest.fixture(scope="module")
def count(capsys_disabled_print: Any) -> Iterator[Count]:
    counted = Count()
    yield counted
    capsys_disabled_print(
        f"\ndemo model over real processes: {counted.tokens} tokens compared, {counted.excused} near ties excused"
    )
    assert counted.excused * 10_000 <= max(counted.tokens, 10_000)


@pytest.fixture(scope="module")
def capsys_disabled_print(request: pytest.FixtureRequest) -> Any:
    """Print past pytest's capture: the number of excused ties is to be seen in a run that passes."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def show(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(text)

    return show


@pytest.fixture(scope="module")
def references(demo_models_root: Path) -> list[Reference]:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    servable = demo_models_root / MODEL
    with tempfile.TemporaryDirectory() as whole:
        shutil.copytree(servable / "tokenizer", whole, dirs_exist_ok=True)
        tensors = {
            name: t for path in servable.glob("shards/*/model.safetensors") for name, t in load_file(path).items()
        }
        save_file(tensors, Path(whole) / "model.safetensors", metadata={"format": "pt"})
        tokenizer = AutoTokenizer.from_pretrained(whole)
        model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    return [reference(model, tokenizer, prompt) for prompt in PROMPTS]


def reference(model: Any, tokenizer: Any, prompt: str) -> Reference:
    messages = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(
        **inputs,
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    length = inputs["input_ids"].shape[1]
    ids = out.sequences[0, length:].tolist()
    best = [logits[0].topk(2).values for logits in out.logits]
    texts = [tokenizer.decode(ids[:n], skip_special_tokens=True) for n in range(len(ids) + 1)]
    return Reference(ids, [float(pair[0] - pair[1]) for pair in best], texts, length)


@pytest.fixture(scope="module")
def swarm(demo_models_root: Path) -> Iterator[Swarm]:
    """Five peers, so that one swarm takes every stage count; what they fetch is removed with them."""
    with tempfile.TemporaryDirectory(prefix="swarmnode-parity-") as folder:
        swarm = start_swarm(Path(folder), demo_models_root, peers=5)
        try:
            yield swarm
        finally:
            swarm.close()


def chat(swarm: Swarm, prompt: str, **options: object) -> tuple[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": MAX_TOKENS, **options}
    reply = swarm.client.post("/v1/chat/completions", body)
    return reply["choices"][0]["message"]["content"], reply["usage"]


def check(text: str, usage: Any, expected: Reference, count: Count) -> None:
    assert usage["prompt_tokens"] == expected.prompt_tokens
    count.tokens += len(expected.ids)
    if text == expected.texts[-1] and usage["completion_tokens"] == len(expected.ids):
        return
    same = max(n for n, part in enumerate(expected.texts) if text.startswith(part))
    # Another token may begin with the same characters, so the texts may part one token after the tokens did.
    gap = min(expected.gaps[max(0, same - 1) : same + 1])
    assert gap < NEAR_TIE, f"{text!r} with {usage}, transformers says {expected.texts[-1]!r}"
    count.excused += 1


@pytest.mark.parametrize("stages", [2, 1, 5, pytest.param(3, marks=pytest.mark.soak)])
def test_greedy_replies_equal_generate(
    swarm: Swarm, references: list[Reference], sampled: dict[int, str], count: Count, stages: int
) -> None:
    swarm.unload(MODEL)
    status = swarm.load(MODEL, num_stages=stages, dtype="float32")
    assert (status["dtype"], len(status["stages"])) == ("float32", stages)
    for index in ASKED[stages]:
        check(*chat(swarm, PROMPTS[index], temperature=0), references[index], count)
    sampled[stages], _ = chat(swarm, PROMPTS[4], temperature=0.9, top_p=0.95, seed=20)
    wait_until(lambda: swarm.quiet(MODEL), "all sessions are freed")


@pytest.fixture(scope="module")
def sampled() -> dict[int, str]:
    """The same question with the same seed, by stage count."""
    return {}


def test_a_seed_gives_the_same_reply_whatever_the_stage_count(
    sampled: dict[int, str], references: list[Reference]
) -> None:
    assert sampled.keys() >= {1, 2, 5}, "the tests above ran"
    assert len(set(sampled.values())) == 1, sampled
    assert sampled[1] != references[4].texts[-1], "it was sampled, not the greedy reply"


def test_the_prompts_are_what_they_are_meant_to_be(references: list[Reference]) -> None:
    assert 1400 < references[0].prompt_tokens < 1700, "six pieces of 256"
    assert sum(len(one.ids) for one in references) > 100
