"""What an artifact says about where it may run: its driver, the features it needs, the machine of each unit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from coldsnap.core.drivers import DRIVERS, DriverId
from coldsnap.core.execution import repeated
from coldsnap.core.names import Choice, Count, Id, Index, Items, Line, SomeItems
from coldsnap.core.parsing import Record, parsed, rule
from coldsnap.core.paths import show
from coldsnap.core.versions import version_fault, version_of
from coldsnap.errors import Problem

__all__ = ["ArtifactDriver", "Compatibility", "DeviceCompatibility", "Requires", "UnitCompatibility"]


class ArtifactDriver(Record):
    """The driver that froze the tree, with its contract as it was then."""

    id: Choice[DriverId]
    abi: Line
    capture_boundary: Line
    minimum_nvidia_driver_major: Count
    base_requirements: Items[Id]

    @rule
    def _contract_is_ours(self) -> Iterator[Problem]:
        contract = DRIVERS[self.id]
        for field, expected in (
            ("abi", contract.abi),
            ("capture_boundary", contract.capture_boundary),
            ("minimum_nvidia_driver_major", contract.minimum_nvidia_driver_major),
        ):
            found = getattr(self, field)
            if found != expected:
                yield _contract_problem(field, self.id, show(found), show(expected))

    @rule
    def _base_is_ours(self) -> Iterator[Problem]:
        expected = DRIVERS[self.id].base_features
        if sorted(self.base_requirements) != sorted(expected):
            found = ", ".join(self.base_requirements[:16])
            yield _contract_problem("base_requirements", self.id, f"[{found}]", ", ".join(expected))


def _contract_problem(field: str, driver: DriverId, found: str, expected: str) -> Problem:
    return Problem(
        field=field,
        message=f"is not what driver {driver} is here",
        value=found,
        cure=f"this version restores {expected}; capture again, or use the version that captured it",
    )


class Requires(Record):
    """Every feature that a destination must have been probed for."""

    features: Items[Id]

    @rule
    def _features_once(self) -> Iterator[Problem]:
        for index, feature in repeated(enumerate(self.features)):
            yield Problem(
                field=f"features[{index}]", message="stands twice", value=show(feature), cure="keep one of them"
            )


class DeviceCompatibility(Record):
    """What the device in one slot of a unit must be."""

    slot: Index
    gpu_name: Line
    compute_capability: Line


class UnitCompatibility(Record):
    """What the machine of one unit must be. The NVIDIA fields are absent for driver ``host``."""

    unit: Id
    architecture: Line
    kernel: Line
    nvidia_driver_captured: Line | None = None
    nvidia_driver_min: Line | None = None
    cuda_userspace: Line | None = None
    devices: Items[DeviceCompatibility] = ()

    @rule
    def _versions_are_numbers(self) -> Iterator[Problem]:
        for field in ("nvidia_driver_captured", "nvidia_driver_min"):
            text = getattr(self, field)
            fault = version_fault(text) if text is not None else None
            if fault is not None:
                yield Problem(field=field, message=fault, value=show(text), cure="write numbers and dots: 580.159.04")

    @rule
    def _captured_is_at_least_the_minimum(self) -> Iterator[Problem]:
        captured, least = self.nvidia_driver_captured, self.nvidia_driver_min
        if captured is None or least is None or version_fault(captured) or version_fault(least):
            return
        if version_of(captured) < version_of(least):
            yield Problem(
                field="nvidia_driver_min",
                message=f"is above the driver it was captured on, {captured}",
                value=show(least),
                cure="name a driver no newer than the captured one",
            )

    @rule
    def _slots_are_positions(self) -> Iterator[Problem]:
        for position, device in parsed(self.devices, "slot"):
            if device.slot != position:
                yield Problem(
                    field=f"devices[{position}].slot",
                    message="is not the device's position",
                    value=str(device.slot),
                    cure=f"write {position}; there is one entry a slot, in order",
                )


class Compatibility(Record):
    """What must match at restore; placement (hosts, addresses, device ids) is not in it."""

    policy: Literal["placement-independent-v1"] = "placement-independent-v1"
    units: SomeItems[UnitCompatibility]
