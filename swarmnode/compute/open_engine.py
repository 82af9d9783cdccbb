"""Open the engine a stage needs: torch for real models, the script for scripted ones. Imports torch only for the first."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from swarmnode.compute.model_config import read_config
from swarmnode.compute.script import read_script
from swarmnode.compute.scripted import ScriptedEngine
from swarmnode.compute.supported import SCRIPTED, architecture_name, check_supported

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarmnode.compute.spec import StageSpec
    from swarmnode.ring.work import Engine


def open_engine(spec: StageSpec, progress: Callable[[int, int], None] | None = None) -> Engine:
    """Load the stage; `progress` gets bytes done and bytes in all. Raises LoadRefused, LoadFailed or InvalidModel."""
    config = read_config(spec.folder)
    check_supported(config)
    if architecture_name(config) == SCRIPTED:
        script = read_script(spec.files)
        time.sleep(script.load_ms / 1000)
        return ScriptedEngine(script, spec)
    from swarmnode.compute.loader import load_stage

    return load_stage(spec, progress)
