"""Reading a committed artifact from a file, and what it promises about each unit's and worker's files."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from coldsnap.core.artifact import MAX_ARTIFACT_BYTES, ObjectRecord, SnapshotArtifact, artifact_digest, parse_artifact
from coldsnap.core.bindings import acceptance_of, process_images_of
from coldsnap.core.digest import Digest
from coldsnap.errors import InvalidDocument, UserError
from coldsnap.ops.places import object_path

if TYPE_CHECKING:
    from coldsnap.core.messages import Answer, Prompt

__all__ = ["LoadedArtifact", "load_artifact"]


@dataclass(frozen=True, kw_only=True)
class LoadedArtifact:
    """An artifact that parsed, and where it was read. What is looked up in it again and again is found once."""

    path: Path
    artifact: SnapshotArtifact
    digest: Digest

    def capsule_digest(self, unit: str) -> Digest:
        """The capsule of a unit."""
        return next(image.digest for image in self.artifact.capsule.images if image.unit == unit)

    def expected_files(self, unit: str) -> dict[str, tuple[int, Digest]]:
        """(bytes, SHA-256) that the artifact promises for files of a unit's capsule, by path inside it."""
        return dict(self._files[unit])

    @cached_property
    def _files(self) -> Mapping[str, Mapping[str, tuple[int, Digest]]]:
        unit_of = {f"unit/{unit.id}": unit.id for unit in self.artifact.launch.units}
        unit_of |= {f"worker/{worker.id}": worker.unit for worker in self.artifact.launch.execution.workers}
        promised: dict[str, dict[str, tuple[int, Digest]]] = {unit.id: {} for unit in self.artifact.launch.units}
        for entry in self.artifact.capsule.objects:
            if (unit := unit_of.get(str(entry.owner))) is not None:
                promised[unit][entry.path] = (entry.bytes, entry.sha256)
        for binding in process_images_of(self.artifact.runtime.bindings):
            promised[binding.unit] |= {file.path: (file.bytes, file.sha256) for file in binding.files}
        return promised

    def worker_object(self, worker: str, role: str) -> ObjectRecord | None:
        """A worker's file of ``role`` inside its unit's capsule, or None when there is none."""
        return self._objects.get(object_path(worker, role))

    @cached_property
    def _objects(self) -> Mapping[str, ObjectRecord]:
        return {entry.path: entry for entry in self.artifact.capsule.objects}

    def packs(self) -> Mapping[str, ObjectRecord]:
        """The pack of each worker; empty when the artifact has none."""
        payloads = self.artifact.weights.model_payloads
        return {entry.owner.id: entry for entry in payloads.objects} if payloads is not None else {}

    def acceptance(self) -> tuple[tuple[Prompt, ...], tuple[Answer, ...]]:
        """The captured prompts and their answers. Raises InvalidDocument when there are none."""
        from coldsnap.core.messages import Answer, Prompt  # who only compares files does not pay for the protocol

        binding = acceptance_of(self.artifact.runtime.bindings)
        answers = binding.answers if binding is not None else ()
        return (
            tuple(Prompt(text=one.prompt, max_tokens=one.max_tokens) for one in answers),
            tuple(Answer(token_ids=one.token_ids, text=one.text) for one in answers),
        )


def load_artifact(path: Path) -> LoadedArtifact:
    """Read and check an artifact. Raises UserError when it cannot be read, InvalidDocument with every problem."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would be waited on for ever
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise UserError(f"the artifact {path} is no file", cure="name the descriptor that a capture wrote")
            data = file.read(MAX_ARTIFACT_BYTES + 1)
    except OSError as error:
        raise UserError(
            f"cannot read the artifact {path}: {error.strerror}", cure="name the descriptor that a capture wrote"
        ) from error
    try:
        artifact = parse_artifact(data)
    except InvalidDocument as error:
        raise InvalidDocument(str(path), error.problems, cure=error.cure, facts=error.facts) from error
    return LoadedArtifact(path=path.absolute(), artifact=artifact, digest=artifact_digest(artifact))
