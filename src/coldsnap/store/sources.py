"""Where the bytes of an extent come from while a pack or residual is written: memory that is still mapped.

``read`` starts over at every call and yields the extent's bytes front to back. A buffer is good until the next
one is asked for, so a reader of device memory may use one staging buffer again and again. Different
sources are read by different threads at the same time; one source by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from coldsnap.errors import IntegrityError

__all__ = ["Buffer", "PackSource", "ResidualSource", "Source", "chunks_of"]

Buffer: TypeAlias = bytes | bytearray | memoryview


class Source(Protocol):
    """``size`` bytes at ``ptr``, which ``read`` gives from the start at every call."""

    @property
    def ptr(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def read(self) -> Callable[[], Iterator[Buffer]]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidualSource:
    """``size`` bytes at ``ptr`` that belong to no model extent."""

    ptr: int
    size: int
    read: Callable[[], Iterator[Buffer]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSource:
    """``size`` model bytes at ``ptr``, with the identity of the tensors in them."""

    ptr: int
    size: int
    semantic_id: str
    read: Callable[[], Iterator[Buffer]]


def chunks_of(source: Source) -> Iterator[memoryview]:
    """The source's bytes. Raises IntegrityError when it gives more or fewer than ``size``."""
    left = source.size
    for buffer in source.read():
        view = memoryview(buffer).cast("B")
        left -= len(view)
        if left < 0:
            break
        yield view
    if left != 0:
        given = source.size - left if left > 0 else f"more than {source.size}"
        raise IntegrityError(
            f"the extent at {source.ptr:#x} gave {given} bytes instead of {source.size}",
            cure="keep the allocation mapped and its size unchanged while it is written",
            facts={"ptr": source.ptr, "size": source.size},
        )
