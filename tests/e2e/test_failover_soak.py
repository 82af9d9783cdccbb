"""Five coordinators killed one after another while clients chat: what C3 promises, in seconds, with real processes.

`make soak ARGS=tests/e2e/test_failover_soak.py` prints the times. Links between nodes are mutual TLS, and the model is
a small real one.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import openai
import pytest
from local_swarms import alive, descendants, wait_until
from random_clients import Tally
from tiny_models import make_tiny
from voting_swarms import FAILOVER_S, FIRST, SERVED_S, VOTERS, Voters

from swarmnode.catalog.importing import import_model
from swarmnode.cli.client import ApiClient

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.soak]
MODEL, SPARE = "tiny", "spare"
KILLS = 5
CLIENTS = 4
HOLDERS = ("den", "loft")
"""Who holds the stages; none of them may coordinate, so whoever is killed, the ring lives."""
PROMPTS = ("hello", "what is the capital of France?", "tell me of the ring, " * 12)
REPLY_TOKENS = 48
REQUEST_S = 60.0
AWAY = frozenset({"no_coordinator", "not_coordinator", "link_broken", "model_not_loaded", "stage_lost"})
"""What a client may hear while there is no coordinator, or one that has not found all stages yet."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Times since a coordinator was killed: until its successor coordinates, and until each node answers a chat."""

    who: str
    successor: str
    elected_s: float
    served_s: dict[str, float]


@dataclass(slots=True)
class Chats:
    """Clients of a swarm, the replies they must get, and what became of their requests."""

    apis: dict[str, str]
    token: str = "none"
    replies: dict[str, str] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)

    def learn(self) -> None:
        """What the model says while nothing is wrong is what it has to say ever after."""
        with closing(self.client(FIRST)) as client:
            self.replies = {prompt: "".join(texts(client, prompt)) for prompt in PROMPTS}
        assert all(self.replies.values())

    def client(self, node: str) -> openai.OpenAI:
        url = f"{self.apis[node]}/v1"
        return openai.OpenAI(base_url=url, api_key=self.token, max_retries=0, timeout=REQUEST_S)

    def be_a_client(self, rng: random.Random) -> None:
        """Ask any node, again and again."""
        with ExitStack() as stack:
            clients = {node: stack.enter_context(closing(self.client(node))) for node in self.apis}
            while self.tally.pause(rng.uniform(0, 0.2)):
                self.ask(clients[rng.choice([*clients])], rng.choice(PROMPTS))

    def ask(self, client: openai.OpenAI, prompt: str) -> bool:
        """One chat: right to its end, or an error that says to come back."""
        try:
            said = "".join(texts(client, prompt))
        except openai.APITimeoutError:
            outcome, right = "hung", False
        except openai.APIConnectionError:
            outcome, right = "cut off", True
        except openai.APIError as error:
            outcome, right = str(error.code), error.code in AWAY
        else:
            outcome, right = "replied", said == self.replies[prompt]
        self.tally.outcomes[outcome] += 1
        if not right:
            self.tally.wrong.append(f"{outcome}: {prompt[:20]!r}")
        return outcome == "replied"

    def until_served(self, node: str, since_s: float) -> float:
        """Seconds until a client that tries again is answered by this node."""
        with closing(self.client(node)) as client:
            wait_until(lambda: self.ask(client, PROMPTS[0]), f"{node} answers", SERVED_S + REQUEST_S)
        return time.monotonic() - since_s


def texts(client: openai.OpenAI, prompt: str) -> Iterator[str]:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompt}],
        stream=True,
        temperature=0,
        max_tokens=REPLY_TOKENS,
    )
    finished = False
    for chunk in stream:
        for choice in chunk.choices:
            yield choice.delta.content or ""
            finished = finished or choice.finish_reason is not None
    assert finished, "a stream that ends says why"


@pytest.fixture
def voters(tmp_path: Path) -> Iterator[Voters]:
    source = str(make_tiny(tmp_path / "source"))
    for model in (MODEL, SPARE):
        import_model(source, tmp_path / "models", model_id=model)
    started = Voters(tmp_path, tmp_path / "models", others=HOLDERS)
    yield started
    started.close()


