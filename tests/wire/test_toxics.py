"""The toxic proxy does what it says: an injector that does nothing would make every fault test pass."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from toxics import FIFO_BYTES, ToxicProxy, Uplink, toxic_proxy

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def proxy() -> Iterator[ToxicProxy]:
    """In front of a server that echoes."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        threading.Thread(target=_echo_all, args=(server,), daemon=True).start()
        with toxic_proxy(server.getsockname()[:2]) as spoiling:
            yield spoiling


def _echo_all(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=_echo, args=(connection,), daemon=True).start()


def _echo(connection: socket.socket) -> None:
    with connection:
        try:
            while data := connection.recv(1 << 16):
                connection.sendall(data)
        except OSError:
            return


def dialed(proxy: ToxicProxy) -> socket.socket:
    client = socket.create_connection(proxy.address)
    client.settimeout(5)
    return client


def answer(client: socket.socket, data: bytes) -> bytes:
    client.sendall(data)
    back = b""
    while len(back) < len(data):
        part = client.recv(1 << 16)
        if not part:
            break
        back += part
    return back


def test_without_toxics_everything_passes(proxy: ToxicProxy) -> None:
    with dialed(proxy) as client:
        assert answer(client, b"x" * 300_000) == b"x" * 300_000


def test_latency_delays_at_least_so_long(proxy: ToxicProxy) -> None:
    proxy.there.latency_s = 0.1
    with dialed(proxy) as client:
        began_s = time.monotonic()
        assert answer(client, b"x") == b"x"
        assert time.monotonic() - began_s >= 0.1
    assert proxy.there.effects.delayed_chunks


def test_bandwidth_lets_no_more_through(proxy: ToxicProxy) -> None:
    proxy.there.uplink = Uplink(1_000_000)
    with dialed(proxy) as client:
        began_s = time.monotonic()
        answer(client, b"x" * 300_000)
        assert time.monotonic() - began_s >= 0.29
    assert proxy.there.effects.limited_s > 0


def hears_nothing(client: socket.socket) -> None:
    """For a fifth of a second, in which an answer would long be there."""
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.recv(1)


def test_a_cut_way_swallows_and_says_nothing(proxy: ToxicProxy) -> None:
    with dialed(proxy) as client:
        assert answer(client, b"before") == b"before"
        proxy.there.cut = True
        client.sendall(b"lost")
        hears_nothing(client)
    assert proxy.there.effects.vanished_bytes == 4


def test_a_stalled_way_passes_nothing_on_until_it_is_over(proxy: ToxicProxy) -> None:
    with dialed(proxy) as client:
        assert answer(client, b"x") == b"x"
        proxy.there.stalled = True
        client.sendall(b"b")
        hears_nothing(client)
        proxy.there.stalled = False
        client.settimeout(5)
        assert client.recv(1) == b"b"
    assert proxy.there.effects.stalled_s > 0


def test_slices_and_corruption(proxy: ToxicProxy) -> None:
    proxy.there.slice_bytes, proxy.there.corrupt_every = 3, 5
    with dialed(proxy) as client:
        assert answer(client, b"\0" * 10) == b"\0\0\0\0\1\0\0\0\0\1"
    assert (proxy.there.effects.slices, proxy.there.effects.corrupted_bytes) == (4, 2)


def test_reset_reaches_both_ends(proxy: ToxicProxy) -> None:
    with dialed(proxy) as client:
        assert answer(client, b"x") == b"x"
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    assert proxy.resets == 2


def test_directions_share_one_uplink() -> None:
    uplink = Uplink(1000.0)
    assert [round(uplink.wait_s(500), 1) for _ in range(3)] == [0.5, 1.0, 1.5]
    assert uplink.overfull_s() == 0
    slow = Uplink(1.0)
    slow.wait_s(FIFO_BYTES + 9)
    assert 8 < slow.overfull_s() <= 9


def test_toxics_may_be_for_one_process_that_dialled(proxy: ToxicProxy) -> None:
    proxy.there.corrupt_every = 1
    for dialer, carried in ((os.getpid(), b"iff"), (os.getppid(), b"hgg")):
        proxy.dialers = frozenset({dialer})
        with closing(dialed(proxy)) as client:
            assert answer(client, b"hgg") == carried
