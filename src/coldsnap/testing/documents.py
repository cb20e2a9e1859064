"""Example documents as plain values, for tests that need a whole, valid one to change a little.

    document = request_example()
    document["launch"]["units"][0]["index"] = 1
    with pytest.raises(InvalidDocument): request_from(document)

Every call returns new values. They are documents of one host-driver unit with one worker unless more is asked for.
"""

from __future__ import annotations

from typing import Any

from coldsnap.core.artifact import artifact_digest, artifact_document, artifact_from
from coldsnap.core.canonical import canonical_sha256
from coldsnap.core.digest import Digest
from coldsnap.core.drivers import DRIVERS, DriverId, required_features
from coldsnap.core.objects import MODEL_PAYLOAD_ROLE, payload_path
from coldsnap.core.request import OperationRequest, request_document, request_from, request_sha256

__all__ = [
    "artifact_example",
    "digest_of",
    "launch_example",
    "overlay_example",
    "receipt_example",
    "request_example",
    "timing_example",
]

Document = dict[str, Any]


def digest_of(name: str) -> str:
    """A digest that tells examples apart."""
    return str(Digest.of(name.encode()))


def launch_example(*, num_units: int = 1, workers_per_unit: int = 1, driver: str = "host") -> Document:
    """Units ``u0..`` on hosts ``node-0..`` with workers ``w0..`` in one world group and one service."""
    on_host = driver == "host"
    names = [f"w{index}" for index in range(num_units * workers_per_unit)]
    payload = {"world_size": len(names)}
    return {
        "engine": "transformers",
        "model": {"id": "example-model", "revision": digest_of("model"), "source": "local"},
        "units": [
            {
                "id": f"u{index}",
                "index": index,
                "host": f"node-{index}",
                "devices": [] if on_host else [f"GPU-{slot}" for slot in range(workers_per_unit)],
                "image": "host" if on_host else f"registry.example/engine@{digest_of('image')}",
                **({} if on_host else {"image_digest": digest_of("image")}),
                "command": ["python", "-m", "engine", "--port", "8000"],
                "environment": {"LANG": "C.UTF-8"},
                "mounts": [{"source": "/srv/models", "target": "/models", "read_only": True}],
            }
            for index in range(num_units)
        ],
        "execution": {
            "workers": [
                {
                    "id": name,
                    "unit": f"u{index // workers_per_unit}",
                    "service": "s0",
                    "process_slot": index % workers_per_unit,
                    "device_slots": [] if on_host else [index % workers_per_unit],
                }
                for index, name in enumerate(names)
            ],
            "groups": [{"id": "world", "kind": "transformers:world", "service": "s0", "members": names}],
            "services": [{"id": "s0", "role": "engine", "workers": names}],
            "adapter": {"schema": "example-1", "digest": str(canonical_sha256(payload)), "payload": payload},
        },
    }


def request_example(
    operation: str = "capture", *, driver: str = "host", num_units: int = 1, workers_per_unit: int = 1
) -> Document:
    """A request with everything that ``operation`` needs and nothing else."""
    document: Document = {
        "format": 4,
        "kind": "coldsnap-operation-request",
        "operation": operation,
        "id": "op-1",
        "snapshot_driver": {"id": driver},
        "launch": launch_example(driver=driver, num_units=num_units, workers_per_unit=workers_per_unit),
    }
    if operation in ("capture", "publish", "publish-native"):
        document["output"] = "/srv/artifacts/out.json"
    if operation != "capture":
        document["artifact"] = "/srv/artifacts/in.json"
    if operation == "publish":
        document["policy"] = {"capsule": {"repository": "registry.example/capsules"}}
    if operation == "publish-native":
        document["policy"] = {"weights": {"native": {"repository": "example/packs", "revision": "main"}}}
    if operation in ("sleep", "wake", "status"):
        document["workload"] = {"cluster_id": "demo"}
    return document


def artifact_example(*, driver: str = "host", num_units: int = 1, workers_per_unit: int = 1) -> Document:
    """A committed artifact with one pack a worker; packs of all workers are the same object."""
    request = request_from(request_example(driver=driver, num_units=num_units, workers_per_unit=workers_per_unit))
    contract = DRIVERS[DriverId(driver)]
    units = [unit.id for unit in request.launch.units]
    workers = [worker.id for worker in request.launch.execution.workers]
    pack = Digest.of(b"pack")
    plans = [
        _object("recovery-manifest", f"worker/{worker}", f"workers/{worker}/manifest.json", f"plan {worker}")
        for worker in workers
    ]
    return {
        "format": 9,
        "kind": "coldsnap-snapshot-artifact",
        "state": "committed",
        "capture_id": "capture-1",
        "request_sha256": str(request_sha256(request)),
        "snapshot_driver": {
            "id": driver,
            "abi": contract.abi,
            "capture_boundary": contract.capture_boundary,
            "minimum_nvidia_driver_major": contract.minimum_nvidia_driver_major,
            "base_requirements": list(contract.base_features),
        },
        "requires": {"features": list(required_features(DriverId(driver), request.launch.execution))},
        "launch": request_document(request)["launch"],
        "compatibility": {
            "policy": "placement-independent-v1",
            "units": [_compatibility(unit.id, len(unit.devices), driver) for unit in request.launch.units],
        },
        "capsule": {
            "images": [
                {
                    "unit": unit,
                    "reference": f"{unit}@{digest_of(unit)}",
                    "digest": digest_of(unit),
                    "root": "coldsnap",
                    "snapshot_driver": driver,
                }
                for unit in units
            ],
            "objects": [
                *(dict(plan) for plan in plans),
                *(
                    _object("native-manifest", f"worker/{worker}", f"workers/{worker}/native-manifest.json", worker)
                    for worker in workers
                ),
            ],
        },
        "runtime": {"bindings": [{"kind": "coldsnap-cpu", "unit": unit, "flags": ["avx2", "fma"]} for unit in units]},
        "graph": {"policy": request.policy.process.graph_policy.value},
        "weights": {
            "model_payloads": {
                "objects": [
                    {
                        "role": MODEL_PAYLOAD_ROLE,
                        "owner": f"worker/{worker}",
                        "path": payload_path(pack),
                        "bytes": 8192,
                        "sha256": str(pack),
                    }
                    for worker in workers
                ]
            },
            "native": {"snapshot_driver": driver},
            "recovery": {
                "source": "huggingface-safetensors",
                "model_id": request.launch.model.id,
                "revision": request.launch.model.revision,
                "snapshot_driver": driver,
                "load_path": "mmap",
                "replay_plan": plans,
            },
        },
        "acceptance": {"health_path": "/health", "prompt": "The capital of France is", "expected": " Paris"},
    }


