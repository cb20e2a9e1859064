"""Which artifacts this machine keeps files for: one small record each, below ``<state-root>/artifacts/``.

An artifact descriptor lies where its user put it; the record says where, and names the packs and capsules it
needs, so that ``gc`` keeps them without reading anything else. A record goes only with ``coldsnap delete``, or
with ``gc --forget-missing`` once the descriptor is gone.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Literal

from coldsnap.core.artifact import SnapshotArtifact, artifact_digest
from coldsnap.core.canonical import canonical_json
from coldsnap.core.digest import Digest
from coldsnap.core.names import Items
from coldsnap.core.parsing import NEWER, Record, parse_document
from coldsnap.errors import ColdsnapError, InvalidDocument, Problem
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.overlay import overlays, read_overlay
from coldsnap.ops.tools import Tools
from coldsnap.store.documents import read_private, replace
from coldsnap.store.faults import translated
from coldsnap.store.sweep import References

__all__ = ["Lease", "find_references", "forget", "lease", "lease_of", "leases", "put_back", "read_leases"]

_LIMIT_BYTES = 16 * 1024 * 1024


class Lease(Record):
    """What one artifact needs on this machine."""

    format: Literal[1] = 1
    kind: Literal["coldsnap-artifact-lease"] = "coldsnap-artifact-lease"
    artifact: Digest
    path: str
    packs: Items[Digest]
    capsules: Items[Digest]
    roots: Items[Digest] = ()

    def is_missing(self, leased: Collection[Digest]) -> bool:
        """Whether the descriptor is no longer where it was, or one of the other ``leased`` artifacts lies there now.

        One that is damaged, or cannot be read just now, is not missing: whoever mends it needs what it names.
        """
        path = Path(self.path)
        if not os.path.lexists(path):
            return True
        try:
            found = load_artifact(path).digest
        except ColdsnapError:
            return False
        return found != self.artifact and found in leased


def lease(tools: Tools, path: Path, artifact: SnapshotArtifact) -> Lease:
    """Keep what ``artifact`` needs from now on. Idempotent; the newest path wins."""
    record = _needs_of(path, artifact)
    if not _is_written(tools, record):
        _write(tools, record)
    return record


def _is_written(tools: Tools, record: Lease) -> bool:
    """Whether it stands there already: a restore need not wait for the disk twice."""
    try:
        return lease_of(tools, record.artifact) == record
    except ColdsnapError:  # unreadable, so it is written again
        return False


def _needs_of(path: Path, artifact: SnapshotArtifact) -> Lease:
    payloads = artifact.weights.model_payloads
    return Lease(
        artifact=artifact_digest(artifact),
        path=str(path),
        packs=tuple(dict.fromkeys(entry.sha256 for entry in payloads.objects)) if payloads is not None else (),
        capsules=tuple(image.digest for image in artifact.capsule.images),
        roots=tuple(dict.fromkeys(unit.image_digest for unit in artifact.launch.units if unit.image_digest)),
    )


def _write(tools: Tools, record: Lease) -> None:
    replace(_path(tools, record.artifact), canonical_json(record.model_dump(mode="json")) + b"\n")


def lease_of(tools: Tools, artifact: Digest) -> Lease | None:
    """The lease of an artifact. Raises what an unreadable one raises."""
    path = _path(tools, artifact)
    return _read(path) if os.path.lexists(path) else None


def put_back(tools: Tools, artifact: Digest, before: Lease | None) -> None:
    """Make the lease of an artifact be what it was ``before``; none, when there was none."""
    if before is None:
        forget(tools, artifact)
    else:
        _write(tools, before)


def leases(tools: Tools) -> tuple[Lease, ...]:
    """Every lease, by path. Raises what an unreadable one raises: nothing may be collected on a guess."""
    return read_leases(tools.state.artifacts)


def read_leases(folder: Path) -> tuple[Lease, ...]:
    """The leases in ``folder``, as ``leases`` gives them, for who only reads."""
    return tuple(sorted(map(_read, sorted(folder.glob("*.json"))), key=lambda one: one.path))


def _read(path: Path) -> Lease:
    data = read_private(path, _LIMIT_BYTES)
    try:
        found = parse_document(Lease, data, subject=str(path), limit_bytes=_LIMIT_BYTES)
    except InvalidDocument as error:
        cure = f"`coldsnap prepare` of artifact sha256:{path.stem} writes it again; remove it, if that artifact is gone"
        problems = [one if one.message == NEWER else replace_fields(one, cure=cure) for one in error.problems]
        raise InvalidDocument(str(path), problems, facts={"path": str(path)}) from error
    if path.stem != found.artifact.hex:  # nobody would find it again to write or to forget it
        problem = Problem(
            field="artifact",
            message="is not the one that the file's name says",
            value=str(found.artifact),
            cure=f"remove {path}, or call it {found.artifact.hex}.json",
        )
        raise InvalidDocument(str(path), [problem], facts={"path": str(path)})
    return found


def forget(tools: Tools, artifact: Digest) -> None:
    """Stop keeping what an artifact needs. Idempotent."""
    path = _path(tools, artifact)
    with translated("remove", path):
        path.unlink(missing_ok=True)


def find_references(tools: Tools, *, without: Collection[Digest] = ()) -> tuple[References, ...]:
    """What ``gc`` must keep: every lease's packs and capsules, but for the artifacts ``without`` which it is planned.

    Leases are told apart by artifact, never by path: a new artifact may lie where an old one was. What the descriptor
    itself names, when it can be read, is kept too, and so is what a service here was restored from: a lease that lost
    a line takes nothing with it. An overlay's capsules are kept as long as its portable artifact is. Raises what an
    unreadable lease, service record or overlay of an artifact that is kept raises.
    """
    kept = [one for one in leases(tools) if one.artifact not in without]
    needed = [_references(one.path, one, _described(one.path, one.artifact)) for one in kept]
    needed += [one for one in _served(tools) if not any(one.is_within(other) for other in needed)]
    artifacts = {one.artifact for one in kept}
    # One that could not be listed is read again, to raise: mended, it would miss its capsules.
    local = {
        portable: overlay or read_overlay(tools, portable)
        for portable, overlay in overlays(tools)
        if portable in artifacts
    }
    return (
        *needed,
        *(
            References(
                label=f"the overlay of {one.path}",
                capsules=frozenset(image.digest for image in local[one.artifact].artifact.capsule.images),
            )
            for one in kept
            if one.artifact in local
        ),
    )


def _references(label: str, *needs: Lease | None) -> References:
    return References(
        label=label,
        packs=frozenset(digest for one in needs if one is not None for digest in one.packs),
        capsules=frozenset(digest for one in needs if one is not None for digest in one.capsules),
        roots=frozenset(digest for one in needs if one is not None for digest in one.roots),
    )


def _served(tools: Tools) -> Iterator[References]:
    """What the services of this machine need, as far as their artifacts can still be read."""
    for name in tools.services.names():
        record = tools.services.load(name)
        if record is None or record.artifact_path is None or record.artifact_digest is None:
            continue
        if (described := _described(record.artifact_path, record.artifact_digest)) is not None:
            yield _references(f"service {name}", described)


def _described(path: str, artifact: Digest) -> Lease | None:
    """What the descriptor at ``path`` names, if it is ``artifact``'s and can be read."""
    try:
        loaded = load_artifact(Path(path))
    except ColdsnapError:
        return None
    return _needs_of(loaded.path, loaded.artifact) if loaded.digest == artifact else None


def _path(tools: Tools, artifact: Digest) -> Path:
    return tools.state.artifacts / f"{artifact.hex}.json"
