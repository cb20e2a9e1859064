"""A capture's bytes on a model that was built again: which live address each extent belongs to.

A template that is placed builds its model from the configuration and the checkpoint's headers; its allocations lie
where they landed. Three rules say where the captured bytes go, and none of them trusts an address of the capture:

1. allocations are the same when, in address order, they have the same size and tag;
2. a model extent goes to the live range that the loader would have filled with the same tensors: the same semantic_id
   and size. Of several such ranges it takes the one at its own offset, else the lowest that is left;
3. a residual extent goes to its own offset in its allocation.

Which tensors make up the rest of an allocation is in no manifest; an engine whose layout may vary puts a digest of it
into the tag. Then the whole is proved as a manifest is: every live byte belongs to exactly one extent. So a model that
was built in another way is refused, with every extent that found no place, every range that no extent fills, and every
gap. What the residual holds is plain numbers (buffers, casts, padding); an engine that keeps addresses in its memory
cannot be built from metadata.

Worked example. Captured: one allocation at 0x1000, 0x3000 bytes, an extent E of 0x2000 bytes at 0x1000, the rest
residual. Live: one of the same size and tag at 0x9000, in which E's tensors would be at 0x9000. E moves to 0x9000, the
residual extent to 0xb000. Were E's place 0xa000, the residual would overlap it: refused.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from coldsnap.core.cover import RangeGroup, cover_problems
from coldsnap.core.extents import PAGE_BYTES, Allocation, MergedRange, ResidualExtent, residual_group
from coldsnap.core.manifest import NativeManifest, RecoveryManifest
from coldsnap.errors import Problem, Refused

__all__ = ["Relocation"]

_CURE = "build the model as at capture: the same checkpoint, options and package versions; or restore another capture"


class _Located(Protocol):
    @property
    def ptr(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def semantic_id(self) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Relocation:
    """The live side: every allocation, and every range that a loader would fill from the checkpoint."""

    allocations: tuple[Allocation, ...]
    ranges: tuple[MergedRange, ...]

    def native(self, manifest: NativeManifest) -> NativeManifest:
        """The manifest with live addresses. Raises Refused naming everything that differs."""
        moves = _Moves(self, manifest.entries)
        places = moves.places(manifest.model_weight_extents, "model_weight_extents")
        starts = [one.ptr for one in self.allocations]
        moved = replace(
            manifest,
            entries=self.allocations,
            model_weight_extents=tuple(
                replace(extent, ptr=ptr, allocation_ptr=starts[bisect_right(starts, ptr) - 1])
                for extent, ptr in zip(manifest.model_weight_extents, places, strict=True)
            ),
            residual_extents=moves.residual(manifest.residual_extents),
        )
        self._prove(moved, "model_weight_extents", moved.model_weight_extents)
        return moved

    def recovery(self, manifest: RecoveryManifest) -> RecoveryManifest:
        """The manifest with live addresses. Raises Refused naming everything that differs."""
        moves = _Moves(self, manifest.entries)
        places = moves.places(manifest.replay_plan, "replay_plan")
        moved = replace(
            manifest,
            entries=self.allocations,
            replay_plan=tuple(replace(entry, ptr=ptr) for entry, ptr in zip(manifest.replay_plan, places, strict=True)),
            residual_extents=moves.residual(manifest.residual_extents),
        )
        self._prove(moved, "replay_plan", moved.replay_plan)
        return moved

    def _prove(self, moved: NativeManifest | RecoveryManifest, field: str, model: Sequence[_Located]) -> None:
        rows = [(one.ptr, one.size, None) for one in model]
        problems = cover_problems(
            [(one.ptr, one.size) for one in moved.entries],
            [RangeGroup(field=field, rows=rows), residual_group(moved.residual_extents)],
            page_bytes=PAGE_BYTES,
        )
        if problems:
            raise _refused([replace(problem, cure=_CURE) for problem in problems])


class _Moves:
    def __init__(self, live: Relocation, captured: Sequence[Allocation]) -> None:
        self._live = live
        self._captured = sorted(captured, key=lambda one: one.ptr)
        self._starts = [one.ptr for one in self._captured]
        self._problems = list(_allocation_problems(self._captured, live.allocations))

    def moved(self, ptr: int) -> int:
        """The live address with the same offset in the allocation of the same number."""
        number = bisect_right(self._starts, ptr) - 1
        return self._live.allocations[number].ptr + ptr - self._captured[number].ptr

    def residual(self, extents: Sequence[ResidualExtent]) -> tuple[ResidualExtent, ...]:
        return tuple(
            replace(one, ptr=self.moved(one.ptr), allocation_ptr=self.moved(one.allocation_ptr)) for one in extents
        )

    def places(self, extents: Sequence[_Located], field: str) -> list[int]:
        """The live address of each extent, in their order. Raises Refused for these, and for the allocations."""
        free: dict[tuple[str, int], list[int]] = defaultdict(list)
        named = {one.ptr: one for one in self._live.ranges}
        for one in sorted(self._live.ranges, key=lambda one: one.ptr):
            free[one.semantic_id, one.size].append(one.ptr)
        places: dict[int, int] = {}
        for at_home in (True, False) if not self._problems else (False,):
            for number in sorted(range(len(extents)), key=lambda number: extents[number].ptr):
                extent = extents[number]
                left = free[extent.semantic_id, extent.size]
                ptr = self.moved(extent.ptr) if at_home else left[0] if left else None
                if number not in places and ptr is not None and ptr in left:
                    left.remove(ptr)
                    places[number] = ptr
        problems = list(self._problems)
        if len(places) < len(extents):
            lost = [(number, one) for number, one in enumerate(extents) if number not in places]
            unfilled = [named[ptr] for left in free.values() for ptr in left]
            problems += [*_lost(lost, field), *_unfilled(unfilled)]
        if problems:
            raise _refused(problems)
        return [places[number] for number in range(len(extents))]


def _allocation_problems(captured: Sequence[Allocation], live: Sequence[Allocation]) -> Iterable[Problem]:
    for number in range(max(len(captured), len(live))):
        was = captured[number] if number < len(captured) else None
        now = live[number] if number < len(live) else None
        if was is None or now is None or (was.size, was.tag) != (now.size, now.tag):
            yield Problem(
                field=f"entries[{number}]",
                message=f"was {_named(was)} at capture, and the model that was built here has {_named(now)}",
                cure=_CURE,
            )


def _named(one: Allocation | None) -> str:
    return f"{one.size} bytes of {one.tag!r}" if one is not None else "no such allocation"


def _lost(extents: Sequence[tuple[int, _Located]], field: str) -> Iterable[Problem]:
    for number, extent in extents:
        yield Problem(
            field=f"{field}[{number}]",
            message=f"has no place: no live range of {extent.size} bytes has its semantic_id",
            value=extent.semantic_id,
            cure=_CURE,
        )


def _unfilled(ranges: Sequence[MergedRange]) -> Iterable[Problem]:
    for one in sorted(ranges, key=lambda one: one.ptr):
        tensors = ", ".join(name for name, _, _ in one.tensors[:3])
        yield Problem(
            field=f"live[{one.ptr:#x}]",
            message=f"the {one.size} bytes for {tensors} were no model extent at capture, or not of this size",
            value=one.semantic_id,
            cure=_CURE,
        )


def _refused(problems: Sequence[Problem]) -> Refused:
    return Refused("place", problems)
