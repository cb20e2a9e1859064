"""From what a capture gathered to its capsules and its artifact document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coldsnap.capsule.driver import DumpReport
from coldsnap.capsule.hygiene import HygieneReport
from coldsnap.capsule.image import CACHE_SEED, PROCESS_IMAGE, RESIDUAL, CapsuleFile, CapsuleImage, write_capsule
from coldsnap.core.artifact import MODEL_PAYLOAD_ROLE, SnapshotArtifact, artifact_from, payload_path
from coldsnap.core.bindings import CudaStateBinding, HostFile
from coldsnap.core.compat import HostFacts
from coldsnap.core.digest import Digest
from coldsnap.core.drivers import DRIVERS, DriverId, required_features
from coldsnap.core.messages import Answer, Exported, ExportedFile, Prompt
from coldsnap.core.owners import Owner
from coldsnap.core.points import reached
from coldsnap.core.request import OperationRequest, request_document, request_sha256
from coldsnap.ops.places import NATIVE_MANIFEST, RECOVERY_MANIFEST, object_path
from coldsnap.ops.tools import Tools
from coldsnap.store.staging import sync_folder

__all__ = [
    "NATIVE_MANIFEST",
    "RECOVERY_MANIFEST",
    "Captured",
    "assemble",
    "capsule_folder",
    "commit_capsule",
    "object_path",
]

PROCESS_FOLDER = "process"
LOAD_PATH = "stable-allocations"


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """Everything a capture gathered before it writes its capsules. Keyed by worker or unit id."""

    request: OperationRequest
    prompts: tuple[Prompt, ...]
    answers: tuple[Answer, ...]
    exported: Mapping[str, Exported]
    dumps: Mapping[str, DumpReport]
    hygiene: Mapping[str, HygieneReport]
    host_files: Mapping[str, tuple[HostFile, ...]]
    facts: Mapping[str, HostFacts]
    seeds: Mapping[str, tuple[CapsuleFile, ...]]
    cuda: Mapping[str, CudaStateBinding] = field(default_factory=dict)


def commit_capsule(tools: Tools, captured: Captured, unit: str, scratch: Path) -> CapsuleImage:
    """Write one unit's capsule aside and move it to the place its digest names. An equal one that is there wins."""
    files = [
        CapsuleFile(
            role=PROCESS_IMAGE,
            owner=Owner.parse(f"unit/{unit}"),
            path=f"{PROCESS_FOLDER}/{file.name}",
            source=captured.dumps[unit].images_dir / file.name,
        )
        for file in captured.dumps[unit].files
    ]
    for worker in captured.request.launch.execution.workers:
        if worker.unit == unit:
            files.extend(_worker_files(worker.id, captured.exported[worker.id]))
    files.extend(captured.seeds[unit])
    total = sum(file.source.stat().st_size for file in files)
    with tools.reporter.phase(f"write capsule {unit}", total_bytes=total) as advance:
        image = write_capsule(
            scratch / f"capsule-{unit}",
            unit=unit,
            files=files,
            annotations={"org.opencontainers.image.title": captured.request.launch.model.id},
            progress=advance,
        )
    final = capsule_folder(tools, image.digest)
    if not final.exists():
        (scratch / f"capsule-{unit}").rename(final)
        sync_folder(final.parent)
    reached("capsule.placed")
    return image


def capsule_folder(tools: Tools, digest: Digest) -> Path:
    """The image layout of a capsule on this host: derived from its digest and nothing else."""
    return tools.state.capsules / digest.hex


def assemble(captured: Captured, images: Mapping[str, CapsuleImage]) -> SnapshotArtifact:
    """The artifact document. It is checked by the same rules as one that is read."""
    request = captured.request
    driver = request.snapshot_driver.id
    contract = DRIVERS[driver]
    execution = request.launch.execution
    objects = [
        _object(role, f"worker/{worker.id}", object_path(worker.id, role), file)
        for worker in execution.workers
        for role, file in _roles(captured.exported[worker.id])
    ]
    for unit, image in images.items():
        objects += [
            {"role": f.role, "owner": f"unit/{unit}", "path": f.path, "bytes": f.bytes, "sha256": str(f.sha256)}
            for f in image.objects
            if f.role == CACHE_SEED
        ]
    replay = [entry for entry in objects if entry["role"] == RECOVERY_MANIFEST]
    weights: dict[str, Any] = {
        "recovery": {
            "source": "huggingface-safetensors",
            "model_id": request.launch.model.id,
            "revision": request.launch.model.revision,
            "snapshot_driver": driver.value,
            "load_path": LOAD_PATH,
            "replay_plan": replay,
        }
    }
    packs = {worker.id: captured.exported[worker.id].pack for worker in execution.workers}
    if all(pack is not None for pack in packs.values()):
        weights["model_payloads"] = {
            "objects": [
                _object(MODEL_PAYLOAD_ROLE, f"worker/{worker}", payload_path(pack.sha256), pack)
                for worker, pack in packs.items()
                if pack is not None
            ]
        }
        weights["native"] = {"snapshot_driver": driver.value}
    document = {
        "format": 9,
        "kind": "coldsnap-snapshot-artifact",
        "state": "committed",
        "capture_id": request.id,
        "request_sha256": str(request_sha256(request)),
        "snapshot_driver": {
            "id": driver.value,
            "abi": contract.abi,
            "capture_boundary": contract.capture_boundary,
            "minimum_nvidia_driver_major": contract.minimum_nvidia_driver_major,
            "base_requirements": list(contract.base_features),
        },
        "requires": {"features": list(required_features(driver, execution))},
        "launch": _launch(request),
        "compatibility": {
            "policy": "placement-independent-v1",
            "units": [_compatibility(unit.id, captured.facts[unit.id], driver) for unit in request.launch.units],
        },
        "capsule": {
            "images": [
                {
                    "unit": unit.id,
                    "reference": images[unit.id].reference,
                    "digest": str(images[unit.id].digest),
                    "root": images[unit.id].root,
                    "snapshot_driver": driver.value,
                }
                for unit in request.launch.units
            ],
            "objects": objects,
        },
        "runtime": {"bindings": _bindings(captured, images)},
        "graph": {"policy": request.policy.process.graph_policy.value},
        "weights": weights,
        "acceptance": {
            "health_path": request.validation.health_path,
            "prompt": captured.prompts[0].text,
            "expected": captured.answers[0].text,
        },
    }
    return artifact_from(document)


