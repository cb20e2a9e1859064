"""The threads that read a file into slots for the conductor. They make no driver call.

While the device copies out of some slots, others are filled. What a byte costs on this way is host memory: it is read
from the page cache, written to the slot and read by the device, three crossings; that, and not the link, is the
limit (34-37 GB/s where the link does 54).

For a source that nobody has proved, ``read_chains`` hashes each slot before it is handed over. One thread takes all
of a segment, in order, so the hash needs no second look at the bytes; and what was hashed is what is sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from coldsnap.core.digest import Digest
from coldsnap.hydrate.cuda.conductor import Conductor
from coldsnap.hydrate.cuda.plan import Block
from coldsnap.hydrate.cuda.reading import StretchReader
from coldsnap.hydrate.segments import Segment
from coldsnap.hydrate.verify import mismatch
from coldsnap.hydrate.workers import Stop

__all__ = ["read_blocks", "read_chains"]


def read_blocks(conductor: Conductor, take: Callable[[], Block | None], reader: StretchReader, stop: Stop) -> None:
    """The work of one thread: read what ``take`` gives until it gives None."""
    try:
        while not stop.requested() and (slot := conductor.slot()) is not None:
            block = take()
            if block is None:
                return
            skip = reader.read(slot, block.file_offset, block.size)
            conductor.hand_over(slot, skip, block)
    finally:
        conductor.reader_done()


def read_chains(
    conductor: Conductor,
    take: Callable[[], tuple[Block, ...] | None],
    reader: StretchReader,
    stop: Stop,
    segments: Sequence[Segment],
) -> None:
    """The work of one thread: read and hash chains. Raises IntegrityError for bytes that were not promised."""
    try:
        while not stop.requested() and (chain := take()) is not None:
            state = hashlib.sha256()
            for block in chain:
                slot = conductor.slot()
                if slot is None:
                    return
                skip = reader.read(slot, block.file_offset, block.size)
                for row in block.rows:
                    start = skip + row.file_offset - block.file_offset
                    state.update(slot.view[start : start + row.size])
                    segment = segments[row.segment]
                    if row.ptr + row.size == segment.ptr + segment.size:  # its last byte
                        found = Digest.from_hash(state)
                        if found != segment.sha256:
                            raise mismatch(segment, found)
                        state = hashlib.sha256()
                conductor.hand_over(slot, skip, block)
    finally:
        conductor.reader_done()
