"""Leases, gc and delete: what anybody needs stays, shared packs stay, the descriptor goes last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coldsnap.core.artifact import artifact_bytes, artifact_document, artifact_from
from coldsnap.core.digest import Digest
from coldsnap.core.points import install
from coldsnap.errors import InvalidDocument, ResourceBusy, SignatureRejected, UserError
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.capture import capture
from coldsnap.ops.leases import find_references, forget, lease, leases
from coldsnap.ops.live import sleep_service, stop_service, wake_service
from coldsnap.ops.preparing import prepare
from coldsnap.ops.scratch import scratch_folder
from coldsnap.ops.signing import new_key, require_signature, sign_artifact, signature_path
from coldsnap.ops.tidy import plan_delete, plan_tidy, run_delete, run_tidy
from coldsnap.store.staging import stage_file
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.desk import Desk, plan

from .conftest import Shop  # isort: skip


def capture_as(kit: Desk, model: Path, output: Path, operation_id: str, **changes: Any) -> LoadedArtifact:
    planned = plan(model, output, operation_id=operation_id, **changes)
    return load_artifact(capture(kit.tools, planned.request, planned.model).artifact_path)


def capsule_of(shop: Shop) -> Path:
    return shop.tools.state.capsules / shop.loaded.capsule_digest("u0").hex


# -- leases -------------------------------------------------------------------------------------------


def test_a_capture_leases_what_its_artifact_names(shop: Shop) -> None:
    (one,) = leases(shop.tools)
    assert (one.artifact, one.path) == (shop.loaded.digest, str(shop.loaded.path))
    assert one.packs == shop.result.pack_digests
    assert one.capsules == (shop.loaded.capsule_digest("u0"),)
    assert not one.is_missing({one.artifact})
    (kept,) = find_references(shop.tools)
    assert (kept.label, kept.packs, kept.capsules) == (one.path, frozenset(one.packs), frozenset(one.capsules))


def test_the_newest_path_of_an_artifact_wins(shop: Shop, tmp_path: Path) -> None:
    moved = tmp_path / "moved.json"
    shop.loaded.path.rename(moved)
    (one,) = leases(shop.tools)
    assert one.is_missing({one.artifact})
    lease(shop.tools, moved, shop.loaded.artifact)
    (one,) = leases(shop.tools)
    assert one.path == str(moved)
    assert not one.is_missing({one.artifact})


def test_another_artifact_in_its_place_counts_as_missing_when_it_has_a_lease_of_its_own(
    shop: Shop, model: Path
) -> None:
    path = shop.loaded.path
    path.unlink()
    planned = plan(model, path, operation_id="capture-2")
    other = capture(shop.tools, planned.request, planned.model).artifact_digest
    (first, second) = sorted(leases(shop.tools), key=lambda one: one.artifact == other)
    assert first.is_missing({first.artifact, second.artifact})
    assert not first.is_missing({first.artifact})
    assert not second.is_missing({first.artifact, second.artifact})


@pytest.mark.parametrize("harm", [b"", b"{}", b"\0", None], ids=["empty", "other", "noise", "folder"])
def test_a_damaged_descriptor_is_not_missing(shop: Shop, harm: bytes | None) -> None:
    shop.loaded.path.unlink()
    if harm is None:
        shop.loaded.path.mkdir()
    else:
        shop.loaded.path.write_bytes(harm)
    (one,) = leases(shop.tools)
    assert not one.is_missing({one.artifact})
    assert plan_tidy(shop.tools, forget_missing=True).forgotten == ()
    run_tidy(shop.tools, plan_tidy(shop.tools, forget_missing=True))
    assert shop.pack.exists()
    assert capsule_of(shop).is_dir()


def test_forgetting_twice_is_fine(shop: Shop) -> None:
    forget(shop.tools, shop.loaded.digest)
    forget(shop.tools, shop.loaded.digest)
    assert leases(shop.tools) == ()


def test_nothing_is_collected_on_the_guess_that_an_unreadable_lease_is_nothing(shop: Shop) -> None:
    path = shop.tools.state.artifacts / f"{shop.loaded.digest.hex}.json"
    path.write_text("{}")
    for act in (lambda: plan_tidy(shop.tools), lambda: plan_delete(shop.tools, shop.loaded.path)):
        with pytest.raises(InvalidDocument, match=path.name):
            act()
    assert shop.pack.exists()


def test_a_lease_that_cannot_be_read_says_how_it_comes_back(shop: Shop) -> None:
    path = shop.tools.state.artifacts / f"{shop.loaded.digest.hex}.json"
    good = path.read_bytes()
    path.write_bytes(b"{}")
    with pytest.raises(InvalidDocument) as caught:
        plan_tidy(shop.tools)
    cures = {str(problem.cure) for problem in caught.value.problems}
    assert len(cures) == 1
    assert f"`coldsnap prepare` of artifact {shop.loaded.digest} writes it again" in cures.pop()
    prepare(shop.tools, shop.loaded, shop.request("prepare-1"))
    assert path.read_bytes() == good
    assert plan_tidy(shop.tools).items == ()


def test_a_lease_that_stands_there_already_is_not_written_again(shop: Shop) -> None:
    path = shop.tools.state.artifacts / f"{shop.loaded.digest.hex}.json"
    before = path.stat()
    lease(shop.tools, shop.loaded.path, shop.loaded.artifact)
    after = path.stat()
    assert (after.st_ino, after.st_ctime_ns) == (before.st_ino, before.st_ctime_ns)
    path.chmod(0o666)  # whatever others may have written there
    lease(shop.tools, shop.loaded.path, shop.loaded.artifact)
    assert path.stat().st_mode & 0o777 == 0o600


def lease_file(shop: Shop) -> Path:
    return shop.tools.state.artifacts / f"{shop.loaded.digest.hex}.json"


def forge(shop: Shop, **changes: object) -> None:
    """A lease that somebody who may write here has changed, or a disk."""
    path = lease_file(shop)
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))


@pytest.mark.parametrize("forget_missing", [False, True])
@pytest.mark.parametrize(
    "changes",
    [{"packs": []}, {"capsules": []}, {"packs": [], "capsules": [], "path": "/nowhere.json"}, None],
    ids=["no-packs", "no-capsules", "elsewhere", "gone"],
)
def test_what_a_service_runs_from_stays_whatever_its_lease_says(
    shop: Shop, changes: dict[str, object] | None, forget_missing: bool
) -> None:
    shop.restore()
    forge(shop, **changes) if changes is not None else lease_file(shop).unlink()
    run_tidy(shop.tools, plan_tidy(shop.tools, forget_missing=forget_missing))
    assert shop.pack.exists()
    assert capsule_of(shop).is_dir()
    sleep_service(shop.tools, shop.live("sleep"))
    wake_service(shop.tools, shop.live("wake"))


def test_what_a_descriptor_names_stays_though_its_lease_does_not_name_it(shop: Shop) -> None:
    forge(shop, packs=[], capsules=[])
    assert plan_tidy(shop.tools).items == ()
    (kept,) = find_references(shop.tools)
    assert kept.packs == frozenset(shop.result.pack_digests)


def test_what_a_lease_names_beyond_its_descriptor_stays(shop: Shop) -> None:
    other = Digest.of(b"another pack")
    forge(shop, packs=[str(other)])
    (kept,) = find_references(shop.tools)
    assert kept.packs == {other, *shop.result.pack_digests}


def test_a_lease_under_a_wrong_name_is_named(shop: Shop) -> None:
    """No artifact's name leads to it, so nobody would ever write or forget it again."""
    path = lease_file(shop)
    wrong = path.with_name(f"{'0' * 64}.json")
    path.rename(wrong)
    for act in (lambda: plan_tidy(shop.tools), lambda: plan_delete(shop.tools, shop.loaded.path)):
        with pytest.raises(InvalidDocument) as caught:
            act()
        (problem,) = caught.value.problems
        assert problem.value == str(shop.loaded.digest)
        assert problem.cure == f"remove {wrong}, or call it {path.name}"
    wrong.rename(path)
    assert plan_tidy(shop.tools).items == ()


