"""Every command as a user types it: real processes, exit codes, what goes to stdout and what to stderr."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from local_swarms import COMMAND_S, REPLY, Swarm, alive, clean_environment, descendants, swarmnode, wait_until

from swarmnode.cli.client import ApiClient
from swarmnode.cli.local_swarm import NodeProcess
from swarmnode.cluster.join_token import JoinToken, format_join_token

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e
MODEL = "scripted"
ERROR, USAGE = 1, 2
END_WITHIN_S = 5.0
"""The promise of `up`: SIGTERM and Ctrl-C end it, its workers included, within this."""
ESCAPE = "\x1b"
TOKEN = format_join_token(JoinToken(bytes(32), ("127.0.0.1:7700",), bytes(8), bytes(32)))


def command(swarm: Swarm, *arguments: object, stdin: str = "") -> str:
    """The stdout of a command that must work."""
    done = swarmnode(*arguments, "--api", swarm.local.api, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout


def json_of(swarm: Swarm, *arguments: object) -> Any:
    """The one JSON line a command prints with --json."""
    (line,) = command(swarm, *arguments, "--json").splitlines()
    return json.loads(line)


def refusal(swarm: Swarm, *arguments: object, code: int = USAGE) -> str:
    """The stderr of a command that must fail: one line that begins with the program's name, and nothing on stdout."""
    done = swarmnode(*arguments, "--api", swarm.local.api)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("swarmnode: ")
    return line


@pytest.fixture(autouse=True)
def unloaded(swarm: Swarm) -> Iterator[None]:
    """Whatever a test loads or leaves half loaded is gone before the next one."""
    yield
    if swarm.client.get("/api/v1/nodes")["rings"]:
        wait_until(lambda: swarm.status(MODEL)["state"] != "loading", "the load has settled")
        swarm.unload(MODEL)


@pytest.fixture
def loaded(swarm: Swarm) -> None:
    swarm.load(MODEL)


# models and loads


def test_models_lists_what_is_there(swarm: Swarm) -> None:
    assert {"scripted", "scripted-two", "scripted-three"} <= {m["id"] for m in json_of(swarm, "models")["models"]}
    table = command(swarm, "models")
    assert "MODEL" in table.splitlines()[0]
    assert [line for line in table.splitlines() if line.startswith("scripted-three")]
    assert ESCAPE not in table


def test_a_load_that_waits_shows_its_stages_and_an_unload_gives_them_back(swarm: Swarm) -> None:
    done = swarmnode("model-load", MODEL, "--wait", "--api", swarm.local.api)
    assert done.returncode == 0, done.stderr
    assert "scripted ready" in done.stdout
    assert "layers 4-7" in done.stderr, "progress goes to stderr, a line for every change"
    assert ESCAPE not in done.stdout + done.stderr
    workers = swarm.worker_pids(MODEL)
    assert len(workers) == 2
    assert "scripted available" in command(swarm, "model-unload", MODEL)
    assert not any(alive(pid) for pid in workers.values())


def test_stages_peers_and_dtype_of_a_load(swarm: Swarm) -> None:
    status = json_of(swarm, "model-load", MODEL, "--stages", 3, "--dtype", "bfloat16", "--wait")
    assert (status["state"], status["dtype"]) == ("ready", "bfloat16")
    layers = [tuple(stage["layers"]) for stage in status["stages"]]
    assert len(layers) == 3
    assert [layer for first, last in layers for layer in range(first, last + 1)] == list(range(8))
    assert json_of(swarm, "model-unload", MODEL)["state"] == "available"
    status = json_of(swarm, "model-load", MODEL, "--peer", "peer-2", "--peer", "peer-0", "--wait")
    assert [stage["peer"] for stage in status["stages"]] == ["peer-2", "peer-0"]
    assert "unload it first" in refusal(swarm, "model-load", MODEL, "--stages", 1, code=ERROR)
    assert json_of(swarm, "model-unload", MODEL, "--force")["state"] == "available"


