"""Files only this user may read: replaced whole or not at all, and read no further than they can be."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from swarmnode.errors import NoSpace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PRIVATE_MODE = 0o600


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """A whole file; raises OSError, and ValueError for one that is larger than any of ours."""
    with path.open("rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"it is larger than {most_bytes} bytes")
    return data


def write_private(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: 0600 from its first byte on, and after a crash the old file or the new one.

    The caller keeps two writers of one path apart. Raises OSError.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def keep_private(path: Path, data: bytes) -> None:
    """`write_private`; raises NoSpace."""
    with unwritable_as_no_space(path):
        write_private(path, data)


@contextmanager
def unwritable_as_no_space(path: Path) -> Iterator[None]:
    """What the disk does not take is said with the path and what helps."""
    try:
        yield
    except OSError as error:
        raise NoSpace(
            f"{path} cannot be written: {error.strerror}; free some space there, or let this user write it"
        ) from error
