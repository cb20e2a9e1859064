"""Where the bytes are: of artifacts by owner, of packs by who shares them, of a state root by folder.

An artifact's files are what its descriptor names, at their full size. What a disk holds is something else: capsules
are compressed, prepared folders are not, a pack that ten workers of three artifacts name is there once. Both are
reported, and never added to each other. Reads descriptors, leases and file sizes, and changes nothing.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldsnap.core.bindings import process_images_of
from coldsnap.core.digest import Digest
from coldsnap.core.objects import payload_path
from coldsnap.errors import ColdsnapError, UsageError
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.leases import Lease, read_leases

__all__ = ["ArtifactUsage", "FolderUsage", "OwnerUsage", "PackUsage", "Usage", "find_usage"]

PROCESS_IMAGES, PACK = "process images", "pack"
IN_MEMORY = "in-memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerUsage:
    """Bytes of the files of one owner (``unit/u0``, ``worker/w0``) by what they are."""

    owner: str
    bytes_by_role: dict[str, int]

    @property
    def bytes(self) -> int:
        """All of them."""
        return sum(self.bytes_by_role.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtifactUsage:
    """``named_bytes`` counts every file of every owner, ``unique_bytes`` each digest once.

    ``capsule_disk_bytes`` and ``prepared_disk_bytes`` are what its capsules take in the state root, packed and
    unpacked; 0 when they are not there.
    """

    path: str
    digest: Digest
    model: str
    owners: tuple[OwnerUsage, ...]
    named_bytes: int
    unique_bytes: int
    capsule_disk_bytes: int
    prepared_disk_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PackUsage:
    """One pack. ``references``: (artifact path, number of its workers) that name it. ``here``: the store has it."""

    digest: Digest
    bytes: int
    references: tuple[tuple[str, int], ...]
    here: bool

    @property
    def saved_bytes(self) -> int:
        """What its users would take more if each worker had a copy of its own."""
        return self.bytes * max(0, sum(count for _, count in self.references) - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderUsage:
    """A folder of the state root: ``disk_bytes`` are blocks in use, a file with several names counted once.

    Those of ``in-memory`` are memory.
    """

    name: str
    num_files: int
    disk_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Everything. ``unread`` are (path, reason) of leased artifacts whose descriptor could not be read."""

    artifacts: tuple[ArtifactUsage, ...]
    packs: tuple[PackUsage, ...]
    folders: tuple[FolderUsage, ...]
    unread: tuple[tuple[str, str], ...]

    @property
    def saved_bytes(self) -> int:
        """What sharing packs between workers and artifacts saves."""
        return sum(pack.saved_bytes for pack in self.packs)

    @property
    def disk_bytes(self) -> int:
        """What the state root takes of its disk."""
        return sum(folder.disk_bytes for folder in self.folders if folder.name != IN_MEMORY)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "artifacts": [
                {
                    "path": one.path,
                    "digest": str(one.digest),
                    "model": one.model,
                    "owners": [{"owner": who.owner, "bytes": who.bytes, **who.bytes_by_role} for who in one.owners],
                    "named_bytes": one.named_bytes,
                    "unique_bytes": one.unique_bytes,
                    "capsule_disk_bytes": one.capsule_disk_bytes,
                    "prepared_disk_bytes": one.prepared_disk_bytes,
                }
                for one in self.artifacts
            ],
            "packs": [
                {
                    "digest": str(one.digest),
                    "bytes": one.bytes,
                    "references": [{"artifact": path, "workers": count} for path, count in one.references],
                    "here": one.here,
                    "saved_bytes": one.saved_bytes,
                }
                for one in self.packs
            ],
            "saved_bytes": self.saved_bytes,
            "state_root": {
                "folders": {one.name: {"files": one.num_files, "disk_bytes": one.disk_bytes} for one in self.folders},
                "disk_bytes": self.disk_bytes,
            },
            "unread": [{"path": path, "reason": reason} for path, reason in self.unread],
        }


def find_usage(state_root: Path, paths: Sequence[Path] = ()) -> Usage:
    """The usage of the artifacts at ``paths``, or of all that the state root keeps files for, and of the root itself.

    Raises UserError or InvalidDocument for a named artifact that cannot be read, UsageError when there is neither
    a state root nor an artifact to look at.
    """
    if not paths and not state_root.is_dir():
        raise UsageError(
            f"{state_root} does not exist, so there is nothing to look at",
            cure="name the --state-root that holds packs and capsules, or an ARTIFACT.json",
            facts={"path": str(state_root)},
        )
    leased = read_leases(state_root / "artifacts")
    loaded, unread = ([load_artifact(path) for path in paths], []) if paths else _load_leased(leased)
    return Usage(
        artifacts=tuple(_artifact(state_root, one) for one in loaded),
        packs=tuple(_packs(state_root, loaded)),
        folders=tuple(_folders(state_root)),
        unread=tuple(unread),
    )