def kill(voters: Voters, chats: Chats, who: str) -> Kill:
    """Kill who coordinates, see who follows, and start it again."""
    killed_s = time.monotonic()
    voters.node(who).kill()
    wait_until(lambda: voters.successor() is not None, f"somebody follows {who}", FAILOVER_S)
    elected_s, successor = time.monotonic() - killed_s, voters.successor()
    assert successor is not None
    survivors = [name for name in chats.apis if name != who]
    with ThreadPoolExecutor(len(survivors)) as pool:
        served = pool.map(lambda name: chats.until_served(name, killed_s), survivors)
        served_s = dict(zip(survivors, served, strict=True))
    voters.start_again(who)
    chats.until_served(who, time.monotonic())
    return Kill(who, successor, elected_s, served_s)


def known(api: str, token: str) -> dict[str, Any]:
    """What a coordinator must not forget."""
    with closing(ApiClient(api, token=token)) as admin:
        status = admin.get(f"/api/v1/models/{MODEL}/status")
        return {
            "tokens": {token["label"] for token in admin.get("/api/v1/api-tokens")["tokens"]},
            "models": [model["id"] for model in admin.get("/api/v1/models")["models"]],
            "ring": (status["ring"], [(stage["peer"], stage["pid"]) for stage in status["stages"]]),
            "voters": {*admin.get("/api/v1/nodes")["voters"]},
        }


def table(kills: list[Kill]) -> str:
    rows = [f"{'killed':12} {'followed by':12} {'after':>7} {'all served after':>17}"]
    rows += [f"{k.who:12} {k.successor:12} {k.elected_s:5.1f} s {max(k.served_s.values()):15.1f} s" for k in kills]
    return "\n".join(rows)


def test_five_coordinators_killed_under_load(voters: Voters, capsys: pytest.CaptureFixture[str]) -> None:
    swarm, chats = voters.swarm, Chats(voters.apis)
    swarm.load(MODEL, peers=[*HOLDERS])
    workers = swarm.worker_pids(MODEL)
    chats.learn()
    with closing(voters.local.client()) as admin:
        chats.token = admin.post("/api/v1/api-tokens", {"label": "first", "scopes": ["admin"]})["token"]
    expected = known(voters.apis[FIRST], chats.token)
    clients = [threading.Thread(target=chats.be_a_client, args=(random.Random(n),)) for n in range(CLIENTS)]
    for client in clients:
        client.start()
    kills: list[Kill] = []
    try:
        who = FIRST
        for number in range(KILLS):
            with closing(ApiClient(voters.apis[HOLDERS[number % 2]], token=chats.token)) as admin:
                admin.post("/api/v1/api-tokens", {"label": f"before kill {number}", "scopes": ["read"]})
                if SPARE in expected["models"] and who != FIRST:  # whose files are on the first one's disk
                    admin.delete(f"/api/v1/models/{SPARE}")
                    expected["models"].remove(SPARE)
            expected["tokens"].add(f"before kill {number}")
            kills.append(kill(voters, chats, who))
            who = kills[-1].successor
            assert known(voters.apis[who], chats.token) == expected
    finally:
        chats.tally.stop.set()
        for client in clients:
            client.join(2 * REQUEST_S)
        with capsys.disabled():
            print(f"\n{table(kills)}\n{dict(chats.tally.outcomes)}")
    assert not any(client.is_alive() for client in clients), "a request has no end"
    assert chats.tally.wrong == []
    assert chats.tally.outcomes["replied"] > KILLS * CLIENTS, "there was load"
    assert max(max(kill.served_s.values()) for kill in kills) < SERVED_S
    nothing_is_left(voters, chats.token, who, workers)


def nothing_is_left(voters: Voters, token: str, coordinator: str, workers: dict[str, int]) -> None:
    """No session, no reserved token, no cache, and after the unload no process of any stage."""
    swarm = voters.swarm
    swarm.client.close()
    swarm.client = ApiClient(voters.apis[coordinator], token=token)
    wait_until(lambda: swarm.quiet(MODEL), "no stage holds anything")
    swarm.unload(MODEL)
    wait_until(
        lambda: not any(peer["stages"] for peer in swarm.client.get("/api/v1/nodes")["peers"]), "no beat says so"
    )
    nodes = [voters.node(name).process.pid for name in (*VOTERS, *HOLDERS)]
    assert not any(map(alive, workers.values()))
    assert not [child for pid in nodes for child in descendants(pid)]
