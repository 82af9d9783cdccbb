"""What a peer declares: by its device, and by what a program of its own finds there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from swarmnode import node
from swarmnode.available_memory import CARD_SHARE
from swarmnode.cluster.placement import CPU_CAPABILITIES
from swarmnode.cluster.quantization import SERVE_INT4_FAST, SERVE_INT8, SERVE_ON_CARD
from swarmnode.config import read_settings
from swarmnode.node import NodeOptions
from swarmnode.roles import capabilities
from swarmnode.roles.api_port import ApiOptions
from swarmnode.roles.capabilities import Abilities, find_abilities
from swarmnode.roles.context import CardMemory, PeerResources
from swarmnode.wire.address import Address

if TYPE_CHECKING:
    from collections.abc import Mapping

KERNELS = {SERVE_INT8, SERVE_INT4_FAST, SERVE_ON_CARD}


def saying(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", f"print('a library says hello'); print({text!r})")


NEVER_ASKED = ("/nowhere/to/be/found",)
AMPERE = saying(json.dumps({"device": "cuda", "int4_obstacle": ""}))
OLDER = saying(json.dumps({"device": "cuda", "int4_obstacle": "GeForce has compute capability 7.5"}))


async def kernels(device: str, probe: tuple[str, ...]) -> set[str]:
    return KERNELS & set((await find_abilities(device, probe)).capabilities)


async def test_a_cpu_is_not_asked_about(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert await kernels("cpu", NEVER_ASKED) == CPU_CAPABILITIES
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(capabilities, "DRIVERS", ())
    assert await kernels("auto", NEVER_ASKED) == CPU_CAPABILITIES


async def test_q2_a_recent_card_declares_int4_fast_and_an_older_one_says_why_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert await kernels("cuda", AMPERE) == {SERVE_ON_CARD, SERVE_INT4_FAST}
    assert await kernels("cuda:1", OLDER) == {SERVE_ON_CARD}
    assert "int4-fast is not served here: GeForce has compute capability 7.5" in caplog.text


async def test_a_card_says_what_memory_it_has_and_stages_take_of_that(tmp_path: Path) -> None:
    probed = {"device": "cuda", "int4_obstacle": "", "vram_bytes": 8 << 30, "vram_free_bytes": 6 << 30}
    card = (await find_abilities("cuda", saying(json.dumps(probed)))).card
    assert card == CardMemory(8 << 30, 6 << 30)
    assert (await find_abilities("cuda", AMPERE)).card is None
    offered = int(CARD_SHARE * (6 << 30))
    ram = PeerResources(64 << 30, "cuda", 1)
    assert ram.on_card(card).memory_bytes == offered
    for asked, gets in ((2 << 30, 2 << 30), (64 << 30, offered)):
        assert PeerResources(asked, "cuda", 1, bounded=True).on_card(card).memory_bytes == gets, "--memory bounds it"


@pytest.mark.parametrize("driver", ["nvidia-smi", "device file"])
async def test_a_machine_with_a_driver_is_asked_what_auto_means(
    driver: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / driver
    path.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(capabilities, "DRIVERS", (path,) if driver == "device file" else ())
    assert await kernels("auto", AMPERE) == {SERVE_ON_CARD, SERVE_INT4_FAST}
    hidden = saying(json.dumps({"device": "cpu", "int4_obstacle": ""}))
    assert await kernels("auto", hidden) == CPU_CAPABILITIES


@pytest.mark.parametrize(
    "broken",
    [NEVER_ASKED, saying("no JSON"), saying("{}"), saying("[]"), (sys.executable, "-c", "import sys; sys.exit('no')")],
    ids=["missing", "not JSON", "empty", "a list", "fails"],
)
async def test_where_the_answer_is_none_no_packed_kernel_is_declared(
    broken: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert await kernels("cuda", broken) == set()
    assert "torch did not say what it finds on device cuda" in caplog.text


async def test_a_driver_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "DEVICE_PROBE_S", 0.3)
    assert await kernels("cuda", (sys.executable, "-c", "import time; time.sleep(60)")) == set()


async def test_the_real_program_says_that_there_is_no_card_where_torch_sees_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(capabilities, "DRIVERS", (Path("/"),))
    assert await kernels("auto", capabilities.PROBE) == CPU_CAPABILITIES


async def test_only_the_peer_of_a_node_waits_until_its_device_was_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It listens, coordinates and answers at its API meanwhile; then it declares what was found."""
    looked = trio.Event()

    async def slow_look(_device: str) -> Abilities:
        await looked.wait()
        return Abilities(("found",), CardMemory(total_bytes=8 << 30, free_bytes=4 << 30))

    monkeypatch.setattr(node, "find_abilities", slow_look)
    events: dict[str, Mapping[str, object]] = {}
    told: dict[str, trio.Event] = {name: trio.Event() for name in ("ready", "peer_joined")}

    def emit(event: str, values: Mapping[str, object]) -> None:
        events[event] = values
        if event in told:
            told[event].set()

    here = Address("127.0.0.1", 0)
    options = NodeOptions(
        ("coordinator", "peer"), here, ApiOptions(here), None, tmp_path, "both", PeerResources(1 << 30, "cuda", 1)
    )
    made = node._Node(options, read_settings(tmp_path), emit)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.run)
            await told["ready"].wait()
            assert "api" in events["ready"]
            coordinator = made._office_for("control").coordinator
            assert coordinator is not None
            assert coordinator.members == {}
            looked.set()
            await told["peer_joined"].wait()
            (member,) = coordinator.members.values()
            assert member.identity.capabilities == ("found",)
            while member.beat is None:  # noqa: ASYNC110 - the coordinator's own task
                await trio.sleep(0.01)
            assert (member.beat.vram_bytes, member.beat.vram_free_bytes) == (8 << 30, 4 << 30)
            assert member.resources(None).memory_bytes == int(CARD_SHARE * (4 << 30)), "not of the machine's memory"
            nursery.cancel_scope.cancel()
