"""Damage and forgery for tests: a flipped bit that is put back afterwards, and a capsule written anew with one file
changed and every digest made to fit, which no digest can notice."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coldsnap.capsule.image import PROCESS_IMAGE, CapsuleFile, write_capsule
from coldsnap.core.artifact import artifact_bytes, artifact_document, artifact_from
from coldsnap.core.digest import Digest
from coldsnap.core.messages import Exported, ExportedFile
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.assembly import NATIVE_MANIFEST, RECOVERY_MANIFEST, capsule_folder
from coldsnap.ops.tools import Tools

__all__ = ["changed", "exported_of", "flipped", "forge"]


@contextmanager
def changed(path: Path, data: bytes) -> Iterator[None]:
    """The file holds ``data`` meanwhile; afterwards it is there again with its own bytes."""
    before, mode = path.read_bytes(), path.stat().st_mode
    path.write_bytes(data)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        path.write_bytes(before)
        path.chmod(mode & 0o777)


@contextmanager
def flipped(path: Path, at: int) -> Iterator[None]:
    """One bit of the byte ``at`` is another meanwhile."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    with changed(path, bytes(data)):
        yield


def exported_of(tools: Tools, loaded: LoadedArtifact, prepared: Path, worker: str = "w0") -> Exported:
    """What the worker's export must have been, from the prepared capsule and the store."""

    def file(role: str) -> ExportedFile:
        entry = loaded.worker_object(worker, role)
        assert entry is not None
        return ExportedFile(path=str(prepared / entry.path), bytes=entry.bytes, sha256=entry.sha256)

    pack = loaded.packs()[worker]
    return Exported(
        pack=ExportedFile(path=str(tools.store.path(pack.sha256)), bytes=pack.bytes, sha256=pack.sha256),
        pack_shared=False,
        residual=None,
        native_manifest=file(NATIVE_MANIFEST),
        recovery_manifest=file(RECOVERY_MANIFEST),
        model_bytes=0,
        residual_bytes=0,
        num_model_extents=0,
        residual_reasons={},
        seconds={},
    )


def forge(
    tools: Tools,
    loaded: LoadedArtifact,
    prepared: Path,
    output: Path,
    *,
    files: Mapping[str, bytes],
    pack: tuple[Digest, int] | None = None,
    unit: str = "u0",
) -> LoadedArtifact:
    """An artifact at ``output`` whose capsule, put in its place, holds ``files`` by path instead of its own, and which
    names ``pack`` (digest and bytes). Everything is bound to everything, as in a capture."""
    folder = output.with_suffix(".files")
    folder.mkdir()
    document = artifact_document(loaded.artifact)
    roles: dict[str, tuple[str, str]] = {
        entry["path"]: (entry["role"], entry["owner"]) for entry in document["capsule"]["objects"]
    }
    sources = []
    for path in loaded.expected_files(unit):
        source = prepared / path
        if path in files:
            source = folder / path.replace("/", "-")
            source.write_bytes(files[path])
            source.chmod(0o600)
        role, owner = roles.get(path, (PROCESS_IMAGE, f"unit/{unit}"))
        sources.append(CapsuleFile(role=role, owner=owner, path=path, source=source))
    layout = output.with_suffix(".capsule")
    image = write_capsule(layout, unit=unit, files=sources, annotations={})
    os.rename(layout, capsule_folder(tools, image.digest))  # noqa: PTH104
    _rebind(document, files, image.digest, image.reference, unit)
    if pack is not None:
        for entry in document["weights"]["model_payloads"]["objects"]:
            entry |= {
                "sha256": str(pack[0]),
                "bytes": pack[1],
                "path": f"model-payloads/sha256/{pack[0].hex}.pack",
            }
    output.write_bytes(artifact_bytes(artifact_from(document)))
    return load_artifact(output)


def _rebind(document: dict[str, Any], files: Mapping[str, bytes], digest: Digest, reference: str, unit: str) -> None:
    for image in document["capsule"]["images"]:
        if image["unit"] == unit:
            image |= {"digest": str(digest), "reference": reference}
    bound = [*document["capsule"]["objects"], *document["weights"]["recovery"]["replay_plan"]]
    for binding in document["runtime"]["bindings"]:
        bound += binding["files"] if binding["kind"] == "coldsnap-process-images" else []
    for entry in bound:
        if (data := files.get(entry["path"])) is not None:
            entry |= {"bytes": len(data), "sha256": str(Digest.of(data))}
