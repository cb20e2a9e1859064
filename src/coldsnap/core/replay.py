"""The recovery replay plan: which bytes of which safetensors file each model extent is made of.

A loader may write one place twice (tied weights, a fused tensor filled piece by piece). ``tile_pieces``
settles that once, at capture, so that a replay may copy pieces in any order and in parallel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from coldsnap.core.digest import Digest
from coldsnap.errors import Problem

__all__ = ["ReplayEntry", "ReplayPiece", "replay_problems", "tile_pieces"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayPiece:
    """``size`` bytes that the loader copied from a safetensors file to a place in an extent.

    They start at byte ``tensor_offset`` of ``tensor``, which is byte ``file_offset`` of ``file``, and go to
    byte ``extent_offset`` of the extent.
    """

    file: str
    tensor: str
    file_offset: int
    tensor_offset: int
    extent_offset: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayEntry:
    """How one model extent is rebuilt from the checkpoint: its pieces tile it without gap or overlap."""

    semantic_id: str
    sha256: Digest
    ptr: int
    size: int
    pieces: tuple[ReplayPiece, ...]


def tile_pieces(pieces: Iterable[ReplayPiece]) -> tuple[ReplayPiece, ...]:
    """Cut pieces given in the order of their writes so that they no longer overlap: the last write wins.

    The result is in ``extent_offset`` order. Gaps stay gaps, and empty pieces vanish.
    """
    pieces = [piece for piece in pieces if piece.size > 0]
    in_place = sorted(pieces, key=lambda piece: piece.extent_offset)
    if all(before.extent_offset + before.size <= after.extent_offset for before, after in pairwise(in_place)):
        return tuple(in_place)
    tiles: list[ReplayPiece] = []
    for piece in pieces:
        start, end = piece.extent_offset, piece.extent_offset + piece.size
        kept: list[ReplayPiece] = []
        for tile in tiles:
            tile_end = tile.extent_offset + tile.size
            if tile.extent_offset < min(start, tile_end):
                kept.append(_cut(tile, tile.extent_offset, min(start, tile_end)))
            if max(end, tile.extent_offset) < tile_end:
                kept.append(_cut(tile, max(end, tile.extent_offset), tile_end))
        tiles = [*kept, piece]
    return tuple(sorted(tiles, key=lambda tile: tile.extent_offset))


def _cut(piece: ReplayPiece, start: int, end: int) -> ReplayPiece:
    skipped = start - piece.extent_offset
    return ReplayPiece(
        file=piece.file,
        tensor=piece.tensor,
        file_offset=piece.file_offset + skipped,
        tensor_offset=piece.tensor_offset + skipped,
        extent_offset=start,
        size=end - start,
    )


def replay_problems(plan: Sequence[ReplayEntry]) -> Iterator[Problem]:
    """Entries out of address order, and every gap, overlap and overrun of the pieces inside each entry."""
    for index, (before, after) in enumerate(pairwise(plan), start=1):
        if after.ptr < before.ptr:
            yield Problem(
                field=f"replay_plan[{index}]",
                message="is out of order: the plan is sorted by address",
                value=f"{after.ptr:#x}",
                cure=f"place it before {before.ptr:#x}",
            )
    for index, entry in enumerate(plan):
        reach = 0
        for number, piece in enumerate(entry.pieces):
            field = f"replay_plan[{index}].pieces[{number}]"
            start, end = piece.extent_offset, piece.extent_offset + piece.size
            if piece.size < 1:
                yield Problem(
                    field=f"{field}.size",
                    message="a piece holds at least one byte",
                    value=str(piece.size),
                    cure="leave empty pieces out",
                )
            elif end > entry.size:
                yield Problem(
                    field=field,
                    message=f"runs past the extent's {entry.size} bytes",
                    value=f"{start}..{end}",
                    cure="pieces lie inside their extent; what the loader wrote beyond it belongs to another",
                )
            if start != reach:
                kind = "leaves a gap" if start > reach else "overlaps the piece before it, or is out of order"
                yield Problem(
                    field=f"{field}.extent_offset",
                    message=f"{kind}: the pieces before it end at {reach}",
                    value=str(start),
                    cure="pieces tile their extent in extent_offset order; tile_pieces cuts overlapping writes",
                )
            reach = max(reach, end)
        if reach < entry.size:
            yield Problem(
                field=f"replay_plan[{index}].pieces",
                message=f"leave the last {entry.size - reach} of {entry.size} bytes out",
                value=f"{reach}..{entry.size}",
                cure="bytes the loader was not seen to write are residual",
            )
