"""Worker pipes: a node's trio end against a worker's blocking end, in threads and in a real process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial

import pytest
import trio
import trio.testing

from swarmnode.errors import LinkBroken, ProtocolError
from swarmnode.wire.blocking import FrameReader, FrameWriter, SharedWriter
from swarmnode.wire.frames import Frame, encode_bytes
from swarmnode.wire.pipe import FramePipe


def tensor(size: int) -> Frame:
    rows = {"sessions": [1], "gens": [0], "poss": [0], "ns": [1]}
    return Frame("group", {**rows, "dtype": "uint8", "shape": [1, size], "bytes": size}, os.urandom(size))


def pipes() -> tuple[FramePipe, int, int]:
    """A node's end, and the worker's fds: (its input, its output)."""
    worker_in, node_out = os.pipe()
    node_in, worker_out = os.pipe()
    return FramePipe(node_in, node_out), worker_in, worker_out


async def test_a_worker_process_echoes_frames_of_all_sizes() -> None:
    program = (
        "from swarmnode.wire.blocking import FrameReader, FrameWriter\n"
        "reader, writer = FrameReader(0), FrameWriter(1)\n"
        "while (frame := reader.read()) is not None:\n"
        "    writer.write(frame)\n"
    )
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: ASYNC220 - as the node
    assert process.stdin is not None
    assert process.stdout is not None
    pipe = FramePipe(os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno()))
    process.stdin.close()
    process.stdout.close()
    frames = [Frame("init", {}, b"\x80"), *(tensor(size) for size in (1, 1000, 100_000, 4 << 20)), Frame("shutdown")]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(pipe.send, *frames))
        with trio.fail_after(20):
            assert await receive(pipe, len(frames)) == frames
    assert pipe.counts.frames_in == pipe.counts.frames_out == len(frames)
    assert pipe.counts.bytes_in == pipe.counts.bytes_out == sum(len(encode_bytes(frame)) for frame in frames)
    pipe.close()
    assert await trio.to_thread.run_sync(process.wait) == 0


async def receive(pipe: FramePipe, count: int) -> list[Frame]:
    """So many frames, however they are read."""
    found: list[Frame] = []
    while len(found) < count:
        found += await pipe.receive()
    return found


async def test_the_end_of_a_workers_output_between_frames_is_clean() -> None:
    pipe, worker_in, worker_out = pipes()
    FrameWriter(worker_out).write(Frame("shutdown"), Frame("shutdown"))
    os.close(worker_out)
    assert await receive(pipe, 2) == [Frame("shutdown")] * 2
    assert await pipe.receive() == []
    os.close(worker_in)
    with pytest.raises(LinkBroken, match="input is closed"):
        await pipe.send(Frame("shutdown"))
    pipe.close()


async def test_what_a_worker_wrote_in_one_go_comes_in_one_go() -> None:
    pipe, worker_in, worker_out = pipes()
    writer, said = SharedWriter(worker_out), [Frame("text", {"request": name, "text": name, "n": 1}) for name in "abc"]
    writer.post(*said)
    assert await pipe.receive() == said
    os.close(worker_out)
    assert await pipe.receive() == []
    pipe.close()
    os.close(worker_in)


async def test_the_end_inside_a_frame_is_a_broken_link() -> None:
    pipe, worker_in, worker_out = pipes()
    os.write(worker_out, encode_bytes(tensor(100))[:50])
    os.close(worker_out)
    with pytest.raises(LinkBroken, match="inside a frame"):
        await pipe.receive()
    os.write(worker_in_end(pipe), encode_bytes(tensor(100))[:50])
    pipe.close()
    with pytest.raises(LinkBroken, match="inside a frame"):
        FrameReader(worker_in).read()
    os.close(worker_in)


def worker_in_end(pipe: FramePipe) -> int:
    return pipe._send_fd


async def test_rubbish_on_a_workers_output_is_a_protocol_error() -> None:
    pipe, worker_in, worker_out = pipes()
    os.write(worker_out, b"Loading checkpoint shards: 100%\n")
    with pytest.raises(ProtocolError, match="declares"):
        await pipe.receive()
    pipe.close()
    os.close(worker_in)
    os.close(worker_out)


async def test_a_cut_off_send_tears_the_pipe() -> None:
    pipe, worker_in, worker_out = pipes()
    with trio.move_on_after(0.05) as scope:
        await pipe.send(tensor(8 << 20))
    assert scope.cancelled_caught
    with pytest.raises(LinkBroken, match="cut off"):
        await pipe.send(Frame("shutdown"))
    pipe.close()
    os.close(worker_in)
    os.close(worker_out)


async def test_closing_wakes_a_receiver() -> None:
    pipe, worker_in, worker_out = pipes()
    async with trio.open_nursery() as nursery:

        async def receive() -> None:
            with pytest.raises(LinkBroken, match="pipe to the worker was closed"):
                await pipe.receive()

        nursery.start_soon(receive)
        await trio.testing.wait_all_tasks_blocked()
        pipe.close()
    os.close(worker_in)
    os.close(worker_out)


def test_blocking_ends_carry_more_frames_than_one_writev_takes() -> None:
    read_fd, write_fd = os.pipe()
    frames = [Frame("end", {"session": number}) for number in range(2000)] + [tensor(3 << 20)]
    writing = threading.Thread(target=FrameWriter(write_fd).write, args=frames)
    writing.start()
    reader = FrameReader(read_fd)
    assert [reader.read() for _ in frames] == frames
    writing.join()
    os.close(write_fd)
    assert reader.read() is None
    os.close(read_fd)


def test_writing_to_nobody_is_a_broken_link() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    with pytest.raises(LinkBroken):
        FrameWriter(write_fd).write(Frame("shutdown"))
    os.close(write_fd)


def test_a_workers_wire_imports_neither_trio_nor_h2() -> None:
    program = (
        "import sys\n"
        "import swarmnode.wire.blocking, swarmnode.wire.ring_codec, swarmnode.wire.bodies, swarmnode.wire.deadlines\n"
        "print({'trio', 'h2', 'torch'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_a_shared_writer_keeps_each_threads_order_and_every_byte_while_the_pipe_fills() -> None:
    read_fd, write_fd = os.pipe()
    writer = SharedWriter(write_fd)
    running = threading.Thread(target=writer.run)
    running.start()
    sizes = (0, 10, 5_000, 300_000)

    def post(thread: int) -> None:
        for number in range(60):
            writer.post(Frame("data", {"offset": thread * 1000 + number}, bytes([thread]) * sizes[number % 4]))

    posting = [threading.Thread(target=post, args=(thread,)) for thread in range(3)]
    for thread in posting:
        thread.start()
    reader = FrameReader(read_fd)
    got = [frame for _ in range(180) if (frame := reader.read()) is not None]
    for thread in posting:
        thread.join()
    writer.post(Frame("shutdown"))
    writer.close()
    running.join(timeout=5)
    assert not running.is_alive()
    last = reader.read()
    assert last is not None
    assert last.kind == "shutdown"
    offsets = [frame.header["offset"] for frame in got]
    for thread in range(3):
        assert [n for n in offsets if n // 1000 == thread] == [thread * 1000 + number for number in range(60)]
    for frame in got:
        thread, number = divmod(frame.header["offset"], 1000)
        assert frame.body == bytes([thread]) * sizes[number % 4]
    os.close(read_fd)
    os.close(write_fd)


def test_a_shared_writer_writes_in_the_posting_thread_while_the_pipe_has_room() -> None:
    read_fd, write_fd = os.pipe()
    SharedWriter(write_fd).post(Frame("shutdown"))  # nobody runs it
    os.set_blocking(read_fd, False)
    frame = FrameReader(read_fd).read()
    assert frame is not None
    assert frame.kind == "shutdown"
    os.close(read_fd)
    with pytest.raises(LinkBroken):
        SharedWriter(write_fd).post(Frame("shutdown"))
    os.close(write_fd)
