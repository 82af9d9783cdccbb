"""The settings: one table, flags win, and a bad value names its variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode.config import VARIABLES, explain, read_settings
from swarmnode.errors import InvalidRequest
from swarmnode.ring.head_config import SCHEDULES

NAMES = [variable.name for variable in VARIABLES]
NUMBERS = [name for name in NAMES if name.startswith("SWARM_SERVE_")]


def test_the_table_is_complete_and_says_what_each_is_for() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for variable in VARIABLES:
        assert variable.name.startswith("SWARM_")
        assert variable.role in ("both", "coordinator", "peer")
        assert len(variable.meaning) > 10
        assert variable.default


def test_the_defaults_are_what_the_table_says(tmp_path: Path) -> None:
    settings = read_settings(tmp_path, {})
    table = {variable.name: variable.default for variable in VARIABLES}
    assert settings.typical_tokens == int(table["SWARM_SERVE_TYPICAL_TOKENS"])
    assert settings.context_tokens == int(table["SWARM_SERVE_CONTEXT_TOKENS"])
    assert settings.max_batch == int(table["SWARM_SERVE_MAX_BATCH"])
    assert settings.prefill_chunk == int(table["SWARM_SERVE_PREFILL_CHUNK"])
    assert settings.schedule == table["SWARM_SERVE_SCHEDULE"]
    assert settings.in_flight is None
    assert settings.max_in_flight is None
    assert str(settings.models_root) == table["SWARM_SERVABLE_MODELS_ROOT"].replace("$SWARM_DATA_DIR", str(tmp_path))
    assert str(settings.model_cache) == table["SWARM_FELLOW_MODEL_CACHE"].replace("$SWARM_DATA_DIR", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("SWARM_DATA_DIR", "/srv/swarm", "data_dir", Path("/srv/swarm")),
        ("SWARM_SERVABLE_MODELS_ROOT", "/srv/m", "models_root", Path("/srv/m")),
        ("SWARM_FELLOW_MODEL_CACHE", "/srv/c", "model_cache", Path("/srv/c")),
        ("SWARM_FELLOW_MODEL_CACHE", "~/c", "model_cache", Path("~/c").expanduser()),
        ("SWARM_SERVE_IN_FLIGHT", "3", "in_flight", 3),
        ("SWARM_SERVE_MAX_IN_FLIGHT", " 5 ", "max_in_flight", 5),
        ("SWARM_SERVE_TYPICAL_TOKENS", "64", "typical_tokens", 64),
        ("SWARM_SERVE_CONTEXT_TOKENS", "128", "context_tokens", 128),
        ("SWARM_SERVE_MAX_BATCH", "1", "max_batch", 1),
        ("SWARM_SERVE_PREFILL_CHUNK", "0", "prefill_chunk", 0),
        ("SWARM_SERVE_SCHEDULE", "source", "schedule", "source"),
        ("SWARM_SERVE_STEP_COSTS", "on", "step_costs", True),
        ("SWARM_SERVE_STEP_COSTS", "off", "step_costs", False),
    ],
)
def test_every_variable_is_read(name: str, text: str, field: str, value: object) -> None:
    assert getattr(read_settings(environ={name: text}), field) == value


def test_the_flag_wins_and_the_folders_follow_it(tmp_path: Path) -> None:
    settings = read_settings(tmp_path, {"SWARM_DATA_DIR": "/elsewhere"})
    assert settings.data_dir == tmp_path
    assert settings.models_root == tmp_path / "servable_models"


def test_the_variable_moves_the_folders_too() -> None:
    assert read_settings(environ={"SWARM_DATA_DIR": "/srv"}).model_cache == Path("/srv/models")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("text", ["many", "1.5", "-1", "0x10", "1e3"])
def test_a_bad_value_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_settings(environ={name: text})
    message = str(refused.value)
    assert message.startswith(f"{name}={text!r}: ")
    assert next(v.meaning for v in VARIABLES if v.name == name) in message


@pytest.mark.parametrize("name", ["SWARM_SERVE_IN_FLIGHT", "SWARM_SERVE_TYPICAL_TOKENS", "SWARM_SERVE_CONTEXT_TOKENS"])
def test_zero_is_refused_where_it_means_nothing(name: str) -> None:
    with pytest.raises(InvalidRequest, match="must be at least 1"):
        read_settings(environ={name: "0"})


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_value_is_the_default(name: str) -> None:
    assert read_settings(environ={name: "  "}) == read_settings(environ={})


def test_explain_shows_every_variable_and_where_its_value_is_from(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SWARM_SERVE_MAX_BATCH", "3")
    rows = {row["name"]: row for row in explain()}
    assert list(rows) == NAMES
    assert (rows["SWARM_SERVE_MAX_BATCH"]["value"], rows["SWARM_SERVE_MAX_BATCH"]["source"]) == ("3", "environment")
    assert {row["source"] for name, row in rows.items() if name != "SWARM_SERVE_MAX_BATCH"} == {"default"}


def test_a_schedule_is_one_the_ring_knows() -> None:
    for schedule in SCHEDULES:
        assert read_settings(environ={"SWARM_SERVE_SCHEDULE": schedule}).schedule == schedule
    with pytest.raises(InvalidRequest, match="SWARM_SERVE_SCHEDULE='fast': must be one of cost, source"):
        read_settings(environ={"SWARM_SERVE_SCHEDULE": "fast"})