def test_l5_a_plan_names_peers_and_bytes_and_loads_nothing(swarm: Swarm) -> None:
    plan = json_of(swarm, "model-load", MODEL, "--plan", "--stages", 3)
    assert [stage["stage"] for stage in plan["stages"]] == [0, 1, 2]
    assert all(stage["need_bytes"] <= stage["offered_bytes"] for stage in plan["stages"])
    assert swarm.status(MODEL)["state"] == "available"
    assert "nothing is loaded" in command(swarm, "model-load", MODEL, "--plan")


def test_a_load_that_does_not_wait_answers_at_once(swarm: Swarm) -> None:
    status = json_of(swarm, "model-load", MODEL)
    assert status["state"] == "loading"
    wait_until(lambda: swarm.status(MODEL)["state"] == "ready", "the load ends by itself")


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["nothing"], ERROR, "scripted-two"),
        ([MODEL, "--stages", "9"], USAGE, "8 layers"),
        ([MODEL, "--peer", "nobody"], ERROR, "peer-0"),
        ([MODEL, "--dtype", "int3"], USAGE, "float32"),
        (["../scripted"], USAGE, "model id '../scripted'"),
    ],
)
def test_a_load_that_cannot_work_says_what_is_allowed(swarm: Swarm, arguments: list[str], code: int, why: str) -> None:
    assert why in refusal(swarm, "model-load", *arguments, "--wait", code=code)
    assert swarm.client.get("/api/v1/nodes")["rings"] == []


def test_an_unload_of_what_is_not_there(swarm: Swarm) -> None:
    assert "nothing" in refusal(swarm, "model-unload", "nothing", code=ERROR)
    assert "scripted available" in command(swarm, "model-unload", MODEL), "an unload twice is no error"


# infer


@pytest.mark.usefixtures("loaded")
def test_infer_prints_the_reply_to_stdout_and_its_cost_to_stderr(swarm: Swarm) -> None:
    done = swarmnode("infer", MODEL, "hello", "--api", swarm.local.api)
    assert (done.returncode, done.stdout) == (0, REPLY + "\n")
    for part in ("TTFT", "tokens/s", "stage0", "stage1", "link", "route direct"):
        assert part in done.stderr
    assert ESCAPE not in done.stderr


@pytest.mark.usefixtures("loaded")
def test_infer_reads_stdin_and_takes_its_options(swarm: Swarm) -> None:
    assert command(swarm, "infer", MODEL, "-", "--max-tokens", 12, stdin="a long one").strip() == "abcdefghijab"
    assert command(swarm, "infer", MODEL, "hello", "--stop", "群れ").strip() == REPLY.split("群れ")[0].strip()
    assert command(swarm, "infer", MODEL, "hello", "--system", "long", "--max-tokens", 5).strip() == "abcde"
    sampled = ["--temperature", 0.7, "--top-p", 0.9, "--seed", 3]
    assert command(swarm, "infer", MODEL, "hello", *sampled).strip() == REPLY


@pytest.mark.usefixtures("loaded")
def test_infer_as_json(swarm: Swarm) -> None:
    answer = json_of(swarm, "infer", MODEL, "hello")
    assert (answer["reply"], answer["finish_reason"]) == (REPLY, "stop")
    assert answer["completion_tokens"] == len(REPLY.encode()) + 1
    assert {"ttft_s", "tokens_per_s", "prompt_tokens"} <= answer.keys()
    assert {"stage0_ms", "stage1_ms", "link_ms", "queue_ms"} <= answer["timing"].keys()


@pytest.mark.usefixtures("loaded")
def test_infer_that_cannot_be_answered(swarm: Swarm) -> None:
    assert "model-load scripted-two" in refusal(swarm, "infer", "scripted-two", "hello", code=ERROR)
    assert "scripted-three" in refusal(swarm, "infer", "nothing", "hello", code=ERROR)
    assert "4,096" in refusal(swarm, "infer", MODEL, "hello", "--max-tokens", 5000, code=ERROR)
    assert "the script fails" in refusal(swarm, "infer", MODEL, "early", code=ERROR)
    broken = swarmnode("infer", MODEL, "broken", "--api", swarm.local.api)
    assert (broken.returncode, broken.stdout) == (ERROR, "this "), "the text so far, then the error"
    assert "the script fails" in broken.stderr