# -- gc -----------------------------------------------------------------------------------------------


def test_gc_takes_nothing_that_an_artifact_needs(shop: Shop) -> None:
    shop.restore()
    stop_service(shop.tools, "svc")
    plan = plan_tidy(shop.tools)
    assert plan.items == ()
    assert run_tidy(shop.tools, plan).removed == ()
    assert shop.restore("restore-2").prepared_from_record


def test_a_descriptor_that_is_gone_still_keeps_its_files_until_told(shop: Shop) -> None:
    shop.loaded.path.unlink()
    assert plan_tidy(shop.tools).items == ()
    plan = plan_tidy(shop.tools, forget_missing=True)
    assert [one.artifact for one in plan.forgotten] == [shop.loaded.digest]
    assert {item.path for item in plan.items} >= {shop.pack, capsule_of(shop)}
    assert shop.pack.exists(), "a plan changes nothing"
    report = run_tidy(shop.tools, plan)
    assert not shop.pack.exists()
    assert not capsule_of(shop).exists()
    assert leases(shop.tools) == ()
    assert report.freed_bytes >= shop.result.pack_bytes


def test_a_descriptor_that_came_back_keeps_its_files(shop: Shop) -> None:
    text = shop.loaded.path.read_bytes()
    shop.loaded.path.unlink()
    plan = plan_tidy(shop.tools, forget_missing=True)
    shop.loaded.path.write_bytes(text)
    run_tidy(shop.tools, plan)
    assert shop.pack.exists()
    assert len(leases(shop.tools)) == 1


