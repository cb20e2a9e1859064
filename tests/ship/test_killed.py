"""Uploads and downloads killed at random points: what is left is never half an object, and the next run ends right.

The number of kills of each kind is small here; COLDSNAP_KILLS=50 asks for as many as were shown once.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

from coldsnap.capsule.image import open_capsule
from coldsnap.capsule.prepared import is_prepared
from coldsnap.core.digest import Digest
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.store.payloads import PayloadStore
from coldsnap.store.stateroot import StateRoot
from coldsnap.testing.shipping import Errand, Tripwire, run_errand, start_errand

from .conftest import LIMITS, TOKEN, Harbour  # isort: skip

KILLS = int(os.environ.get("COLDSNAP_KILLS", "3"))
SEED = int(os.environ.get("COLDSNAP_SEED", "1"))


def errand(harbour: Harbour, verb: str, **more: object) -> Errand:
    return Errand(
        verb=verb,
        operation_id=harbour.next_id(verb),
        limits=LIMITS,
        hub_url=harbour.hub.url,
        token=TOKEN,
        login_files=(harbour.folder / "config.json",),
        **{"state_root": harbour.tools.state.path, "artifact": harbour.loaded.path, **more},  # type: ignore[arg-type]
    )


def kill_at(wire: Tripwire, one: Errand, count: int) -> bool:
    """Run an errand that is killed at a count; whether it was, or ended first."""
    wire.arm(None, 0)
    process = start_errand(one)
    wire.arm(process, count)
    process.join()
    wire.arm(None, 0)
    assert process.exitcode in (0, -9)
    return process.exitcode == -9


def points(total: int, kind: str) -> list[int]:
    draw = random.Random(f"{SEED} {kind}")
    return [draw.randint(1, total) for _ in range(KILLS)]


def check_hub_objects(harbour: Harbour) -> None:
    for path in harbour.hub.folder.iterdir():
        if len(path.name) == 64:
            assert Digest.of(path.read_bytes()).hex == path.name


def test_a_killed_upload_of_packs_ends_right(harbour: Harbour) -> None:
    wire = Tripwire(harbour.servers)

    def fresh(number: int) -> Errand:
        for path in harbour.hub.folder.iterdir():
            path.unlink()
        output = harbour.folder / f"native-{number}.json"
        return errand(harbour, "publish-native", to=f"hf://org/packs-{number}", output=output)

    run_errand(fresh(0))
    total = wire.count
    pack = next(iter(harbour.loaded.packs().values()))
    killed = 0
    for number, count in enumerate(points(total, "packs"), start=1):
        one = fresh(number)
        killed += kill_at(wire, one, count)
        check_hub_objects(harbour)
        repository = harbour.hub.repositories.get(f"org/packs-{number}")
        assert repository is None or all(files in ({}, whole(pack)) for files in repository.commits.values())
        run_errand(replace(one, operation_id=harbour.next_id("again")))
        assert harbour.hub.num_commits(f"org/packs-{number}") == 1
        head = harbour.hub.repositories[f"org/packs-{number}"].branches["main"]
        payloads = load_artifact(one.output).artifact.weights.model_payloads
        assert payloads is not None
        assert (payloads.repository, payloads.revision) == (f"org/packs-{number}", head)
    assert killed >= KILLS // 2


def whole(pack: object) -> dict[str, tuple[str, int]]:
    return {pack.path: (pack.sha256.hex, pack.bytes)}  # type: ignore[attr-defined]


def test_a_killed_upload_of_capsules_ends_right(harbour: Harbour) -> None:
    wire = Tripwire(harbour.servers)
    digest = harbour.loaded.capsule_digest("u0")

    def fresh(number: int) -> Errand:
        to = f"oci://{harbour.registry.host}/org/c{number}"
        return errand(harbour, "publish", to=to, output=harbour.folder / f"capsules-{number}.json")

    run_errand(fresh(0))
    total = wire.count
    killed = 0
    for number, count in enumerate(points(total, "capsules"), start=1):
        one = fresh(number)
        killed += kill_at(wire, one, count)
        name = f"org/c{number}"
        if str(digest) in harbour.registry.manifests.get(name, {}):
            assert len(harbour.registry.blobs[name]) == len(harbour.registry.blobs["org/c0"])
        run_errand(replace(one, operation_id=harbour.next_id("again")))
        assert list(harbour.registry.manifests[name]) == [str(digest)]
        assert harbour.registry.blobs[name] == harbour.registry.blobs["org/c0"]
        assert load_artifact(one.output).artifact.capsule.images[0].reference.endswith(f"/{name}@{digest}")
    assert killed >= KILLS // 2


def check_eligible(state_root: Path, loaded: LoadedArtifact) -> None:
    """Whatever has its final name is whole."""
    state = StateRoot.open(state_root)
    for pack in loaded.packs().values():
        if PayloadStore(state).exists(pack.sha256):
            assert Digest.of(PayloadStore(state).path(pack.sha256).read_bytes()) == pack.sha256
    digest = loaded.capsule_digest("u0")
    if (folder := state.capsules / digest.hex).exists():
        for blob, _ in open_capsule(folder, digest).blobs:
            assert Digest.of((folder / "blobs" / "sha256" / blob.hex).read_bytes()) == blob


def test_a_killed_download_ends_right(harbour: Harbour) -> None:
    loaded = harbour.publish_both()
    wire = Tripwire(harbour.servers)

    def fresh(number: int) -> Errand:
        return errand(harbour, "prepare", state_root=harbour.folder / f"state-{number}", artifact=loaded.path)

    run_errand(fresh(0))
    total = wire.count
    killed = 0
    for number, count in enumerate(points(total, "download"), start=1):
        one = fresh(number)
        killed += kill_at(wire, one, count)
        check_eligible(one.state_root, loaded)
        harbour.hub.reset()
        run_errand(replace(one, operation_id=harbour.next_id("again")))
        check_eligible(one.state_root, loaded)
        assert PayloadStore(StateRoot.open(one.state_root)).exists(next(iter(loaded.packs().values())).sha256)
        assert [path for path in one.state_root.rglob("*") if "partial" in path.name] == []
    assert killed >= KILLS // 2


def test_a_prepare_and_a_gc_beside_it_that_are_killed_leave_nothing_false(harbour: Harbour) -> None:
    """One state root all the time; what a prepare that ended well brought stays until somebody takes it away."""
    loaded = harbour.publish_both()
    wire = Tripwire(harbour.servers)
    state_root = harbour.folder / "state-b"

    def fresh(verb: str) -> Errand:
        return errand(harbour, verb, state_root=state_root, artifact=loaded.path)

    run_errand(fresh("prepare"))
    total = wire.count
    state = StateRoot.open(state_root)
    pack = next(iter(loaded.packs().values())).sha256
    for count in points(total, "beside gc"):
        for folder in (state.payloads, state.capsules, state.prepared):
            shutil.rmtree(folder)
            folder.mkdir(mode=0o700)
        sweeps = [start_errand(fresh("gc")) for _ in range(2)]
        kill_at(wire, fresh("prepare"), count)
        sweeps[0].kill()
        for one in sweeps:
            one.join()
        assert sweeps[1].exitcode == 0
        check_eligible(state_root, loaded)
        run_errand(fresh("prepare"))
        run_errand(fresh("gc"))
        check_eligible(state_root, loaded)
        assert PayloadStore(state).exists(pack)
        assert is_prepared(state, loaded.capsule_digest("u0"), loaded.expected_files("u0"))
        assert [path for path in state_root.rglob("*") if "partial" in path.name] == []
