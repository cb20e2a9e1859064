"""The ``policy`` of a request: how to freeze, where weights come from, what must match at restore.

Every default of a request is here or in ``request.defaults_for``, which knows the driver and the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Literal

from pydantic import Field

from coldsnap.core.digest import Digest
from coldsnap.core.drivers import GraphPolicy, ProcessBackend
from coldsnap.core.execution import repeated
from coldsnap.core.names import AbsolutePath, Choice, Count, Id, Items, RelativePath, Table, Text
from coldsnap.core.parsing import Record, parsed, rule
from coldsnap.core.paths import show
from coldsnap.errors import Problem

__all__ = [
    "ArtifactScope",
    "CachePolicy",
    "CapsulePolicy",
    "CompatibilityPolicy",
    "KernelPolicy",
    "LoaderBackend",
    "Materialize",
    "NativeWeights",
    "Policy",
    "ProcessPolicy",
    "RecoveryWeights",
    "StagedPayload",
    "WeightsMode",
    "WeightsPolicy",
    "revision_problems",
]


class ArtifactScope(StrEnum):
    """Whether an artifact may travel, or is bound to the one target it was made on."""

    PORTABLE = "portable"
    TARGET_LOCAL = "target-local"


class WeightsMode(StrEnum):
    """Which provider may bring the model bytes."""

    AUTO = "auto"
    NATIVE = "native"
    RECOVERY = "recovery"
    CACHE_ONLY_AUTO = "cache-only-auto"


class Materialize(StrEnum):
    """Whether a recovery restore also writes the pack: not, beside serving, or before it is ready."""

    OFF = "off"
    ASYNC = "async"
    REQUIRED = "required"


class LoaderBackend(StrEnum):
    """How safetensors files are read at recovery."""

    DIRECT = "direct"
    BUFFERED = "buffered"
    AUTO = "auto"
    MMAP = "mmap"


class KernelPolicy(StrEnum):
    """Whether a destination's kernel must be able, or be the same."""

    CAPABILITY = "capability"
    EXACT = "exact"


class ProcessPolicy(Record):
    """How the process tree is frozen. ``backend`` and ``graph_policy`` default to the driver's."""

    backend: Choice[ProcessBackend] = ProcessBackend.CUDA_CRIU
    kv_discard: bool = True
    async_graphs: bool = True
    graph_policy: Choice[GraphPolicy] = GraphPolicy.DISABLED
    artifact_scope: Choice[ArtifactScope] = ArtifactScope.PORTABLE


class StagedPayload(Record):
    """A pack that the caller already put on the host of ``worker``'s unit."""

    worker: Id
    path: AbsolutePath
    bytes: Count
    sha256: Digest


class NativeWeights(Record):
    """Packs: where they are published, which are staged, whether a recovery restore writes them."""

    repository: Text = ""
    revision: Text = ""
    files_by_worker: Table[Id, RelativePath] = Field(default_factory=dict)
    staged: Items[StagedPayload] = ()
    materialize: Choice[Materialize] = Materialize.OFF

    @rule
    def _repository_is_pinned(self) -> Iterator[Problem]:
        yield from revision_problems(self.repository, self.revision)

    @rule
    def _staged_once(self) -> Iterator[Problem]:
        for index, worker in repeated((i, entry.worker) for i, entry in parsed(self.staged, "worker")):
            yield Problem(
                field=f"staged[{index}].worker",
                message="has an earlier staged pack",
                value=show(worker),
                cure="stage one pack a worker",
            )


class RecoveryWeights(Record):
    """Pinned safetensors files and how to read them."""

    enabled: bool = True
    source: Literal["huggingface-safetensors"] = "huggingface-safetensors"
    loader_backend: Choice[LoaderBackend] = LoaderBackend.AUTO


class WeightsPolicy(Record):
    """Where model bytes come from at restore."""

    mode: Choice[WeightsMode] = WeightsMode.AUTO
    native: NativeWeights = NativeWeights()
    recovery: RecoveryWeights = RecoveryWeights()

    @rule
    def _recovery_mode_is_enabled(self) -> Iterator[Problem]:
        if self.mode is WeightsMode.RECOVERY and not self.recovery.enabled:
            yield Problem(
                field="recovery.enabled",
                message="is off, and mode recovery has nothing else",
                value="false",
                cure="enable recovery or use another mode",
            )


class CachePolicy(Record):
    """Derived caches (compiled kernels and the like) that travel inside the capsule."""

    seed: bool = True
    paths: Items[AbsolutePath] = ()


class CapsulePolicy(Record):
    """Where ``publish`` puts the capsule images."""

    repository: Text = ""


class CompatibilityPolicy(Record):
    """What of the captured machine is demanded beyond what always holds."""

    enforce_captured_driver_floor: bool = True
    kernel: Choice[KernelPolicy] = KernelPolicy.CAPABILITY


class Policy(Record):
    """How to freeze, where weights come from, and what must match at restore."""

    process: ProcessPolicy = ProcessPolicy()
    weights: WeightsPolicy = WeightsPolicy()
    cache: CachePolicy = CachePolicy()
    capsule: CapsulePolicy = CapsulePolicy()
    compatibility: CompatibilityPolicy = CompatibilityPolicy()


def revision_problems(repository: str, revision: str) -> Iterator[Problem]:
    """A named repository needs a revision, and a revision needs a repository."""
    if repository and not revision:
        yield Problem(
            field="revision",
            message=f"is missing for repository {show(repository)}",
            value='""',
            cure="name the revision to use",
        )
    if revision and not repository:
        yield Problem(
            field="repository",
            message=f"is missing for revision {show(revision)}",
            value='""',
            cure="name the repository",
        )
