"""A local folder's identity is its bytes."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from coldsnap.core.canonical import canonical_sha256
from coldsnap.core.manifest import ModelSource
from coldsnap.engines.local_model import checkpoint_files, model_files, pinned_files, resolve_local
from coldsnap.engines.safetensors import metadata_sha256
from coldsnap.errors import HostError, IntegrityError, UserError
from coldsnap.testing.checkpoint import write_checkpoint


def test_the_revision_is_the_digest_of_the_rows_of_its_files(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "sub").mkdir()
    (folder / "sub" / "x").write_bytes(b"x")
    (folder / ".hidden").write_bytes(b"not the model's")
    names = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "sub/x"]
    assert model_files(folder) == names
    rows = []
    for name in names:
        data = (folder / name).read_bytes()
        rows.append([name, len(data), "sha256:" + hashlib.sha256(data).hexdigest()])
    counted: list[int] = []
    model = resolve_local(folder, progress=counted.append)
    assert model.revision == str(canonical_sha256(rows))
    assert (model.id, model.source, model.path) == ("m", "local", folder.resolve())
    assert sum(counted) == sum(size for _, size, _ in rows if isinstance(size, int))


def test_a_folder_that_cannot_be_listed_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its subfolder the model would be another one."""
    folder = write_checkpoint(tmp_path / "m")
    (folder / "sub").mkdir()
    (folder / "sub" / "x").write_bytes(b"x")
    scan, shut = os.scandir, ""

    def scandir(path: Any) -> Any:
        if str(path).endswith(shut):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    shut = "/sub"
    assert len(checkpoint_files(folder)) == 2
    with pytest.raises(HostError, match=r"cannot list .*/m/sub: Too many open files"):
        model_files(folder)


def test_a_checkpoint_that_cannot_be_listed_is_the_machines_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / "m")

    def listdir(path: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, listdir)
    with pytest.raises(HostError, match=r"cannot list .*/m: Too many open files"):
        checkpoint_files(folder)


def test_the_place_does_not_matter_and_every_byte_does(tmp_path: Path) -> None:
    here = resolve_local(write_checkpoint(tmp_path / "a"), model_id="m")
    there = resolve_local(write_checkpoint(tmp_path / "b"), model_id="m")
    assert (here.revision, here.metadata_sha256) == (there.revision, there.metadata_sha256)
    other = resolve_local(write_checkpoint(tmp_path / "c", seed=1), model_id="m")
    assert other.revision != here.revision
    assert other.metadata_sha256 == here.metadata_sha256  # same names and shapes: headers alone prove no content


def test_a_wanted_revision_is_compared(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    found = resolve_local(folder).revision
    assert resolve_local(folder, revision=found).revision == found
    with pytest.raises(UserError, match="is wanted"):
        resolve_local(folder, revision="sha256:" + "0" * 64)


@pytest.mark.parametrize("act", [resolve_local, checkpoint_files])
def test_what_is_no_checkpoint_is_named(tmp_path: Path, act: object) -> None:
    assert callable(act)
    with pytest.raises(UserError, match="does not exist"):
        act(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no \.safetensors"):
        act(tmp_path / "empty")


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00002.safetensors"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(UserError, match=f"{name} is no file"):
        resolve_local(folder)


def test_links_to_files_are_as_good_as_files(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    wanted = resolve_local(folder, model_id="m").revision
    (folder / "config.json").rename(tmp_path / "blob")
    (folder / "config.json").symlink_to(tmp_path / "blob")
    assert resolve_local(folder, model_id="m").revision == wanted


def test_the_headers_of_another_checkpoint_than_the_pinned_one_are_refused_by_both_digests(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    pinned = resolve_local(folder)
    source = ModelSource(model_id=pinned.id, revision=pinned.revision, metadata_sha256=pinned.metadata_sha256)
    assert pinned_files(folder, source) == checkpoint_files(folder)
    shutil.rmtree(folder)
    write_checkpoint(folder, tensors={"other": 64})
    found = metadata_sha256(checkpoint_files(folder))
    with pytest.raises(
        IntegrityError, match=f"{folder} changed since it was pinned.*plan the operation again"
    ) as caught:
        pinned_files(folder, source)
    assert caught.value.facts == {"found": str(found), "expected": str(pinned.metadata_sha256)}
