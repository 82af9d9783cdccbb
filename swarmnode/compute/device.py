"""The device a stage computes on, and whether torchao's 4-bit kernels run there.

Also a program, `python -m swarmnode.compute.device NAME`: a node with a card, which never imports torch itself, asks it
what a stage worker would find, before it tells the coordinator what it can serve.
"""

from __future__ import annotations

import json
import signal
import sys

import torch

from swarmnode.errors import LoadRefused
from swarmnode.wire.deadlines import DEVICE_PROBE_S

LEAST_CAPABILITY = (8, 0)
"""Ampere: torch's 4-bit kernel uses its tensor cores, and fails in the launch on older cards."""
OLDER_CARDS_ROWS = 2
"""B4: two rows cost such a card little more than one, four cost it several times as much (nf4, which unpacks a weight
for more than one row; nothing here splits such a call, so there is no cap of four)."""


def pick_device(name: str) -> torch.device:
    """The torch device of a spec's `device`; raises LoadRefused if it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
        raise LoadRefused(f"device {name[:40]!r} is not auto, cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise LoadRefused("device 'cuda' was asked for, but torch sees no CUDA card here")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise LoadRefused(f"device {name!r} was asked for, this machine has {torch.cuda.device_count()} CUDA cards")
    return torch.device(name)


def int4_obstacle(device: torch.device) -> str:
    """Why torchao's 4-bit kernels do not run on this card; empty where they do."""
    if torch.version.cuda is None:
        return "this torch is not built for CUDA"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability {'.'.join(map(str, capability))}, and "
            f"torchao's kernels need {'.'.join(map(str, LEAST_CAPABILITY))} (Ampere) or newer"
        )
    try:
        import torchao.quantization  # noqa: F401 - one that does not fit this torch fails here
    except Exception as error:  # whatever a library that is missing, broken or for another torch raises
        return f"torchao cannot be imported ({type(error).__name__}: {str(error)[:200]})"
    return ""


def unmeasured_rows(device: torch.device) -> int:
    """Rows that a decode group may have here while nobody knows what they cost; 0: any number."""
    older = device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY
    return OLDER_CARDS_ROWS if older else 0


def card_memory(device: torch.device) -> dict[str, int]:
    """What a card has and what of it is free now, whoever took the rest; nothing for a CPU."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {"vram_bytes": int(total), "vram_free_bytes": int(free)}


def stage_gauges(device: torch.device) -> dict[str, int]:
    """What this process holds of its card, and what is free there; nothing for a CPU."""
    memory = card_memory(device)
    return {**memory, "vram_bytes": int(torch.cuda.memory_reserved(device))} if memory else {}


def main() -> None:
    """Print the device that a worker would choose, a card's memory and what keeps 4-bit kernels from it, as JSON."""
    signal.alarm(int(DEVICE_PROBE_S))  # its node may be gone while a driver hangs
    device = pick_device(sys.argv[1])
    on_card = device.type == "cuda"
    obstacle = int4_obstacle(device) if on_card else ""
    print(json.dumps({"device": device.type, "int4_obstacle": obstacle, **card_memory(device)}))


if __name__ == "__main__":
    main()
