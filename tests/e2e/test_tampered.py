"""Bytes that are not what they should be: found before they are used, or, where everything was made to fit, by the
answers. Each error has its class, names the file, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coldsnap.cli.exits import exit_code
from coldsnap.core.digest import Digest
from coldsnap.core.messages import Answer, AnswerBody, Answers, Verb, WakeReport
from coldsnap.core.selection import Provider
from coldsnap.errors import (
    AcceptanceFailed,
    ColdsnapError,
    IntegrityError,
    InvalidDocument,
    PayloadRejected,
    Refused,
    UnsafePath,
)
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.assembly import NATIVE_MANIFEST, capsule_folder
from coldsnap.ops.operation import operation
from coldsnap.ops.prepare import make_ready, wake_bodies
from coldsnap.ops.quarantine import clear_artifact
from coldsnap.ops.steps import attach_workers
from coldsnap.ops.verify import verify_artifact
from coldsnap.ops.workers import ask_all
from coldsnap.store.admission import record_path
from coldsnap.testing.repack import repack_with_change
from coldsnap.testing.stand import UNSEEN, Stand
from coldsnap.testing.tamper import changed, exported_of, flipped, forge

pytestmark = pytest.mark.criu


@pytest.fixture(autouse=True)
def _whole_again(stand: Stand) -> Iterator[None]:
    """The artifact's failures are forgotten after each test, and what was unpacked of it is thrown away before."""
    shutil.rmtree(prepared_of(stand), ignore_errors=True)
    yield
    clear_artifact(stand.tools, stand.loaded.digest)
    for path in stand.tools.state.quarantine.iterdir():
        path.unlink()


def prepared_of(stand: Stand) -> Path:
    return stand.tools.state.prepared / stand.loaded.capsule_digest("u0").hex


def blob_with(stand: Stand, member: str) -> tuple[Path, int]:
    """The layer of the capsule that holds ``member`` (a prefix), and the offset of the member's data in the middle."""
    blobs = capsule_folder(stand.tools, stand.loaded.capsule_digest("u0")) / "blobs" / "sha256"
    for path in blobs.iterdir():
        if path.read_bytes()[257:262] == b"ustar":
            with tarfile.open(path) as layer:
                for entry in layer:
                    if entry.name.startswith(member) and entry.size > 16:
                        return path, entry.offset_data + entry.size // 2
    raise AssertionError(f"no layer holds {member}")


def fails(stand: Stand, error: type[ColdsnapError], code: int, operation_id: str, **changes: Any) -> ColdsnapError:
    """A restore that must fail this way and leave nothing."""
    with pytest.raises(error) as caught:
        stand.restore(operation_id, **changes)
    assert exit_code(caught.value) == code
    stand.assert_nothing_left()
    return caught.value


# -- the pack -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("remembered", [True, False], ids=["with a record", "without"])
def test_a_truncated_pack(stand: Stand, remembered: bool) -> None:
    pack = stand.pack
    if not remembered:
        record_path(pack).unlink(missing_ok=True)
    with changed(pack, pack.read_bytes()[:-4096]):
        error = fails(stand, PayloadRejected, 5, f"truncated-{remembered}")
    assert isinstance(error, PayloadRejected)
    assert error.reason == "size_mismatch"
    assert str(pack) in str(error)


@pytest.mark.parametrize("remembered", [True, False], ids=["with a record", "without"])
def test_a_bit_flipped_in_the_pack(stand: Stand, remembered: bool) -> None:
    pack = stand.pack
    if not remembered:
        record_path(pack).unlink(missing_ok=True)
    with flipped(pack, 1_000_000):
        error = fails(stand, PayloadRejected, 5, f"flipped-{remembered}")
    assert isinstance(error, PayloadRejected)
    assert error.reason == "digest_mismatch"
    assert str(pack) in str(error)


def test_a_pack_that_is_a_link(stand: Stand, folder: Path) -> None:
    pack = stand.pack
    elsewhere = folder / "elsewhere.pack"
    pack.rename(elsewhere)
    pack.symlink_to(elsewhere)
    try:
        error = fails(stand, ColdsnapError, 5, "linked")
        assert isinstance(error, PayloadRejected | UnsafePath)
        assert str(pack) in str(error)
    finally:
        pack.unlink()
        elsewhere.rename(pack)


def test_a_damaged_pack_does_not_end_the_service_that_runs(stand: Stand, expected: tuple[Answer, ...]) -> None:
    stand.restore("runs-1")
    with flipped(stand.pack, 7), pytest.raises(PayloadRejected):
        stand.restore("runs-2")
    assert stand.ask(UNSEEN) == expected
    stand.assert_nothing_left(but_for=["svc"])


