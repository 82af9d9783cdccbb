"""What tests of services share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def writes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """No threads: a virtual clock would jump past one. A test that sleeps takes `autojump_clock` itself, since
    pytest-trio looks at the test's own arguments."""

    async def in_place(work: Callable[..., object], *arguments: object, abandon_on_cancel: bool = False) -> object:
        await trio.lowlevel.checkpoint()
        return work(*arguments)

    monkeypatch.setattr(trio.to_thread, "run_sync", in_place)
