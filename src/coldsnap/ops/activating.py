"""The request that activates an artifact as it was captured, but for its placement: name, port, weights mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coldsnap.core.artifact import artifact_document
from coldsnap.core.bindings import cold_start_of, runtime_said, service_name_of, staging_of
from coldsnap.core.policy import ArtifactScope
from coldsnap.core.request import EXTENSION_SCHEMA, OperationRequest, request_from
from coldsnap.engines.protocol import EnginePlugin
from coldsnap.errors import UsageError
from coldsnap.ops.artifacts import LoadedArtifact
from coldsnap.ops.planning import choose_engine

__all__ = ["activation_request", "default_name", "listen_address", "live_request"]


def default_name(loaded: LoadedArtifact) -> str:
    """The service name when none is given: the one the capture's recipe had."""
    return service_name_of(loaded.artifact.runtime.bindings) or loaded.artifact.launch.engine


def activation_request(
    loaded: LoadedArtifact,
    *,
    operation_id: str,
    warm: bool = False,
    name: str | None = None,
    port: int | None = None,
    weights: str | None = None,
    materialize: str | None = None,
    cache_paths: Sequence[str] = (),
    target_local: bool = False,
    devices: Sequence[str] = (),
    stage: bool | None = None,
    mounts: Mapping[str, str] | None = None,
) -> OperationRequest:
    """A restore request with the artifact's own launch; ``port`` replaces the value of ``--port`` in its commands.

    ``cache_paths`` are the folders below which cache seeds of the capsule may be written. A cold start when nothing can
    be restored is allowed when the captured recipe allowed it. ``target_local`` asks for an overlay after the restore.
    ``devices`` take the place of the captured selectors, unit by unit. Raises UsageError when it is another number.
    ``stage`` says whether packs are copied into memory first; None leaves it to the captured recipe. ``mounts``: the
    source on this host of mounts, by their target in the unit. Raises UsageError for a target that no unit has.
    """
    document = artifact_document(loaded.artifact)
    launch = document["launch"]
    if port is not None:
        for unit in launch["units"]:
            unit["command"] = _with_port(unit["command"], port)
    if devices:
        _place_on(launch["units"], devices)
    if mounts:
        _mount_from(launch["units"], mounts)
    request: dict[str, Any] = {
        "format": 4,
        "kind": "coldsnap-operation-request",
        "operation": "restore",
        "id": operation_id,
        "snapshot_driver": {"id": loaded.artifact.snapshot_driver.id.value},
        "artifact": str(loaded.path),
        "launch": launch,
        "workload": {"cluster_id": name or default_name(loaded)},
        "lifecycle": {"activation_state": "warm" if warm else ""},
    }
    policy: dict[str, Any] = {"cache": {"paths": list(cache_paths)}}
    if target_local:
        policy["process"] = {"artifact_scope": ArtifactScope.TARGET_LOCAL.value}
    chosen = _weights(mode=weights, materialize=materialize)
    request["policy"] = {**policy, **chosen}
    bindings = loaded.artifact.runtime.bindings
    said: dict[str, Any] = {
        "cold_start": cold_start_of(bindings),
        "stage": staging_of(bindings) if stage is None else stage,
        **runtime_said(bindings),
    }
    if any(said.values()):
        request["extension"] = {"schema": EXTENSION_SCHEMA, **said}
    return request_from(request)


def live_request(
    loaded: LoadedArtifact, verb: str, *, operation_id: str, name: str, materialize: str | None = None
) -> OperationRequest:
    """A request for ``sleep``, ``wake`` or ``status`` of the live service ``name``."""
    document = artifact_document(loaded.artifact)
    said = runtime_said(loaded.artifact.runtime.bindings)
    return request_from(
        {
            "format": 4,
            "kind": "coldsnap-operation-request",
            "operation": verb,
            "id": operation_id,
            "snapshot_driver": {"id": loaded.artifact.snapshot_driver.id.value},
            "artifact": str(loaded.path),
            "launch": document["launch"],
            "workload": {"cluster_id": name},
            "policy": _weights(materialize=materialize),
            **({"extension": {"schema": EXTENSION_SCHEMA, **said}} if said else {}),
        }
    )


def _weights(*, mode: str | None = None, materialize: str | None = None) -> dict[str, Any]:
    """What is said about weights, as a part of a policy; what is not said is left to the defaults."""
    weights: dict[str, Any] = {} if mode is None else {"mode": mode}
    if materialize is not None:
        weights["native"] = {"materialize": materialize}
    return {"weights": weights} if weights else {}


def listen_address(engines: Mapping[str, EnginePlugin], request: OperationRequest) -> tuple[str, int]:
    """Where the restored service will listen: what its engine reads from the command of the first unit."""
    plugin = choose_engine(engines, request.launch.engine, field="launch.engine")
    facts = plugin.read_command(request.launch.units[0].command)
    return facts.host, facts.port


def _place_on(units: list[dict[str, Any]], devices: Sequence[str]) -> None:
    """Deal the devices out to the units, in order, as many to each as it was captured with."""
    needed = sum(len(unit["devices"]) for unit in units)
    if len(devices) != needed:
        raise UsageError(
            f"{len(devices)} devices are named, and the artifact was captured with {needed}",
            cure=f"name {needed} with --devices" if needed else "leave --devices out: it uses none",
        )
    rest = list(devices)
    for unit in units:
        unit["devices"], rest = rest[: len(unit["devices"])], rest[len(unit["devices"]) :]


def _mount_from(units: list[dict[str, Any]], sources: Mapping[str, str]) -> None:
    """Give the units' mounts these sources."""
    targets = [mount["target"] for unit in units for mount in unit["mounts"]]
    for target, source in sources.items():
        if target not in targets:
            raise UsageError(
                f"no unit has a mount at {target}",
                cure=f"name one of {', '.join(targets)}" if targets else "the artifact was captured without mounts",
            )
        for unit in units:
            for mount in unit["mounts"]:
                if mount["target"] == target:
                    mount["source"] = source


def _with_port(command: list[str], port: int) -> list[str]:
    changed = list(command)
    for index, word in enumerate(changed):
        if word == "--port" and index + 1 < len(changed):
            changed[index + 1] = str(port)
        elif word.startswith("--port="):
            changed[index] = f"--port={port}"
    return changed
