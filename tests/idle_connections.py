"""Open COUNT connections to HOST PORT, say nothing on them, and hold them until stdin ends: a process of its own, since
both ends of a connection take a descriptor."""

from __future__ import annotations

import resource
import socket
import sys
from contextlib import suppress

SPARE = 64
"""Descriptors that a Python process has besides."""


def main(host: str, port: int, count: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count + SPARE:
        sys.exit(f"{count} connections need {count + SPARE} descriptors, and this machine allows {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (count + SPARE, hard))
    held = []
    while len(held) < count:
        with suppress(TimeoutError):  # where nobody accepts, the kernel's queue is full
            held.append(socket.create_connection((host, port), timeout=1.0))
    print(len(held), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
