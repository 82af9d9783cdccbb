"""The demo model in real processes says what transformers' own `generate` says, whatever the number of stages.

Compared as a user sees it, through the endpoint: text and completion_tokens, greedy, in float32. What the engines do
with token ids alone is in `tests/compute/test_demo_parity.py`.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from demo_prompts import NEW_TOKENS, PROMPTS
from local_swarms import Swarm, start_swarm, wait_until
from references import NEAR_TIE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from demo_prompts import DemoPrompt

pytestmark = [pytest.mark.e2e, pytest.mark.model]
MODEL = "smollm2-135m-instruct"
SOME, ALL = (1, 2, 3, 7), tuple(range(len(PROMPTS)))
"""Which prompts are asked: other scripts and emoji, plain ones, a control token; the soak asks all ten. Engines without
a network get all ten in any run (`tests/compute/test_demo_parity.py`)."""
CASES = [(2, SOME), (1, SOME), *(pytest.param(n, ALL, marks=pytest.mark.soak) for n in (2, 3, 5))]


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
def swarm(demo_models_root: Path) -> Iterator[Swarm]:
    """Two peers, and more for who needs them; what they fetch is removed with them."""
    with tempfile.TemporaryDirectory(prefix="swarmnode-parity-") as folder:
        # pieces of one size: else measured costs choose them, and a sampled reply follows their rounding
        swarm = start_swarm(Path(folder), demo_models_root, peers=2, environment={"SWARM_SERVE_PREFILL_CHUNK": "32"})
        try:
            yield swarm
        finally:
            swarm.close()


def chat(swarm: Swarm, prompt: str, **options: object) -> tuple[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": NEW_TOKENS, **options}
    reply = swarm.client.post("/v1/chat/completions", body)
    return reply["choices"][0]["message"]["content"], reply["usage"]


def check(text: str, usage: Any, expected: DemoPrompt, count: Count) -> None:
    assert usage["prompt_tokens"] == len(expected.ids)
    length = len(expected.texts) - 1
    count.tokens += length
    if text == expected.texts[-1] and usage["completion_tokens"] == length:
        return
    same = max(n for n, part in enumerate(expected.texts) if text.startswith(part))
    # Another token may begin with the same characters, so the texts may part one token after the tokens did.
    gap = min(expected.answer.gaps[max(0, same - 1) : same + 1])
    assert gap < NEAR_TIE, f"{text!r} with {usage}, transformers says {expected.texts[-1]!r}"
    count.excused += 1


@pytest.mark.parametrize(("stages", "asked"), CASES)
def test_greedy_replies_equal_generate(
    swarm: Swarm,
    demo_prompts: Sequence[DemoPrompt],
    sampled: dict[int, str],
    count: Count,
    stages: int,
    asked: Sequence[int],
) -> None:
    swarm.unload(MODEL)
    if lacking := [f"peer-{index}" for index in range(len(swarm.local.peers), stages)]:
        swarm.local.start_peers(*lacking)
    status = swarm.load(MODEL, num_stages=stages, dtype="float32")
    assert (status["dtype"], len(status["stages"])) == ("float32", stages)
    for index in asked:
        check(*chat(swarm, PROMPTS[index], temperature=0), demo_prompts[index], count)
    sampled[stages], _ = chat(swarm, PROMPTS[4], temperature=0.9, top_p=0.95, seed=20)
    wait_until(lambda: swarm.quiet(MODEL), "all sessions are freed")


@pytest.fixture(scope="module")
def sampled() -> dict[int, str]:
    """The same question with the same seed, by stage count."""
    return {}


def test_a_seed_gives_the_same_reply_whatever_the_stage_count(
    sampled: dict[int, str], demo_prompts: Sequence[DemoPrompt]
) -> None:
    assert sampled.keys() >= {1, 2}, "the tests above ran"
    assert len(set(sampled.values())) == 1, sampled
    assert sampled[1] != demo_prompts[4].texts[-1], "it was sampled, not the greedy reply"


def test_the_prompts_are_what_they_are_meant_to_be(demo_prompts: Sequence[DemoPrompt]) -> None:
    assert 1500 < len(demo_prompts[0].ids) < 1700, "fifty pieces of 32"
    assert sum(len(prompt.texts) - 1 for prompt in demo_prompts) > 100
