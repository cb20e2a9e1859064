"""What differs between the memory of two workers: which tensors have other bytes, which are new, which only moved.

Pure, from two manifests. Extents are matched by what they are (``semantic_id``: tensors, offsets, sizes), never by
address, so another allocation order is no difference in the model. What is left over is matched by tensor names: the
same tensors in another size or grouping. Residual bytes have no name, so they are matched by address, and their
CRC-32 says where they differ; that they are equal only the residual's digest proves.

Example: of ten extents a fine-tuned twin has one with other bytes and the allocator turned two around:
one ``changed`` with its tensor's name, nine extents equal, two of those at another address.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from coldsnap.core.digest import Digest
from coldsnap.core.extents import ResidualExtent
from coldsnap.core.manifest_records import NativeManifest, RecoveryManifest

__all__ = [
    "ChangeKind",
    "ExtentChange",
    "MemoryDifference",
    "MemoryMap",
    "NamedExtent",
    "ResidualDifference",
    "compare_memory",
    "memory_of",
    "same_but_capture",
]

_CAPTURE = b'{"capture_id":"'


class ChangeKind(StrEnum):
    """What became of an extent."""

    CHANGED = "changed"
    RESIZED = "resized"
    ADDED = "added"
    REMOVED = "removed"


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedExtent:
    """A model extent; ``tensors`` is empty when only a native manifest was there, which has no names."""

    semantic_id: str
    sha256: Digest
    ptr: int
    size: int
    tensors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryMap:
    """What a manifest says of a worker's memory. ``allocations`` are (address, size, tag)."""

    allocations: tuple[tuple[int, int, str], ...]
    extents: tuple[NamedExtent, ...]
    residual: tuple[ResidualExtent, ...]
    residual_sha256: Digest | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtentChange:
    """One extent that is not equal on both sides. Sizes in bytes; None on the side that does not have it."""

    kind: ChangeKind
    tensors: tuple[str, ...]
    semantic_id: str
    bytes_before: int | None
    bytes_after: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidualDifference:
    """Residual bytes at equal addresses with another CRC-32, and those that only one side keeps as residual."""

    same: bool
    changed_bytes: int
    num_changed: int
    only_before_bytes: int
    only_after_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryDifference:
    """``equal_bytes`` of ``num_equal`` extents are the same on both sides; ``num_moved`` of them lie elsewhere."""

    changes: tuple[ExtentChange, ...]
    num_equal: int
    equal_bytes: int
    num_moved: int
    moved_bytes: int
    same_allocations: bool
    residual: ResidualDifference

    @property
    def same(self) -> bool:
        """Whether both memories are the same byte for byte, addresses included."""
        return not self.changes and not self.num_moved and self.same_allocations and self.residual.same


def same_but_capture(before: bytes, after: bytes) -> bool:
    """Whether two manifests as written here differ in ``capture_id`` at most. False also when it takes parsing to say.

    Canonical JSON puts that member first, so this is one comparison of memory, hundreds of times faster than parsing.
    """
    ends = []
    for data in (before, after):
        end = data.find(b'"', len(_CAPTURE))
        if not data.startswith(_CAPTURE) or end < 0:
            return False
        ends.append(end)
    return before[ends[0] :] == after[ends[1] :]


def memory_of(manifest: RecoveryManifest | NativeManifest) -> MemoryMap:
    """What a manifest says; a recovery manifest also knows the tensors' names."""
    if isinstance(manifest, RecoveryManifest):
        extents = tuple(
            NamedExtent(
                semantic_id=one.semantic_id,
                sha256=one.sha256,
                ptr=one.ptr,
                size=one.size,
                tensors=tuple(sorted({piece.tensor for piece in one.pieces})),
            )
            for one in manifest.replay_plan
        )
    else:
        extents = tuple(
            NamedExtent(semantic_id=one.semantic_id, sha256=one.sha256, ptr=one.ptr, size=one.size, tensors=())
            for one in manifest.model_weight_extents
        )
    return MemoryMap(
        allocations=tuple((one.ptr, one.size, one.tag) for one in manifest.entries),
        extents=extents,
        residual=manifest.residual_extents,
        residual_sha256=manifest.residual.sha256 if manifest.residual is not None else None,
    )


