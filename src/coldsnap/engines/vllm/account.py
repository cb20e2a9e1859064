"""From the provenance of a loaded model to what the observer is told: every byte of every allocation once.

Pure. Only memory that a tensor of the model holds may be the model's: what a temporary tensor left behind in an
allocator's free block is nobody's, and would be another pack after the next load.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coldsnap.core.extents import Allocation
from coldsnap.engines.observer import Observer
from coldsnap.engines.vllm.provenance import Provenance, Stored

__all__ = ["BETWEEN", "UNWRITTEN", "account"]

BETWEEN = "space between tensors"
UNWRITTEN = "not written while the loader was watched"


def account(
    provenance: Provenance,
    observer: Observer,
    *,
    allocations: Sequence[Allocation],
    storages: Iterable[tuple[int, int]],
) -> None:
    """Report what is known. `storages` are (ptr, size) of the memory behind the model's tensors, at most one of each;
    those outside every allocation are not preserved and not reported."""
    held = sorted({one for one in storages if one[1] > 0})
    for allocation in allocations:
        reach, end = allocation.ptr, allocation.ptr + allocation.size
        for ptr, size in held:
            if ptr < allocation.ptr or ptr + size > end:
                continue
            if ptr > reach:
                observer.unreplayable(reach, ptr - reach, BETWEEN)
            _account_storage(provenance, observer, ptr, size)
            reach = max(reach, ptr + size)
        if reach < end:
            observer.unreplayable(reach, end - reach, BETWEEN)


def _account_storage(provenance: Provenance, observer: Observer, ptr: int, size: int) -> None:
    at = ptr
    for span in provenance.within(ptr, size):
        if span.start > at:
            observer.unreplayable(at, span.start - at, UNWRITTEN)
        if isinstance(span.what, Stored):
            observer.wrote(
                span.start,
                span.end - span.start,
                tensor=span.what.tensor,
                file=span.what.file,
                file_offset=span.what.offset + span.at,
                tensor_offset=span.at,
                within=(ptr, size),
            )
        else:
            observer.unreplayable(span.start, span.end - span.start, span.what)
        at = span.end
    if at < ptr + size:
        observer.unreplayable(at, ptr + size - at, UNWRITTEN)
