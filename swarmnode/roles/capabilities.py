"""What a peer's stages can do and what memory their card has, found without importing torch.

The packed kernels of a CPU are no use on a card, and torchao's need a recent one. Where there may be a card, a program
of `compute/` is asked what a stage worker would find; elsewhere nothing is started.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from swarmnode.cluster.placement import CPU_CAPABILITIES, RING_CAPABILITIES
from swarmnode.cluster.quantization import SERVE_INT4_FAST, SERVE_ON_CARD, SERVE_QUANTIZED
from swarmnode.roles.context import CardMemory
from swarmnode.wire.deadlines import DEVICE_PROBE_S

if TYPE_CHECKING:
    from collections.abc import Sequence

PROBE = (sys.executable, "-m", "swarmnode.compute.device")
"""Takes a device's name; prints the device and `int4_obstacle`."""
DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
"""What NVIDIA's and AMD's drivers make."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Abilities:
    """`card`: None where stages compute on none, or it did not say what it has."""

    capabilities: tuple[str, ...]
    card: CardMemory | None = None


async def find_abilities(device: str, probe: Sequence[str] = PROBE) -> Abilities:
    """Of a peer whose stages are told to use `device`; takes seconds where there may be a card."""
    quantized = {SERVE_QUANTIZED} if importlib.util.find_spec("bitsandbytes") is not None else frozenset()
    kernels, card = CPU_CAPABILITIES, None
    if _may_be_card(device):
        found = await _ask(device, probe)
        kernels, card = _card_kernels(found), None if found is None else found.card
    return Abilities(tuple(sorted(RING_CAPABILITIES | quantized | kernels)), card)


def _may_be_card(device: str) -> bool:
    if device == "auto":
        return shutil.which("nvidia-smi") is not None or any(path.exists() for path in DRIVERS)
    return device != "cpu"


@dataclass(frozen=True, slots=True)
class _Found:
    """What the probe said."""

    device: str
    int4_obstacle: str
    card: CardMemory | None


def _card_kernels(found: _Found | None) -> frozenset[str]:
    """Neither a CPU's nor a card's where the probe fails: its stages are then loaded without."""
    if found is None:
        return frozenset()
    if found.device == "cpu":
        return CPU_CAPABILITIES
    if found.int4_obstacle:
        _log.warning("int4-fast is not served here: %s", found.int4_obstacle)
        return frozenset({SERVE_ON_CARD})
    return frozenset({SERVE_ON_CARD, SERVE_INT4_FAST})


async def _ask(device: str, probe: Sequence[str]) -> _Found | None:
    said = ""
    with trio.move_on_after(DEVICE_PROBE_S):
        try:
            ended = await trio.run_process(
                [*probe, device], stdin=subprocess.DEVNULL, capture_stdout=True, capture_stderr=True, check=False
            )
            said = ended.stderr.decode(errors="replace")[-500:]
            found = json.loads(ended.stdout.decode().splitlines()[-1])
            total, free = found.get("vram_bytes"), found.get("vram_free_bytes")
            card = None if total is None or free is None else CardMemory(int(total), int(free))
            return _Found(str(found["device"]), str(found["int4_obstacle"]), card)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            said = said or str(error)
    _log.warning("torch did not say what it finds on device %s; stages are served unpacked: %s", device, said)
    return None
