"""A model of a Hugging Face hub, downloaded file by file; an interrupted file goes on where it was.

HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME and HF_TOKEN mean what they mean everywhere: huggingface_hub reads them. What its
cache already holds is used from there. New downloads do not go through its cache, because since version 2 that throws
an interrupted file away, and because the servable is the copy that stays.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.catalog.checkpoint import CONFIG, GENERATION_CONFIG, INDEX_FILE, TOKENIZER_FILES, check_config
from swarmnode.catalog.disk import check_space
from swarmnode.catalog.progress import ImportProgress
from swarmnode.catalog.refusals import read_json_object, refuse_pickles
from swarmnode.errors import FetchFailed, InvalidModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swarmnode.catalog.progress import Report

HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
"""The names transformers saves under; "consolidated.safetensors" beside them is the same weights again."""
_SMALL_FILES = {CONFIG, GENERATION_CONFIG, INDEX_FILE, *TOKENIZER_FILES}
_PARTIAL_SUFFIX = ".partial"


@dataclass(frozen=True, slots=True)
class _HubFile:
    """A file of the repository. `sha256` is known for large files, `git_sha1` for those that git itself keeps."""

    name: str
    size: int
    sha256: str | None
    git_sha1: str | None


def fetch_snapshot(hub_id: str, downloads: Path, report: Report) -> Path:
    """Bring what an import needs of `hub_id` into a folder under `downloads` named like the commit; returns it.

    Offline it is the snapshot in the hub cache. Raises FetchFailed, NoSpace before the download, InvalidModel for
    pickles and for what config.json already gives away.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return _cached_snapshot(hub_id)
    with _hub_errors(hub_id):
        commit, files = _listing(hub_id)
        folder = downloads / commit
        _forget_others(downloads, folder)
        progress = _Progress(sum(file.size for file in files), report)
        # The config comes first: a refusal should not cost a download.
        for file in sorted(files, key=lambda file: (file.name != CONFIG, file.size)):
            _bring(hub_id, commit, file, folder, progress)
            if file.name == CONFIG:
                check_config(read_json_object(folder / CONFIG), f"{hub_id}/{CONFIG}")
                check_space(folder, _needed_bytes(files, folder), f"downloading {hub_id}")
    return folder


