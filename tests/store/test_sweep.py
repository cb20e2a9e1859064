"""The sweep: what is garbage, what is not, and what happens when the world moves between plan and deed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coldsnap.core.digest import Digest
from coldsnap.errors import InvalidDocument, ResourceBusy
from coldsnap.store import garbage
from coldsnap.store.locks import hold
from coldsnap.store.pack import PackSource, WrittenPack, write_pack
from coldsnap.store.payloads import PayloadStore
from coldsnap.store.staging import leftovers, stage_file
from coldsnap.store.stateroot import StateRoot
from coldsnap.store.sweep import GcPlan, References, plan_gc, run_gc

Fork = Callable[[Callable[[], object]], Any]
MakeSource = Callable[[int, bytes, str], PackSource]


@pytest.fixture
def pack(store: PayloadStore, make_source: MakeSource) -> WrittenPack:
    return write_pack(store, [make_source(0, b"a" * 5000, "a")])


def artifact(*packs: Digest, capsules: tuple[Digest, ...] = ()) -> References:
    return References(label="artifact a.json", packs=frozenset(packs), capsules=frozenset(capsules))


def kinds(plan: GcPlan) -> list[str]:
    return sorted(item.kind for item in plan.items)


class TestPlan:
    def test_an_empty_root_has_no_garbage(self, root: StateRoot) -> None:
        plan = plan_gc(root, list)
        assert plan.items == ()
        assert plan.bytes == 0

    def test_a_referenced_pack_stays(self, root: StateRoot, pack: WrittenPack) -> None:
        references = artifact(pack.digest)
        plan = plan_gc(root, lambda: [references])
        assert plan.items == ()
        assert plan.kept == (references,)

    def test_an_unreferenced_pack_goes_with_the_bytes_it_frees(self, root: StateRoot, pack: WrittenPack) -> None:
        plan = plan_gc(root, lambda: [artifact(Digest.of(b"other"))])
        (item,) = plan.items
        assert (item.kind, item.path, item.bytes) == ("pack", pack.path, 8192)
        assert item.reason == "no artifact or service names it"

    def test_planning_changes_nothing(self, root: StateRoot, pack: WrittenPack) -> None:
        before = sorted(root.path.rglob("*"))
        plan_gc(root, list)
        assert sorted(set(root.path.rglob("*")) - {root.locks / "in-use.lock"}) == before

    def test_what_another_sweep_takes_away_meanwhile_is_no_trouble(
        self, root: StateRoot, pack: WrittenPack, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A plan is made while others work: what it has listed may be gone when it looks closer."""
        for folder in (root.capsules, root.prepared):
            (folder / ("f" * 64)).mkdir()
            (folder / ("f" * 64) / "file").write_bytes(b"x" * 5000)
            (folder / f".{'e' * 64}.partial").mkdir()
        (root.staging / "pack.0123.partial").write_bytes(b"half")
        (root.quarantine / "bad").write_bytes(b"bad")
        (root.locks / f"{'d' * 64}.lock").touch()
        before = kinds(plan_gc(root, list))
        assert before == ["capsule", "lock", "pack", "partial", "partial", "partial", "prepared", "quarantine"]

        def empty(folder: Path, found: Any) -> Any:
            for path in folder.iterdir():
                if path.name != "in-use.lock":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            return found

        names = garbage._names
        monkeypatch.setattr(garbage, "_names", lambda folder: empty(folder, names(folder)))
        monkeypatch.setattr(garbage, "leftovers", lambda folder: empty(root.staging, leftovers(folder)))
        plan = plan_gc(root, list)
        assert plan.bytes == 0
        report = run_gc(plan)
        assert report.removed == ()

    def test_a_record_without_its_pack_goes(self, root: StateRoot, pack: WrittenPack) -> None:
        pack.path.unlink()
        assert kinds(plan_gc(root, lambda: [artifact(pack.digest)])) == ["lock", "record"]

    def test_leftovers_of_the_dead_go_everywhere_and_those_of_the_living_stay(
        self, root: StateRoot, fork: Fork
    ) -> None:
        for folder in (root.path, root.staging, root.payloads, root.services, root.receipts):
            (folder / ".x.0123456789abcdef.partial").write_bytes(b"x")
        with stage_file(root.staging, 4096):
            assert kinds(plan_gc(root, list)) == ["partial"] * 5

    def test_quarantined_objects_go(self, root: StateRoot) -> None:
        (root.quarantine / "x.pack.0").write_bytes(b"x")
        (root.quarantine / "dangling.pack.0").symlink_to("nowhere")
        assert kinds(plan_gc(root, list)) == ["quarantine", "quarantine"]

    @pytest.mark.parametrize(("kind", "name"), [("capsule", "capsules"), ("prepared", "prepared")])
    def test_capsules_and_prepared_ones(self, root: StateRoot, kind: str, name: str) -> None:
        used, unused = Digest.of(b"used"), Digest.of(b"unused")
        folder = root.path / name
        for digest in (used, unused):
            (folder / digest.hex / "deep").mkdir(parents=True)
            (folder / digest.hex / "deep" / "file").write_bytes(b"x" * 5000)
        (folder / f".{used.hex}.0123456789abcdef.partial").mkdir()
        (folder / "in-use.lock").write_bytes(b"")
        plan = plan_gc(root, lambda: [artifact(capsules=(used,))])
        assert [(item.kind, item.path.name) for item in plan.items] == [
            ("partial", f".{used.hex}.0123456789abcdef.partial"),
            (kind, unused.hex),
        ]
        assert plan.items[1].bytes == 8192

    def test_a_half_unpacked_folder_may_belong_to_a_running_operation(self, root: StateRoot) -> None:
        (root.prepared / ".x.partial").mkdir()
        with root.in_use():
            assert plan_gc(root, list).items == ()
        assert kinds(plan_gc(root, list)) == ["partial"]

    def test_lock_files_of_absent_packs_go(self, root: StateRoot, store: PayloadStore, pack: WrittenPack) -> None:
        with store.lock(Digest.of(b"absent")):
            pass
        assert kinds(plan_gc(root, lambda: [artifact(pack.digest)])) == ["lock"]

    @pytest.mark.parametrize(
        ("name", "there"),
        [
            (f"{'a' * 64}.lock", f"model-payloads/sha256/{'a' * 64}.pack"),
            (f"{'a' * 64}.writer.lock", f"model-payloads/sha256/{'a' * 64}.pack"),
            (f"capsule-{'a' * 64}.lock", f"capsules/{'a' * 64}"),
            (f"prepared-{'a' * 64}.lock", f"prepared/{'a' * 64}"),
            (f"failures-{'a' * 64}.lock", f"failures/{'a' * 64}.json"),
            (f"root-{'a' * 64}.lock", f"roots/{'a' * 64}"),
            (f"publish-{'a' * 32}.lock", None),
        ],
    )
    def test_a_lock_goes_when_what_it_guards_is_not_here_and_nobody_holds_it(
        self, root: StateRoot, name: str, there: str | None
    ) -> None:
        path = root.locks / name
        with hold(path, deadline_s=0.0, purpose="a test"):
            assert plan_gc(root, list).items == ()
        (item,) = plan_gc(root, list).items
        assert (item.kind, item.path) == ("lock", path)
        plan = plan_gc(root, list)
        with hold(path, deadline_s=0.0, purpose="a test"):
            assert run_gc(plan).removed == ()
        assert path.exists()
        if there is not None:
            root.make_roots()
            (root.path / there).mkdir()
            assert "lock" not in kinds(plan_gc(root, list))
            (root.path / there).rmdir()
        run_gc(plan_gc(root, list))
        assert not path.exists()

    @pytest.mark.parametrize("name", ["other-" + "a" * 64 + ".lock", "publish-x.lock", "in-use.lock"])
    def test_other_locks_stay(self, root: StateRoot, name: str) -> None:
        (root.locks / name).write_bytes(b"")
        assert plan_gc(root, list).items == ()

    def test_a_lock_that_is_a_link_is_left_alone(self, root: StateRoot, tmp_path: Path) -> None:
        (root.locks / f"publish-{'a' * 32}.lock").symlink_to(tmp_path)
        assert plan_gc(root, list).items == ()

    def test_a_capsule_takes_its_locks_along(self, root: StateRoot) -> None:
        for kind, folder in (("capsule", root.capsules), ("prepared", root.prepared)):
            (folder / ("a" * 64)).mkdir()
            with hold(root.locks / f"{kind}-{'a' * 64}.lock", deadline_s=0.0, purpose="a test"):
                pass
        run_gc(plan_gc(root, list))
        assert [one.name for one in root.locks.iterdir()] == ["in-use.lock"]

    def test_unfinished_uploads_go_when_nobody_publishes(self, root: StateRoot) -> None:
        path = root.staging / f"upload-{'a' * 32}.json"
        path.write_bytes(b"{}")
        with root.in_use():
            assert plan_gc(root, list).items == ()
        assert kinds(plan_gc(root, list)) == ["upload"]
        run_gc(plan_gc(root, list))
        assert not path.exists()

    def test_names_that_are_not_ours_are_reported_and_never_touched(self, root: StateRoot) -> None:
        strange = [root.payloads / "notes.txt", root.payloads / f"{'A' * 64}.pack", root.prepared / "mine"]
        for path in strange[:2]:
            path.write_bytes(b"x")
        strange[2].mkdir()
        plan = plan_gc(root, list)
        assert plan.items == ()
        assert set(plan.unknown) == set(strange)
        run_gc(plan)
        assert all(path.exists() for path in strange)

    def test_an_artifact_that_cannot_be_read_stops_the_plan(self, root: StateRoot, pack: WrittenPack) -> None:
        def broken() -> list[References]:
            raise InvalidDocument("artifact", [])

        with pytest.raises(InvalidDocument):
            plan_gc(root, broken)
        assert pack.path.exists()


