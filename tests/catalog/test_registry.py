"""The registry finds servables, names broken ones, and never leaves a model's folder."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from swarmnode.catalog import registry as registry_module
from swarmnode.catalog.importing import import_model
from swarmnode.catalog.manifest import MAX_MANIFEST_BYTES, FileEntry, Manifest
from swarmnode.catalog.registry import Registry
from swarmnode.catalog.workspace import Workspace, sweep_removed
from swarmnode.errors import Conflict, InvalidModel, ModelNotFound

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def folder(root: Path, servable: Manifest) -> Path:
    return root / servable.id


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "servable.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_root_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "none")
    assert registry.models() == ()
    with pytest.raises(ModelNotFound, match="no model is; import one"):
        registry.get("x")


def test_new_imports_and_removals_are_noticed(root: Path, tiny_llama: Path) -> None:
    registry = Registry(root)
    assert registry.models() == ()
    manifest = import_model(str(tiny_llama), root)
    assert registry.models() == (manifest,)
    second = import_model(str(tiny_llama), root, model_id="a-second", stages=1)
    assert registry.models() == (second, manifest)
    replaced = import_model(str(tiny_llama), root, stages=3, replace=True)
    assert registry.get("tiny-llama") == replaced
    shutil.rmtree(root / "a-second")
    assert registry.models() == (replaced,)


def test_what_did_not_change_is_not_read_again(root: Path, servable: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(root)
    assert registry.models() == (servable,)

    def fail(path: Path) -> Manifest:
        raise AssertionError(f"{path} was read again")

    monkeypatch.setattr(registry_module, "read_manifest", fail)
    assert registry.models() == (servable,)
    os.utime(root / servable.id / "servable.json", ns=(1, 1))
    with pytest.raises(AssertionError, match="was read again"):
        registry.models()


def test_an_unknown_model_names_the_served_ones(root: Path, servable: Manifest, tiny_llama: Path) -> None:
    import_model(str(tiny_llama), root, model_id="other")
    with pytest.raises(
        ModelNotFound, match=r"model 'gpt-4' is not served here; served are: other, tiny-llama"
    ) as raised:
        Registry(root).get("gpt-4")
    assert raised.value.param == "model"


def test_other_things_under_the_root_are_ignored(root: Path, servable: Manifest) -> None:
    (root / "notes.txt").write_text("x")
    (root / "empty").mkdir()
    (root / ".importing-x").mkdir()
    shutil.copy(root / servable.id / "servable.json", root / ".importing-x")
    registry = Registry(root)
    assert registry.models() == (servable,)
    assert registry.problems() == {}


def swap_for_link(path: Path) -> None:
    """Put a link in the place of a file or folder of the model, to the same content outside the models root."""
    root = next(parent for parent in path.parents if parent.name == "models")
    elsewhere = root.parent / f"outside-{path.name}"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no JSON": (lambda f: (f / "servable.json").write_text("{"), "Invalid JSON"),
    "no object": (lambda f: (f / "servable.json").write_text("[]"), "the whole"),
    "too large": (lambda f: (f / "servable.json").write_bytes(b" " * (MAX_MANIFEST_BYTES + 1)), "larger than"),
    "other format": (lambda f: edit(f, format=2), "format"),
    "other id": (lambda f: edit(f, id="other"), "id is 'other', but the folder is 'tiny-llama'"),
    "bad cut": (lambda f: edit(f, boundaries=[9]), "do not cut 4 layers"),
    "path trick": (lambda f: edit(f, files=[entry("../../etc/passwd")]), "not allowed in a servable"),
    "absolute path": (lambda f: edit(f, files=[entry("/etc/hosts.json")]), "not allowed in a servable"),
    "dot dot": (lambda f: edit(f, files=[entry("tokenizer/..json")]), "not allowed in a servable"),
    "pickle listed": (lambda f: edit(f, files=[entry("shards/stage-0/model.bin")]), "not allowed in a servable"),
    "negative size": (lambda f: edit(f, files=[entry("tokenizer/a.json") | {"size": -1}]), "files.0.size"),
    "no digest": (lambda f: edit(f, files=[entry("tokenizer/a.json") | {"sha256": "x"}]), "files.0.sha256"),
    "file missing": (lambda f: (f / "tokenizer/config.json").unlink(), "listed in the manifest but not there"),
    "shard missing": (lambda f: shutil.rmtree(f / "shards/stage-1"), "listed in the manifest but not there"),
    "file cut short": (lambda f: os.truncate(f / "shards/stage-1/model.safetensors", 9), "has 9 bytes, the manifest"),
    "pickle": (lambda f: (f / "shards/stage-0/pytorch_model.bin").write_bytes(b"x"), "is a pickle"),
    "own code": (lambda f: own_code(f), "has auto_map"),
    "linked file": (lambda f: swap_for_link(f / "tokenizer/config.json"), "is a link"),
    "linked shard": (lambda f: swap_for_link(f / "shards/stage-0/model.safetensors"), "is a link"),
    "linked folder": (lambda f: swap_for_link(f / "shards/stage-0"), "is a link"),
    "linked manifest": (lambda f: swap_for_link(f / "servable.json"), "a link is not followed"),
}


def entry(path: str) -> dict[str, Any]:
    return {"path": path, "size": 1, "sha256": "0" * 64}


def own_code(folder: Path) -> None:
    """Put auto_map into the config and keep the manifest true, as an attacker would."""
    path = folder / "tokenizer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {}}))
    manifest = json.loads((folder / "servable.json").read_text())
    for file in manifest["files"]:
        if file["path"] == "tokenizer/config.json":
            file["size"] = path.stat().st_size
    edit(folder, files=manifest["files"])


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_servable_is_named_and_the_others_go_on(root: Path, folder: Path, tiny_llama: Path, case: str) -> None:
    good = import_model(str(tiny_llama), root, model_id="good")
    spoil, reason = BROKEN[case]
    spoil(folder)
    registry = Registry(root)
    assert registry.models() == (good,)
    assert list(registry.problems()) == ["tiny-llama"]
    assert reason in registry.problems()["tiny-llama"]
    with pytest.raises(ModelNotFound) as raised:
        registry.get("tiny-llama")
    assert reason in raised.value.message


def test_a_linked_model_folder_is_not_followed(root: Path, folder: Path, tmp_path: Path) -> None:
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    registry = Registry(root)
    assert registry.models() == ()
    assert "a link is not followed" in registry.problems()["tiny-llama"]


def test_a_folder_whose_name_is_no_id_is_named(root: Path, folder: Path) -> None:
    folder.rename(root / "Tiny Llama")
    assert "is not allowed" in Registry(root).problems()["Tiny Llama"]


def test_files_are_found_and_read(root: Path, servable: Manifest) -> None:
    registry = Registry(root)
    for file in servable.files:
        path = registry.file_path(servable.id, file)
        assert path == root / servable.id / file.path
        with registry.open_file(servable.id, file) as opened:
            assert len(opened.read()) == file.size


@pytest.mark.parametrize("model", ["..", ".", "", "../models", "/etc", "tiny-llama/..", "tiny-llama\0"])
def test_a_model_name_is_looked_up_not_joined(root: Path, servable: Manifest, model: str) -> None:
    with pytest.raises(ModelNotFound):
        Registry(root).file_path(model, servable.files[0])


def test_a_file_that_changed_after_the_scan_is_refused(root: Path, servable: Manifest, folder: Path) -> None:
    registry = Registry(root)
    assert registry.models()
    file = next(f for f in servable.files if f.path == "tokenizer/config.json")
    swap_for_link(folder / file.path)
    with pytest.raises(InvalidModel, match=r"config\.json is a link"):
        registry.file_path(servable.id, file)
    with pytest.raises(InvalidModel, match="not there"):
        registry.file_path(servable.id, FileEntry(path="tokenizer/gone.json", size=1, sha256="0" * 64))


def test_a_root_that_is_no_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidModel, match=r"models root .*file cannot be read"):
        Registry(tmp_path / "file").models()


def test_a_model_that_is_removed_is_hidden_first_and_then_gone(root: Path, servable: Manifest) -> None:
    registry = Registry(root)
    with registry.hidden(servable.model_id):
        assert (registry.models(), registry.here()) == ((), (servable,)), "it is still here"
        with pytest.raises(ModelNotFound, match="is being removed"):
            registry.get(servable.id)
    assert registry.models() == (servable,)
    registry.remove_files(servable)
    registry.remove_files(servable)  # what lies elsewhere only has none here
    assert (registry.models(), list(root.iterdir())) == ((), [])


def test_what_a_removal_that_was_cut_off_left_goes_with_the_next_import(
    root: Path, servable: Manifest, tiny_llama: Path
) -> None:
    (root / servable.id).rename(root / f".removed-{servable.id}")
    again = import_model(str(tiny_llama), root)
    assert (Registry(root).models(), [path.name for path in root.iterdir()]) == ((again,), [servable.id])


def test_no_model_is_removed_while_it_is_imported_anew(root: Path, servable: Manifest) -> None:
    with Workspace(root, servable.model_id).opened(), pytest.raises(Conflict, match="another import"):
        Registry(root).remove_files(servable)
    assert Registry(root).models() == (servable,)


def test_what_a_broken_import_has_downloaded_outlives_the_models_removal(root: Path, servable: Manifest) -> None:
    part = root / f".importing-{servable.id}" / "download" / "part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"half of it")
    Registry(root).remove_files(servable)
    assert (Registry(root).models(), part.read_bytes()) == ((), b"half of it")


def test_no_two_imports_and_all_copies_of_one_have_the_same_digest(root: Path, tiny_llama: Path) -> None:
    first = import_model(str(tiny_llama), root)
    copied = Manifest.model_validate_json(json.dumps(first.model_dump(mode="json") | {"of a later version": 1}))
    second = import_model(str(tiny_llama), root, replace=True)
    assert (copied.digest, second.files) == (first.digest, first.files)
    assert second.digest != first.digest, "though it is of the same second"


def test_what_was_removed_from_the_swarm_is_a_problem_and_no_servable(root: Path, servable: Manifest) -> None:
    removed: dict[str, float] = {}
    registry = Registry(root, removed=lambda: removed)
    assert (registry.left_over(servable.id), registry.problems()) == (None, {})
    removed[servable.digest] = 86400.0
    assert (registry.models(), registry.here(), registry.left_over(servable.id)) == ((), (), servable)
    assert str(root / servable.id) in registry.problems()[servable.id]
    with pytest.raises(ModelNotFound, match=r"removed from the swarm on 1970-01-02; delete .*import it again"):
        registry.get(servable.id)


def test_another_import_that_lies_elsewhere_is_served_and_never_from_what_was_left(
    root: Path, servable: Manifest, tiny_llama: Path, tmp_path: Path
) -> None:
    again = import_model(str(tiny_llama), tmp_path / "elsewhere", model_id=servable.id, stages=2)
    registry = Registry(root, lambda: {again.id: again}, lambda: {servable.digest: 0.0})
    assert (registry.models(), registry.get(again.id)) == ((again,), again)
    with pytest.raises(InvalidModel, match=r"not whole on this machine .*removed from the swarm"):
        registry.file_path(again.id, again.files[0])


def test_a_removal_deletes_what_was_removed_and_no_other_import(
    root: Path, servable: Manifest, tiny_llama: Path
) -> None:
    again = import_model(str(tiny_llama), root, replace=True)
    Registry(root).remove_files(servable)
    assert Registry(root).models() == (again,)


def test_removals_that_were_cut_off_are_swept(root: Path, servable: Manifest) -> None:
    (root / servable.id).rename(root / f".removed-{servable.id}")
    (root / ".importing-other").mkdir()
    sweep_removed(root)
    sweep_removed(root / "none")
    assert [path.name for path in root.iterdir()] == [".importing-other"]


def test_a_model_whose_files_are_elsewhere_says_so(tmp_path: Path, servable: Manifest) -> None:
    registry = Registry(tmp_path / "empty", lambda: {servable.id: servable})
    with pytest.raises(InvalidModel, match="not on this machine"):
        registry.file_path(servable.id, servable.files[0])
    with pytest.raises(InvalidModel, match="not on this machine"):
        registry.archive(servable.id)
