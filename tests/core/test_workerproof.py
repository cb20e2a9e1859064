"""Two manifests of a worker: each complete, both of the same memory, and the ones the artifact means."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from coldsnap.core.digest import Digest
from coldsnap.core.workerproof import ExpectedWorker, WorkerProof, prove_worker
from coldsnap.testing.synthetic import SyntheticSpec, tensor_name, worker_manifests

SPEC = SyntheticSpec(num_units=1, workers_per_unit=2, num_extents=150)
MADE = worker_manifests(SPEC, "w1")
EXPECTED = ExpectedWorker(
    capture_id="capture-1",
    worker="w1",
    rank=1,
    pack=(MADE.pack_bytes, MADE.pack),
    residual=(MADE.residual_bytes, Digest.of(bytes(MADE.residual_bytes))),
    model_id="example-model",
    revision=str(Digest.of(b"model")),
)


def fields(proof: WorkerProof) -> list[str]:
    return [problem.field for problem in proof.problems]


def changed(data: bytes, **members: Any) -> bytes:
    return json.dumps({**json.loads(data), **members}, sort_keys=True, separators=(",", ":")).encode()


def test_what_belongs_together_is_proved_in_numbers() -> None:
    proof = prove_worker(MADE.native, MADE.recovery, EXPECTED)
    assert proof.problems == ()
    # Of 150 tensors, sizes 4096, 8192, 64, 1024 and 2048 thirty times each, number 0 and 100 are 16 bytes short.
    assert proof.model_bytes == 30 * (4096 + 8192 + 64 + 1024 + 2048) - 2 * 16
    assert proof.preserved_bytes == -(-(proof.model_bytes + 2 * 16 + 1) // 4096) * 4096
    assert proof.residual_bytes == proof.preserved_bytes - proof.model_bytes
    assert (proof.num_model_extents, proof.num_residual_extents) == (150, 3)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"capture_id": "capture-2"}, "capture_id"),
        ({"worker": "w0"}, "worker"),
        ({"rank": 0}, "rank"),
        ({"pack": None}, "model_weights"),
        ({"pack": (MADE.pack_bytes, Digest.of(b"other"))}, "model_weights"),
        ({"residual": (1, Digest.of(b""))}, "residual"),
        ({"model_id": "other"}, "model_source.model_id"),
        ({"revision": "other"}, "model_source.revision"),
    ],
)
def test_another_artifacts_manifests(change: dict[str, Any], field: str) -> None:
    proof = prove_worker(MADE.native, MADE.recovery, replace(EXPECTED, **change))
    worker = change.get("worker", "w1")
    assert f"worker/{worker}: {field}" in fields(proof)
    assert all(problem.value and problem.cure for problem in proof.problems)


def test_pack_and_checkpoint_must_give_the_same_bytes() -> None:
    twin = worker_manifests(replace(SPEC, changed={"w1": frozenset({5, 77})}), "w1")
    proof = prove_worker(MADE.native, twin.recovery, EXPECTED)
    assert len(proof.problems) == 2
    assert all("pack and checkpoint would give other bytes" in problem.message for problem in proof.problems)
    named = " ".join(str(problem.value) for problem in proof.problems)
    assert tensor_name(5) in named
    assert tensor_name(77) in named


def test_many_wrong_extents_are_counted() -> None:
    twin = worker_manifests(replace(SPEC, changed={"w1": frozenset(range(30))}), "w1")
    proof = prove_worker(MADE.native, twin.recovery, EXPECTED)
    assert len(proof.problems) == 21
    assert "10 more such extents" in proof.problems[-1].message


def test_another_memory_in_the_recovery_manifest() -> None:
    shorter = worker_manifests(replace(SPEC, num_extents=146), "w1")  # without one of 8192 bytes: two pages fewer
    proof = prove_worker(MADE.native, shorter.recovery, EXPECTED)
    assert {"worker/w1: entries", "worker/w1: residual_extents", "worker/w1: model extents"} <= set(fields(proof))


def test_a_gap_is_named_by_its_manifest_and_address() -> None:
    document = json.loads(MADE.native)
    gone = document["residual_extents"].pop(0)
    document["residual_bytes"] -= gone["size"]
    proof = prove_worker(json.dumps(document).encode(), MADE.recovery, EXPECTED)
    text = "\n".join(map(str, proof.problems))
    assert "worker/w1: native manifest: entries[0]" in text
    assert f"{gone['ptr']:#x}" in text
    assert proof.preserved_bytes == 0, "numbers of a cover that is not proved are worth nothing"


def test_both_manifests_are_looked_at_when_one_is_unreadable() -> None:
    proof = prove_worker(b"{", changed(MADE.recovery, rank=-1), EXPECTED)
    assert any(field.startswith("worker/w1: native manifest") for field in fields(proof))
    assert "worker/w1: recovery manifest: rank" in fields(proof)
