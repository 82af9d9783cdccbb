"""Lane names on the wire: stage 0 sends on `act` and `pre`, stage i on `act<i>` and `pre<i>`, the last on `tok`."""

from __future__ import annotations

from swarmnode.errors import ProtocolError

BASE_LANES = ("act", "pre", "tok")


def wire_lane(base: str, stage: int) -> str:
    """The name of the lane `base` that `stage` sends on."""
    return base if stage == 0 or base == "tok" else f"{base}{stage}"


def base_lane(name: str) -> str:
    """The lane a frame of wire lane `name` is handed to; raises ProtocolError for a name no stage sends on."""
    base = name.rstrip("0123456789")
    if base not in BASE_LANES or (base == "tok" and name != base):
        raise ProtocolError(f"{name[:32]!r} is no lane of a ring")
    return base


def outgoing_lanes(stage: int, num_stages: int) -> tuple[str, ...]:
    """Wire lanes a stage dials its successor with (none in a ring of one): the last stage only returns answers."""
    if num_stages == 1:
        return ()
    bases = ("tok",) if stage == num_stages - 1 else ("act", "pre")
    return tuple(wire_lane(base, stage) for base in bases)
