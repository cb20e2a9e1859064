"""The fields of the worker manifests, and the rules across them that the cover proof does not know.

One table per object is parser and JSON Schema in one; ``ManifestReader`` goes through a document list by
list, so that whatever parsed is still looked at when something else did not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain, islice
from typing import Any, Protocol, TypeVar

from pydantic_core import from_json

from coldsnap.core import rows
from coldsnap.core.extents import padded
from coldsnap.core.manifest_records import Blob, ModelSource
from coldsnap.core.paths import ROOT, Positions
from coldsnap.core.reading import UNREADABLE
from coldsnap.core.replay import ReplayEntry, ReplayPiece
from coldsnap.errors import InvalidDocument, Problem

__all__ = [
    "ENTRY",
    "MANIFEST_LIMIT_BYTES",
    "MODEL_EXTENT",
    "NATIVE",
    "NATIVE_KIND",
    "RECOVERY",
    "RECOVERY_KIND",
    "RESIDUAL_EXTENT",
    "ManifestReader",
    "read_quickly",
]

MANIFEST_LIMIT_BYTES = 1 << 30  # 640,000 extents are 0.2 GB of JSON
NATIVE_KIND = "coldsnap-native-manifest"
RECOVERY_KIND = "coldsnap-recovery-manifest"

_ADDRESS = rows.integer(0, (1 << 64) - 1)
_CRC32 = rows.integer(0, (1 << 32) - 1)
_BYTES = rows.integer(0, (1 << 63) - 1)  # file offsets and sizes are signed 64-bit
_RANK = rows.integer(0, (1 << 31) - 1)
ENTRY = rows.Table(ptr=_ADDRESS, size=_ADDRESS, tag=rows.line)
MODEL_EXTENT = rows.Table(
    ptr=_ADDRESS,
    size=_BYTES,
    allocation_ptr=_ADDRESS,
    semantic_id=rows.hex64,
    sha256=rows.digest,
    offset=_BYTES,
    crc32=_CRC32,
)
RESIDUAL_EXTENT = rows.Table(ptr=_ADDRESS, size=_BYTES, allocation_ptr=_ADDRESS, offset=_BYTES, crc32=_CRC32)
PIECE = rows.Table(
    file=rows.clean_path,
    tensor=rows.line,
    file_offset=_BYTES,
    tensor_offset=_BYTES,
    extent_offset=_BYTES,
    size=_BYTES,
)
REPLAY = rows.Table(
    semantic_id=rows.hex64,
    sha256=rows.digest,
    ptr=_ADDRESS,
    size=_BYTES,
    pieces=rows.any_list(PIECE.schema()),
)
_SOURCE = rows.Table(model_id=rows.line, revision=rows.line, metadata_sha256=rows.digest)
_BLOB = rows.Table(name=rows.line, bytes=_BYTES, sha256=rows.digest)


_BLOB_OR_NULL = rows.optional(rows.nested(_BLOB, Blob))
_COMMON = {
    "capture_id": rows.identifier,
    "worker": rows.identifier,
    "rank": _RANK,
    "preserved_bytes": _BYTES,
    "model_weight_bytes": _BYTES,
    "residual_bytes": _BYTES,
    "entries": rows.any_list(ENTRY.schema()),
    "residual_extents": rows.any_list(RESIDUAL_EXTENT.schema()),
    "residual": _BLOB_OR_NULL,
}
NATIVE = rows.Table(
    format=rows.constant(1),
    kind=rows.constant(NATIVE_KIND),
    **_COMMON,
    model_weight_extents=rows.any_list(MODEL_EXTENT.schema()),
    model_weights=_BLOB_OR_NULL,
)
RECOVERY = rows.Table(
    format=rows.constant(1),
    kind=rows.constant(RECOVERY_KIND),
    **_COMMON,
    model_source=rows.nested(_SOURCE, ModelSource),
    replay_plan=rows.any_list(REPLAY.schema()),
)


class _Sized(Protocol):
    @property
    def size(self) -> int: ...


T = TypeVar("T")


class ManifestReader:
    """Takes one manifest apart. Every method adds what it finds wrong to ``problems`` and goes on.

    ``num_members`` counts the members of all objects that were taken, for ``read_quickly``.
    """

    def __init__(self, data: bytes, table: rows.Table, subject: str, *, tree: object = None) -> None:
        """``tree`` is what ``data`` holds, should that be known. Raises InvalidDocument when it is no JSON at all."""
        self._subject = subject
        self._tree, self.problems = (
            (tree, []) if tree is not None else rows.load(data, limit_bytes=MANIFEST_LIMIT_BYTES)
        )
        if self._tree is UNREADABLE:
            raise InvalidDocument(subject, self.problems)
        self.members: dict[str, Any] = table.partial(self._tree, "", self.problems)
        self.num_members = len(self.members)
        self.num_members += sum(len(fields(one)) for one in self.members.values() if is_dataclass(one))

    def rows(self, field: str, table: rows.Table, make: Callable[..., T]) -> list[T] | None:
        """The records of one list; None when the list or any row of it is wrong."""
        items = self.members.get(field)
        if items is None:
            return None
        self.num_members += len(items) * len(table)
        return table.rows(items, field, self.problems, make)

    def replay_plan(self) -> list[ReplayEntry] | None:
        """The replay plan, whose rows hold lists of their own."""
        items = self.members.get("replay_plan")
        if items is None:
            return None
        if (quick := _good_plan(items)) is not None:
            self.num_members += len(items) * len(REPLAY) + sum(len(one.pieces) for one in quick) * len(PIECE)
            return quick
        plan: list[ReplayEntry] = []
        for index, item in enumerate(items):
            members = REPLAY.row(item, f"replay_plan[{index}]", self.problems)
            if members is None:
                continue
            pieces = PIECE.rows(members.pop("pieces"), f"replay_plan[{index}].pieces", self.problems, ReplayPiece)
            if pieces is not None:
                plan.append(ReplayEntry(**members, pieces=tuple(pieces)))
        return plan if len(plan) == len(items) else None

    def total(self, field: str, extents: Sequence[_Sized] | None) -> None:
        """The byte total ``field`` is the sum of the list's sizes."""
        said = self.members.get(field)
        if extents is None or said is None:
            return
        summed = sum(one.size for one in extents)
        if said != summed:
            self.problems.append(
                Problem(
                    field=field,
                    message=f"is not the sum of the sizes, {summed}",
                    value=str(said),
                    cure="export the worker's manifest again",
                )
            )

    def blob(self, field: str, name: str, extents: Sequence[_Sized] | None) -> None:
        """The file that the extents point into: absent when there is none, else of this name and exact size."""
        if extents is None or field not in self.members:
            return
        blob: Blob | None = self.members[field]
        if blob is None or not extents:
            if (blob is None) != (not extents):
                missing = blob is None
                self.problems.append(
                    Problem(
                        field=field,
                        message="is null although extents point into it" if missing else "is named without any extent",
                        cure="name the file, its bytes and its digest" if missing else "write null",
                    )
                )
            return
        if blob.name != name:
            self.problems.append(
                Problem(field=f"{field}.name", message="is another file name", value=blob.name, cure=f"write {name}")
            )
        wanted = sum(padded(one.size) for one in extents)
        if blob.bytes != wanted:
            self.problems.append(
                Problem(
                    field=f"{field}.bytes",
                    message=f"is not the end of the last extent's padding, {wanted}",
                    value=str(blob.bytes),
                    cure="export the worker's files again",
                )
            )

    def finish(self) -> dict[str, Any]:
        """The checked members. Raises InvalidDocument with all problems in document order."""
        if self.problems:
            places = Positions(self._tree)
            self.problems.sort(key=lambda problem: () if problem.field == ROOT else places.of(problem.field))
            raise InvalidDocument(self._subject, self.problems)
        return self.members


