"""What differs between two artifacts, by meaning, from their descriptors alone.

A section is one thing a person asks about: the model, the launch, the packs. Files are compared by digest, so that
gigabytes are compared without being read. Sections that do not ``count`` (which capture it is, where it was placed)
differ between any two captures and keep nobody from restoring one for the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from coldsnap.core.artifact import SnapshotArtifact
from coldsnap.core.bindings import (
    acceptance_of,
    containers_of,
    cpu_of,
    host_files_of,
    hygiene_of,
    process_images_of,
    service_name_of,
    worker_exports_of,
)
from coldsnap.core.digest import Digest
from coldsnap.core.launchdiff import Difference, launch_differences, placement_differences, value_differences
from coldsnap.core.parsing import plain_document
from coldsnap.core.paths import show

__all__ = ["Section", "compare_artifacts"]

ABSENT = "absent"
_RESIDUAL = "residual"
_CACHE_SEED = "cache-seed"
Files = Mapping[str, tuple[int, Digest | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One subject: what differs in it, and a few words on what was compared.

    ``shared_bytes`` are those of equal files, for subjects that are files.
    """

    name: str
    changes: tuple[Difference, ...]
    detail: str = ""
    shared_bytes: int | None = None
    counts: bool = True

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.changes


def compare_artifacts(a: SnapshotArtifact, b: SnapshotArtifact) -> tuple[Section, ...]:
    """Every section, those without a difference too, in the order in which a reader wants them."""
    runtimes = (containers_of(a.runtime.bindings), containers_of(b.runtime.bindings))
    launch = (*launch_differences(a.launch, b.launch), *value_differences("container", *runtimes))
    return (
        Section(name="capture", counts=False, changes=tuple(_capture(a, b))),
        Section(
            name="model",
            changes=tuple(one for one in launch if one.field.startswith("launch.model")),
            detail=f"{b.launch.model.id}, {b.launch.model.source}",
        ),
        Section(
            name="launch",
            changes=tuple(one for one in launch if not one.field.startswith("launch.model")),
            detail=f"{len(b.launch.units)} units, {len(b.launch.execution.workers)} workers, {b.launch.engine}",
        ),
        Section(
            name="placement",
            counts=False,
            changes=tuple(placement_differences(a.launch, b.launch)),
            detail="may change at a restore",
        ),
        Section(name="driver", changes=tuple(_driver(a, b)), detail=b.snapshot_driver.id.value),
        Section(name="compatibility", changes=tuple(_compatibility(a, b)), detail="what a destination must be"),
        Section(name="host files", changes=_files("host-files", _host_files(a), _host_files(b)), detail="by digest"),
        Section(name="acceptance", changes=tuple(_acceptance(a, b)), detail="prompts and their exact answers"),
        Section(name="hygiene", changes=tuple(_hygiene(a, b)), detail="allowed secrets, publishable"),
        _packs(a, b),
        Section(name="residual", changes=tuple(_residual(a, b)), detail="memory that no checkpoint holds"),
        _process_images(a, b),
        Section(name="cache seeds", changes=_files("capsule", _seeds(a), _seeds(b)), detail="by digest"),
    )


def _capture(a: SnapshotArtifact, b: SnapshotArtifact) -> Iterator[Difference]:
    names = (service_name_of(a.runtime.bindings), service_name_of(b.runtime.bindings))
    yield from value_differences("capture_id", a.capture_id, b.capture_id)
    yield from value_differences("request_sha256", str(a.request_sha256), str(b.request_sha256))
    yield from value_differences("service", names[0], names[1])


def _driver(a: SnapshotArtifact, b: SnapshotArtifact) -> Iterator[Difference]:
    old, new = plain_document(a.snapshot_driver), plain_document(b.snapshot_driver)
    yield from value_differences("snapshot_driver", old, new)
    yield from _set_difference("requires.features", set(a.requires.features), set(b.requires.features))
    yield from value_differences("graph.policy", a.graph.policy.value, b.graph.policy.value)
    yield from value_differences(
        "weights.recovery.load_path", a.weights.recovery.load_path, b.weights.recovery.load_path
    )


def _compatibility(a: SnapshotArtifact, b: SnapshotArtifact) -> Iterator[Difference]:
    old = {entry.unit: plain_document(entry) for entry in a.compatibility.units}
    new = {entry.unit: plain_document(entry) for entry in b.compatibility.units}
    yield from value_differences("compatibility.units", old, new)
    flags = {binding.unit: set(binding.flags) for binding in cpu_of(a.runtime.bindings)}
    theirs = {binding.unit: set(binding.flags) for binding in cpu_of(b.runtime.bindings)}
    for unit in sorted({*flags, *theirs}):
        field = f"compatibility.units.{unit}.cpu_flags"
        yield from _set_difference(field, flags.get(unit, set()), theirs.get(unit, set()))