def test_a_new_artifact_in_an_old_ones_place_keeps_its_files(kit: Desk, model: Path, tmp_path: Path) -> None:
    """The user removed a descriptor by hand and captured again under its name: two leases, one path."""
    old = capture_as(kit, write_checkpoint(tmp_path / "m2", seed=9), tmp_path / "a.json", "capture-1")
    old.path.unlink()
    new = capture_as(kit, model, tmp_path / "a.json", "capture-2")
    report = run_tidy(kit.tools, plan_tidy(kit.tools, forget_missing=True))
    (old_pack,), (new_pack,) = old.packs().values(), new.packs().values()
    assert kit.tools.store.path(old_pack.sha256) in {item.path for item in report.removed}
    assert kit.tools.store.path(new_pack.sha256).exists()
    assert [one.artifact for one in leases(kit.tools)] == [new.digest]


def test_delete_of_a_new_artifact_in_an_old_ones_place_takes_only_its_own(
    kit: Desk, model: Path, tmp_path: Path
) -> None:
    old = capture_as(kit, write_checkpoint(tmp_path / "m2", seed=9), tmp_path / "a.json", "capture-1")
    text = old.path.read_bytes()
    old.path.unlink()
    capture_as(kit, model, tmp_path / "a.json", "capture-2")
    run_delete(kit.tools, plan_delete(kit.tools, tmp_path / "a.json"))
    old.path.write_bytes(text)
    assert [one.artifact for one in leases(kit.tools)] == [old.digest]
    assert plan_tidy(kit.tools).items == ()


def test_a_sleeping_service_keeps_what_it_wakes_from_though_its_descriptor_is_gone(shop: Shop) -> None:
    shop.restore(warm=True)
    text = shop.loaded.path.read_bytes()
    shop.loaded.path.unlink()
    plan = plan_tidy(shop.tools, forget_missing=True)
    assert plan.items == ()
    assert plan.forgotten == ()
    run_tidy(shop.tools, plan)
    shop.loaded.path.write_bytes(text)
    wake_service(shop.tools, shop.live("wake"))


def test_gc_does_not_run_beside_an_operation(shop: Shop) -> None:
    plan = plan_tidy(shop.tools)
    with shop.tools.state.in_use(), pytest.raises(ResourceBusy):
        run_tidy(shop.tools, plan)


def test_gc_takes_dead_scratch_and_not_live(shop: Shop) -> None:
    dead = shop.tools.state.staging / "capture-x.0123.partial"
    dead.mkdir()
    (dead / "half").write_bytes(b"x" * 10)
    with scratch_folder(shop.tools.state, "op-1") as live:
        plan = plan_tidy(shop.tools)
        assert [(item.path, item.bytes) for item in plan.items] == [(dead, 10)]
        report = run_tidy(shop.tools, plan)
        assert live.exists()
    assert [item.path for item in report.removed] == [dead]
    assert not dead.exists()


# -- delete -------------------------------------------------------------------------------------------


def test_delete_takes_everything_that_only_it_needs(shop: Shop) -> None:
    shop.restore()
    stop_service(shop.tools, "svc")
    prepared = shop.tools.state.prepared / shop.loaded.capsule_digest("u0").hex
    plan = plan_delete(shop.tools, shop.loaded.path)
    assert {item.path for item in plan.sweep.items} >= {shop.pack, capsule_of(shop), prepared}
    assert plan.shared == ()
    assert shop.pack.exists()
    run_delete(shop.tools, plan)
    for path in (shop.pack, capsule_of(shop), prepared, shop.loaded.path):
        assert not path.exists(), path
    assert leases(shop.tools) == ()


