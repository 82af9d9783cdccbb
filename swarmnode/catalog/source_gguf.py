"""A GGUF file made into a checkpoint by a process of its own, so that torch never enters this one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from typing import IO, TYPE_CHECKING

from swarmnode.catalog.disk import check_space
from swarmnode.catalog.progress import ImportProgress
from swarmnode.errors import InvalidModel, NoSpace

if TYPE_CHECKING:
    from pathlib import Path

    from swarmnode.catalog.progress import Report

MODULE = "swarmnode.compute.gguf_import"
MAGIC = b"GGUF"
_BYTES_PER_GGUF_BYTE = 5
"""Dequantized bfloat16 and the kept blocks over quantized bytes: 16 and 4.5 bits against the 4.5 of the smallest usual
files, rounded up."""
_MAX_LINE_CHARS = 10_000
_LOG_TAIL_BYTES = 2000


def checkpoint_from_gguf(gguf: Path, target: Path, report: Report) -> Path:
    """Dequantize `gguf` into a Hugging Face directory `target`; raises InvalidModel with the converter's own words."""
    with gguf.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise InvalidModel(f"{gguf.name}: does not begin with {MAGIC.decode()}, so it is not a GGUF file")
    size = gguf.stat().st_size
    check_space(target.parent, size * _BYTES_PER_GGUF_BYTE, f"dequantizing {gguf.name}")
    report(ImportProgress("dequantize", 0, None, gguf.name))
    with tempfile.TemporaryFile() as log:
        result = _convert(gguf, target, log, report)
        if result != 0:
            log.seek(-min(_LOG_TAIL_BYTES, log.seek(0, os.SEEK_END)), os.SEEK_END)
            tail = log.read().decode(errors="replace").strip()
            raise InvalidModel(f"{gguf.name}: the converter ended with status {result}{_why(result)}: {tail}")
    return target


def _why(status: int) -> str:
    if status != -signal.SIGKILL:
        return ""
    return " (the system ended it, most likely for lack of memory: it takes up to six bytes for each parameter)"


def _convert(gguf: Path, target: Path, log: IO[bytes], report: Report) -> int:
    """Run the converter and pass on its progress lines; its open stdin tells it that we live."""
    # Everything it needs is in the file; a tokenizer looked up on the hub would be somebody else's.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-m", MODULE, str(gguf.resolve()), str(target.resolve())]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, text=True
    ) as process:
        try:
            assert process.stdout is not None
            while line := process.stdout.readline(_MAX_LINE_CHARS):
                _take_line(line, gguf.name, report)
        except BaseException:
            process.kill()
            raise
    return process.returncode


def _take_line(line: str, name: str, report: Report) -> None:
    try:
        message = json.loads(line)
    except ValueError:
        return  # a library printed something
    if not isinstance(message, dict):
        return
    if isinstance(message.get("error"), str):
        raise _failure(message, name)
    if type(message.get("done")) is int:
        total = message.get("total")
        report(ImportProgress("dequantize", message["done"], total if type(total) is int else None, name))


def _failure(message: dict[str, object], name: str) -> InvalidModel | NoSpace:
    text = f"{name}: {message['error']}"
    return NoSpace(text) if message.get("code") == NoSpace.code else InvalidModel(text)
