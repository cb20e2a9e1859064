"""A torch memory pool over a pluggable allocator: segments that are got whole and cut into blocks.

As torch does it, in small: a request is rounded up to 512 bytes, goes to the smallest block that is free and large
enough, else to a new segment of 2 MiB (up to 1 MiB), 20 MiB (up to 10 MiB) or whole 2 MiB; what is left of the block
stays free. Segments for requests of up to 1 MiB are apart from the others, of which no rest of 1 MiB or less is cut.
Freed blocks join their free neighbours, and segments are never given back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["FakePool", "segment_bytes"]

_MIB = 1 << 20
_ROUND_BYTES = 512


@dataclass(slots=True)
class _Block:
    address: int
    size: int
    requested: int = 0  # 0: free


class FakePool:
    """torch's `MemPool`, as far as vLLM's allocator looks at it. `get_segment` is asked for bytes, and says where."""

    def __init__(self, get_segment: Callable[[int], int]) -> None:
        self._get_segment = get_segment
        self._segments: dict[int, list[_Block]] = {}
        self._small: set[int] = set()

    def malloc(self, size: int) -> int:
        """A block of at least `size` bytes; its address."""
        wanted = -(-size // _ROUND_BYTES) * _ROUND_BYTES
        fitting = [
            (block.size, block.address, blocks)
            for segment, blocks in self._segments.items()
            for block in blocks
            if not block.requested and block.size >= wanted and (segment in self._small) == (size <= _MIB)
        ]
        if not fitting:
            total = segment_bytes(size)
            address = self._get_segment(total)
            self._segments[address] = [_Block(address, total)]
            if size <= _MIB:
                self._small.add(address)
            fitting = [(total, address, self._segments[address])]
        _, address, blocks = min(fitting, key=lambda one: one[:2])
        index = next(i for i, block in enumerate(blocks) if block.address == address)
        whole = blocks[index]
        if whole.size - wanted <= (0 if size <= _MIB else _MIB):
            wanted = whole.size
        rest = [_Block(address + wanted, whole.size - wanted)] if whole.size > wanted else []
        blocks[index : index + 1] = [_Block(address, wanted, size), *rest]
        return address

    def free(self, address: int) -> None:
        """The block is nobody's. Raises KeyError for an address that is not one that was given out."""
        for blocks in self._segments.values():
            for block in blocks:
                if block.address == address and block.requested:
                    block.requested = 0
                    _join(blocks)
                    return
        raise KeyError(hex(address))

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        """Every segment and its blocks, in torch's words."""
        return [
            {
                "address": address,
                "segment_type": "small" if address in self._small else "large",
                "total_size": sum(block.size for block in blocks),
                "allocated_size": sum(block.size for block in blocks if block.requested),
                "blocks": [
                    {
                        "address": block.address,
                        "size": block.size,
                        "requested_size": block.requested or block.size,
                        "state": "active_allocated" if block.requested else "inactive",
                    }
                    for block in blocks
                ],
            }
            for address, blocks in self._segments.items()
        ]


def segment_bytes(size: int) -> int:
    """How much torch asks an allocator for when it needs `size` bytes and has none."""
    if size <= _MIB:
        return 2 * _MIB
    if size < 10 * _MIB:
        return 20 * _MIB
    return -(-size // (2 * _MIB)) * 2 * _MIB


def _join(blocks: list[_Block]) -> None:
    joined: list[_Block] = []
    for block in blocks:
        if joined and not joined[-1].requested and not block.requested:
            joined[-1].size += block.size
        else:
            joined.append(block)
    blocks[:] = joined