def _set_difference(field: str, before: set[str], after: set[str]) -> Iterator[Difference]:
    if before != after:
        yield Difference(field=field, before=_only(before - after), after=_only(after - before))


def _only(names: set[str]) -> str:
    return f"also {' '.join(sorted(names))}" if names else "nothing more"


def _acceptance(a: SnapshotArtifact, b: SnapshotArtifact) -> Iterator[Difference]:
    yield from value_differences("acceptance", plain_document(a.acceptance), plain_document(b.acceptance))
    old, new = _answers(a), _answers(b)
    for prompt in dict.fromkeys((*old, *new)):
        before, after = old.get(prompt), new.get(prompt)
        if before != after:
            field = f"acceptance[{show(prompt[0])}, {prompt[1]} tokens]"
            yield Difference(field=field, before=_answer(before), after=_answer(after))


def _answers(artifact: SnapshotArtifact) -> dict[tuple[str, int], tuple[tuple[int, ...], str]]:
    binding = acceptance_of(artifact.runtime.bindings)
    answers = binding.answers if binding is not None else ()
    return {(one.prompt, one.max_tokens): (tuple(one.token_ids), one.text) for one in answers}


def _answer(answer: tuple[tuple[int, ...], str] | None) -> str:
    return ABSENT if answer is None else f"{show(answer[1])} {list(answer[0])}"


def _hygiene(a: SnapshotArtifact, b: SnapshotArtifact) -> Iterator[Difference]:
    def facts(artifact: SnapshotArtifact) -> dict[str, Any]:
        return {
            one.unit: {"publishable": one.publishable, "allowed_secrets": sorted(one.allowed_secrets)}
            for one in hygiene_of(artifact.runtime.bindings)
        }

    yield from value_differences("hygiene", facts(a), facts(b))


def _packs(a: SnapshotArtifact, b: SnapshotArtifact) -> Section:
    def packs(artifact: SnapshotArtifact) -> dict[str, tuple[int, Digest | None]]:
        payloads = artifact.weights.model_payloads
        return {entry.owner.id: (entry.bytes, entry.sha256) for entry in payloads.objects} if payloads else {}

    old, new = packs(a), packs(b)
    both = {digest: size for size, digest in old.values() if digest in {found for _, found in new.values()}}
    used = {digest for _, digest in (*old.values(), *new.values())}
    detail = f"{len(both)} of {len(used)} packs are shared"
    changes = _files("weights.model_payloads", old, new)
    return Section(name="packs", changes=changes, detail=detail, shared_bytes=sum(both.values()))


def _residual(a: SnapshotArtifact, b: SnapshotArtifact) -> Iterator[Difference]:
    def files(artifact: SnapshotArtifact) -> dict[str, tuple[int, Digest | None]]:
        found = (one for one in artifact.capsule.objects if one.role == _RESIDUAL)
        return {one.owner.id: (one.bytes, one.sha256) for one in found}

    def reasons(artifact: SnapshotArtifact) -> dict[str, Any]:
        return {one.worker: dict(one.residual_reasons) for one in worker_exports_of(artifact.runtime.bindings)}

    yield from _files("residual", files(a), files(b))
    yield from value_differences("residual_reasons", reasons(a), reasons(b))


def _process_images(a: SnapshotArtifact, b: SnapshotArtifact) -> Section:
    def images(artifact: SnapshotArtifact) -> dict[str, tuple[int, Digest | None]]:
        return {
            f"{binding.unit}/{file.path}": (file.bytes, file.sha256)
            for binding in process_images_of(artifact.runtime.bindings)
            for file in binding.files
        }

    old, new = images(a), images(b)
    same = [size for path, (size, digest) in old.items() if new.get(path) == (size, digest)]
    detail = f"{len(same)} of {len({*old, *new})} files are equal"
    changes = _files("process-images", old, new)
    return Section(name="process images", changes=changes, detail=detail, shared_bytes=sum(same))


def _host_files(artifact: SnapshotArtifact) -> Files:
    bindings = host_files_of(artifact.runtime.bindings)
    return {f"{one.unit}:{file.path}": (file.bytes, file.sha256) for one in bindings for file in one.files}


def _seeds(artifact: SnapshotArtifact) -> Files:
    found = (one for one in artifact.capsule.objects if one.role == _CACHE_SEED)
    return {f"{one.owner.id}/{one.path}": (one.bytes, one.sha256) for one in found}


def _files(prefix: str, before: Files, after: Files) -> tuple[Difference, ...]:
    return tuple(
        Difference(field=f"{prefix}[{name}]", before=_file(before.get(name)), after=_file(after.get(name)))
        for name in _union(before, after)
        if before.get(name) != after.get(name)
    )


def _union(before: Iterable[str], after: Iterable[str]) -> Iterable[str]:
    return dict.fromkeys((*before, *after))


def _file(file: tuple[int, Digest | None] | None) -> str:
    if file is None:
        return ABSENT
    size, digest = file
    return f"{size} bytes, {'open for writing' if digest is None else digest}"