@pytest.mark.usefixtures("loaded")
def test_infer_interrupted_frees_the_session(swarm: Swarm) -> None:
    arguments = ["infer", MODEL, "a long one", "--api", swarm.local.api]
    process = subprocess.Popen([sys.executable, "-m", "swarmnode", *arguments], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(4) == b"abcd"
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    process.stdout.close()
    wait_until(lambda: swarm.quiet(MODEL), "the session is freed")


# bench


@pytest.mark.usefixtures("loaded")
def test_bench_measures_the_loaded_model(swarm: Swarm) -> None:
    asked = ["--users", "1,3", "--prompt-tokens", 150, "--output-tokens", 12, "--rounds", 1]
    done = swarmnode("bench", *asked, "--json", "--api", swarm.local.api)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert (report["model"], [row["users"] for row in report["rows"]]) == (MODEL, [1, 3])
    for row in report["rows"]:
        assert (row["replies"], row["output_tokens"], row["cached_tokens"]) == (row["users"], 12, 0)
        assert abs(row["prompt_tokens"] - 150) <= 8
        assert row["ttft_ms"]["p99"] >= row["ttft_ms"]["p50"] > 0
        assert row["itl_ms"]["p99"] >= row["itl_ms"]["p50"] > 0
        assert list(row["stage_ms"]) == ["stage0", "stage1"]
        assert row["tokens_per_s"] > 0
    repeated = swarmnode(
        "bench", MODEL, "--users", 1, "--output-tokens", 4, "--repeat-prompt", "--api", swarm.local.api
    )
    assert repeated.returncode == 0, repeated.stderr
    for part in ("TTFT p50", "STAGE1 ms", "route direct", "came from memory", "TTFT: from sending"):
        assert part in repeated.stdout
    assert "1 user: warming up" in repeated.stderr
    wait_until(lambda: swarm.quiet(MODEL), "nothing of it is left")


def test_bench_that_cannot_work_says_what_to_do(swarm: Swarm) -> None:
    assert "model-load ID --wait" in refusal(swarm, "bench", code=ERROR)
    assert "1,4,8" in refusal(swarm, "bench", "--users", "some")
    swarm.load(MODEL)
    assert f"served are: {MODEL}" in refusal(swarm, "bench", "nothing", "--json", code=ERROR)
    assert "SWARM_SERVE_IN_FLIGHT" in refusal(swarm, "bench", "--users", 24, "--json", code=ERROR)
    wait_until(lambda: swarm.quiet(MODEL), "what was being answered has ended")


# ps and config


@pytest.mark.usefixtures("loaded")
def test_ps_shows_nodes_stages_and_layers(swarm: Swarm) -> None:
    answer = json_of(swarm, "ps")
    assert {peer["name"] for peer in answer["peers"]} == {"peer-0", "peer-1", "peer-2"}
    (ring,) = answer["rings"]
    assert [stage["layers"] for stage in ring["stages"]] == [[0, 3], [4, 7]]
    table = command(swarm, "ps")
    for part in ("coordinator", "peer-1", "scripted ready", "0-3", "4-7", "4.0 GiB"):
        assert part in table
    assert ESCAPE not in table


@pytest.mark.usefixtures("loaded")
def test_l2_a_load_takes_an_idle_models_place_never_a_running_ones_and_all_of_it_can_be_watched(swarm: Swarm) -> None:
    """Three peers hold one model each at most; both models want two."""
    other, workers = "scripted-two", swarm.worker_pids(MODEL)
    with ThreadPoolExecutor(1) as pool:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "long Schwarmgeheimnis"}], "max_tokens": 300}
        running = pool.submit(swarm.client.post, "/v1/chat/completions", body)
        wait_until(lambda: bool(swarm.client.get("/api/v1/nodes")["requests"]), "the request is shown")
        assert "1 running there" in refusal(swarm, "model-load", other, code=ERROR)
        assert running.result()["usage"]["completion_tokens"] == 300
    window = swarm.client.get(f"/api/v1/models/{MODEL}/performance")
    assert window["generated_tokens"] >= 300
    assert [stage["device"] for stage in window["stages"]] == ["script"] * 2
    assert all(stage["compute_ms"] > 0 for stage in window["stages"])
    assert json_of(swarm, "model-load", other, "--wait")["state"] == "ready"
    assert not any(alive(pid) for pid in workers.values())
    table = command(swarm, "top")
    for part in (f"RING {other} ready", "peer-2", f"{MODEL} is being unloaded to make room for {other}"):
        assert part in table
    assert ESCAPE not in table
    metrics = swarm.http.get("/metrics").text
    assert f'swarmnode_stages{{model_name="{other}",phase="ready"}} 2.0' in metrics
    assert f'swarmnode_request_success_total{{finished_reason="length",model_name="{MODEL}"}}' in metrics
    tails = [swarm.client.get(f"/api/v1/workers/{peer}/logs")["workers"] for peer in workers]
    assert MODEL in {tail["model"] for peer in tails for tail in peer}, "of the worker that is gone, too"
    assert "probe came round" in str(tails)
    assert "Schwarmgeheimnis" not in str(tails)
    swarm.unload(other)