def _load_leased(leased: Iterable[Lease]) -> tuple[list[LoadedArtifact], list[tuple[str, str]]]:
    found: list[LoadedArtifact] = []
    unread: list[tuple[str, str]] = []
    for one in leased:
        try:
            loaded = load_artifact(Path(one.path))
        except ColdsnapError as error:
            unread.append((one.path, error.message))
            continue
        if loaded.digest == one.artifact:
            found.append(loaded)
        else:
            unread.append((one.path, f"another artifact lies there now; files of {one.artifact} are still kept"))
    return found, unread


def _artifact(state_root: Path, loaded: LoadedArtifact) -> ArtifactUsage:
    by_owner: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    contents: dict[Digest, int] = {}
    for owner, role, size, digest in _files(loaded):
        by_owner[owner][role] += size
        contents[digest] = size
    capsules = [image.digest.hex for image in loaded.artifact.capsule.images]
    owners = tuple(OwnerUsage(owner=owner, bytes_by_role=dict(roles)) for owner, roles in by_owner.items())
    return ArtifactUsage(
        path=str(loaded.path),
        digest=loaded.digest,
        model=loaded.artifact.launch.model.id,
        owners=owners,
        named_bytes=sum(one.bytes for one in owners),
        unique_bytes=sum(contents.values()),
        capsule_disk_bytes=sum(_measure(state_root / "capsules" / name)[1] for name in capsules),
        prepared_disk_bytes=sum(_measure(state_root / "prepared" / name)[1] for name in capsules),
    )


def _files(loaded: LoadedArtifact) -> Iterator[tuple[str, str, int, Digest]]:
    """(owner, what it is, bytes, digest) of every file that the artifact names, units first."""
    for binding in process_images_of(loaded.artifact.runtime.bindings):
        for file in binding.files:
            yield f"unit/{binding.unit}", PROCESS_IMAGES, file.bytes, file.sha256
    for entry in sorted(loaded.artifact.capsule.objects, key=lambda one: one.owner.kind != "unit"):
        yield str(entry.owner), entry.role, entry.bytes, entry.sha256
    for worker, pack in loaded.packs().items():
        yield f"worker/{worker}", PACK, pack.bytes, pack.sha256


def _packs(state_root: Path, artifacts: Iterable[LoadedArtifact]) -> Iterator[PackUsage]:
    sizes: dict[Digest, int] = {}
    users: dict[Digest, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for loaded in artifacts:
        for pack in loaded.packs().values():
            sizes[pack.sha256] = pack.bytes
            users[pack.sha256][str(loaded.path)] += 1
    for digest, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0].hex)):
        here = (state_root / payload_path(digest)).is_file()
        yield PackUsage(digest=digest, bytes=size, references=tuple(users[digest].items()), here=here)


def _folders(state_root: Path) -> Iterator[FolderUsage]:
    if not state_root.is_dir():
        return
    own_files = [one for one in state_root.iterdir() if not one.is_dir() or one.is_symlink()]
    seen: set[tuple[int, int]] = set()
    for folder in sorted(one for one in state_root.iterdir() if one not in own_files):
        num_files, disk_bytes = _measure(folder, seen)
        yield FolderUsage(name=folder.name, num_files=num_files, disk_bytes=disk_bytes)
    blocks = sum(one.lstat().st_blocks for one in own_files)
    yield FolderUsage(name="(its own files)", num_files=len(own_files), disk_bytes=blocks * 512)


def _measure(folder: Path, seen: set[tuple[int, int]] | None = None) -> tuple[int, int]:
    """(files, bytes on disk) below ``folder``. Links are not followed; what vanishes meanwhile is not counted."""
    seen = set() if seen is None else seen
    num_files = blocks = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(os.path.join(base, name))  # noqa: PTH118 - a Path for each of many files costs
            except FileNotFoundError:
                continue
            if (found.st_dev, found.st_ino) not in seen:
                seen.add((found.st_dev, found.st_ino))
                num_files += 1
                blocks += found.st_blocks
    return num_files, blocks * 512