def read_quickly(data: bytes, table: rows.Table, subject: str, read: Callable[[ManifestReader], T]) -> T:
    """What ``read`` makes of a manifest. A good one is read several times faster than by the careful reader.

    The fast JSON reader takes the last of two equal keys without a word. So its tree only counts when nothing is wrong
    with it and it holds as many members as the text does. In text without escapes and spaces, as manifests are written
    here, a member is ``":`` and nothing else is, but for a value that begins with a colon. In case of doubt, and for
    whatever else is wrong, the careful reader has the last word. Raises what ``read`` raises with that one.
    """
    odd = any(mark in data for mark in (b"\\", b" ", b"\t", b"\r")) or data.find(b"\n") not in (-1, len(data) - 1)
    if len(data) <= MANIFEST_LIMIT_BYTES and not odd:
        try:
            reader = ManifestReader(data, table, subject, tree=from_json(data, cache_strings="keys"))
            found = read(reader)
        except (ValueError, InvalidDocument):
            pass  # the careful reader says what is wrong
        else:
            if data.count(b'":') == reader.num_members:
                return found
    return read(ManifestReader(data, table, subject))


def _good_plan(items: list[Any]) -> list[ReplayEntry] | None:
    """The entries of a long plan without a fault; None when its rows must be looked at one by one."""
    columns = REPLAY.columns(items)
    if columns is None:
        return None
    flat = list(chain.from_iterable(columns["pieces"]))
    pieces = PIECE.columns(flat)
    if pieces is None:
        return None
    made = iter(rows.records(ReplayPiece, pieces))
    columns["pieces"] = [tuple(islice(made, len(own))) for own in columns["pieces"]]
    return rows.records(ReplayEntry, columns)