@pytest.mark.usefixtures("loaded")
def test_top_opens_what_keys_ask_for_and_leaves_the_terminal_as_it_was(swarm: Swarm) -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    with subprocess.Popen(
        [sys.executable, "-m", "swarmnode", "top", "--api", swarm.local.api],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=clean_environment(TERM="xterm-256color", NO_COLOR="1", COLUMNS="80", LINES="24"),
    ) as process:
        shown = read_until(ours, "q quit")
        assert not termios.tcgetattr(theirs)[3] & termios.ICANON
        os.write(ours, b"r\r")
        shown += read_until(ours, "LANE")
        os.write(ours, b"q")
        assert process.wait(COMMAND_S) == 0
    assert termios.tcgetattr(theirs) == before
    os.close(theirs)
    shown += read_terminal(ours)
    os.close(ours)
    assert f"{ESCAPE}[?1049h" in shown
    assert f"{ESCAPE}[?1049l{ESCAPE}[?25h" in shown, "back on the screen that was there, with its cursor"
    assert "peer-1" in shown
    assert f"{ESCAPE}[32m" not in shown


def test_ps_without_a_ring_says_what_to_do(swarm: Swarm) -> None:
    assert "model-load" in command(swarm, "ps")


def test_config_says_where_each_value_comes_from(tmp_path: Path) -> None:
    done = swarmnode("config", "--json", SWARM_SERVE_MAX_BATCH="3")
    rows = {row["name"]: row for row in json.loads(done.stdout)["variables"]}
    assert (rows["SWARM_SERVE_MAX_BATCH"]["value"], rows["SWARM_SERVE_MAX_BATCH"]["source"]) == ("3", "environment")
    assert rows["SWARM_DATA_DIR"]["source"] == "default"
    assert "SWARM_SERVE_PREFILL_CHUNK" in swarmnode("config").stdout
    wrong = swarmnode("config", SWARM_SERVE_MAX_BATCH="many")
    assert (wrong.returncode, wrong.stdout) == (USAGE, "")
    assert "SWARM_SERVE_MAX_BATCH='many'" in wrong.stderr


# the command line itself


def test_an_api_that_is_not_there() -> None:
    for arguments in (["ps"], ["infer", MODEL, "hello"], ["model-load", MODEL, "--wait"]):
        done = swarmnode(*arguments, SWARM_API="http://127.0.0.1:9")
        assert (done.returncode, done.stdout) == (ERROR, "")
        assert "no swarmnode API at http://127.0.0.1:9" in done.stderr
        assert "Traceback" not in done.stderr
    wrong = swarmnode("models", "--api", "localhost:7701")
    assert wrong.returncode == USAGE
    assert "http://127.0.0.1:7701" in wrong.stderr


