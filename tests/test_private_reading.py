"""A file of ours is read no further than it can be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from swarmnode.private_files import read_bounded, write_private

if TYPE_CHECKING:
    from pathlib import Path


def test_the_whole_file_or_nothing(tmp_path: Path) -> None:
    write_private(tmp_path / "x", b"12345")
    assert read_bounded(tmp_path / "x", 5) == b"12345"
    with pytest.raises(ValueError, match="larger than 4 bytes"):
        read_bounded(tmp_path / "x", 4)
    with pytest.raises(FileNotFoundError):
        read_bounded(tmp_path / "y", 5)
