"""What is launched: the model, the launch units (containers or process trees) and the execution graph over them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum

from pydantic import Field

from coldsnap.core.digest import Digest
from coldsnap.core.drivers import DriverId
from coldsnap.core.execution import Execution, repeated
from coldsnap.core.names import AbsolutePath, EnvironmentName, Id, Index, Items, Line, SomeItems, Table, Text
from coldsnap.core.parsing import Record, parsed, rule
from coldsnap.core.paths import show
from coldsnap.errors import Problem

__all__ = ["HOST_IMAGE", "Launch", "ModelRef", "ModelSource", "Mount", "Runtime", "Unit", "device_problems"]

HOST_IMAGE = "host"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class ModelSource(StrEnum):
    """Where a checkpoint's identity comes from."""

    HUGGINGFACE = "huggingface"
    LOCAL = "local"


class Runtime(StrEnum):
    """A program that makes containers, for units with an image that are not to run on coldsnap's own."""

    DOCKER = "docker"
    PODMAN = "podman"


class ModelRef(Record):
    """A model, pinned. A local checkpoint's revision is the digest of its files, a hub's is a commit."""

    id: Line
    revision: Line
    source: Id

    @rule
    def _revision_is_pinned(self) -> Iterator[Problem]:
        if self.source == ModelSource.LOCAL and _DIGEST.fullmatch(self.revision) is None:
            yield Problem(
                field="revision",
                message="of a local checkpoint must be the digest of its files",
                value=show(self.revision),
                cure="write sha256: and the digest of the canonical [[file, size, sha256], ...]",
            )
        if self.source == ModelSource.HUGGINGFACE and _COMMIT.fullmatch(self.revision) is None:
            yield Problem(
                field="revision",
                message="must be a commit; a branch or tag can move",
                value=show(self.revision),
                cure="write the 40 hex digits of the commit",
            )


class Mount(Record):
    """A folder or file of the host, bound into the unit. ``source`` is placement, the rest identity."""

    source: AbsolutePath
    target: AbsolutePath
    read_only: bool


class Unit(Record):
    """One container or process tree. ``index`` is its position among the units."""

    id: Id
    index: Index
    host: Line
    devices: Items[Line]
    image: Line = Field(description="reference@digest, a bare digest, or 'host' for a plain process tree")
    image_digest: Digest | None = None
    command: SomeItems[Text]
    environment: Table[EnvironmentName, Text]
    mounts: Items[Mount]

    @rule
    def _image_is_pinned(self) -> Iterator[Problem]:
        if self.image == HOST_IMAGE:
            if self.image_digest is not None:
                yield Problem(
                    field="image_digest",
                    message="is given for a plain process tree on its host, which has no image",
                    value=str(self.image_digest),
                    cure="remove it, or name the image",
                )
            return
        reference, at_sign, digest = self.image.rpartition("@")
        if _DIGEST.fullmatch(digest) is None or (at_sign and not reference):
            yield Problem(
                field="image",
                message="is not pinned; a tag can move",
                value=show(self.image),
                cure="write reference@sha256:..., the bare digest, or 'host'",
            )
        elif self.image_digest is not None and digest != str(self.image_digest):
            yield Problem(
                field="image",
                message=f"names another digest than image_digest, {self.image_digest}",
                value=show(self.image),
                cure="make the two agree",
            )

    @rule
    def _digest_is_given(self) -> Iterator[Problem]:
        if self.image != HOST_IMAGE and self.image_digest is None:
            yield Problem(field="image_digest", message="is missing", cure="add the digest that the image is pinned to")

    @rule
    def _program_is_named(self) -> Iterator[Problem]:
        if self.command[0] == "":
            yield Problem(field="command[0]", message="is empty", value='""', cure="name the program to run")

    @rule
    def _mount_targets_once(self) -> Iterator[Problem]:
        keyed = ((index, mount.target) for index, mount in parsed(self.mounts, "target"))
        for index, target in repeated(keyed):
            yield Problem(
                field=f"mounts[{index}].target",
                message="is taken by an earlier mount",
                value=show(target),
                cure="mount each target once",
            )


class Launch(Record):
    """An engine, its model, its units and its execution graph."""

    engine: Id
    model: ModelRef
    units: SomeItems[Unit]
    execution: Execution

    @rule
    def _unit_ids_once(self) -> Iterator[Problem]:
        for index, name in repeated((i, unit.id) for i, unit in parsed(self.units, "id")):
            yield Problem(
                field=f"units[{index}].id", message="is taken by an earlier unit", value=show(name), cure="use another"
            )

    @rule
    def _index_is_position(self) -> Iterator[Problem]:
        for position, unit in parsed(self.units, "index"):
            if unit.index != position:
                yield Problem(
                    field=f"units[{position}].index",
                    message="is not the unit's position",
                    value=str(unit.index),
                    cure=f"write {position}, or move the unit",
                )

    @rule
    def _devices_once_a_host(self) -> Iterator[Problem]:
        taken: dict[tuple[str, str], str] = {}
        for index, unit in parsed(self.units, "host", "devices"):
            for slot, device in enumerate(unit.devices):
                place = f"units[{index}].devices[{slot}]"
                first = taken.setdefault((unit.host, device), place)
                if first != place:
                    yield Problem(
                        field=place,
                        message=f"is a device of host {unit.host} that {first} has",
                        value=show(device),
                        cure="give each unit its own devices",
                    )

    @rule
    def _worker_units_exist(self) -> Iterator[Problem]:
        known = {unit.id for unit in self.units}
        for index, worker in parsed(self.execution.workers, "unit"):
            if worker.unit not in known:
                yield Problem(
                    field=f"execution.workers[{index}].unit",
                    message="names no unit of this launch",
                    value=show(worker.unit),
                    cure="name one of its units",
                )

    @rule
    def _every_unit_has_a_worker(self) -> Iterator[Problem]:
        used = {worker.unit for worker in self.execution.workers}
        for index, unit in parsed(self.units, "id"):
            if unit.id not in used:
                yield Problem(
                    field=f"units[{index}].id",
                    message="has no worker",
                    value=show(unit.id),
                    cure="add a worker of it, or remove the unit",
                )

    @rule
    def _device_slots_in_range(self) -> Iterator[Problem]:
        num_devices = {unit.id: len(unit.devices) for _, unit in parsed(self.units, "id", "devices")}
        for index, worker in parsed(self.execution.workers, "unit", "device_slots"):
            limit = num_devices.get(worker.unit)
            for place, slot in enumerate(worker.device_slots):
                if limit is not None and slot >= limit:
                    yield Problem(
                        field=f"execution.workers[{index}].device_slots[{place}]",
                        message=f"is out of range: unit {worker.unit} has {limit} devices",
                        value=str(slot),
                        cure="use a slot of the unit, counted from 0",
                    )


def device_problems(launch: Launch, driver: DriverId) -> Iterator[Problem]:
    """Workers that own devices under ``host``, or none under a driver for accelerators. Paths are below ``launch``."""
    for index, worker in parsed(launch.execution.workers, "device_slots"):
        if (driver is DriverId.HOST) == bool(worker.device_slots):
            has = "owns devices, and driver host has none" if worker.device_slots else f"owns no device under {driver}"
            yield Problem(
                field=f"execution.workers[{index}].device_slots",
                message=has,
                value=str(list(worker.device_slots)),
                cure="write []" if worker.device_slots else "name the slots of its unit's devices, or use driver host",
            )