def test_help_has_an_example_and_unknown_commands_fail() -> None:
    for name in ("up", "model-load", "infer"):
        assert f"swarmnode {name}" in swarmnode(name, "--help").stdout
    overview = swarmnode("--help").stdout
    assert "model-load" in overview
    assert "worker" not in overview, "what only nodes start is hidden"
    assert swarmnode("dance").returncode == USAGE
    assert swarmnode("infer", MODEL, "x", "--temperature", "9").returncode == USAGE


@pytest.mark.parametrize(("environment", "colours"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_on_a_terminal_unless_no_color(swarm: Swarm, environment: dict[str, str], colours: bool) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "swarmnode", "ps", "--api", swarm.local.api],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**clean_environment(TERM="xterm-256color"), **environment},
    ) as process:
        os.close(theirs)
        shown = read_terminal(ours)
    os.close(ours)
    assert process.returncode == 0
    assert "peer-1" in shown
    assert (f"{ESCAPE}[32malive" in shown) == colours


def read_until(fd: int, mark: str) -> str:
    """What a process writes to its terminal, up to a mark."""
    shown = b""
    while mark.encode() not in shown:
        assert select.select([fd], [], [], COMMAND_S)[0], f"{mark} did not come: {shown!r}"
        shown += os.read(fd, 65536)
    return shown.decode(errors="replace")


def read_terminal(fd: int) -> str:
    """All that a process wrote to its terminal; the read fails when the last one has left it."""
    shown = b""
    while True:
        try:
            data = os.read(fd, 65536)
        except OSError:
            data = b""
        if not data:
            return shown.decode()
        shown += data