# -- the capsule --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "member", ["coldsnap/process/pages", "coldsnap/workers/w0/weights.blob", "coldsnap/index.json"]
)
def test_a_bit_flipped_in_a_layer_of_the_capsule(stand: Stand, member: str) -> None:
    blob, at = blob_with(stand, member)
    with flipped(blob, at):
        error = fails(stand, IntegrityError, 5, f"layer-{member.rpartition('/')[2]}")
        findings = [proof for proof in verify_artifact(stand.tools, stand.loaded) if proof.problems]
        assert findings, "verify says so as well"
    assert blob.name in str(error) or member.partition("/")[2] in str(error)
    assert not prepared_of(stand).exists()


@pytest.mark.parametrize("what", ["process image", "residual", "manifest"])
def test_a_prepared_file_that_was_touched_is_unpacked_again(
    stand: Stand, what: str, expected: tuple[Answer, ...]
) -> None:
    stand.prepare(f"touched-{what.split()[0]}-0")
    folder = prepared_of(stand)
    path = {
        "process image": next(iter(sorted((folder / "process").glob("pages-*.img")))),
        "residual": folder / "workers" / "w0" / "weights.blob",
        "manifest": folder / "workers" / "w0" / "native-manifest.json",
    }[what]
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    result = stand.restore(f"touched-{what.split()[0]}-1")
    assert not result.prepared_from_record
    assert path.read_bytes() == whole
    assert stand.ask(UNSEEN) == expected


def test_a_process_image_exchanged_in_capsule_and_preparation(stand: Stand, folder: Path) -> None:
    """Both places say the same and the descriptor does not: the descriptor is believed."""
    stand.prepare("exchange-0")
    prepared = prepared_of(stand)
    path = next(iter(sorted((prepared / "process").glob("pages-*.img"))))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    inside = str(path.relative_to(prepared))
    forged = forge(stand.tools, stand.loaded, prepared, folder / "a.json", files={inside: bytes(data)})
    document = json.loads((folder / "a.json").read_bytes())
    for binding in document["runtime"]["bindings"]:
        if binding["kind"] == "coldsnap-process-images":
            for entry in binding["files"]:
                if entry["path"] == inside:
                    entry["sha256"] = str(stand.loaded.expected_files("u0")[inside][1])
    forged.path.write_text(json.dumps(document))
    error = fails(stand, Refused, 3, "exchange-1", loaded=load_artifact(forged.path))
    assert isinstance(error, Refused)
    assert [problem.field for problem in error.problems] == [inside]


@pytest.mark.parametrize("role", ["residual", NATIVE_MANIFEST, "process images"])
def test_a_descriptor_that_leaves_a_file_out(stand: Stand, folder: Path, role: str) -> None:
    """What the capsule holds and nobody promises would be missed after the running service is gone."""
    stand.prepare(f"left-out-{role.split()[0]}-0")
    document = json.loads(stand.loaded.path.read_bytes())
    gone = {path for path in stand.loaded.expected_files("u0") if path.startswith("process/")}
    if role == "process images":
        document["runtime"]["bindings"] = [
            one for one in document["runtime"]["bindings"] if one["kind"] != "coldsnap-process-images"
        ]
    else:
        gone = {one["path"] for one in document["capsule"]["objects"] if one["role"] == role}
        document["capsule"]["objects"] = [one for one in document["capsule"]["objects"] if one["role"] != role]
    (folder / "less.json").write_text(json.dumps(document))
    error = fails(stand, Refused, 3, f"left-out-{role.split()[0]}-1", loaded=load_artifact(folder / "less.json"))
    assert isinstance(error, Refused)
    assert gone
    assert {problem.field for problem in error.problems} == gone
    stand.prepare(f"left-out-{role.split()[0]}-2")


# -- everything made to fit ---------------------------------------------------------------------------