def _cached_snapshot(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    with _hub_errors(hub_id):
        return Path(snapshot_download(hub_id, local_files_only=True))


def _listing(hub_id: str) -> tuple[str, list[_HubFile]]:
    """The commit of the main branch, and the files that an import needs."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(hub_id, files_metadata=True)
    siblings = info.siblings or []
    wanted = [s for s in siblings if s.rfilename in _SMALL_FILES or _WEIGHTS.fullmatch(s.rfilename)]
    files = [_HubFile(s.rfilename, s.size or 0, s.lfs.sha256 if s.lfs else None, s.blob_id) for s in wanted]
    if not any(_WEIGHTS.fullmatch(file.name) for file in files):
        refuse_pickles((s.rfilename for s in siblings), hub_id)
        raise InvalidModel(
            f"{hub_id}: no model.safetensors among its {len(siblings)} files; only safetensors are taken"
        )
    if info.sha is None or not _COMMIT.fullmatch(info.sha) or all(file.name != CONFIG for file in files):
        raise InvalidModel(f"{hub_id}: no {CONFIG} or no commit; it is not a transformers checkpoint")
    return info.sha, files


def _forget_others(downloads: Path, folder: Path) -> None:
    """Remove what an import of an older commit left, and make the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for other in downloads.iterdir():
        if other != folder:
            shutil.rmtree(other)


def _needed_bytes(files: list[_HubFile], folder: Path) -> int:
    """What is still to be downloaded, and the servable that is then cut from all of it."""
    there = sum(path.stat().st_size for path in folder.iterdir())
    total = sum(file.size for file in files)
    return 2 * total - min(there, total)


def _bring(hub_id: str, commit: str, file: _HubFile, folder: Path, progress: _Progress) -> None:
    """Make folder/name a whole, checked file: what is there, what the hub cache holds, or a download."""
    from huggingface_hub import try_to_load_from_cache

    target = folder / file.name
    cached = try_to_load_from_cache(hub_id, file.name, revision=commit)
    if not target.exists() and isinstance(cached, str):
        _take(Path(cached).resolve(), target)
    if target.exists():
        progress.advance(file.size, file.name)
        return
    partial = folder / f"{file.name}{_PARTIAL_SUFFIX}"
    _download(hub_id, commit, file, partial, progress)
    if not _matches(partial, file):
        partial.unlink()
        raise FetchFailed(f"{hub_id}/{file.name}: what came does not have the hub's checksum; try again")
    partial.rename(target)


def _take(cached: Path, target: Path) -> None:
    """A hard link where both are on one disk, else a copy."""
    try:
        target.hardlink_to(cached)
    except OSError:
        partial = target.with_name(f"{target.name}{_PARTIAL_SUFFIX}")
        shutil.copyfile(cached, partial)
        partial.rename(target)


def _download(hub_id: str, commit: str, file: _HubFile, partial: Path, progress: _Progress) -> None:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    # Unbuffered: what came is on the disk when the process is killed.
    with partial.open("ab", buffering=0) as out:
        if out.tell() > file.size:
            out.truncate(0)
        http_get(
            hf_hub_url(hub_id, file.name, revision=commit),
            out,
            resume_size=out.tell(),
            headers=build_hf_headers(),
            expected_size=file.size,
            tqdm_class=progress.bar_for(file.name),
        )


def _matches(path: Path, file: _HubFile) -> bool:
    """Whether the content has the checksum that the hub lists; a file without one only has to have its size."""
    if path.stat().st_size != file.size:
        return False
    with path.open("rb") as content:
        if file.sha256 is not None:
            return hashlib.file_digest(content, "sha256").hexdigest() == file.sha256
        if file.git_sha1 is not None:
            digest = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
            while chunk := content.read(1 << 20):
                digest.update(chunk)
            return digest.hexdigest() == file.git_sha1
    return True


class _Progress:
    """Sums the bytes of all files of one snapshot."""

    def __init__(self, total_bytes: int, report: Report) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._report = report

    def bar_for(self, name: str) -> type[Any]:
        """A class that huggingface_hub takes for its progress bar and that reports instead of drawing."""
        from huggingface_hub.utils.tqdm import tqdm

        progress = self

        class Bar(tqdm):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                kwargs.pop("name", None)
                super().__init__(*args, **(kwargs | {"disable": True}))  # type: ignore[no-untyped-call]
                progress.advance(int(kwargs.get("initial") or 0), name)

            def update(self, n: float | None = 1) -> bool | None:
                progress.advance(int(n or 0), name)
                return None

        return Bar

    def advance(self, count: int, name: str) -> None:
        self._done_bytes = max(0, min(self._done_bytes + count, self._total_bytes))
        self._report(ImportProgress("download", self._done_bytes, self._total_bytes, name))


@contextmanager
def _hub_errors(hub_id: str) -> Iterator[None]:
    """Map what huggingface_hub raises to FetchFailed that says what the user can do."""
    import httpx2
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise FetchFailed(f"{hub_id}: is gated; accept its terms on its page and set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise FetchFailed(f"{hub_id}: the hub has no such model, or it is private and HF_TOKEN is not set") from error
    except errors.LocalEntryNotFoundError as error:
        raise FetchFailed(
            f"{hub_id}: is not in the hub cache, and HF_HUB_OFFLINE forbids to ask the hub; unset it to download"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, httpx2.HTTPError) as error:
        raise FetchFailed(f"{hub_id}: the hub could not be asked: {str(error).strip()[:300]}") from error