def overlay_example(*, driver: str = "host", num_units: int = 1, workers_per_unit: int = 1) -> Document:
    """An overlay of ``artifact_example`` with the same arguments, made on machines ``node-0..``."""
    shape = {"driver": driver, "num_units": num_units, "workers_per_unit": workers_per_unit}
    portable = artifact_from(artifact_example(**shape))  # type: ignore[arg-type]
    document = artifact_example(**shape)  # type: ignore[arg-type]
    for image in document["capsule"]["images"]:
        image["digest"] = digest_of(f"overlay {image['unit']}")
        image["reference"] = f"{image['unit']}@{image['digest']}"
    local = artifact_from(document)
    workers = document["launch"]["execution"]["workers"]
    return {
        "format": 1,
        "kind": "coldsnap-overlay",
        "state": "committed",
        "portable": str(artifact_digest(portable)),
        "snapshot_driver": driver,
        "target": {
            "hosts": [
                {
                    "group": "world",
                    "rank": rank,
                    "worker": worker["id"],
                    "unit": worker["unit"],
                    "host": digest_of(f"machine of {worker['unit']}"),
                }
                for rank, worker in enumerate(workers)
            ],
            "machines": [
                {
                    "unit": entry["unit"],
                    "architecture": entry["architecture"],
                    "kernel": entry["kernel"],
                    "criu": "4.2.1",
                    **({} if driver == "host" else {"nvidia_driver": "580.159.04", "cuda_userspace": "13.0"}),
                    "devices": entry["devices"],
                }
                for entry in document["compatibility"]["units"]
            ],
        },
        "model_payloads": document["weights"]["model_payloads"]["objects"],
        "artifact_sha256": str(artifact_digest(local)),
        "artifact": artifact_document(local),
    }


def timing_example() -> Document:
    """Two spans, one inside the other, on one clock."""
    span = {"clock": "controller", "status": "ok", "start_offset_seconds": 0.0}
    return {
        "format": 1,
        "kind": "coldsnap-operation-timing",
        "operation_id": "op-1",
        "clocks": [{"id": "controller", "source": "monotonic", "origin_unix_ns": 1_764_426_000_000_000_000}],
        "spans": [
            {**span, "id": "s1", "name": "restore", "duration_seconds": 0.5, "attributes": {"unit": "u0"}},
            {**span, "id": "s2", "parent": "s1", "name": "hydrate", "duration_seconds": 0.25},
        ],
    }


def receipt_example(*, state: str = "succeeded", request: OperationRequest | None = None) -> Document:
    """A receipt of a restore."""
    digest = str(request_sha256(request)) if request is not None else digest_of("request")
    document: Document = {
        "format": 2,
        "kind": "coldsnap-operation-receipt",
        "operation_id": "op-1",
        "operation": "restore",
        "state": state,
        "request_sha256": digest,
        "engine": "transformers",
        "snapshot_driver": "host",
        "replay_semantics": DRIVERS[DriverId.HOST].replay_semantics,
        "started_at": "2026-11-29T14:37:00Z",
        "completed_at": "2026-11-29T14:37:00.5Z",
        "duration_seconds": 0.5,
        "timing": timing_example(),
        "result": {"port": 8000},
    }
    if state == "failed":
        document["error"] = {"kind": "CriuError", "message": "restore failed", "cure": "read the log"}
    return document


def _compatibility(unit: str, num_devices: int, driver: str) -> Document:
    entry: Document = {
        "unit": unit,
        "architecture": "x86_64",
        "kernel": "6.12.0",
        "devices": [
            {"slot": slot, "gpu_name": "NVIDIA H200", "compute_capability": "9.0"} for slot in range(num_devices)
        ],
    }
    if driver != "host":
        entry |= {
            "nvidia_driver_captured": "580.159.04",
            "nvidia_driver_min": "580",
            "cuda_userspace": "13.0",
        }
    return entry


def _object(role: str, owner: str, path: str, content: str) -> Document:
    return {"role": role, "owner": owner, "path": path, "bytes": len(content), "sha256": digest_of(content)}
