"""From a file into device memory: the path's threads set up, run to their end, and cleaned up after.

What holds afterwards, whatever happened: no thread of the transfer runs, no copy is on its way, no page of the
file is registered, and no byte outside the segments was written. Copy buffers stay with the memory, for the next
transfer, until its ``trim`` or ``unmap``.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from coldsnap.hydrate.backing import backing_of
from coldsnap.hydrate.choose import FileFacts, PathChoice, TransferPath
from coldsnap.hydrate.cuda.choose import RingShape, choose_device_path, ring_shape
from coldsnap.hydrate.cuda.conductor import Conductor
from coldsnap.hydrate.cuda.driver import DriverFailure
from coldsnap.hydrate.cuda.mapping import MappedFile
from coldsnap.hydrate.cuda.plan import Block, piece_of, plan_chains, plan_windows
from coldsnap.hydrate.cuda.readers import read_blocks, read_chains
from coldsnap.hydrate.cuda.reading import BufferedStretches, DirectStretches, MappedStretches, StretchReader
from coldsnap.hydrate.cuda.registered import WINDOW_BYTES, RegisteredFile
from coldsnap.hydrate.cuda.window import DeviceWindow
from coldsnap.hydrate.cuda.work import Work
from coldsnap.hydrate.direct import open_direct
from coldsnap.hydrate.extents import ExtentsProof
from coldsnap.hydrate.segments import ExtentsSource, ProvedSource, Segment, Source, UnprovedSource
from coldsnap.hydrate.verify import Verifier
from coldsnap.hydrate.workers import Progress, Stop, num_cores, run_together

__all__ = ["BLOCK_BYTES", "DeviceTransfer", "fill_device"]

BLOCK_BYTES = 8 << 20
"""What one thread reads in one go; 8 threads made 40 GB/s then, 38 with 4 MiB and 13 with 2."""

_SHARED_WINDOW_BYTES = 32 << 20  # while the ring needs the driver as well

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTransfer:
    """What happened: the path really taken, the threads that read or registered, bytes from registered pages."""

    choice: PathChoice
    num_threads: int
    verified_bytes: int
    registered_bytes: int


def fill_device(
    source: Source,
    segments: Sequence[Segment],
    memory: DeviceWindow,
    facts: FileFacts,
    *,
    num_threads: int,
    wanted: TransferPath | None,
    block_bytes: int = BLOCK_BYTES,
    stop: Stop,
    told: Progress,
    registered: RegisteredFile | None = None,
) -> DeviceTransfer:
    """Fill sound ``segments`` of mapped ``memory``. ``registered``: the same file, registered ahead as a whole.

    Raises IntegrityError, HostError and OperationInterrupted as ``hydrate_file`` does.
    """
    unified = memory.facts.integrated
    proved = isinstance(source, ProvedSource)
    choice = choose_device_path(
        facts, backing_of(source.fd), proved=proved, unified=unified, num_cores=num_cores(), wanted=wanted
    )
    if registered is not None and proved:
        choice = PathChoice(path=TransferPath.REGISTERED, reason="the file was registered ahead")
    shape = ring_shape(
        choice.path,
        num_cores=num_cores(),
        unified=unified,
        hashing=isinstance(source, UnprovedSource),
        block_bytes=block_bytes,
        asked=num_threads,
    )
    if registered is not None:
        block_bytes = BLOCK_BYTES  # which divides the windows it was registered in
    with contextlib.ExitStack() as closing:
        one = _Transfer(source, segments, memory, choice, shape, block_bytes=block_bytes, stop=stop, told=told)
        closing.callback(one.close)
        one.open(facts)
        if isinstance(source, UnprovedSource):
            return one.verified()
        if isinstance(source, ExtentsSource):
            return one.proved(source.proof)
        if choice.path is TransferPath.MAPPED:
            return one.mapped()
        if choice.path in (TransferPath.REGISTERED, TransferPath.MIXED):
            return one.windows(registered)
        return one.ring()


class _Transfer:
    """One transfer's choices, and the threads of each way."""

    def __init__(
        self,
        source: Source,
        segments: Sequence[Segment],
        memory: DeviceWindow,
        choice: PathChoice,
        shape: RingShape,
        *,
        block_bytes: int,
        stop: Stop,
        told: Progress,
    ) -> None:
        self._source = source
        self._segments = segments
        self._memory = memory
        self._choice = choice
        self._shape = shape
        self._block_bytes = block_bytes
        self._stop = stop
        self._told = told
        self._direct_fd: int | None = None
        self._refused = threading.Event()
        self._reader: StretchReader = BufferedStretches(source.fd, drop_behind=False)

    def open(self, facts: FileFacts) -> None:
        """Choose who reads."""
        shared = self._memory.facts.integrated and not backing_of(self._source.fd).in_memory
        buffered = BufferedStretches(self._source.fd, drop_behind=shared)
        self._reader = buffered
        if self._choice.path is not TransferPath.DIRECT or facts.direct is None:
            return
        if self._block_bytes % facts.direct.offset:
            reason = f"O_DIRECT moves {facts.direct.offset} bytes at a time, which pieces are no multiple of"
            self._choice = PathChoice(path=TransferPath.BUFFERED, reason=reason)
            return
        try:
            self._direct_fd = open_direct(self._source.fd)
        except OSError as error:
            reason = f"O_DIRECT cannot be opened here: {error.strerror}"
            self._choice = PathChoice(path=TransferPath.BUFFERED, reason=reason)
            return
        self._reader = DirectStretches(
            self._direct_fd, alignment=facts.direct, refused=self._refused, otherwise=buffered
        )

    def close(self) -> None:
        if self._direct_fd is not None:
            os.close(self._direct_fd)

    def ring(self) -> DeviceTransfer:
        """Everything through slots."""
        work = self._work()
        self._conduct(work, [partial(read_blocks, take=work.take_block)] * self._num_readers())
        return self._report(work, num_threads=self._num_readers())

    def mapped(self) -> DeviceTransfer:
        """Everything through slots, out of the file's pages."""
        try:
            file = MappedFile(self._source.fd, file_bytes=self._source.bytes)
        except OSError as error:
            return self._fall_back(self._work(), f"the file cannot be mapped: {error.strerror}")
        with file:
            self._reader = MappedStretches(file.address)
            return self.ring()

    def verified(self) -> DeviceTransfer:
        """Everything through slots, hashed there."""
        chains = deque(plan_chains(self._segments, block_bytes=self._block_bytes))
        count = min(self._shape.num_threads, len(chains))
        read = partial(read_chains, take=partial(_next, chains), segments=self._segments)
        self._conduct(Work((), block_bytes=self._block_bytes), [read] * count)
        return self._report(None, num_threads=count, verified_bytes=self._total())

    def proved(self, proof: ExtentsProof) -> DeviceTransfer:
        """Everything through slots, and hashed from the device as extents become complete.

        Their parts come in any order and from several transfers, so there is no slot that could be hashed instead.
        """
        work = self._work()
        count = self._num_readers()
        hashers = min(count, len(self._segments))
        verifier = Verifier(self._segments, (), self._memory, num_readers=1, num_hashers=hashers, proof=proof)
        self._conduct(
            work,
            [partial(read_blocks, take=work.take_block)] * count,
            verifier=verifier,
        )
        return self._report(work, num_threads=count, verified_bytes=verifier.verified_bytes)

    def windows(self, registered: RegisteredFile | None) -> DeviceTransfer:
        """From the file's own pages, and from the other end through slots."""
        mixed = self._choice.path is TransferPath.MIXED
        work = self._work(_SHARED_WINDOW_BYTES if mixed else WINDOW_BYTES)
        ring = [partial(read_blocks, take=work.take_block)] * self._shape.num_threads
        try:
            file = registered or RegisteredFile(self._memory, self._source.fd, file_bytes=self._source.bytes)
        except OSError as error:
            return self._fall_back(work, f"the file cannot be mapped: {error.strerror}")
        readers = ring if mixed else []
        otherwise = self._reader
        with contextlib.nullcontext() if registered is not None else file:
            if backing_of(self._source.fd).in_memory:
                self._reader = MappedStretches(file.address)
            refusal = self._conduct(work, readers, file=file)
        self._reader = otherwise
        if refusal is not None:
            return self._fall_back(work, f"the driver does not register the file's pages: {refusal.code}")
        return self._report(work, num_threads=1 + len(readers))

    def _fall_back(self, work: Work, reason: str) -> DeviceTransfer:
        self._choice = PathChoice(path=TransferPath.BUFFERED, reason=reason)
        if not work.is_done:
            self._conduct(work, [partial(read_blocks, take=work.take_block)] * self._shape.num_threads)
        return self._report(work, num_threads=self._shape.num_threads)

    def _work(self, window_bytes: int = WINDOW_BYTES) -> Work:
        window_bytes = max(1, window_bytes // self._block_bytes) * self._block_bytes
        return Work(plan_windows(self._segments, window_bytes=window_bytes), block_bytes=self._block_bytes)

    def _num_readers(self) -> int:
        """No more than there are blocks, roughly."""
        return max(1, min(self._shape.num_threads, self._total() // self._block_bytes + len(self._segments)))

    def _conduct(
        self,
        work: Work,
        readers: Sequence[Callable[..., None]],
        *,
        file: RegisteredFile | None = None,
        verifier: Verifier | None = None,
    ) -> DriverFailure | None:
        """Run readers and a conductor; why it stopped registering, if it did."""

        def arrived(block: Block) -> None:
            if verifier is not None:
                verifier.arrived(piece_of(block))

        num_slots = self._shape.num_slots if readers else 0
        with self._memory.buffers.slots(slot_bytes=self._block_bytes, num_slots=num_slots) as slots:
            conductor = Conductor(
                self._memory,
                work,
                slots,
                num_readers=len(readers),
                stop=self._stop,
                told=self._told,
                file=file,
                arrived=arrived if verifier is not None else None,
            )

            def conduct() -> None:
                try:
                    conductor.run()
                finally:
                    if verifier is not None:
                        verifier.reader_done()

            reading = [partial(read, conductor, reader=self._reader, stop=self._stop) for read in readers]
            hashing = [partial(verifier.hash_arrived, self._stop)] * verifier.num_hashers if verifier else []
            try:
                # The conductor before the hashers: one that cannot be started must leave none waiting for it.
                run_together([*reading, conduct, *hashing], stop=self._stop, name="hydrate")
            finally:
                self._memory.attach()  # to unlock the slots in this thread
        return conductor.refusal

    def _total(self) -> int:
        return sum(segment.size for segment in self._segments)

    def _report(self, work: Work | None, *, num_threads: int, verified_bytes: int = 0) -> DeviceTransfer:
        choice = self._choice
        if self._refused.is_set():
            choice = PathChoice(path=TransferPath.BUFFERED, reason="the file system refused an O_DIRECT read (EINVAL)")
        return DeviceTransfer(
            choice=choice,
            num_threads=num_threads,
            verified_bytes=verified_bytes,
            registered_bytes=work.registered_bytes if work is not None else 0,
        )


def _next(remaining: deque[T]) -> T | None:
    try:
        return remaining.popleft()
    except IndexError:
        return None
