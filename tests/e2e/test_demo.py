"""`swarmnode demo` as the README tells a newcomer to run it; nothing of it is left, however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from local_swarms import alive, clean_environment, descendants, swarmnode, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.model]
UP_S = 60.0
END_S = 8.0
"""A demo's nodes end within 5 s of their signal or of the demo's death."""


@pytest.fixture(scope="module")
def data_dir() -> Iterator[Path]:
    """One for the module: peers keep the files they fetched, so that only the first demo copies them."""
    with tempfile.TemporaryDirectory(prefix="swarmnode-demo-") as folder:
        yield Path(folder)


def users_of(folder: Path) -> list[int]:
    """Pids of live processes whose command line names `folder`: the demo's nodes, whoever is their parent."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in found if alive(pid)]


@pytest.mark.parametrize("stages", [1, *(pytest.param(n, marks=pytest.mark.soak) for n in (2, 3))])
def test_a_question_is_answered_and_nothing_stays(demo_models_root: Path, data_dir: Path, stages: int) -> None:
    arguments = ["demo", "--once", "--json", "--max-tokens", "12", "--stages", stages, "--data-dir", data_dir]
    done = swarmnode(*arguments, SWARM_SERVABLE_MODELS_ROOT=str(demo_models_root))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert "bees" in answer["reply"].lower()
    assert 1 < answer["completion_tokens"] <= 12
    assert answer["ttft_s"] > 0
    assert answer["tokens_per_s"] > 0
    assert answer["stages"] == stages
    for index in range(stages):
        assert answer["timing"][f"stage{index}_ms"] > 0
    assert f"stage{stages}_ms" not in answer["timing"]
    assert users_of(data_dir) == []


def test_for_people_it_shows_the_reply_how_to_go_on_and_ends_on_ctrl_c(demo_models_root: Path, data_dir: Path) -> None:
    arguments = ["demo", "--prompt", "Say hello.", "--max-tokens", "5", "--data-dir", str(data_dir)]
    with subprocess.Popen(
        [sys.executable, "-m", "swarmnode", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(SWARM_SERVABLE_MODELS_ROOT=str(demo_models_root)),
    ) as demo:
        assert demo.stdout is not None
        reply, curl = demo.stdout.readline(), demo.stdout.readline()
        demo.send_signal(signal.SIGINT)
        rest, errors = demo.communicate(timeout=END_S)
    assert demo.returncode == 128 + signal.SIGINT
    assert reply.strip()
    assert re.match(r"curl http://127\.0\.0\.1:\d+/v1/chat/completions ", curl)
    assert rest == ""
    for part in ("starting a coordinator and 2 peers", "layers 15-29", "TTFT", "stays up until Ctrl-C"):
        assert part in errors
    assert "Traceback" not in errors
    assert "\x1b" not in reply + curl + errors
    assert users_of(data_dir) == []


@contextmanager
def running_demo(models_root: Path, data_dir: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A demo that has answered and stays up."""
    arguments = ["demo", "--json", "--max-tokens", "2", "--data-dir", str(data_dir)]
    environment = clean_environment(SWARM_SERVABLE_MODELS_ROOT=str(models_root))
    process = subprocess.Popen(
        [sys.executable, "-m", "swarmnode", *arguments], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    with process, process.stdout:
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.parametrize("sign", [pytest.param(signal.SIGTERM, marks=pytest.mark.soak), signal.SIGKILL])
def test_a_demo_that_is_ended_takes_every_process_along(
    demo_models_root: Path, data_dir: Path, sign: signal.Signals
) -> None:
    with running_demo(demo_models_root, data_dir) as (demo, answer):
        with urllib.request.urlopen(f"{answer['api']}/health", timeout=5) as response:
            assert response.status == 200
        started = descendants(demo.pid)
        assert len(started) == 5, "a coordinator, two peers, two workers"
        demo.send_signal(sign)
        code = demo.wait(timeout=END_S)
        if sign is signal.SIGKILL:
            assert code == -signal.SIGKILL
            wait_until(lambda: not any(alive(pid) for pid in started), "nobody outlives a killed demo", END_S)
        else:
            assert code == 128 + sign
            assert not any(alive(pid) for pid in started), "a demo that ends in order ends last"
    assert users_of(data_dir) == []


def test_a_demo_killed_while_it_starts_leaves_nothing(demo_models_root: Path, data_dir: Path) -> None:
    environment = clean_environment(SWARM_SERVABLE_MODELS_ROOT=str(demo_models_root))
    arguments = ["demo", "--once", "--json", "--data-dir", str(data_dir)]
    with subprocess.Popen(
        [sys.executable, "-m", "swarmnode", *arguments], stdout=subprocess.PIPE, env=environment
    ) as demo:
        wait_until(lambda: len(users_of(data_dir)) >= 3, "its first nodes are starting", UP_S)
        os.kill(demo.pid, signal.SIGKILL)
    wait_until(lambda: not users_of(data_dir), "nodes that were just starting end too", UP_S)
