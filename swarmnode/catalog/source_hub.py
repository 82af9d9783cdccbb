"""A model of a Hugging Face hub, downloaded into the user's own hub cache (HF_HOME), where an interrupted file resumes.

HF_ENDPOINT, HF_HUB_OFFLINE and HF_TOKEN mean what they mean everywhere: huggingface_hub reads them.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
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
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
"""The names transformers saves under; "consolidated.safetensors" beside them is the same weights again."""
_SMALL_FILES = {CONFIG, GENERATION_CONFIG, INDEX_FILE, *TOKENIZER_FILES}


def fetch_snapshot(hub_id: str, report: Report) -> Path:
    """Bring what an import needs of `hub_id` into the hub cache; returns the snapshot's folder.

    Raises FetchFailed, NoSpace before the download, InvalidModel for pickles and what config.json already gives away.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return _cached_snapshot(hub_id)
    with _hub_errors(hub_id):
        commit, sizes = _listing(hub_id)
        # The config comes first: a refusal should not cost a download.
        folder = _download(hub_id, commit, CONFIG).parent
        check_config(read_json_object(folder / CONFIG), f"{hub_id}/{CONFIG}")
        missing = {name: size for name, size in sizes.items() if not (folder / name).exists()}
        check_space(_existing(folder), sum(missing.values()), f"downloading {hub_id}")
        progress = _Progress(sum(sizes.values()), sum(sizes.values()) - sum(missing.values()), report)
        for name in missing:
            _download(hub_id, commit, name, progress.bar_for(name))
    return folder


def _cached_snapshot(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    with _hub_errors(hub_id):
        return Path(snapshot_download(hub_id, local_files_only=True))


def _listing(hub_id: str) -> tuple[str, dict[str, int]]:
    """The commit of the main branch, and the files that an import needs with their sizes."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(hub_id, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    wanted = {name: size for name, size in sizes.items() if name in _SMALL_FILES or _WEIGHTS.fullmatch(name)}
    if not any(_WEIGHTS.fullmatch(name) for name in wanted):
        refuse_pickles(sizes, hub_id)
        raise InvalidModel(f"{hub_id}: no model.safetensors among its {len(sizes)} files; only safetensors are taken")
    if CONFIG not in wanted or info.sha is None:
        raise InvalidModel(f"{hub_id}: no {CONFIG}; it is not a transformers checkpoint")
    return info.sha, wanted


def _download(hub_id: str, commit: str, name: str, bar: type[Any] | None = None) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(hub_id, name, revision=commit, tqdm_class=bar))


class _Progress:
    """Sums the bytes of all files of one snapshot."""

    def __init__(self, total_bytes: int, done_bytes: int, report: Report) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = done_bytes
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
        self._done_bytes = min(self._done_bytes + count, self._total_bytes)
        self._report(ImportProgress("download", self._done_bytes, self._total_bytes, name))


def _existing(folder: Path) -> Path:
    """The nearest folder above that is there, for asking its disk."""
    return next(path for path in (folder, *folder.parents) if path.exists())


@contextmanager
def _hub_errors(hub_id: str) -> Iterator[None]:
    """Map what huggingface_hub raises to FetchFailed that says what the user can do."""
    import httpx
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise FetchFailed(f"{hub_id}: is gated; accept its terms on its page and set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise FetchFailed(f"{hub_id}: the hub has no such model, or it is private and HF_TOKEN is not set") from error
    except errors.LocalEntryNotFoundError as error:
        raise FetchFailed(
            f"{hub_id}: is not in the hub cache and cannot be downloaded; unset HF_HUB_OFFLINE or check the network"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, httpx.HTTPError) as error:
        raise FetchFailed(f"{hub_id}: the hub answered: {str(error).strip()[:300]}") from error
