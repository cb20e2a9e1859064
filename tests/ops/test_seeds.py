"""Cache seeds travel with their times, and an artifact cannot choose where it writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coldsnap.capsule.image import CACHE_SEED
from coldsnap.errors import Refused
from coldsnap.ops.activating import activation_request
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.capture import capture
from coldsnap.ops.preparing import prepare
from coldsnap.ops.seeds import place_seeds
from coldsnap.testing.desk import Desk, plan

TIME_NS = 1_600_000_000_123_456_789


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with a file, one in a folder, a link and an empty folder."""
    folder = tmp_path / "cache"
    (folder / "sub").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "kernel.so").write_bytes(b"compiled")
    (folder / "sub" / "graph").write_bytes(b"x" * 5000)
    (folder / "link").symlink_to("kernel.so")
    for path in (folder / "kernel.so", folder / "sub" / "graph"):
        os.utime(path, ns=(TIME_NS, TIME_NS))
    return folder


def captured(kit: Desk, model: Path, tmp_path: Path, cache: Path) -> LoadedArtifact:
    planned = plan(model, tmp_path / "a.json", cache_seeds=(str(cache),))
    return load_artifact(capture(kit.tools, planned.request, planned.model).artifact_path)


def prepared(kit: Desk, loaded: LoadedArtifact) -> Path:
    prepare(kit.tools, loaded, activation_request(loaded, operation_id="prepare-1"))
    return kit.tools.state.prepared / loaded.capsule_digest("u0").hex


def test_regular_files_are_taken_and_links_are_not(kit: Desk, model: Path, tmp_path: Path, cache: Path) -> None:
    loaded = captured(kit, model, tmp_path, cache)
    seeds = {entry.path for entry in loaded.artifact.capsule.objects if entry.role == CACHE_SEED}
    inside = f"cache{cache}"
    assert seeds == {f"{inside}/kernel.so", f"{inside}/sub/graph"}


def test_missing_seeds_come_back_with_their_times(kit: Desk, model: Path, tmp_path: Path, cache: Path) -> None:
    loaded = captured(kit, model, tmp_path, cache)
    folder = prepared(kit, loaded)
    before = {path: path.read_bytes() for path in cache.rglob("*") if path.is_file() and not path.is_symlink()}
    for path in before:
        path.unlink()
    (cache / "sub").rmdir()
    assert place_seeds(loaded, folder, "u0", [str(cache)]) == 2
    for path, data in before.items():
        assert path.read_bytes() == data
        assert path.stat().st_mtime_ns == TIME_NS
    assert place_seeds(loaded, folder, "u0", [str(cache)]) == 0


def test_a_file_of_the_host_is_left_alone(kit: Desk, model: Path, tmp_path: Path, cache: Path) -> None:
    loaded = captured(kit, model, tmp_path, cache)
    folder = prepared(kit, loaded)
    (cache / "kernel.so").write_bytes(b"of this host")
    (cache / "sub" / "graph").unlink()
    (cache / "sub" / "graph").symlink_to("/nonexistent")
    assert place_seeds(loaded, folder, "u0", [str(cache)]) == 0
    assert (cache / "kernel.so").read_bytes() == b"of this host"
    assert (cache / "sub" / "graph").is_symlink()


@pytest.mark.parametrize("allowed", [[], ["/somewhere/else"], ["{cache}/sub"], ["{cache}x"]])
def test_only_below_the_folders_that_the_restore_allows(
    kit: Desk, model: Path, tmp_path: Path, cache: Path, allowed: list[str]
) -> None:
    loaded = captured(kit, model, tmp_path, cache)
    folder = prepared(kit, loaded)
    (cache / "kernel.so").unlink()
    (cache / "sub" / "graph").unlink()
    wanted = [one.format(cache=cache) for one in allowed]
    assert place_seeds(loaded, folder, "u0", wanted) == (1 if wanted == [f"{cache}/sub"] else 0)
    assert not (cache / "kernel.so").exists()


def test_a_cache_that_is_not_there_is_refused_before_anything_starts(kit: Desk, model: Path, tmp_path: Path) -> None:
    planned = plan(model, tmp_path / "a.json", cache_seeds=(str(tmp_path / "absent"),))
    with pytest.raises(Refused) as caught:
        capture(kit.tools, planned.request, planned.model)
    assert [problem.value for problem in caught.value.problems] == [str(tmp_path / "absent")]
    assert kit.units.calls == []


def test_what_a_killed_restore_left_of_a_seed_is_cleared_and_never_captured(
    kit: Desk, model: Path, tmp_path: Path, cache: Path
) -> None:
    half = cache / ".kernel.so.0123456789abcdef.partial"
    half.write_bytes(b"comp")
    loaded = captured(kit, model, tmp_path, cache)
    assert not any(entry.path.endswith(".partial") for entry in loaded.artifact.capsule.objects)
    folder = prepared(kit, loaded)
    (cache / "kernel.so").unlink()
    assert place_seeds(loaded, folder, "u0", [str(cache)]) == 1
    assert not half.exists()
    assert (cache / "kernel.so").read_bytes() == b"compiled"
    assert (cache / "kernel.so").stat().st_mtime_ns == TIME_NS