class TestRun:
    def test_removes_what_was_planned_and_counts_it(self, root: StateRoot, pack: WrittenPack) -> None:
        (root.staging / ".x.partial").write_bytes(b"x")
        (root.quarantine / "x.pack.0").write_bytes(b"x")
        (root.prepared / ("0" * 64)).mkdir()
        plan = plan_gc(root, list)
        report = run_gc(plan)
        assert report.spared == ()
        assert set(report.removed) == set(plan.items)
        assert report.freed_bytes == plan.bytes == 8192 + 4096 + 4096
        assert [one.name for one in root.path.rglob("*") if one.is_file()] == ["in-use.lock"]

    def test_what_was_referenced_meanwhile_is_spared(self, root: StateRoot, pack: WrittenPack) -> None:
        references: list[References] = []
        plan = plan_gc(root, lambda: references)
        assert kinds(plan) == ["pack"]
        references.append(artifact(pack.digest))  # a capture shared the pack and committed its artifact
        report = run_gc(plan)
        assert report.removed == ()
        assert [reason for _, reason in report.spared] == ["it is in use now, or gone already"]
        assert pack.path.exists()

    def test_what_became_garbage_after_the_plan_is_not_removed(
        self, root: StateRoot, store: PayloadStore, make_source: MakeSource
    ) -> None:
        plan = plan_gc(root, list)
        pack = write_pack(store, [make_source(0, b"a", "a")])
        assert run_gc(plan).removed == ()
        assert pack.path.exists()

    def test_is_refused_while_an_operation_runs(self, root: StateRoot, pack: WrittenPack) -> None:
        plan = plan_gc(root, list)
        with root.in_use(), pytest.raises(ResourceBusy):
            run_gc(plan)
        assert pack.path.exists()

    def test_a_pack_somebody_works_on_is_spared(self, root: StateRoot, store: PayloadStore, pack: WrittenPack) -> None:
        plan = plan_gc(root, list)
        with store.lock(pack.digest):
            report = run_gc(plan)
        assert [reason for _, reason in report.spared] == ["somebody is working on it"]
        assert pack.path.exists()

    def test_a_lock_somebody_holds_is_spared(self, root: StateRoot, store: PayloadStore) -> None:
        digest = Digest.of(b"coming")
        with store.lock(digest):
            report = run_gc(plan_gc(root, list))
            assert report.removed == ()
            assert (root.locks / f"{digest.hex}.lock").exists()

    def test_what_cannot_be_removed_is_spared_with_the_reason(
        self, root: StateRoot, pack: WrittenPack, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (root.quarantine / "x.pack.0").write_bytes(b"x")
        plan = plan_gc(root, list)
        real = os.unlink

        def stubborn(path: Any, **keywords: Any) -> None:
            if Path(path).name == "x.pack.0":
                raise OSError(1, "Operation not permitted")
            real(path, **keywords)

        monkeypatch.setattr(os, "unlink", stubborn)
        report = run_gc(plan)
        assert [item.kind for item in report.removed] == ["pack"]
        assert "Operation not permitted" in report.spared[0][1]

    def test_a_prepared_folder_has_no_name_while_it_goes(
        self, root: StateRoot, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = root.prepared / ("0" * 64)
        folder.mkdir()
        (folder / "file").write_bytes(b"x")
        seen: list[bool] = []
        real = os.unlink

        def look(path: Any, **keywords: Any) -> None:
            seen.append(folder.exists())
            real(path, **keywords)

        monkeypatch.setattr(os, "unlink", look)
        run_gc(plan_gc(root, list))
        assert seen == [False]
        assert list(root.prepared.iterdir()) == []