def test_a_shared_pack_stays_with_the_last_artifact_that_needs_it(kit: Desk, model: Path, tmp_path: Path) -> None:
    first = capture_as(kit, model, tmp_path / "a.json", "capture-1")
    second = capture_as(kit, model, tmp_path / "b.json", "capture-2", serve={"shuffle": 3})
    (digest,) = {entry.sha256 for entry in (*first.packs().values(), *second.packs().values())}
    plan = plan_delete(kit.tools, first.path)
    assert plan.shared == ((str(digest), str(second.path)),)
    run_delete(kit.tools, plan)
    assert kit.tools.store.path(digest).exists()
    assert not (kit.tools.state.capsules / first.capsule_digest("u0").hex).exists()
    assert (kit.tools.state.capsules / second.capsule_digest("u0").hex).exists()
    run_delete(kit.tools, plan_delete(kit.tools, second.path))
    assert not kit.tools.store.path(digest).exists()


def test_delete_touches_no_garbage_of_others(kit: Desk, model: Path, tmp_path: Path) -> None:
    mine = capture_as(kit, model, tmp_path / "a.json", "capture-1")
    other = capture_as(kit, write_checkpoint(tmp_path / "m2", seed=9), tmp_path / "b.json", "capture-2")
    forget(kit.tools, other.digest)
    run_delete(kit.tools, plan_delete(kit.tools, mine.path))
    for entry in other.packs().values():
        assert kit.tools.store.path(entry.sha256).exists()


def test_a_live_service_keeps_its_artifact(shop: Shop) -> None:
    shop.restore()
    with pytest.raises(ResourceBusy, match=r"is in use by svc; stop it first: coldsnap stop svc"):
        plan_delete(shop.tools, shop.loaded.path)
    assert shop.loaded.path.exists()


def test_a_service_that_started_after_the_plan_keeps_its_files(shop: Shop) -> None:
    plan = plan_delete(shop.tools, shop.loaded.path)
    shop.restore()
    with pytest.raises(ResourceBusy, match="is in use by svc"):
        run_delete(shop.tools, plan)
    assert shop.loaded.path.exists()
    assert shop.pack.exists()


def test_a_service_that_started_during_the_delete_keeps_lease_and_descriptor(shop: Shop, tmp_path: Path) -> None:
    """Its objects are another artifact's too, so that it could start; without its lease it could not wake again."""
    document = artifact_document(shop.loaded.artifact)
    document["capture_id"] = "another"
    other = artifact_from(document)
    (tmp_path / "other.json").write_bytes(artifact_bytes(other))
    lease(shop.tools, tmp_path / "other.json", other)
    plan = plan_delete(shop.tools, shop.loaded.path)
    assert plan.sweep.items == ()

    def restore_at(name: str) -> None:
        if name == "delete.swept":
            shop.restore()

    install(restore_at)
    try:
        with pytest.raises(ResourceBusy, match="is in use by svc"):
            run_delete(shop.tools, plan)
    finally:
        install(None)
    assert shop.loaded.path.exists()
    assert shop.loaded.digest in {one.artifact for one in leases(shop.tools)}


def test_an_image_that_only_it_names_goes(shop: Shop, tmp_path: Path) -> None:
    image = Digest.of(b"an image")
    document = artifact_document(shop.loaded.artifact)
    document["launch"]["units"][0] |= {"image": f"ghcr.io/org/x@{image}", "image_digest": str(image)}
    paths = [tmp_path / "one.json", tmp_path / "two.json"]
    for path in paths:
        artifact = artifact_from({**document, "capture_id": path.stem})
        path.write_bytes(artifact_bytes(artifact))
        lease(shop.tools, path, artifact)
    shop.tools.state.make_roots()
    root = shop.tools.state.roots / image.hex
    (root / "usr").mkdir(parents=True)
    first = plan_delete(shop.tools, paths[0])
    assert (str(image), str(paths[1])) in first.shared
    run_delete(shop.tools, first)
    assert root.exists()
    assert root in [item.path for item in plan_delete(shop.tools, paths[1]).sweep.items]
    run_delete(shop.tools, plan_delete(shop.tools, paths[1]))
    assert not root.exists()
    assert shop.pack.exists()


def test_the_descriptor_goes_last(shop: Shop) -> None:
    """A delete that stops half way can be run again, because what names the rest is still there."""
    plan = plan_delete(shop.tools, shop.loaded.path)
    with shop.tools.state.in_use(), pytest.raises(ResourceBusy):
        run_delete(shop.tools, plan)
    assert shop.loaded.path.exists()
    assert len(leases(shop.tools)) == 1
    run_delete(shop.tools, plan_delete(shop.tools, shop.loaded.path))
    assert not shop.loaded.path.exists()


