"""Artifacts of any size without a model: real descriptors, capsules and manifests, and no payload worth the name.

    made = make_synthetic(state, folder / "a.json", SyntheticSpec(num_units=8, workers_per_unit=8))

Every document is one that a capture could have written and passes every proof that needs no pack: capsules are
image layouts at the place their digest names, manifests are bound by them, the cover of every worker is complete.
Packs are named, sized as their extents demand, and absent unless ``payloads`` asks for real bytes. Equal specs give
equal bytes.

A worker's memory is one allocation of tensors that start at multiples of 64. Every hundredth is 16 bytes short of one,
which leaves a gap; gaps and the tail are residual, and all zeros. ``changed`` are the tensors whose bytes a fine-tuned
twin changed.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from coldsnap.capsule.image import PROCESS_IMAGE, RESIDUAL, CapsuleFile, CapsuleImage, write_capsule
from coldsnap.core.artifact import artifact_bytes, artifact_from
from coldsnap.core.digest import Digest
from coldsnap.core.extents import file_layout, padded, semantic_id
from coldsnap.core.objects import MODEL_PAYLOAD_ROLE, payload_path
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.assembly import NATIVE_MANIFEST, RECOVERY_MANIFEST, object_path
from coldsnap.store.documents import write_new
from coldsnap.store.payloads import PayloadStore
from coldsnap.store.staging import write_all
from coldsnap.store.stateroot import StateRoot
from coldsnap.testing.checkpoint import seeded_bytes
from coldsnap.testing.documents import artifact_example

__all__ = ["SyntheticSpec", "SyntheticWorker", "make_synthetic", "tensor_name", "worker_manifests"]

BASE_ADDRESS = 0x5000_0000_0000
_SIZES = (4096, 8192, 64, 1024, 2048)
_SHORT_EVERY, _SHORT_BYTES = 100, 16
_ALIGNMENT = 64
_SHARD_TENSORS = 1000
_ENGINE = "transformers"


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticSpec:
    """What to make.

    ``changed``: worker -> numbers of the tensors whose bytes are not the base model's. ``host_files`` are files of this
    machine that the processes of every unit are said to map. ``replicas``: every worker has the same model bytes.
    ``payloads``: digests are those of real bytes, and the packs are written; without, digests stand for nothing.
    """

    num_units: int = 1
    workers_per_unit: int = 1
    num_extents: int = 100
    num_images: int = 12
    image_bytes: int = 4096
    seed: int = 0
    capture_id: str = "capture-1"
    model: str = "/srv/models/synthetic"
    host_files: tuple[Path, ...] = ()
    replicas: bool = False
    payloads: bool = False
    changed: Mapping[str, frozenset[int]] = field(default_factory=dict)

    @property
    def workers(self) -> tuple[str, ...]:
        """Ids of all workers, in rank order."""
        return tuple(f"w{index}" for index in range(self.num_units * self.workers_per_unit))


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticWorker:
    """One worker's two manifests as bytes, the identity of the pack they name, and the size of the residual.

    ``payload`` is the pack itself, when the spec asks for payloads.
    """

    native: bytes
    recovery: bytes
    pack: Digest
    pack_bytes: int
    residual_bytes: int
    payload: bytes | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tensor:
    ptr: int
    size: int
    semantic_id: str
    sha256: str
    crc32: int
    number: int
    content: bytes


def tensor_name(number: int) -> str:
    """The name of a tensor."""
    return f"model.layers.{number // 10}.{number % 10}.weight"


def make_synthetic(state: StateRoot, path: Path, spec: SyntheticSpec) -> LoadedArtifact:
    """Write the capsules of ``spec`` into ``state`` (what is there already wins) and its descriptor to ``path``."""
    document = artifact_example(num_units=spec.num_units, workers_per_unit=spec.workers_per_unit)
    objects: list[dict[str, Any]] = []
    packs: list[dict[str, Any]] = []
    images: dict[str, CapsuleImage] = {}
    with TemporaryDirectory(prefix="synthetic-", dir=state.staging) as folder:
        for number in range(spec.num_units):
            unit = f"u{number}"
            mine = spec.workers[number * spec.workers_per_unit : (number + 1) * spec.workers_per_unit]
            files = _process_files(Path(folder), unit, spec)
            for worker in mine:
                made = worker_manifests(spec, worker)
                _write_pack(state, made)
                residual = bytes(made.residual_bytes)
                for role, data in (
                    (RESIDUAL, residual),
                    (NATIVE_MANIFEST, made.native),
                    (RECOVERY_MANIFEST, made.recovery),
                ):
                    source = Path(folder) / f"{worker}.{role}"
                    source.write_bytes(data)
                    owner, where = f"worker/{worker}", object_path(worker, role)
                    files.append(CapsuleFile(role=role, owner=owner, path=where, source=source))
                    objects.append(_object(role, owner, where, len(data), Digest.of(data)))
                packs.append(
                    _object(MODEL_PAYLOAD_ROLE, f"worker/{worker}", payload_path(made.pack), made.pack_bytes, made.pack)
                )
            images[unit] = _commit(state, Path(folder) / f"layout-{unit}", unit, files)
            for file in files:
                file.source.unlink()
    _fill_in(document, spec, images, objects, packs)
    write_new(path, artifact_bytes(artifact_from(document)))
    return load_artifact(path)


def worker_manifests(spec: SyntheticSpec, worker: str) -> SyntheticWorker:
    """A worker's manifests: canonical, complete, and of tensors whose digests depend on seed, worker and number."""
    changed = spec.changed.get(worker, frozenset())
    tensors: list[_Tensor] = []
    cursor = BASE_ADDRESS
    for number in range(spec.num_extents):
        size = _SIZES[number % len(_SIZES)] - (_SHORT_BYTES if number % _SHORT_EVERY == 0 else 0)
        origin = f"{spec.seed}:{'' if spec.replicas else worker}:{number}" + (":changed" if number in changed else "")
        content = seeded_bytes(spec.seed, origin, size) if spec.payloads else b""
        digest = sha256(content or origin.encode()).hexdigest()
        tensors.append(
            _Tensor(
                ptr=cursor,
                size=size,
                semantic_id=semantic_id([(tensor_name(number), 0, size)]),
                sha256=digest,
                crc32=zlib.crc32(content) if content else int(digest[:8], 16),
                number=number,
                content=content,
            )
        )
        cursor += -(-size // _ALIGNMENT) * _ALIGNMENT
    total = padded(cursor - BASE_ADDRESS + 1)  # the tail is never empty
    residual = _residual(tensors, BASE_ADDRESS + total)
    ordered = sorted(tensors, key=lambda one: (one.sha256, one.size, one.semantic_id, one.ptr))
    layout = file_layout(one.size for one in ordered)
    payload = b"".join(one.content.ljust(padded(one.size), b"\0") for one in ordered) if spec.payloads else None
    whose = "all" if spec.replicas else worker
    pack = Digest.of(payload or f"pack of {spec.seed} {spec.num_extents} {whose} {sorted(changed)}".encode())
    common = _common(spec, worker, total, sum(one.size for one in tensors), residual)
    native = common | {
        "kind": "coldsnap-native-manifest",
        "model_weights": {"name": "model-weights.pack", "bytes": layout.bytes, "sha256": str(pack)},
        "model_weight_extents": [
            {
                "ptr": one.ptr,
                "size": one.size,
                "allocation_ptr": BASE_ADDRESS,
                "semantic_id": one.semantic_id,
                "sha256": f"sha256:{one.sha256}",
                "offset": offset,
                "crc32": one.crc32,
            }
            for one, offset in zip(ordered, layout.offsets, strict=True)
        ],
    }
    recovery = common | {
        "kind": "coldsnap-recovery-manifest",
        "model_source": {
            "model_id": "example-model",
            "revision": str(Digest.of(b"model")),
            "metadata_sha256": str(Digest.of(b"headers")),
        },
        "replay_plan": [_replay(one) for one in tensors],
    }
    return SyntheticWorker(
        native=_json(native),
        recovery=_json(recovery),
        pack=pack,
        pack_bytes=layout.bytes,
        residual_bytes=common["residual"]["bytes"],
        payload=payload,
    )


def _write_pack(state: StateRoot, made: SyntheticWorker) -> None:
    store = PayloadStore(state)
    if made.payload is not None and not store.exists(made.pack):
        with store.stage(made.pack_bytes) as staged:
            write_all(staged.fd, made.payload, 0)
            store.commit(staged, made.pack)


def _residual(tensors: list[_Tensor], end: int) -> list[dict[str, Any]]:
    starts = [*(one.ptr for one in tensors), end]
    gaps = [(one.ptr + one.size, after) for one, after in zip(tensors, starts[1:], strict=True)]
    sizes = [(start, after - start) for start, after in gaps if after > start]
    offsets = file_layout(size for _, size in sizes).offsets
    return [
        {
            "ptr": start,
            "size": size,
            "allocation_ptr": BASE_ADDRESS,
            "offset": offset,
            "crc32": zlib.crc32(bytes(size)),
        }
        for (start, size), offset in zip(sizes, offsets, strict=True)
    ]


def _common(
    spec: SyntheticSpec, worker: str, total: int, model_bytes: int, residual: list[dict[str, Any]]
) -> dict[str, Any]:
    size = residual[-1]["offset"] + padded(residual[-1]["size"])
    blob = {"name": "weights.blob", "bytes": size, "sha256": str(Digest.of(bytes(size)))}
    return {
        "format": 1,
        "capture_id": spec.capture_id,
        "worker": worker,
        "rank": spec.workers.index(worker),
        "preserved_bytes": total,
        "model_weight_bytes": model_bytes,
        "residual_bytes": total - model_bytes,
        "entries": [{"ptr": BASE_ADDRESS, "size": total, "tag": "weights"}],
        "residual_extents": residual,
        "residual": blob,
    }


def _replay(one: _Tensor) -> dict[str, Any]:
    piece = {
        "file": f"model-{one.number // _SHARD_TENSORS:05d}.safetensors",
        "tensor": tensor_name(one.number),
        "file_offset": 8 + (one.number % _SHARD_TENSORS) * max(_SIZES),
        "tensor_offset": 0,
        "extent_offset": 0,
        "size": one.size,
    }
    return {
        "semantic_id": one.semantic_id,
        "sha256": f"sha256:{one.sha256}",
        "ptr": one.ptr,
        "size": one.size,
        "pieces": [piece],
    }


def _process_files(folder: Path, unit: str, spec: SyntheticSpec) -> list[CapsuleFile]:
    files = []
    for number in range(spec.num_images):
        source = folder / f"{unit}-{number}.img"
        source.write_bytes(sha256(f"{spec.seed}:{unit}:{number}".encode()).digest() * (spec.image_bytes // 32))
        where = f"process/core-{number}.img"
        files.append(CapsuleFile(role=PROCESS_IMAGE, owner=f"unit/{unit}", path=where, source=source))
    return files


def _commit(state: StateRoot, layout: Path, unit: str, files: list[CapsuleFile]) -> CapsuleImage:
    image = write_capsule(layout, unit=unit, files=files, annotations={}, machine="x86_64")
    final = state.capsules / image.digest.hex
    if not final.exists():
        layout.rename(final)
    return image


def _fill_in(
    document: dict[str, Any],
    spec: SyntheticSpec,
    images: Mapping[str, CapsuleImage],
    objects: list[dict[str, Any]],
    packs: list[dict[str, Any]],
) -> None:
    launch = document["launch"]
    launch["engine"] = _ENGINE
    for unit in launch["units"]:
        unit["host"] = "local"
        unit["command"] = [sys.executable, "-m", "coldsnap.engines.transformers", "--model", spec.model]
        unit["command"] += ["--host", "127.0.0.1", "--port", "8000"]
    for record in document["capsule"]["images"]:
        image = images[record["unit"]]
        record |= {"reference": image.reference, "digest": str(image.digest), "root": image.root}
    document["capture_id"] = spec.capture_id
    document["capsule"]["objects"] = objects
    document["weights"]["model_payloads"]["objects"] = packs
    document["weights"]["recovery"]["replay_plan"] = [one for one in objects if one["role"] == RECOVERY_MANIFEST]
    mapped = [
        {"path": str(path), "bytes": path.stat().st_size, "sha256": str(Digest.of(path.read_bytes()))}
        for path in spec.host_files
    ]
    document["runtime"]["bindings"] = [
        *document["runtime"]["bindings"],
        *(
            {
                "kind": "coldsnap-process-images",
                "unit": unit,
                "files": [{"path": f.path, "bytes": f.bytes, "sha256": str(f.sha256)} for f in image.process_files],
            }
            for unit, image in images.items()
        ),
        *({"kind": "coldsnap-host-files", "unit": unit, "files": mapped} for unit in images if mapped),
    ]


def _object(role: str, owner: str, path: str, size: int, digest: Digest) -> dict[str, Any]:
    return {"role": role, "owner": owner, "path": path, "bytes": size, "sha256": str(digest)}


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"