def _launch(request: OperationRequest) -> dict[str, Any]:
    """The request's launch without the variables whose values are allowed secrets: those are in the image alone."""
    launch: dict[str, Any] = request_document(request)["launch"]
    allowed = request.extension.allow_secrets if request.extension is not None else ()
    for unit in launch["units"]:
        unit["environment"] = {name: value for name, value in unit["environment"].items() if name not in allowed}
    return launch


def _worker_files(worker: str, exported: Exported) -> list[CapsuleFile]:
    return [
        CapsuleFile(
            role=role,
            owner=Owner.parse(f"worker/{worker}"),
            path=object_path(worker, role),
            source=Path(file.path),
            bytes=file.bytes,
            sha256=file.sha256,
        )
        for role, file in _roles(exported)
    ]


def _roles(exported: Exported) -> list[tuple[str, ExportedFile]]:
    files = [(NATIVE_MANIFEST, exported.native_manifest), (RECOVERY_MANIFEST, exported.recovery_manifest)]
    return [(RESIDUAL, exported.residual), *files] if exported.residual is not None else files


def _object(role: str, owner: str, path: str, file: ExportedFile) -> dict[str, Any]:
    return {"role": role, "owner": owner, "path": path, "bytes": file.bytes, "sha256": str(file.sha256)}


def _compatibility(unit: str, facts: HostFacts, driver: DriverId) -> dict[str, Any]:
    machine = {"unit": unit, "architecture": facts.architecture, "kernel": facts.kernel}
    if driver is DriverId.HOST:
        return {**machine, "devices": []}
    devices = [
        {"slot": one.slot, "gpu_name": one.gpu_name, "compute_capability": one.compute_capability}
        for one in facts.devices
    ]
    return {
        **machine,
        "nvidia_driver_captured": facts.nvidia_driver,
        "nvidia_driver_min": str(DRIVERS[driver].minimum_nvidia_driver_major),
        "cuda_userspace": facts.cuda_userspace,
        "devices": devices,
    }


def _bindings(captured: Captured, images: Mapping[str, CapsuleImage]) -> list[dict[str, Any]]:
    bindings: list[dict[str, Any]] = [
        {
            "kind": "coldsnap-acceptance",
            "answers": [
                {
                    "prompt": prompt.text,
                    "max_tokens": prompt.max_tokens,
                    "token_ids": list(answer.token_ids),
                    "text": answer.text,
                }
                for prompt, answer in zip(captured.prompts, captured.answers, strict=True)
            ],
        }
    ]
    if captured.request.workload.cluster_id:
        bindings.append({"kind": "coldsnap-service", "name": captured.request.workload.cluster_id})
    if captured.request.extension is not None and captured.request.extension.cold_start:
        bindings.append({"kind": "coldsnap-fallback", "cold_start": True})
    if captured.request.extension is not None and captured.request.extension.stage:
        bindings.append({"kind": "coldsnap-staging", "stage": True})
    for unit, image in images.items():
        files = [{"path": f.path, "bytes": f.bytes, "sha256": str(f.sha256)} for f in image.process_files]
        report = captured.hygiene[unit]
        bindings += [
            {"kind": "coldsnap-process-images", "unit": unit, "files": files},
            report.binding(unit).model_dump(mode="json"),
            {
                "kind": "coldsnap-host-files",
                "unit": unit,
                "files": [file.model_dump(mode="json", exclude_none=True) for file in captured.host_files[unit]],
            },
            {"kind": "coldsnap-cpu", "unit": unit, "flags": sorted(captured.facts[unit].cpu_flags)},
        ]
        if captured.request.runtime is not None:
            bindings.append({"kind": "coldsnap-container", "unit": unit, "runtime": captured.request.runtime.value})
        if unit in captured.cuda:
            bindings.append(captured.cuda[unit].model_dump(mode="json"))
    for worker, exported in captured.exported.items():
        bindings.append(
            {
                "kind": "coldsnap-worker-export",
                "worker": worker,
                "model_bytes": exported.model_bytes,
                "residual_bytes": exported.residual_bytes,
                "residual_reasons": dict(exported.residual_reasons),
                "num_model_extents": exported.num_model_extents,
                "pack_shared": exported.pack_shared,
            }
        )
    return bindings
