"""What a peer declares that its stages can do, found without importing torch.

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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from swarmnode.cluster.placement import CPU_CAPABILITIES, RING_CAPABILITIES
from swarmnode.cluster.quantization import SERVE_INT4_FAST, SERVE_ON_CARD, SERVE_QUANTIZED
from swarmnode.wire.deadlines import DEVICE_PROBE_S

if TYPE_CHECKING:
    from collections.abc import Sequence

PROBE = (sys.executable, "-m", "swarmnode.compute.device")
"""Takes a device's name; prints the device and `int4_obstacle`."""
DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
"""What NVIDIA's and AMD's drivers make."""

_log = logging.getLogger(__name__)


async def find_capabilities(device: str, probe: Sequence[str] = PROBE) -> tuple[str, ...]:
    """Of a peer whose stages are told to use `device`; takes seconds where there may be a card."""
    quantized = {SERVE_QUANTIZED} if importlib.util.find_spec("bitsandbytes") is not None else frozenset()
    kernels = await _card_kernels(device, probe) if _may_be_card(device) else CPU_CAPABILITIES
    return tuple(sorted(RING_CAPABILITIES | quantized | kernels))


def _may_be_card(device: str) -> bool:
    if device == "auto":
        return shutil.which("nvidia-smi") is not None or any(path.exists() for path in DRIVERS)
    return device != "cpu"


async def _card_kernels(device: str, probe: Sequence[str]) -> frozenset[str]:
    """Neither a CPU's nor a card's where the probe fails: its stages are then loaded without."""
    found = await _ask(device, probe)
    if found is None:
        return frozenset()
    if found["device"] == "cpu":
        return CPU_CAPABILITIES
    if found["int4_obstacle"]:
        _log.warning("int4-fast is not served here: %s", found["int4_obstacle"])
        return frozenset({SERVE_ON_CARD})
    return frozenset({SERVE_ON_CARD, SERVE_INT4_FAST})


async def _ask(device: str, probe: Sequence[str]) -> dict[str, Any] | None:
    said = ""
    with trio.move_on_after(DEVICE_PROBE_S):
        try:
            ended = await trio.run_process(
                [*probe, device], stdin=subprocess.DEVNULL, capture_stdout=True, capture_stderr=True, check=False
            )
            said = ended.stderr.decode(errors="replace")[-500:]
            found = json.loads(ended.stdout.decode().splitlines()[-1])
            return {"device": str(found["device"]), "int4_obstacle": str(found["int4_obstacle"])}
        except (OSError, ValueError, LookupError, TypeError) as error:
            said = said or str(error)
    _log.warning("torch did not say what it finds on device %s; stages are served unpacked: %s", device, said)
    return None
