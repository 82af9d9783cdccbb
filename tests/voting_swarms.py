"""Real swarms that outlive their coordinator: three nodes that may coordinate, and clients that try again."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import openai
from local_swarms import REPLY, start_again, start_swarm, wait_until

from swarmnode.cli.client import ApiClient

if TYPE_CHECKING:
    from pathlib import Path

    from swarmnode.cli.local_swarm import NodeProcess

FAILOVER_S = 20.0
"""Promised: a new coordinator."""
SERVED_S = 30.0
"""Promised: a client that tries again is served, whichever node it asks."""
WITH_API = ("--api-listen", "127.0.0.1:0")
FIRST, SECOND, THIRD = VOTERS = ("coordinator", "attic", "cellar")


class Voters:
    """A coordinator, and two peers that may follow it; each has an API port, and so have the `others`, who do not."""

    def __init__(
        self,
        folder: Path,
        models_root: Path,
        others: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        coordinator: tuple[str, ...] = (),
    ) -> None:
        self.swarm = start_swarm(folder, models_root, peers=0, environment=environment, coordinator=coordinator)
        self.local = self.swarm.local
        try:
            self.start_followers()
            if others:
                self.local.start_peers(*others, extra=WITH_API)
            self.apis = {name: str(self.ready(name)["api"]) for name in (*VOTERS, *others)}
            wait_until(lambda: len(self.voters(self.local.api)) == len(VOTERS), "all three vote")
        except BaseException:
            self.close()
            raise

    def start_followers(self) -> None:
        self.local.start_peers(SECOND, THIRD, extra=("--voter", *WITH_API))

    def voters(self, api: str) -> list[str]:
        with closing(ApiClient(api, data_dir=self.local.folder / FIRST)) as client:
            return list(client.get("/api/v1/nodes")["voters"])

    def node(self, name: str) -> NodeProcess:
        node = self.local.coordinator if name == FIRST else self.local.peers[name]
        assert node is not None
        return node

    def ready(self, name: str) -> dict[str, object]:
        return next(event for event in self.node(name).seen if event["event"] == "ready")

    def successor(self) -> str | None:
        """Which voter was elected and coordinates, by its own word; the first one never was while it stood alone."""
        for name in VOTERS:
            seen = [event["event"] for event in self.node(name).seen]
            if self.node(name).process.poll() is None and seen.count("coordinating") > seen.count("resigned"):
                return name
        return None

    def admin(self, name: str) -> ApiClient:
        """An administrator's calls through a node that coordinates."""
        return ApiClient(self.apis[name], data_dir=self.local.folder / name)

    def start_again(self, name: str) -> None:
        """A node that was killed, at the addresses that it had."""
        api = self.apis[name].removeprefix("http://")
        if name == FIRST:
            self.local.start_coordinator(swarm_listen=self.local.swarm, api_listen=api)
        else:
            start_again(self.local, name, "--voter", "--api-listen", api)

    def start_elsewhere(self, name: str) -> None:
        """A node that was killed, at whatever ports it gets."""
        if name == FIRST:
            self.local.start_coordinator()
        else:
            self.local.start_peers(name, extra=("--voter", *WITH_API))
        self.apis[name] = str(self.ready(name)["api"])

    def close(self) -> None:
        self.swarm.close()


def answers(api: str, token: str, model: str = "scripted") -> bool:
    """One try of a client that repeats itself."""
    client = openai.OpenAI(base_url=f"{api}/v1", api_key=token, max_retries=0, timeout=10)
    try:
        reply = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hello"}])
    except openai.APIError:
        return False
    finally:
        client.close()
    return reply.choices[0].message.content == REPLY
