"""A hub on a loopback port: the few routes that huggingface_hub asks for, with faults on demand."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """One repository, `owner/tiny`. `stall` names a file of which only half is sent before the hub falls silent;
    `garble` one that comes as zeros."""

    files: dict[str, bytes]
    stall: str | None = None
    garble: str | None = None
    stalled: threading.Event = field(default_factory=threading.Event)
    closing: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path and Range of every request."""
    endpoint: str = ""

    def fetched(self) -> list[str]:
        """Names of the files whose content was asked for."""
        return [path.rsplit("/", 1)[1] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]


@contextmanager
def run_fake_hub(folder: Path, **extra: bytes) -> Iterator[FakeHub]:
    """Serve the files of `folder` and `extra` until the block ends."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()} | extra
    hub = FakeHub(files)

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _sibling(name: str, content: bytes) -> dict[str, Any]:
    """As a hub lists it: git keeps small files under their blob id, large ones are pointers with a sha256."""
    blob_id = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    listed: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": blob_id}
    if name.endswith(".safetensors"):
        listed["blobId"] = "0" * 40  # of the pointer, not of the content
        listed["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return listed


class _Handler(BaseHTTPRequestHandler):
    served: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        pass

    def _answer(self, *, body: bool) -> None:
        path = urlsplit(self.path).path
        self.served.requests.append((self.command, path, self.headers.get("Range")))
        parts = path.strip("/").split("/")
        if parts[:4] == ["api", "models", "owner", "tiny"]:
            self._send_json(self._listing(), body=body)
        elif parts[:3] == ["owner", "tiny", "resolve"] and parts[-1] in self.served.files:
            self._send_file(parts[-1], body=body)
        else:
            self._send(404, json.dumps({"error": "Repository not found"}).encode(), {"X-Error-Code": "RepoNotFound"})

    def _listing(self) -> dict[str, Any]:
        siblings = [_sibling(name, content) for name, content in self.served.files.items()]
        return {"id": "owner/tiny", "modelId": "owner/tiny", "sha": COMMIT, "siblings": siblings, "tags": []}

    def _send_json(self, content: dict[str, Any], *, body: bool) -> None:
        self._send(200, json.dumps(content).encode() if body else b"", {"Content-Type": "application/json"})

    def _send_file(self, name: str, *, body: bool) -> None:
        content = self.served.files[name]
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        asked = self.headers.get("Range")
        begin = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
        if asked:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        rest = content[begin:] if name != self.served.garble else bytes(len(content) - begin)
        self._send(206 if asked else 200, rest if body else b"", headers, length=len(rest), name=name)

    def _send(
        self, status: int, content: bytes, headers: dict[str, str], *, length: int | None = None, name: str = ""
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        if name and name == self.served.stall and content:
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.served.stalled.set()
            self.served.closing.wait()
            self.close_connection = True
            return
        self.wfile.write(content)
