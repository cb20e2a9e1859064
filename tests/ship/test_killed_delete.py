"""A delete killed at random requests and at every phase: what others need stays, the descriptor goes last.

The number of kills by requests is small here; COLDSNAP_KILLS=50 asks for as many as were shown once.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.capture import capture
from coldsnap.ops.leases import forget, leases
from coldsnap.ops.signing import new_key, sign_artifact, signature_path
from coldsnap.testing.desk import plan
from coldsnap.testing.shipping import Errand, Tripwire, run_errand, start_errand

from .conftest import LIMITS, TOKEN, Harbour  # isort: skip
from .test_killed import KILLS, SEED, kill_at  # isort: skip

SCOPES = ("local", "published", "both")
POINTS = ("gc.shut", "gc.unproved", "gc.unnamed", "gc.swept", "delete.swept", "delete.forgotten")


@dataclass(frozen=True, kw_only=True)
class Two:
    """Two published artifacts with one pack and a capsule each; the first is signed."""

    harbour: Harbour
    first: LoadedArtifact
    second: LoadedArtifact

    def errand(self, scope: str, **more: object) -> Errand:
        return Errand(
            verb="delete",
            operation_id=self.harbour.next_id("delete"),
            state_root=self.harbour.tools.state.path,
            artifact=self.first.path,
            limits=LIMITS,
            hub_url=self.harbour.hub.url,
            token=TOKEN,
            login_files=(self.harbour.folder / "config.json",),
            to=scope,
            **more,  # type: ignore[arg-type]
        )

    def capsules(self, loaded: LoadedArtifact) -> tuple[bool, bool]:
        """Whether its capsule is at the registry, and here."""
        digest = loaded.capsule_digest("u0")
        there = str(digest) in self.harbour.registry.manifests.get("org/capsules", {})
        return there, (self.harbour.tools.state.capsules / digest.hex).is_dir()

    def check_second(self) -> None:
        """Everything of the second is where it was."""
        (pack,) = {one.sha256 for one in self.second.packs().values()}
        repository = self.harbour.hub.repositories["org/packs"]
        assert any(pack.hex in path for path in repository.commits[repository.branches["main"]])
        assert self.capsules(self.second) == (True, True)
        assert self.harbour.tools.store.path(pack).exists()
        assert load_artifact(self.second.path).digest == self.second.digest
        assert self.second.digest in {one.artifact for one in leases(self.harbour.tools)}

    def check_order(self, scope: str) -> None:
        """What is gone of the first, went in its order: servers, objects, lease, signature, descriptor."""
        there, here = self.capsules(self.first)
        leased = self.first.digest in {one.artifact for one in leases(self.harbour.tools)}
        signed = signature_path(self.first.path).exists()
        states = [there and scope != "local", here, leased, signed, self.first.path.exists()]
        if scope == "published":
            assert states[1:] == [True] * 4
        else:
            # Each is there as long as one before it is: what comes first goes first.
            assert states == sorted(states)

    def check_done(self, scope: str) -> None:
        gone = scope != "published"
        assert self.capsules(self.first) == (scope == "local", not gone)
        assert (self.first.path.exists(), signature_path(self.first.path).exists()) == (not gone, not gone)
        assert [one.artifact == self.second.digest for one in leases(self.harbour.tools)].count(False) == (not gone)


@pytest.fixture
def two(harbour: Harbour, model: Path) -> Two:
    def published(loaded: LoadedArtifact, name: str) -> LoadedArtifact:
        """The one descriptor that is left of it."""
        harbour.publish_native(f"{name}-native.json", loaded)
        native = load_artifact(harbour.folder / f"{name}-native.json")
        harbour.publish(f"{name}.json", native)
        for one in (loaded, native):
            forget(harbour.tools, one.digest)
            one.path.unlink()
        return load_artifact(harbour.folder / f"{name}.json")

    planned = plan(model, harbour.folder / "b.json", operation_id="capture-2", serve={"shuffle": 3})
    other = load_artifact(capture(harbour.home.tools, planned.request, planned.model).artifact_path)
    found = Two(harbour=harbour, first=published(harbour.loaded, "first"), second=published(other, "second"))
    sign_artifact(found.first, new_key(harbour.folder / "key.pem").private)
    assert found.first.capsule_digest("u0") != found.second.capsule_digest("u0")
    return found


@pytest.mark.parametrize(("scope", "point"), [*itertools.product(("local", "both"), POINTS), ("published", "")])
def test_a_delete_killed_at_a_phase_ends_right(two: Two, scope: str, point: str) -> None:
    one = two.errand(scope, stops_at=point)
    process = start_errand(one)
    process.join()
    assert process.exitcode in (0, -9)
    two.check_second()
    two.check_order(scope)
    if two.first.path.exists():
        run_errand(replace(one, stops_at=""))
    two.check_second()
    two.check_done(scope)


@pytest.mark.parametrize("scope", ["published", "both"])
@pytest.mark.parametrize("kill", range(KILLS))
def test_a_delete_killed_at_a_request_ends_right(two: Two, scope: str, kill: int) -> None:
    wire = Tripwire(two.harbour.servers)
    one = two.errand(scope)
    kill_at(wire, one, random.Random(f"{SEED} {scope} {kill}").randint(1, 4))
    two.check_second()
    two.check_order(scope)
    if two.first.path.exists():
        run_errand(one)
    two.check_second()
    two.check_done(scope)


@pytest.mark.parametrize("kill", range(KILLS))
def test_a_killed_delete_of_the_last_that_names_a_pack_makes_one_commit(two: Two, kill: int) -> None:
    forget(two.harbour.tools, two.second.digest)
    two.second.path.unlink()
    repository = two.harbour.hub.repositories["org/packs"]
    (whole,) = {tuple(repository.commits[repository.branches["main"]])}
    assert len(whole) == 1
    before = two.harbour.hub.num_commits("org/packs")
    wire = Tripwire(two.harbour.servers)
    one = two.errand("both")
    kill_at(wire, one, random.Random(f"{SEED} last {kill}").randint(1, 9))
    assert tuple(repository.commits[repository.branches["main"]]) in (whole, ())
    two.check_order("both")
    if two.first.path.exists():
        run_errand(one)
    assert tuple(repository.commits[repository.branches["main"]]) == ()
    assert two.harbour.hub.num_commits("org/packs") == before + 1
    assert two.capsules(two.first) == (False, False)
    assert leases(two.harbour.tools) == ()