def compare_memory(before: MemoryMap, after: MemoryMap) -> MemoryDifference:
    """Everything that differs. Changes are in the order of ``before``, then what only ``after`` has."""
    matching = _Matching()
    left, right = _by(before.extents, "semantic_id"), _by(after.extents, "semantic_id")
    for key, old in left.items():
        matching.pair(old, right.pop(key, []))
    for new in right.values():
        matching.pair([], new)
    changes = [*matching.changed, *_renamed(matching.removed, matching.added)]
    places = {id(one): place for place, one in enumerate((*before.extents, *after.extents))}
    changes.sort(key=lambda change: places[id(change[1] or change[2])])
    names = {one.semantic_id: one.tensors for one in (*after.extents, *before.extents) if one.tensors}
    return MemoryDifference(
        changes=tuple(_change(kind, old, new, names) for kind, old, new in changes),
        num_equal=len(matching.equal),
        equal_bytes=sum(old.size for old, _ in matching.equal),
        num_moved=sum(old.ptr != new.ptr for old, new in matching.equal),
        moved_bytes=sum(old.size for old, new in matching.equal if old.ptr != new.ptr),
        same_allocations=before.allocations == after.allocations,
        residual=_residual(before, after),
    )


_Change = tuple[ChangeKind, NamedExtent | None, NamedExtent | None]


class _Matching:
    """Pairs the extents of one identity: equal bytes first, wherever they lie, then by address."""

    def __init__(self) -> None:
        self.equal: list[tuple[NamedExtent, NamedExtent]] = []
        self.changed: list[_Change] = []
        self.removed: list[NamedExtent] = []
        self.added: list[NamedExtent] = []

    def pair(self, before: Sequence[NamedExtent], after: Sequence[NamedExtent]) -> None:
        if len(before) == len(after) == 1 and before[0].sha256 == after[0].sha256:  # nearly always
            self.equal.append((before[0], after[0]))
            return
        waiting = _by(sorted(after, key=lambda one: one.ptr), "sha256")
        left = []
        for old in sorted(before, key=lambda one: one.ptr):
            if same := waiting.get(old.sha256):
                self.equal.append((old, same.pop(0)))
            else:
                left.append(old)
        rest = sorted((one for found in waiting.values() for one in found), key=lambda one: one.ptr)
        self.changed += [(ChangeKind.CHANGED, old, new) for old, new in zip(left, rest, strict=False)]
        self.removed += left[len(rest) :]
        self.added += rest[len(left) :]


def _renamed(removed: Iterable[NamedExtent], added: Iterable[NamedExtent]) -> Iterable[_Change]:
    """Of what only one side has: the same tensors in another size or grouping, and what is really gone or new."""
    new_by_names = _by(added, "tensors")
    for old in removed:
        match = new_by_names.get(old.tensors) if old.tensors else None
        yield (ChangeKind.RESIZED, old, match.pop(0)) if match else (ChangeKind.REMOVED, old, None)
    for left in new_by_names.values():
        for new in left:
            yield ChangeKind.ADDED, None, new


def _change(
    kind: ChangeKind, old: NamedExtent | None, new: NamedExtent | None, names: Mapping[str, tuple[str, ...]]
) -> ExtentChange:
    semantic_id = old.semantic_id if old is not None else new.semantic_id if new is not None else ""
    return ExtentChange(
        kind=kind,
        tensors=names.get(semantic_id, ()),
        semantic_id=semantic_id,
        bytes_before=old.size if old is not None else None,
        bytes_after=new.size if new is not None else None,
    )


def _residual(before: MemoryMap, after: MemoryMap) -> ResidualDifference:
    old = {(one.ptr, one.size): one.crc32 for one in before.residual}
    new = {(one.ptr, one.size): one.crc32 for one in after.residual}
    changed = [size for (ptr, size), crc in old.items() if new.get((ptr, size), crc) != crc]
    return ResidualDifference(
        same=old.keys() == new.keys() and before.residual_sha256 == after.residual_sha256,
        changed_bytes=sum(changed),
        num_changed=len(changed),
        only_before_bytes=sum(size for _, size in old.keys() - new.keys()),
        only_after_bytes=sum(size for _, size in new.keys() - old.keys()),
    )


def _by(extents: Iterable[NamedExtent], field: str) -> dict[object, list[NamedExtent]]:
    grouped: dict[object, list[NamedExtent]] = defaultdict(list)
    for one in extents:
        grouped[getattr(one, field)].append(one)
    return dict(grouped)
