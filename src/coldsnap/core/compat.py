"""Would this artifact restore there? Every mismatch at once, from facts alone, before a byte moves.

Identity plus policy, never a guess: what is not listed as placement (``launchdiff.py``) must be equal, and what
was not inspected counts as a mismatch. A problem's path is that of the artifact or launch field it is about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from coldsnap.core.artifact import SnapshotArtifact
from coldsnap.core.bindings import cpu_of
from coldsnap.core.destination import UnitCompatibility
from coldsnap.core.drivers import DRIVERS, DriverId, FeatureResult, admit_features
from coldsnap.core.launch import Launch
from coldsnap.core.launchdiff import launch_problems
from coldsnap.core.parsing import at
from coldsnap.core.paths import show
from coldsnap.core.policy import CompatibilityPolicy, KernelPolicy
from coldsnap.core.versions import version_fault, version_of
from coldsnap.errors import Problem

__all__ = ["DeviceFacts", "HostFacts", "compatibility_problems", "destination_problems"]

_OTHER_HOST = "choose a host that has it, or capture again on this kind of host"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """The device in one slot of a unit, as found on the destination."""

    slot: int
    gpu_name: str
    compute_capability: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """What a destination is. ``devices`` are those the unit would get, by slot.

    ``architecture`` is ``uname -m``, ``kernel`` ``uname -r``, ``nvidia_driver`` a version such as 580.159.04.
    """

    architecture: str
    kernel: str
    nvidia_driver: str | None = None
    cuda_userspace: str | None = None
    devices: tuple[DeviceFacts, ...] = ()
    cpu_flags: frozenset[str] = frozenset()
    criu_version: str | None = None


def compatibility_problems(
    artifact: SnapshotArtifact,
    *,
    launch: Launch,
    hosts: Mapping[str, HostFacts],
    features: Mapping[str, tuple[FeatureResult, ...]],
    policy: CompatibilityPolicy | None = None,
    driver: DriverId | None = None,
) -> tuple[Problem, ...]:
    """Every reason why ``artifact`` would not restore as ``launch`` on ``hosts`` (facts and features by unit id).

    ``policy`` defaults to the request's default; ``driver``, when given, is the one the request names.
    """
    problems: list[Problem] = []
    if driver is not None and driver is not artifact.snapshot_driver.id:
        problems.append(
            Problem(
                field="snapshot_driver.id",
                message=f"is not the driver of the artifact, {artifact.snapshot_driver.id}",
                value=show(driver.value),
                cure="name the artifact's driver",
            )
        )
    problems.extend(launch_problems(artifact.launch, launch))
    problems.extend(destination_problems(artifact, hosts=hosts, features=features, policy=policy))
    return tuple(problems)


def destination_problems(
    artifact: SnapshotArtifact,
    *,
    hosts: Mapping[str, HostFacts],
    features: Mapping[str, tuple[FeatureResult, ...]],
    policy: CompatibilityPolicy | None = None,
) -> tuple[Problem, ...]:
    """The part of ``compatibility_problems`` that is about the machines and not about the launch."""
    policy = policy if policy is not None else CompatibilityPolicy()
    flags = {binding.unit: binding.flags for binding in cpu_of(artifact.runtime.bindings)}
    problems: list[Problem] = []
    for index, entry in enumerate(artifact.compatibility.units):
        place = f"compatibility.units[{index}]"
        facts = hosts.get(entry.unit)
        if facts is None:
            problems.append(
                Problem(
                    field=place,
                    message="has a host that was not inspected",
                    value=show(entry.unit),
                    cure="inspect the host of every unit",
                )
            )
            continue
        found = [
            *_machine_problems(entry, facts, policy),
            *_driver_problems(entry, facts, policy, artifact.snapshot_driver.id),
            *_device_problems(entry, facts),
            *_cpu_problems(flags.get(entry.unit, ()), facts),
            *admit_features(artifact.requires.features, features.get(entry.unit, ())),
        ]
        problems.extend(at(place, problem) for problem in found)
    return tuple(problems)


def _machine_problems(entry: UnitCompatibility, facts: HostFacts, policy: CompatibilityPolicy) -> Iterator[Problem]:
    if facts.architecture != entry.architecture:
        yield _differs("architecture", entry.architecture, facts.architecture)
    if policy.kernel is KernelPolicy.EXACT and facts.kernel != entry.kernel:
        yield Problem(
            field="kernel",
            message=f"was {show(entry.kernel)} at capture, and policy.compatibility.kernel is exact",
            value=show(facts.kernel),
            cure="boot that kernel, or use kernel policy capability",
        )
    if facts.cuda_userspace != entry.cuda_userspace and entry.cuda_userspace is not None:
        yield _differs("cuda_userspace", entry.cuda_userspace, facts.cuda_userspace)


def _driver_problems(
    entry: UnitCompatibility, facts: HostFacts, policy: CompatibilityPolicy, driver: DriverId
) -> Iterator[Problem]:
    if driver is DriverId.HOST:
        return
    major = DRIVERS[driver].minimum_nvidia_driver_major
    found = facts.nvidia_driver
    if found is None or version_fault(found) is not None:
        yield Problem(
            field="nvidia_driver_min",
            message=f"needs an NVIDIA driver, {entry.nvidia_driver_min or major} or newer",
            value="none" if found is None else show(found),
            cure="install one, or choose a host that has it",
        )
        return
    least = max(str(major), entry.nvidia_driver_min or "0", key=version_of)
    floors = [(least, f"snapshot driver {driver} needs NVIDIA driver", "nvidia_driver_min")]
    if policy.enforce_captured_driver_floor and entry.nvidia_driver_captured is not None:
        floors.append((entry.nvidia_driver_captured, "was captured on NVIDIA driver", "nvidia_driver_captured"))
    for floor, message, field in floors:
        if version_of(found) < version_of(floor):
            yield Problem(
                field=field,
                message=f"{message} {floor}",
                value=show(found),
                cure=f"use a host with driver {floor} or newer",
            )


def _device_problems(entry: UnitCompatibility, facts: HostFacts) -> Iterator[Problem]:
    if len(facts.devices) != len(entry.devices):
        yield _differs("devices", f"{len(entry.devices)} devices", f"{len(facts.devices)} devices")
    by_slot = {device.slot: device for device in facts.devices}
    for index, wanted in enumerate(entry.devices):
        device = by_slot.get(wanted.slot)
        if device is None:
            yield _differs(f"devices[{index}]", wanted.gpu_name, None)
            continue
        if device.gpu_name != wanted.gpu_name:
            yield _differs(f"devices[{index}].gpu_name", wanted.gpu_name, device.gpu_name)
        if device.compute_capability != wanted.compute_capability:
            yield _differs(f"devices[{index}].compute_capability", wanted.compute_capability, device.compute_capability)


def _cpu_problems(flags: tuple[str, ...], facts: HostFacts) -> Iterator[Problem]:
    missing = [flag for flag in flags if flag not in facts.cpu_flags]
    if missing:
        yield Problem(
            field="cpu_flags",
            message=f"lack {', '.join(missing)}, which the captured processes may use",
            value=f"{len(facts.cpu_flags)} flags",
            cure=_OTHER_HOST,
        )


def _differs(field: str, captured: str, found: str | None) -> Problem:
    return Problem(
        field=field,
        message=f"was {show(captured)} at capture",
        value="none" if found is None else show(found),
        cure=_OTHER_HOST,
    )