# up


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--role", "king"], "coordinator, peer"),
        (["--role", "peer"], "--join"),
        (["--role", "peer", "--join", "127.0.0.1:7700"], "swarmnode join-token"),
        (["--role", "peer", "--join", TOKEN[:-1]], "checksum"),
        (["--role", "coordinator", "--swarm-listen", "0.0.0.0:0"], "--advertise HOST:PORT"),
        (["--role", "coordinator", "--join", TOKEN], "--join is for peers"),
        (["--role", "peer", "--join", TOKEN, "--memory", "lots"], "6G"),
        (["--role", "peer", "--join", TOKEN, "--device", "tpu"], "cuda"),
        (["--role", "peer", "--join", TOKEN, "--name", "a/b"], "A-Z"),
        (["--role", "coordinator", "--data-dir", "/proc/none"], "/proc/none cannot be used"),
    ],
)
def test_up_that_cannot_work_ends_with_the_reason(tmp_path: Path, arguments: list[str], why: str) -> None:
    done = swarmnode("up", *arguments, SWARM_DATA_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (USAGE, "")
    (line,) = done.stderr.splitlines()
    assert why in line


def test_up_without_a_role_is_a_usage_error() -> None:
    assert swarmnode("up").returncode == USAGE


def test_what_another_node_holds_is_refused(swarm: Swarm, tmp_path: Path) -> None:
    ports = {"--api-listen": "127.0.0.1:0", "--swarm-listen": "127.0.0.1:0", "--data-dir": str(tmp_path)}
    for option, taken, why in (
        ("--data-dir", str(swarm.local.folder / "coordinator"), "another node uses"),
        ("--api-listen", swarm.local.api.removeprefix("http://"), "choose another --api-listen"),
        ("--swarm-listen", swarm.local.swarm, "choose another --swarm-listen"),
    ):
        arguments = [part for pair in {**ports, option: taken}.items() for part in pair]
        done = swarmnode("up", "--role", "coordinator", *arguments)
        assert (done.returncode, done.stdout) == (ERROR, "")
        (line,) = done.stderr.splitlines()
        assert why in line


@contextmanager
def both_roles(folder: Path, models_root: Path) -> Iterator[tuple[NodeProcess, dict[str, Any]]]:
    arguments = ["--role", "coordinator", "--role", "peer", "--name", "solo", "--data-dir", str(folder)]
    arguments += ["--swarm-listen", "127.0.0.1:0", "--api-listen", "127.0.0.1:0", "--memory", "1G"]
    node = NodeProcess(arguments, {"SWARM_SERVABLE_MODELS_ROOT": str(models_root)})
    try:
        ready = node.wait_for("ready")
        node.wait_for("joined")
        client = ApiClient(ready["api"])
        wait_until(
            lambda: any(peer.get("memory_bytes") for peer in client.get("/api/v1/nodes")["peers"]),
            "its first beat came",
        )
        client.close()
        yield node, ready
    finally:
        node.stop()


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_both_roles_in_one_process_serve_a_model_and_end_on_a_signal(
    tmp_path: Path, models_root: Path, sign: signal.Signals
) -> None:
    with both_roles(tmp_path, models_root) as (node, ready):
        assert ready["roles"] == ["coordinator", "peer"]
        assert ready["pid"] == node.process.pid
        loaded = swarmnode("model-load", MODEL, "--stages", "1", "--wait", "--json", "--api", ready["api"])
        assert json.loads(loaded.stdout)["state"] == "ready", loaded.stderr
        answer = json.loads(swarmnode("infer", MODEL, "hello", "--json", "--api", ready["api"]).stdout)
        assert (answer["reply"], answer["timing"]["route"]) == (REPLY, "local")
        workers = descendants(node.process.pid)
        assert workers
        asked_s = time.monotonic()
        node.process.send_signal(sign)
        assert node.process.wait(timeout=END_WITHIN_S) == 0
        assert time.monotonic() - asked_s < END_WITHIN_S
        assert not any(alive(pid) for pid in workers)
        assert not list(node.log), "a clean end says nothing on stderr"


def test_up_prints_its_events_as_json_lines(swarm: Swarm) -> None:
    peer, coordinator = swarm.local.peers["peer-0"], swarm.local.coordinator
    assert coordinator is not None
    assert [event["event"] for event in coordinator.seen[:4]].count("ready") == 1
    assert coordinator.seen[0]["api"] == swarm.local.api
    assert {"peer-0", "peer-1", "peer-2"} <= {event.get("name") for event in coordinator.seen}
    assert [event["event"] for event in peer.seen[:2]] == ["enrolled", "ready"]
    assert {event["event"] for event in peer.seen[2:]} == {"joined"}
    assert peer.seen[1]["swarm"].startswith("127.0.0.1:")


def test_up_for_people_says_how_to_go_on(tmp_path: Path) -> None:
    arguments = ["up", "--role", "coordinator", "--data-dir", str(tmp_path)]
    arguments += ["--swarm-listen", "127.0.0.1:0", "--api-listen", "127.0.0.1:0"]
    with subprocess.Popen(
        [sys.executable, "-m", "swarmnode", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=END_WITHIN_S)
    assert "swarm port 127.0.0.1:" in lines[0]
    assert "OpenAI endpoint http://127.0.0.1:" in lines[1]
    assert "swarmnode join-token" in lines[2]
    assert "--role peer --join TOKEN" in lines[2]
    assert (process.returncode, errors) == (0, "")


def test_a_node_ends_with_the_program_that_started_it(tmp_path: Path, models_root: Path) -> None:
    with both_roles(tmp_path, models_root) as (node, ready):
        client = ApiClient(ready["api"])
        client.post(f"/api/v1/models/{MODEL}/load", {"wait": True, "num_stages": 1})
        client.close()
        workers = descendants(node.process.pid)
        assert node.process.stdin is not None
        node.process.stdin.close()
        assert node.process.wait(timeout=END_WITHIN_S) == 0
        assert not any(alive(pid) for pid in workers)
