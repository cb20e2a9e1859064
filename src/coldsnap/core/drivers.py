"""Snapshot drivers: how a process tree is frozen, and which features each way needs on the destination.

A driver is a list of features, each proved by a probe; the number in a driver's name is only the NVIDIA driver
that completes its list for every topology. What `n610` needs beyond its base are features that only units with
several communicating workers have: a unit of one worker needs neither CUDA IPC nor NCCL state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from coldsnap.core.execution import Execution
from coldsnap.errors import Problem

__all__ = [
    "DRIVERS",
    "DriverContract",
    "DriverId",
    "FeatureResult",
    "FeatureState",
    "GraphPolicy",
    "ProcessBackend",
    "admit_features",
    "overlay_driver",
    "required_features",
]


class DriverId(StrEnum):
    """The snapshot drivers. Choosing one is the caller's: there is no ``auto``."""

    N580 = "n580"
    N610 = "n610"
    HOST = "host"


class GraphPolicy(StrEnum):
    """What becomes of captured CUDA graphs."""

    DISABLED = "disabled"
    RECREATE_FROM_PLAN = "recreate-from-plan"
    PRESERVE_EXEC = "preserve-exec"
    PRESERVE_NCCL_EXEC = "preserve-nccl-exec"


class ProcessBackend(StrEnum):
    """What freezes the process tree."""

    CUDA_CRIU = "cuda-criu"
    CRIU = "criu"


class FeatureState(StrEnum):
    """What a probe found. Only ``passed`` admits."""

    PASSED = "passed"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"
    UNQUALIFIED = "unqualified"


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureResult:
    """One probe's verdict and why."""

    feature: str
    state: FeatureState
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverContract:
    """What a driver promises and needs. ``abi`` changes when old captures of it can no longer be restored."""

    id: DriverId
    abi: str
    capture_boundary: str
    minimum_nvidia_driver_major: int
    base_features: tuple[str, ...]
    graph_policies: tuple[GraphPolicy, ...]
    backend: ProcessBackend
    replay_semantics: str
    communicating_features: tuple[str, ...] = ()
    allows_warm: bool = True

    def default_graph_policy(self, num_workers: int) -> GraphPolicy:
        """The graph policy of a request that names none."""
        if self.id is DriverId.N610 and num_workers > 1:
            return GraphPolicy.PRESERVE_NCCL_EXEC
        return self.graph_policies[0]


def _contracts() -> Mapping[DriverId, DriverContract]:
    contracts = (
        DriverContract(
            id=DriverId.HOST,
            abi="host-1",
            capture_boundary="process-tree",
            minimum_nvidia_driver_major=0,
            base_features=("criu-process-tree",),
            graph_policies=(GraphPolicy.DISABLED,),
            backend=ProcessBackend.CRIU,
            replay_semantics="resume-process-tree",
        ),
        DriverContract(
            id=DriverId.N580,
            abi="n580-1",
            capture_boundary="pre-cuda-process-template",
            minimum_nvidia_driver_major=580,
            base_features=("criu-process-template", "cuda-fresh-state", "cuda-vmm-exact-address"),
            graph_policies=(GraphPolicy.RECREATE_FROM_PLAN, GraphPolicy.DISABLED),
            backend=ProcessBackend.CUDA_CRIU,
            replay_semantics="re-execute-template",
            allows_warm=False,
        ),
        DriverContract(
            id=DriverId.N610,
            abi="n610-1",
            capture_boundary="initialized-cuda-process-state",
            minimum_nvidia_driver_major=580,
            base_features=(
                "criu-process-tree",
                "cuda-checkpoint-api",
                "cuda-checkpoint-roundtrip",
                "cuda-initialized-state",
                "cuda-vmm-exact-address",
            ),
            graph_policies=(
                GraphPolicy.PRESERVE_EXEC,
                GraphPolicy.PRESERVE_NCCL_EXEC,
                GraphPolicy.RECREATE_FROM_PLAN,
                GraphPolicy.DISABLED,
            ),
            backend=ProcessBackend.CUDA_CRIU,
            replay_semantics="resume-device-state",
            communicating_features=("cuda-classic-ipc", "nccl-communicator-roundtrip"),
        ),
    )
    return MappingProxyType({contract.id: contract for contract in contracts})


DRIVERS: Mapping[DriverId, DriverContract] = _contracts()


def overlay_driver(driver: DriverId) -> DriverId:
    """Who freezes an artifact of ``driver`` again on its target.

    A template is the same on every target. What one target can keep of it is the tree that it became there.
    """
    return DriverId.N610 if driver is DriverId.N580 else driver


def required_features(driver: DriverId, execution: Execution) -> tuple[str, ...]:
    """Every feature a destination needs for this graph, sorted: the base, and what communicating workers add."""
    contract = DRIVERS[driver]
    features = set(contract.base_features)
    if _has_communicating_unit(execution):
        features.update(contract.communicating_features)
    return tuple(sorted(features))


def admit_features(required: Sequence[str], results: Iterable[FeatureResult]) -> tuple[Problem, ...]:
    """One problem for each required feature that did not pass, in the order required."""
    found: dict[str, list[FeatureResult]] = {}
    for result in results:
        found.setdefault(result.feature, []).append(result)
    problems = []
    for feature in required:
        if feature not in found:
            problems.append(
                Problem(
                    field=f"features.{feature}",
                    message="was not probed",
                    value=FeatureState.UNQUALIFIED.value,
                    cure="run `coldsnap capabilities` on the destination",
                )
            )
        problems.extend(
            Problem(
                field=f"features.{feature}",
                message=f"did not pass: {result.reason}",
                value=result.state.value,
                cure="use a host that passes, or a capture whose driver does not need it",
            )
            for result in found.get(feature, ())
            if result.state is not FeatureState.PASSED
        )
    return tuple(problems)


def _has_communicating_unit(execution: Execution) -> bool:
    unit_of = {worker.id: worker.unit for worker in execution.workers}
    for group in execution.groups:
        units = Counter(unit_of[member] for member in group.members if member in unit_of)
        if any(num_workers > 1 for num_workers in units.values()):
            return True
    return False