def test_the_signature_goes_right_before_the_descriptor(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key(tmp_path / "key.pem")
    signature = sign_artifact(shop.loaded, key.private).path
    plan = plan_delete(shop.tools, shop.loaded.path)
    assert plan.signature == signature
    assert signature.exists(), "a plan changes nothing"
    gone: list[Path] = []
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        gone.append(path)
        if path == shop.loaded.path:
            raise PermissionError(1, "no")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(UserError, match="could not be removed"):
        run_delete(shop.tools, plan)
    assert gone[-2:] == [signature, shop.loaded.path]
    assert not shop.pack.exists()
    with pytest.raises(SignatureRejected) as caught:
        require_signature(shop.loaded, key.public)
    assert caught.value.reason == "missing_signature"
    monkeypatch.undo()
    run_delete(shop.tools, plan_delete(shop.tools, shop.loaded.path))
    assert not shop.loaded.path.exists()


@pytest.mark.parametrize("what", ["another artifact's", "no signature", "a link", "a folder"])
def test_what_is_no_signature_of_this_artifact_stays(shop: Shop, tmp_path: Path, what: str) -> None:
    path = signature_path(shop.loaded.path)
    signed = sign_artifact(shop.loaded, new_key(tmp_path / "key.pem").private, tmp_path / "aside").path.read_text()
    if what == "another artifact's":
        path.write_text(signed.replace(shop.loaded.digest.hex, "0" * 64))
    elif what == "no signature":
        path.write_bytes(b"-----BEGIN PGP SIGNATURE-----")
    elif what == "a link":
        path.symlink_to(tmp_path / "aside")
    else:
        path.mkdir()
    plan = plan_delete(shop.tools, shop.loaded.path)
    assert plan.signature is None
    run_delete(shop.tools, plan)
    assert path.lstat()
    assert not shop.loaded.path.exists()


def test_a_signature_that_came_after_the_plan_stays(shop: Shop, tmp_path: Path) -> None:
    plan = plan_delete(shop.tools, shop.loaded.path)
    signature = sign_artifact(shop.loaded, new_key(tmp_path / "key.pem").private).path
    run_delete(shop.tools, plan)
    assert signature.exists()


def test_an_artifact_is_not_deleted_through_a_link(shop: Shop, tmp_path: Path) -> None:
    """It would be the link that goes, and the descriptor would stay and name what is gone."""
    link, between = tmp_path / "link.json", tmp_path / "between.json"
    between.symlink_to(shop.loaded.path)
    link.symlink_to(between)
    with pytest.raises(UserError, match="is a link to") as caught:
        plan_delete(shop.tools, link)
    assert str(shop.loaded.path.resolve()) in str(caught.value.cure)
    linked = tmp_path / "folder"
    linked.symlink_to(shop.loaded.path.parent)
    run_delete(shop.tools, plan_delete(shop.tools, linked / shop.loaded.path.name))
    assert not shop.loaded.path.exists(), "a link on the way is none"


def test_delete_of_what_is_no_artifact(shop: Shop, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the artifact"):
        plan_delete(shop.tools, tmp_path / "absent.json")
    (tmp_path / "x.json").write_text(json.dumps({"format": 9}))
    with pytest.raises(InvalidDocument, match=r"x\.json"):
        plan_delete(shop.tools, tmp_path / "x.json")


def test_what_a_killed_capture_left_beside_its_descriptor_is_swept(shop: Shop, tmp_path: Path) -> None:
    dead = shop.loaded.path.with_name(f".{shop.loaded.path.name}.0123456789abcdef.partial")
    dead.write_bytes(b"half")
    other = tmp_path / ".else.json.0123456789abcdef.partial"
    other.write_bytes(b"not ours to judge")
    with stage_file(shop.loaded.path.parent, 4, stem=f".{shop.loaded.path.name}") as living:
        plan_now = plan_tidy(shop.tools)
        assert [item.path for item in plan_now.drafts] == [dead]
        assert dead in {item.path for item in plan_now.items}
        report = run_tidy(shop.tools, plan_now)
        assert dead in {item.path for item in report.removed}
        assert living.path.exists()
    assert not dead.exists()
    assert other.exists()
    assert shop.loaded.path.exists()
