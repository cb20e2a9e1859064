"""What an artifact stores and where: capsule images, the objects inside them, packs, and the weight providers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from coldsnap.core.digest import Digest
from coldsnap.core.drivers import DriverId
from coldsnap.core.execution import repeated
from coldsnap.core.names import Choice, Count, Id, Items, Line, RelativePath, SomeItems, Text
from coldsnap.core.owners import Owner
from coldsnap.core.parsing import Record, parsed, rule
from coldsnap.core.paths import show
from coldsnap.core.policy import revision_problems
from coldsnap.errors import Problem

__all__ = [
    "MODEL_PAYLOAD_ROLE",
    "Capsule",
    "CapsuleImageRecord",
    "ModelPayloads",
    "NativeProvider",
    "ObjectRecord",
    "RecoveryProvider",
    "Weights",
    "payload_path",
]

MODEL_PAYLOAD_ROLE = "model-weight-payload"


def payload_path(sha256: Digest) -> str:
    """Where a pack lives below a state root or in a repository: derived from its digest and nothing else."""
    return f"model-payloads/sha256/{sha256.hex}.pack"


class CapsuleImageRecord(Record):
    """The capsule of one unit, by digest. ``root`` is the folder inside the image that holds the objects."""

    unit: Id
    reference: Line
    digest: Digest
    root: Text
    snapshot_driver: Choice[DriverId]

    @rule
    def _reference_is_pinned(self) -> Iterator[Problem]:
        _, at_sign, digest = self.reference.rpartition("@")
        if not at_sign or digest != str(self.digest):
            yield Problem(
                field="reference",
                message="does not end in the image's digest",
                value=show(self.reference),
                cure=f"write the reference, @ and {self.digest}",
            )


class ObjectRecord(Record):
    """A stored file: what it is for, whose it is, where it is, and its identity."""

    role: Id
    owner: Owner
    path: RelativePath
    bytes: Count
    sha256: Digest


class Capsule(Record):
    """One image a unit, and the objects inside them that are not process images."""

    images: SomeItems[CapsuleImageRecord]
    objects: Items[ObjectRecord]

    @rule
    def _paths_once(self) -> Iterator[Problem]:
        for index, path in repeated((i, entry.path) for i, entry in parsed(self.objects, "path")):
            yield Problem(
                field=f"objects[{index}].path",
                message="is the path of an earlier object",
                value=show(path),
                cure="give each object its own path; only packs are shared",
            )


class ModelPayloads(Record):
    """The packs. Two workers may name one object; each worker has exactly one entry."""

    repository: Text = ""
    revision: Text = ""
    objects: SomeItems[ObjectRecord]

    @rule
    def _repository_is_pinned(self) -> Iterator[Problem]:
        yield from revision_problems(self.repository, self.revision)

    @rule
    def _paths_follow_digests(self) -> Iterator[Problem]:
        for index, entry in parsed(self.objects, "path", "sha256"):
            if entry.path != payload_path(entry.sha256):
                yield Problem(
                    field=f"objects[{index}].path",
                    message="is not the path of this pack",
                    value=show(entry.path),
                    cure=f"write {payload_path(entry.sha256)}",
                )

    @rule
    def _roles_are_payloads(self) -> Iterator[Problem]:
        for index, entry in parsed(self.objects, "role"):
            if entry.role != MODEL_PAYLOAD_ROLE:
                yield Problem(
                    field=f"objects[{index}].role",
                    message="is not the role of a pack",
                    value=show(entry.role),
                    cure=f"write {MODEL_PAYLOAD_ROLE}",
                )

    @rule
    def _shared_packs_agree(self) -> Iterator[Problem]:
        sizes: dict[Digest, int] = {}
        for index, entry in parsed(self.objects, "sha256", "bytes"):
            if sizes.setdefault(entry.sha256, entry.bytes) != entry.bytes:
                yield Problem(
                    field=f"objects[{index}].bytes",
                    message="differs from an earlier entry of the same pack",
                    value=str(entry.bytes),
                    cure=f"that entry says {sizes[entry.sha256]}; one digest has one size",
                )


class NativeProvider(Record):
    """Packs may be used; the driver whose residuals and maps go with them."""

    snapshot_driver: Choice[DriverId]


class RecoveryProvider(Record):
    """Pinned safetensors: always there, whether or not packs are. ``replay_plan`` names one object a worker."""

    source: Literal["huggingface-safetensors"] = "huggingface-safetensors"
    model_id: Line
    revision: Line
    snapshot_driver: Choice[DriverId]
    load_path: Id
    replay_plan: SomeItems[ObjectRecord]


class Weights(Record):
    """Where the model's bytes come from."""

    model_payloads: ModelPayloads | None = None
    native: NativeProvider | None = None
    recovery: RecoveryProvider

    @rule
    def _native_has_payloads(self) -> Iterator[Problem]:
        if self.native is not None and self.model_payloads is None:
            yield Problem(
                field="native",
                message="is given without model_payloads",
                value=self.native.snapshot_driver.value,
                cure="add the packs or remove native",
            )
