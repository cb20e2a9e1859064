"""The other direction: reading and hashing what stable memory holds."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from coldsnap.core.digest import Digest
from coldsnap.errors import UsageError
from coldsnap.hydrate.memory import DeviceMemory, StableMemory, host_addressable
from coldsnap.hydrate.workers import Progress, Stop, num_cores, run_together

__all__ = ["CHUNK_BYTES", "hash_ranges", "read_chunks"]

CHUNK_BYTES = 4 * 1024 * 1024


def read_chunks(memory: StableMemory, ptr: int, size: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[memoryview]:
    """Read-only views of ``size`` bytes at ``ptr``, in order, ``chunk_bytes`` each but for the last.

    Of host memory no byte is copied: a view shows what is there when it is looked at. A view of device memory is
    a copy, good until the next is asked for. Raises UsageError as ``view`` and ``chunks`` do, HostError.
    """
    if chunk_bytes <= 0:
        raise UsageError(f"chunk_bytes must be positive, not {chunk_bytes}", facts={"chunk_bytes": chunk_bytes})
    if isinstance(memory, DeviceMemory):
        yield from memory.chunks(ptr, size, chunk_bytes)
        return
    memory = host_addressable(memory)
    for start in range(0, size, chunk_bytes):
        yield memory.view(ptr + start, min(chunk_bytes, size - start)).toreadonly()


def hash_ranges(
    memory: StableMemory,
    ranges: Sequence[tuple[int, int]],
    *,
    num_threads: int = 0,
    progress: Callable[[int], None] | None = None,
    cancel: threading.Event | None = None,
) -> list[Digest]:
    """The SHA-256 of each ``(ptr, size)``, in the order given, several ranges at a time.

    ``num_threads`` 0: one per core. The largest ranges go first, so that none is left alone at the end.
    Raises UsageError (a range that is not inside one allocation, or memory unmapped) and
    OperationInterrupted (``cancel`` was set).
    """
    found: dict[int, Digest] = {}
    order = iter(sorted(range(len(ranges)), key=lambda number: -ranges[number][1]))
    lock = threading.Lock()
    stop, told = Stop(cancel), Progress(progress)

    def work() -> None:
        while True:
            with lock:
                number = next(order, None)
            if number is None:
                return
            state = hashlib.sha256()
            for chunk in read_chunks(memory, *ranges[number]):
                if stop.requested():
                    return
                state.update(chunk)
                told.add(len(chunk))
            found[number] = Digest.from_hash(state)

    count = min(num_threads or num_cores(), len(ranges))
    run_together([partial(work) for _ in range(count)], stop=stop, name="hash")
    return [found[number] for number in range(len(ranges))]
