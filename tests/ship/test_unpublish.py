"""Taking back what was published: only what nobody else names, servers before the descriptor, and said where not."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coldsnap.cli import wiring
from coldsnap.errors import ColdsnapError, Refused, RemoteError, ResourceBusy
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.leases import forget
from coldsnap.ops.signing import new_key, sign_artifact
from coldsnap.ops.tidy import plan_delete, run_delete
from coldsnap.ops.unpublishing import plan_unpublish, run_unpublish
from coldsnap.ship.base import Kind
from coldsnap.testing.registry import real_registry
from coldsnap.testing.web import Lie, Reply, Request

from .conftest import LIMITS, Harbour  # isort: skip

DEADLINE_S = 60.0


@pytest.fixture
def published(harbour: Harbour) -> LoadedArtifact:
    """The one descriptor that is left of it: the ones on the way are gone from this host."""
    loaded = harbour.publish_both()
    native = load_artifact(harbour.folder / "native.json")
    forget(harbour.tools, native.digest)
    native.path.unlink()
    return loaded


def at_the_hub(harbour: Harbour) -> list[str]:
    repository = harbour.hub.repositories["org/packs"]
    return sorted(repository.commits[repository.branches["main"]])


def manifests(harbour: Harbour) -> list[str]:
    return sorted(harbour.registry.manifests["org/capsules"])


def test_everything_goes_and_a_second_time_finds_it_gone(harbour: Harbour, published: LoadedArtifact) -> None:
    plan = plan_unpublish(harbour.tools, published)
    assert [part.item.kind for part in plan.going] == [Kind.MANIFEST, Kind.PACK]
    assert len(plan.notes) == 2
    assert {part.outcome for part in run_unpublish(harbour.tools, plan)} == {"deleted"}
    assert (at_the_hub(harbour), manifests(harbour), harbour.registry.tags["org/capsules"]) == ([], [], {})
    commits = harbour.hub.num_commits("org/packs")
    assert {part.outcome for part in run_unpublish(harbour.tools, plan)} == {"was not there"}
    assert harbour.hub.num_commits("org/packs") == commits


def test_a_plan_asks_nobody_and_changes_nothing(harbour: Harbour, published: LoadedArtifact) -> None:
    for server in harbour.servers:
        server.reset()
    plan_unpublish(harbour.tools, published)
    assert [server.asked for server in harbour.servers] == [[], []]


def test_what_another_descriptor_names_there_stays(harbour: Harbour) -> None:
    loaded = harbour.publish_both()  # native.json names the same pack at the same hub
    plan = plan_unpublish(harbour.tools, loaded)
    kept = {part.item.kind: part.kept_by for part in plan.parts}
    assert kept == {Kind.MANIFEST: (), Kind.PACK: (str(harbour.folder / "native.json"),)}
    outcomes = {part.item.kind: part.outcome for part in run_unpublish(harbour.tools, plan)}
    assert outcomes == {Kind.MANIFEST: "deleted", Kind.PACK: ""}
    assert len(at_the_hub(harbour)) == 1


def test_the_same_bytes_at_another_place_keep_nothing(harbour: Harbour, published: LoadedArtifact) -> None:
    harbour.publish("other.json", published, to=f"oci://{harbour.registry.host}/org/others")
    plan = plan_unpublish(harbour.tools, published)
    assert {part.item.kind: bool(part.kept_by) for part in plan.parts} == {Kind.MANIFEST: False, Kind.PACK: True}
    run_unpublish(harbour.tools, plan)
    assert len(harbour.registry.manifests["org/others"]) == 1


def test_what_another_descriptor_calls_by_another_name_stays(harbour: Harbour, published: LoadedArtifact) -> None:
    """The same repository of the same registry, called in another way."""
    localhost = harbour.registry.host.replace("127.0.0.1", "localhost")
    config = harbour.folder / "config.json"  # a login is for a name
    config.write_text(config.read_text().replace(harbour.registry.host, localhost))
    harbour.publish("other.json", published, to=f"oci+http://{localhost}/org/capsules")
    plan = plan_unpublish(harbour.tools, published)
    assert all(part.kept_by == (str(harbour.folder / "other.json"),) for part in plan.parts)
    assert (len(plan.parts), plan.going) == (2, ())
    run_unpublish(harbour.tools, plan)
    assert (len(manifests(harbour)), len(at_the_hub(harbour))) == (1, 1)


def test_a_descriptor_that_cannot_be_read_keeps_everything(harbour: Harbour, published: LoadedArtifact) -> None:
    harbour.loaded.path.write_bytes(b"{")
    plan = plan_unpublish(harbour.tools, published)
    assert (plan.going, plan.notes) == ((), ())
    assert all("cannot be read" in part.kept_by[0] for part in plan.parts)


def test_nothing_is_asked_offline(harbour: Harbour, published: LoadedArtifact) -> None:
    tools = harbour.elsewhere(offline="--offline was given")
    with pytest.raises(Refused):
        run_unpublish(tools, plan_unpublish(harbour.tools, published))
    assert len(manifests(harbour)) == 1


def test_an_artifact_that_was_never_published_has_nothing_there(harbour: Harbour) -> None:
    plan = plan_unpublish(harbour.tools, harbour.loaded)
    assert (plan.parts, run_unpublish(harbour.tools, plan)) == ((), ())


def test_a_registry_that_deletes_nothing_says_so(harbour: Harbour, published: LoadedArtifact) -> None:
    harbour.registry.deletes = False
    with pytest.raises(RemoteError) as caught:
        run_unpublish(harbour.tools, plan_unpublish(harbour.tools, published))
    assert caught.value.reason == "unsupported"
    assert "--scope local" in str(caught.value.cure)
    assert len(at_the_hub(harbour)) == 1


def test_a_hub_that_refuses_is_named_and_the_next_attempt_goes_on(harbour: Harbour, published: LoadedArtifact) -> None:
    harbour.hub.lies.append(Lie(what="status", to="POST .*/commit/", status=403))
    plan = plan_unpublish(harbour.tools, published)
    with pytest.raises(RemoteError) as caught:
        run_unpublish(harbour.tools, plan)
    assert (caught.value.reason, manifests(harbour)) == ("forbidden", [])
    harbour.hub.reset()
    assert [part.outcome for part in run_unpublish(harbour.tools, plan)] == ["was not there", "deleted"]


def test_a_head_that_moves_is_asked_again(harbour: Harbour, published: LoadedArtifact) -> None:
    harbour.hub.lies.append(Lie(what="status", to="POST .*/commit/", status=412, times=1))
    run_unpublish(harbour.tools, plan_unpublish(harbour.tools, published))
    assert at_the_hub(harbour) == []


def test_a_restore_elsewhere_finds_it_gone(harbour: Harbour, published: LoadedArtifact) -> None:
    run_unpublish(harbour.tools, plan_unpublish(harbour.tools, published))
    with pytest.raises(ColdsnapError):
        harbour.prepare(harbour.elsewhere(), published)


def test_nothing_is_taken_back_while_an_operation_runs(harbour: Harbour, published: LoadedArtifact) -> None:
    """It could be a publication that has found there what is about to go."""
    plan = plan_unpublish(harbour.tools, published)
    with harbour.tools.state.in_use(), pytest.raises(ResourceBusy):
        run_unpublish(harbour.tools, plan)
    assert (len(manifests(harbour)), len(at_the_hub(harbour))) == (1, 1)


def test_a_publication_waits_for_a_deletion_and_sends_again(harbour: Harbour, published: LoadedArtifact) -> None:
    plan = plan_unpublish(harbour.tools, published)
    entered, go = threading.Event(), threading.Event()
    honest = harbour.registry.handle

    def slow(request: Request) -> Reply:
        if request.method == "DELETE":
            entered.set()
            assert go.wait(DEADLINE_S)
        return honest(request)

    harbour.registry.handle = slow  # type: ignore[method-assign]
    # Patient with a server that a test holds up.
    patient = replace(harbour.remotes, limits=replace(LIMITS, idle_s=DEADLINE_S, answer_s=DEADLINE_S))
    tools = replace(harbour.tools, remotes=patient)
    with ThreadPoolExecutor(2) as threads:
        deletion = threads.submit(run_unpublish, tools, plan)
        assert entered.wait(DEADLINE_S)
        publication = threads.submit(harbour.publish, "again.json")
        with pytest.raises(ResourceBusy), harbour.tools.state.not_in_use():
            pass
        go.set()
        assert {part.outcome for part in deletion.result(DEADLINE_S)} == {"deleted"}
        result = publication.result(DEADLINE_S)
    assert {one.outcome for one in result.objects if one.item.kind is Kind.MANIFEST} == {"sent"}
    assert len(manifests(harbour)) == 1
    patient.http.close()


def test_what_came_to_be_named_after_the_plan_stays(harbour: Harbour, published: LoadedArtifact) -> None:
    plan = plan_unpublish(harbour.tools, published)
    harbour.publish("another.json")  # names the capsule at the same place, and is another descriptor: no packs
    outcomes = {part.item.kind: (part.kept_by, part.outcome) for part in run_unpublish(harbour.tools, plan)}
    assert outcomes == {
        Kind.MANIFEST: ((str(harbour.folder / "another.json"),), ""),
        Kind.PACK: ((), "deleted"),
    }
    assert len(manifests(harbour)) == 1


@pytest.fixture
def real(harbour: Harbour, tmp_path: Path) -> Iterator[LoadedArtifact]:
    with real_registry(tmp_path / "real") as server:
        harbour.publish("real.json", to=f"oci://{server.host}/org/capsules")
        yield load_artifact(harbour.folder / "real.json")


def test_a_real_registry_lets_go_of_it(harbour: Harbour, real: LoadedArtifact) -> None:
    plan = plan_unpublish(harbour.tools, real)
    assert [part.outcome for part in run_unpublish(harbour.tools, plan)] == ["deleted"]
    assert [part.outcome for part in run_unpublish(harbour.tools, plan)] == ["was not there"]


def test_both_scopes_begin_with_the_servers(harbour: Harbour, published: LoadedArtifact) -> None:
    local = plan_delete(harbour.tools, published.path)
    run_unpublish(harbour.tools, plan_unpublish(harbour.tools, published))
    assert published.path.exists()
    run_delete(harbour.tools, local)
    assert not published.path.exists()
    assert harbour.loaded.path.exists()
    assert harbour.tools.store.path(next(iter(harbour.loaded.packs().values())).sha256).exists()


@pytest.mark.parametrize("scope", ["local", "published", "both"])
def test_the_command(
    harbour: Harbour,
    published: LoadedArtifact,
    scope: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from coldsnap.cli.commands.tidy import Scope, delete

    def make(state_root: Path, **others: Any) -> Any:
        return harbour.tools

    monkeypatch.setattr(wiring, "make_tools", make)
    signature = sign_artifact(published, new_key(tmp_path / "key.pem").private).path
    delete(published.path, scope=Scope(scope), dry_run=True)
    planned = capsys.readouterr().out
    assert (f"then: {signature}\n  last: {published.path}\n" in planned) == (scope != "published")
    delete(published.path, scope=Scope(scope), dry_run=True, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["signature"] == (None if scope == "published" else str(signature))
    assert ("org/capsules" in planned) == (scope != "local")
    assert (f"last: {published.path}" in planned) == (scope != "published")
    assert (published.path.exists(), len(manifests(harbour)), len(at_the_hub(harbour))) == (True, 1, 1)
    delete(published.path, scope=Scope(scope), yes=True)
    left = 0 if scope != "local" else 1
    assert (len(manifests(harbour)), len(at_the_hub(harbour))) == (left, left)
    assert published.path.exists() == signature.exists() == (scope == "published")
