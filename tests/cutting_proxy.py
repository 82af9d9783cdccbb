"""A TCP proxy in threads whose connections a test cuts: both ends live, and the link between them is gone."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

PIECE_BYTES = 65_536


class CuttingProxy:
    """Advertise `address`; `target` (host, port) may be set later. `cut` ends what runs; while `closed`, nothing more
    is let through."""

    def __init__(self) -> None:
        self.target: tuple[str, int] | None = None
        self.closed = False
        self.carried = 0
        """Connections that were let through, ever."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def cut(self) -> None:
        for sock in (sock for pair in self._pairs for sock in pair):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    def close(self) -> None:
        self.closed = True
        self._listener.close()
        self.cut()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self.closed or self.target is None:
                    near.close()
                    continue
                self.carried += 1
                threading.Thread(target=self._carry, args=(near, self.target), daemon=True).start()

    def _carry(self, near: socket.socket, target: tuple[str, int]) -> None:
        with suppress(OSError), near, socket.create_connection(target) as far:
            self._pairs.append((near, far))
            ways = [threading.Thread(target=_copy, args=pair, daemon=True) for pair in ((near, far), (far, near))]
            for way in ways:
                way.start()
            for way in ways:
                way.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(PIECE_BYTES):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
