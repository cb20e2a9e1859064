"""A folder that is there is meant; else a repository, at a commit alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldsnap.engines.named_model import resolve_named
from coldsnap.engines.transformers.plugin import PLUGIN as TRANSFORMERS
from coldsnap.engines.vllm.outer import PLUGIN as VLLM
from coldsnap.errors import UserError
from coldsnap.testing.checkpoint import write_checkpoint


def test_a_folder_that_is_there_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path / "owner" / "name")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    counted: list[int] = []
    found = resolve_named("owner/name", progress=counted.append, num_threads=1)
    assert (found.id, found.source, found.path) == ("name", "local", folder.resolve())
    assert sum(counted) == sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())
    assert resolve_named("~/owner/name", found.revision) == found
    with pytest.raises(UserError, match="is at revision"):
        resolve_named("owner/name", "a" * 40)


def test_both_engines_take_it() -> None:
    assert TRANSFORMERS.resolve_model is VLLM.resolve_model is resolve_named


@pytest.mark.parametrize("revision", [None, "main", "v1.0", "A" * 40, "a" * 39, "sha256:" + "a" * 64])
def test_a_hub_model_needs_a_commit(revision: str | None) -> None:
    with pytest.raises(UserError, match="not pinned"):
        resolve_named("owner/name", revision)


@pytest.mark.parametrize("name", ["/no/such/folder", "../x", "a b", "", "a/b/c"])
def test_what_is_neither_folder_nor_repository_is_named(name: str) -> None:
    with pytest.raises(UserError, match="neither a folder nor a repository"):
        resolve_named(name or "./gone/", "a" * 40)
