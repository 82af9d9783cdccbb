"""The end of a worker process, step by step, and what is kept of its last words."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
import trio.testing

from swarmnode.roles import worker_process
from swarmnode.roles.worker_process import LOG_LINES, MAX_LINE_CHARS, WorkerProcess, _Reaper, describe_exit

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 0.3
OBEDIENT = "echo ready; sleep 30"
STUBBORN = "trap '' TERM; echo ready; while :; do sleep 0.05; done"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start a shell program that has said `ready`; its end is bounded by short patience."""
    monkeypatch.setattr(worker_process, "WORKER_EXIT_S", PATIENCE_S)
    monkeypatch.setattr(worker_process, "WORKER_TERM_S", PATIENCE_S)
    running: list[subprocess.Popen[bytes]] = []

    def start(program: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["sh", "-c", program], stdout=subprocess.PIPE, start_new_session=True)
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in running:
        assert process.poll() is not None, "nothing is left behind"
        assert process.stdout is not None
        process.stdout.close()


async def ended(process: subprocess.Popen[bytes]) -> tuple[int | None, float]:
    """Its exit code, and how long `stop` took."""
    began_s = trio.current_time()
    await _Reaper(process).stop()
    return process.returncode, trio.current_time() - began_s


async def test_a_worker_that_ends_by_itself_gets_no_signal(started: Any) -> None:
    code, _ = await ended(started("echo ready; sleep 0.05; exit 7"))
    assert code == 7


async def test_one_that_stays_gets_sigterm_after_its_patience(started: Any) -> None:
    code, took_s = await ended(started(OBEDIENT))
    assert code == -15
    assert took_s >= PATIENCE_S


async def test_one_that_ignores_it_gets_sigkill(started: Any) -> None:
    code, took_s = await ended(started(STUBBORN))
    assert code == -9
    assert took_s >= 2 * PATIENCE_S


async def test_a_cancelled_caller_leaves_no_worker_behind(started: Any) -> None:
    process = started(STUBBORN)
    with trio.move_on_after(0):
        await _Reaper(process).stop()
    assert process.returncode == -9


async def test_waiting_for_one_that_ends_costs_no_polling(started: Any) -> None:
    process = started("echo ready; sleep 0.2; exit 3")
    reaper = _Reaper(process)
    with trio.fail_after(5):
        assert await reaper.wait() == 3
    await reaper.stop()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended with exit code 0"),
        (70, "ended with exit code 70"),
        (-9, "was ended by SIGKILL"),
        (-200, "was ended by signal 200"),
    ],
)
def test_an_exit_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words


async def logged(*parts: bytes) -> list[str]:
    """What is kept of these writes to stderr."""
    source, sink = os.pipe()
    async with trio.lowlevel.FdStream(source) as errors:
        worker = WorkerProcess(cast("Any", None), cast("Any", None), errors)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.collect_log)
            async with trio.lowlevel.FdStream(sink) as out:
                for part in parts:
                    await out.send_all(part)
                    await trio.testing.wait_all_tasks_blocked()
    return list(worker.log)


async def test_the_tail_of_the_log_is_kept_line_by_line() -> None:
    assert await logged(b"one\ntw", b"o\n\xff", b"three") == ["one", "two", "\ufffdthree"]
    assert await logged(b"".join(b"%d\n" % number for number in range(3 * LOG_LINES))) == [
        str(number) for number in range(2 * LOG_LINES, 3 * LOG_LINES)
    ]


async def test_a_line_without_end_takes_no_memory() -> None:
    (line,) = await logged(*[b"x" * 50_000] * 20)
    assert len(line) == MAX_LINE_CHARS
