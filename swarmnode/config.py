"""The SWARM_ environment variables in one table, and the settings read from them; command-line flags win."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import platformdirs

from swarmnode.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

APP = "swarmnode"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: its default as text, who reads it, and what it means."""

    name: str
    default: str
    role: str
    meaning: str
    parse: Callable[[str], object]


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise ValueError(f"must be at least {least}")
        return value

    return parse


def _one_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return text

    return parse


def _some_of(*names: str) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        found = tuple(name.strip() for name in text.split(",") if name.strip())
        if not found or not set(found) <= set(names):
            raise ValueError(f"must be one or more of {', '.join(names)}, with commas between")
        return found

    return parse


def _switch(text: str) -> bool:
    switches = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in switches:
        raise ValueError("must be 1 or 0")
    return switches[text.lower()]


def _path(text: str) -> Path:
    return Path(text).expanduser()


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "SWARM_DATA_DIR",
        platformdirs.user_data_dir(APP),
        "both",
        "where a node keeps its identity, models and state",
        _path,
    ),
    Variable(
        "SWARM_SERVABLE_MODELS_ROOT",
        "$SWARM_DATA_DIR/servable_models",
        "coordinator",
        "where servable models live",
        _path,
    ),
    Variable(
        "SWARM_FELLOW_MODEL_CACHE",
        "$SWARM_DATA_DIR/models",
        "peer",
        "where a peer keeps the model files it fetched",
        _path,
    ),
    Variable(
        "SWARM_SERVE_IN_FLIGHT",
        "4 x stages",
        "coordinator",
        "requests a ring keeps in flight at once, lowered to what every stage's KV cache fits",
        _at_least(1),
    ),
    Variable(
        "SWARM_SERVE_MAX_IN_FLIGHT",
        "in flight + 8",
        "coordinator",
        "requests a ring's stage 0 holds at once, served or waiting their turn; beyond it 503",
        _at_least(1),
    ),
    Variable(
        "SWARM_SERVE_TYPICAL_TOKENS",
        "1024",
        "coordinator",
        "tokens of a typical chat; sizes the in-flight count and the room of a request without max_tokens",
        _at_least(1),
    ),
    Variable(
        "SWARM_SERVE_CONTEXT_TOKENS",
        "4096",
        "coordinator",
        "the longest conversation a served model must take; the token budget never goes below it",
        _at_least(1),
    ),
    Variable(
        "SWARM_SERVE_MAX_BATCH",
        "0",
        "coordinator",
        "most sessions one decode forward takes (0: as costs tell; while they do not, 2 on cards older than Ampere)",
        _at_least(0),
    ),
    Variable(
        "SWARM_SERVE_SCHEDULE",
        "cost",
        "coordinator",
        "how sessions are grouped: cost (by what steps cost on these cards and links) or source (fixed rules)",
        _one_of("cost", "source"),
    ),
    Variable(
        "SWARM_KEEP_STAGES_S",
        "60",
        "peer",
        "how long stages stay loaded without their coordinator, which takes them over when it is back; 0: not at all",
        _at_least(0),
    ),
    Variable(
        "SWARM_ADMIT_VOTERS",
        "1",
        "coordinator",
        "whether nodes that ask for it with --voter may coordinate the swarm: they get its key",
        _switch,
    ),
    Variable(
        "SWARM_LINK_ROUTES",
        "direct,relayed,polled",
        "both",
        "ways that links may take: direct, relayed (through the coordinator), polled (in requests to its API port)",
        _some_of("direct", "relayed", "polled"),
    ),
    Variable(
        "SWARM_SERVE_PREFILL_CHUNK",
        "256",
        "coordinator",
        "most prompt tokens of a piece sent through the stages, 1024 at most (0: as many as that)",
        _at_least(0),
    ),
    Variable(
        "SWARM_SERVE_STEP_COSTS",
        "off",
        "both",
        "on: every stage of a load measures its step costs anew and logs them (on a peer: for its own stages)",
        _switch,
    ),
    Variable(
        "SWARM_SERVE_ATTENTION",
        "auto",
        "peer",
        "attention: grouped (query heads that share a KV head as one), sdpa (as torch does it), auto (the faster)",
        _one_of("auto", "grouped", "sdpa"),
    ),
    Variable(
        "SWARM_SERVE_LORA",
        "lean",
        "peer",
        "adapters over quantized weights: lean (in float32), lean16 (in the serving dtype), peft (PEFT's own modules)",
        _one_of("lean", "lean16", "peft"),
    ),
    Variable(
        "SWARM_MAX_LOADED_MODELS",
        "1",
        "coordinator",
        "models a peer holds stages of at once; a load beyond it takes the oldest idle model's place",
        _at_least(1),
    ),
    Variable(
        "SWARM_MODEL_IDLE_UNLOAD_S",
        "900",
        "coordinator",
        "seconds without a reply after which a model is unloaded (0: never)",
        _at_least(0),
    ),
    Variable(
        "SWARM_REQUIRE_API_TOKEN",
        "0",
        "coordinator",
        "1: the API wants a token even while there are none",
        _switch,
    ),
    Variable(
        "SWARM_API_TOKENS_FILE",
        "$SWARM_DATA_DIR/api_tokens.json",
        "coordinator",
        "where the hashes of API tokens are kept",
        _path,
    ),
)


