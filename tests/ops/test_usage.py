"""Where the bytes are: owners of an artifact, packs and who shares them, folders of a state root."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from coldsnap.errors import InvalidDocument, UsageError
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.capture import capture
from coldsnap.ops.preparing import prepare
from coldsnap.ops.usage import find_usage
from coldsnap.testing.desk import plan

from .conftest import Shop  # isort: skip


def captured(shop: Shop, model: Path, path: Path, **changes: Any) -> LoadedArtifact:
    planned = plan(model, path, operation_id=path.stem, **changes)
    capture(shop.tools, planned.request, planned.model)
    return load_artifact(path)


def blocks(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def test_every_byte_has_an_owner(shop: Shop) -> None:
    (found,) = find_usage(shop.tools.state.path, [shop.loaded.path]).artifacts
    owners = {one.owner: one for one in found.owners}
    assert set(owners) == {"unit/u0", "worker/w0"}
    promised = shop.loaded.expected_files("u0")
    images = sum(size for path, (size, _) in promised.items() if path.startswith("process/"))
    assert owners["unit/u0"].bytes == images
    worker = owners["worker/w0"].bytes_by_role
    assert worker["pack"] == shop.result.pack_bytes
    assert set(worker) == {"pack", "residual", "native-manifest", "recovery-manifest"}
    assert found.named_bytes == sum(size for size, _ in promised.values()) + shop.result.pack_bytes
    assert found.unique_bytes <= found.named_bytes


def test_sharing_a_pack_saves_every_copy_but_one(shop: Shop, model: Path, tmp_path: Path) -> None:
    again = captured(shop, model, tmp_path / "again.json")
    third = captured(shop, model, tmp_path / "third.json", serve={"shuffle": 3})
    found = find_usage(shop.tools.state.path)
    assert {one.path for one in found.artifacts} == {str(one.path) for one in (shop.loaded, again, third)}
    (pack,) = found.packs
    assert pack.here
    assert sorted(pack.references) == sorted((str(one.path), 1) for one in (shop.loaded, again, third))
    assert found.saved_bytes == pack.saved_bytes == 2 * shop.result.pack_bytes


def test_a_pack_that_is_gone_is_said_to_be(shop: Shop) -> None:
    shop.tools.store.path(shop.result.pack_digests[0]).unlink()
    (pack,) = find_usage(shop.tools.state.path, [shop.loaded.path]).packs
    assert not pack.here
    assert pack.saved_bytes == 0


def test_folders_are_what_the_disk_holds(shop: Shop) -> None:
    prepare(shop.tools, shop.loaded, shop.request("prepare-1"))
    root = shop.tools.state.path
    found = find_usage(root)
    folders = {one.name: one for one in found.folders}
    for name in ("capsules", "prepared", "receipts", "quarantine", "model-payloads"):
        assert folders[name].disk_bytes == blocks(root / name), name
    assert folders["receipts"].num_files == 2
    assert found.disk_bytes == blocks(root)
    (artifact,) = found.artifacts
    assert artifact.capsule_disk_bytes == blocks(root / "capsules" / shop.loaded.capsule_digest("u0").hex)
    assert artifact.prepared_disk_bytes == blocks(root / "prepared" / shop.loaded.capsule_digest("u0").hex)


def test_a_file_with_two_names_counts_once(shop: Shop) -> None:
    pack = shop.tools.store.path(shop.result.pack_digests[0])
    os.link(pack, shop.tools.state.quarantine / "pack.0")
    before = {one.name: one for one in find_usage(shop.tools.state.path).folders}
    assert before["model-payloads"].disk_bytes + before["quarantine"].disk_bytes == blocks(
        shop.tools.state.path / "model-payloads"
    )


def test_a_lease_without_its_descriptor_is_named(shop: Shop, model: Path, tmp_path: Path) -> None:
    other = captured(shop, model, tmp_path / "other.json")
    other.path.unlink()
    shop.loaded.path.write_bytes(shop.loaded.path.read_bytes().replace(b'"state":"committed"', b'"state":"x"'))
    found = find_usage(shop.tools.state.path)
    assert found.artifacts == ()
    assert {path for path, _ in found.unread} == {str(other.path), str(shop.loaded.path)}


def test_another_artifact_at_the_leased_path(shop: Shop, model: Path, tmp_path: Path) -> None:
    other = captured(shop, model, tmp_path / "other.json")
    shop.loaded.path.write_bytes(other.path.read_bytes())
    found = find_usage(shop.tools.state.path)
    assert [one.path for one in found.artifacts] == [str(other.path)]
    assert str(shop.loaded.digest) in found.unread[0][1]


def test_artifacts_need_no_state_root(shop: Shop, tmp_path: Path) -> None:
    found = find_usage(tmp_path / "nowhere", [shop.loaded.path])
    assert found.folders == ()
    assert found.artifacts[0].capsule_disk_bytes == 0
    assert not (tmp_path / "nowhere").exists()


def test_nothing_to_look_at(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist") as caught:
        find_usage(tmp_path / "nowhere")
    assert "--state-root" in str(caught.value.cure)


def test_a_named_artifact_that_is_none_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("{}")
    with pytest.raises(InvalidDocument):
        find_usage(tmp_path, [path])


def test_the_document(shop: Shop) -> None:
    document = find_usage(shop.tools.state.path).document()
    assert document["artifacts"][0]["owners"][0]["owner"] == "unit/u0"
    assert document["state_root"]["disk_bytes"] == sum(
        one["disk_bytes"] for one in document["state_root"]["folders"].values()
    )
    assert document["packs"][0]["references"] == [{"artifact": str(shop.loaded.path), "workers": 1}]
