"""`swarmnode demo` as the README tells a newcomer to run it; nothing of it is left, however it ends."""

from __future__ import annotations

import json
import os
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


@pytest.mark.parametrize("stages", [2, 3])
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


def test_without_json_the_reply_is_on_stdout_and_the_rest_on_stderr(demo_models_root: Path, data_dir: Path) -> None:
    arguments = ["demo", "--once", "--prompt", "Say hello.", "--max-tokens", "5", "--data-dir", data_dir]
    done = swarmnode(*arguments, SWARM_SERVABLE_MODELS_ROOT=str(demo_models_root))
    assert done.returncode == 0, done.stderr
    (reply,) = done.stdout.splitlines()
    assert reply.strip()
    assert "starting a coordinator and 2 peers" in done.stderr
    assert "layers 15-29" in done.stderr
    assert "TTFT" in done.stderr.splitlines()[-1]
    assert "\x1b" not in done.stdout + done.stderr


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


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
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