def test_a_rehashed_pack_with_one_changed_tensor(stand: Stand, folder: Path, expected: tuple[Answer, ...]) -> None:
    """Every digest fits. Acceptance refuses it; and without acceptance the tokens are others."""
    stand.prepare("repack-0")
    exported = exported_of(stand.tools, stand.loaded, prepared_of(stand))
    repacked = repack_with_change(exported, folder / "repacked")
    assert repacked.sha256 != stand.result.pack_digests[0]
    shutil.copyfile(repacked.pack, stand.tools.store.path(repacked.sha256))
    stand.tools.store.path(repacked.sha256).chmod(0o600)
    entry = stand.loaded.worker_object("w0", NATIVE_MANIFEST)
    assert entry is not None
    forged = forge(
        stand.tools,
        stand.loaded,
        prepared_of(stand),
        folder / "a.json",
        files={entry.path: repacked.native_manifest.read_bytes()},
        pack=(repacked.sha256, repacked.bytes),
    )
    findings = [str(problem) for proof in verify_artifact(stand.tools, forged) for problem in proof.problems]
    assert len(findings) == 1, "the pack is whole; only the checkpoint's replay plan contradicts it"
    assert "pack and checkpoint would give other bytes" in findings[0]
    error = fails(stand, AcceptanceFailed, 7, "repack-1", loaded=forged, weights="native")
    assert "prompt 0" in str(error)
    assert "from token 0 on" in str(error)
    assert error.facts["expected_token_ids"] != error.facts["given_token_ids"]

    stand.restore("repack-2", loaded=forged, warm=True, weights="native")
    workers = attach_workers(stand.tools, stand.tools.services.must_load("svc"))
    request = stand.request("repack-3", forged, weights="native")
    with operation(stand.tools, request) as op:
        ready = make_ready(stand.tools, op, forged, request, provider=Provider.NATIVE, reason="a test")
        ask_all(workers, Verb.WAKE, wake_bodies(stand.tools, ready), WakeReport, deadline_s=60)
    given = workers[0].call(Verb.ANSWER, AnswerBody(prompts=UNSEEN), Answers, deadline_s=60).answers
    assert len(given) == len(expected)
    assert all(one != other for one, other in zip(given, expected, strict=True))


def test_a_gap_in_the_map_of_a_manifest(stand: Stand, folder: Path) -> None:
    stand.prepare("gap-0")
    entry = stand.loaded.worker_object("w0", NATIVE_MANIFEST)
    assert entry is not None
    document = json.loads((prepared_of(stand) / entry.path).read_bytes())
    lost = document["residual_extents"].pop()
    document["residual_bytes"] -= lost["size"]
    forged = forge(
        stand.tools,
        stand.loaded,
        prepared_of(stand),
        folder / "a.json",
        files={entry.path: (json.dumps(document, separators=(",", ":"), sort_keys=True) + "\n").encode()},
    )
    findings = [problem for proof in verify_artifact(stand.tools, forged) for problem in proof.problems]
    assert any(f"{lost['ptr']:#x}" in str(problem) for problem in findings), findings
    record_path(stand.pack).unlink(missing_ok=True)
    error = fails(stand, InvalidDocument, 2, "gap-1", loaded=forged)
    assert f"{lost['ptr']:#x}" in str(error)


# -- the descriptor -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda d: d.update(colour="red"), "colour"),
        (lambda d: d["launch"]["units"][0].update(image="registry.example/engine:latest"), "launch.units[0].image"),
        (lambda d: d.update(state="draft"), "state"),
        (lambda d: d["capsule"]["objects"][0].update(path="../../etc/passwd"), "capsule.objects[0].path"),
        (lambda d: d.update(format=8), "format"),
    ],
    ids=["unknown field", "mutable tag", "not committed", "a path that leaves", "another format"],
)
def test_a_descriptor_that_breaks_its_contract(stand: Stand, folder: Path, change: Any, field: str) -> None:
    document = json.loads(stand.loaded.path.read_bytes())
    change(document)
    path = folder / "a.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InvalidDocument) as caught:
        load_artifact(path)
    assert field in {problem.field for problem in caught.value.problems}
    assert str(path) in str(caught.value)
    assert exit_code(caught.value) == 2


def test_a_state_root_that_others_can_write(stand: Stand) -> None:
    root = stand.tools.state.path
    for place in (root, root / "model-payloads", root / "prepared"):
        place.chmod(0o777)
        try:
            error = fails(stand, UnsafePath, 4, f"open-{place.name}")
            assert str(place) in str(error)
            assert error.cure is not None
            assert "chmod go-w" in error.cure
        finally:
            place.chmod(0o700)


def test_the_stand_is_as_good_as_new(stand: Stand, expected: tuple[Answer, ...]) -> None:
    """The tests above put back what they damaged."""
    assert Digest.of(stand.pack.read_bytes()) == stand.result.pack_digests[0]
    stand.restore("whole-1")
    assert stand.ask(UNSEEN) == expected
    assert os.listdir(stand.tools.state.quarantine) == []  # noqa: PTH208