def explain() -> list[dict[str, str]]:
    """The table for `swarmnode config`: name, current text, where it came from, role, meaning."""
    return [
        {
            "name": v.name,
            "value": os.environ.get(v.name, v.default),
            "source": "environment" if v.name in os.environ else "default",
            "role": v.role,
            "meaning": v.meaning,
        }
        for v in VARIABLES
    ]


@dataclass(frozen=True, slots=True)
class Settings:
    """The variables, parsed. None: the rule named in the table's default decides at the load."""

    data_dir: Path
    models_root: Path
    model_cache: Path
    in_flight: int | None
    max_in_flight: int | None
    typical_tokens: int
    context_tokens: int
    max_batch: int
    schedule: str
    link_routes: tuple[str, ...]
    keep_stages_s: int
    admit_voters: bool
    prefill_chunk: int
    step_costs: bool
    max_loaded_models: int
    model_idle_unload_s: int
    require_api_token: bool
    api_tokens_file: Path


def read_settings(data_dir: Path | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Parse the environment; `data_dir` (the flag) wins. Raises InvalidRequest that names the variable."""
    values: dict[str, object] = {}
    for variable in VARIABLES:
        text = environ.get(variable.name, "").strip()
        if text:
            values[variable.name] = _parse(variable, text)
    base = data_dir or values.get("SWARM_DATA_DIR") or platformdirs.user_data_path(APP)
    if not isinstance(base, Path):
        raise TypeError("SWARM_DATA_DIR did not parse to a path")
    return Settings(
        data_dir=base,
        models_root=_as(Path, values.get("SWARM_SERVABLE_MODELS_ROOT"), base / "servable_models"),
        model_cache=_as(Path, values.get("SWARM_FELLOW_MODEL_CACHE"), base / "models"),
        in_flight=_optional_int(values.get("SWARM_SERVE_IN_FLIGHT")),
        max_in_flight=_optional_int(values.get("SWARM_SERVE_MAX_IN_FLIGHT")),
        typical_tokens=_as(int, values.get("SWARM_SERVE_TYPICAL_TOKENS"), 1024),
        context_tokens=_as(int, values.get("SWARM_SERVE_CONTEXT_TOKENS"), 4096),
        max_batch=_as(int, values.get("SWARM_SERVE_MAX_BATCH"), 0),
        schedule=_as(str, values.get("SWARM_SERVE_SCHEDULE"), "cost"),
        keep_stages_s=_as(int, values.get("SWARM_KEEP_STAGES_S"), 60),
        admit_voters=_as(bool, values.get("SWARM_ADMIT_VOTERS"), True),
        link_routes=_as(tuple, values.get("SWARM_LINK_ROUTES"), ("direct", "relayed", "polled")),
        prefill_chunk=_as(int, values.get("SWARM_SERVE_PREFILL_CHUNK"), 256),
        step_costs=_as(bool, values.get("SWARM_SERVE_STEP_COSTS"), False),
        max_loaded_models=_as(int, values.get("SWARM_MAX_LOADED_MODELS"), 1),
        model_idle_unload_s=_as(int, values.get("SWARM_MODEL_IDLE_UNLOAD_S"), 900),
        require_api_token=_as(bool, values.get("SWARM_REQUIRE_API_TOKEN"), False),
        api_tokens_file=_as(Path, values.get("SWARM_API_TOKENS_FILE"), base / "api_tokens.json"),
    )


def _parse(variable: Variable, text: str) -> object:
    try:
        return variable.parse(text)
    except ValueError as error:
        raise InvalidRequest(f"{variable.name}={text!r}: {error} ({variable.meaning})") from error


def _as(kind: type[T], value: object, default: T) -> T:
    return value if isinstance(value, kind) else default


def _optional_int(value: object) -> int | None:
    return value if isinstance(value, int) else None
