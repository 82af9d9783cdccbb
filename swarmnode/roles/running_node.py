"""What a node wrote down when it came up, so that other commands on its machine know where it listens."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from swarmnode.private_files import write_private

if TYPE_CHECKING:
    from pathlib import Path

FILE_NAME = "node.json"
LOCK_NAME = "node.lock"
_MAX_FILE_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class RunningNode:
    """The node of a data directory at its last start. `wanted` is what it was to bind (port 0: any), `swarm` what it
    got, `advertised` what others are told to dial; `api` None: it serves no API."""

    pid: int
    roles: tuple[str, ...]
    wanted: str
    swarm: str
    advertised: str
    api: str | None

    @property
    def coordinates(self) -> bool:
        return "coordinator" in self.roles

    def write(self, data_dir: Path) -> None:
        write_private(data_dir / FILE_NAME, json.dumps(asdict(self)).encode())


def read_running_node(data_dir: Path) -> RunningNode | None:
    """What the last start wrote; None where there was none, or where it cannot be read."""
    try:
        with (data_dir / FILE_NAME).open("rb") as file:
            values = json.loads(file.read(_MAX_FILE_BYTES))
        return RunningNode(**{**values, "roles": tuple(values["roles"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def is_running(data_dir: Path) -> bool:
    """Whether a node holds this data directory now."""
    try:
        lock = os.open(data_dir / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
