"""The one thread of a transfer that talks to the driver, between the threads that read and the device.

                    take_block                       hand_over
    Work  <----------------------- readers (many) ----------------> filled
      |  take_window                   ^                              |
      |                                |  free slots                  v
      '------------------------------ conductor ------ copies ------> device

The driver holds a lock of the context while it registers pages, a few milliseconds a window, and every other call
of any thread waits for it. With readers that sent their own copies, registering and reading together were slower
(25 GB/s) than either alone (29 and 34). So readers only read, and all calls are made here: send what
was filled, take back slots whose copies are done, register the next window, and sleep only when there is nothing
else. It also spares the readers four changes of Python's lock a block.

Two streams, one for each kind of copy, so that a slot never waits for a window of 128 MiB.
"""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from coldsnap.hydrate.cuda.driver import DriverFailure, translated_failure
from coldsnap.hydrate.cuda.plan import Block
from coldsnap.hydrate.cuda.registered import RegisteredFile
from coldsnap.hydrate.cuda.slots import Slot, Slots
from coldsnap.hydrate.cuda.window import DeviceWindow
from coldsnap.hydrate.cuda.work import Work
from coldsnap.hydrate.workers import Progress, Stop

__all__ = ["Conductor"]

_WINDOWS_AHEAD = 3
_POLL_S = 0.1  # how soon a sleeper notices that the transfer was stopped; nobody waits for it otherwise


class _Filled(NamedTuple):
    slot: Slot
    skip: int  # where in the slot the block begins
    block: Block


class _Flight(NamedTuple):
    event: int
    landed: Callable[[], None]


class Conductor:
    """Give it to readers, run ``run`` in a thread of its own, and close ``slots`` and ``file`` after both ended.

    ``file``: whose windows to copy from; without it everything goes through slots. ``arrived`` is told of each
    block that is in the device's memory.
    """

    def __init__(
        self,
        memory: DeviceWindow,
        work: Work,
        slots: Slots,
        *,
        num_readers: int,
        stop: Stop,
        told: Progress,
        file: RegisteredFile | None = None,
        arrived: Callable[[Block], None] | None = None,
    ) -> None:
        self._memory = memory
        self._driver = memory.driver
        self._work = work
        self._slots = slots
        self._num_readers = num_readers
        self._stop = stop
        self._told = told
        self._file = file
        self._arrived = arrived
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for number in range(slots.num_slots):
            self._free.put(slots.slot(number))
        self._filled: queue.SimpleQueue[_Filled | None] = queue.SimpleQueue()
        self._batch: list[_Filled] = []
        self._block_flights: deque[_Flight] = deque()
        self._window_flights: deque[_Flight] = deque()
        self._events: list[int] = []  # all of them
        self._idle_events: list[int] = []
        self._block_stream = self._window_stream = 0
        self.refusal: DriverFailure | None = None

    # For readers.

    def slot(self) -> Slot | None:
        """A slot to fill; None when the transfer was stopped. Raises OperationInterrupted."""
        while not self._stop.requested():
            with contextlib.suppress(queue.Empty):
                return self._free.get(timeout=_POLL_S)
        return None

    def hand_over(self, slot: Slot, skip: int, block: Block) -> None:
        """The slot holds the block from ``skip`` on; it is not the reader's any more."""
        self._filled.put(_Filled(slot, skip, block))

    def reader_done(self) -> None:
        """A reader will hand over nothing more, for whatever reason. Once per reader."""
        self._filled.put(None)

    # The thread.

    def run(self) -> None:
        """Until everything is in the device's memory, or the transfer is stopped. No copy is on its way then.

        Raises HostError, OperationInterrupted, and what ``arrived`` or the progress callback raise.
        """
        self._memory.attach()
        try:
            with contextlib.ExitStack() as closing:
                self._block_stream = self._stream(closing)
                self._window_stream = self._stream(closing)
                closing.callback(self._destroy_events)
                closing.callback(self._driver.synchronize, self._window_stream)
                closing.callback(self._driver.synchronize, self._block_stream)
                self._conduct()
        except DriverFailure as failure:
            raise translated_failure(failure, "copying to the device", device=self._memory.ordinal) from failure

    def _conduct(self) -> None:
        while not self._stop.requested():
            moved = self._send_filled()
            moved |= self._send_window()
            moved |= self._land()
            if moved:
                continue
            if self._num_readers and (self._free.qsize() > self._num_readers or not self._flying):
                # Readers have slots to go on with: their next block is worth more than slots that come back.
                self._collect(wait=True)
            elif self._flying:
                self._wait_for_oldest()
            elif self._work.is_done or self._file is None or self.refusal is not None:
                return

    @property
    def _flying(self) -> bool:
        return bool(self._block_flights or self._window_flights)

    def _collect(self, *, wait: bool) -> bool:
        """Note one message of a reader; False when there is none."""
        try:
            filled = self._filled.get(timeout=_POLL_S) if wait else self._filled.get_nowait()
        except queue.Empty:
            return False
        if filled is None:
            self._num_readers -= 1
        else:
            self._batch.append(filled)
        return True

    def _send_filled(self) -> bool:
        """Send all that readers handed over, with one event for all of it: each call costs a turn of Python's lock."""
        while self._collect(wait=False):
            pass
        if not self._batch:
            return False
        batch, self._batch = self._batch, []
        for slot, skip, block in batch:
            self._slots.lock(slot.number)
            start = slot.address + skip - block.file_offset
            for row in block.rows:
                self._driver.copy_in(row.ptr, start + row.file_offset, row.size, self._block_stream)

        def landed() -> None:
            for slot, _, block in batch:
                self._free.put(slot)
                if self._arrived is not None:
                    self._arrived(block)
                self._told.add(block.payload_bytes)

        self._block_flights.append(self._flight(self._block_stream, landed))
        return True

    def _send_window(self) -> bool:
        if self._file is None or self.refusal is not None or len(self._window_flights) >= _WINDOWS_AHEAD:
            return False
        window = self._work.take_window()
        if window is None:
            return False
        try:
            self._file.register(window.file_offset, window.size)
        except DriverFailure as failure:
            self.refusal = failure
            self._work.put_back(window)
            return False
        for row in window.rows:
            self._driver.copy_in(row.ptr, self._file.address(row.file_offset), row.size, self._window_stream)
        landed = partial(self._told.add, window.payload_bytes)
        self._window_flights.append(self._flight(self._window_stream, landed))
        return True

    def _land(self) -> bool:
        """Deal with copies that are done."""
        moved = False
        for flights in (self._block_flights, self._window_flights):
            while flights and self._driver.done(flights[0].event):
                self._landed(flights.popleft())
                moved = True
        return moved

    def _wait_for_oldest(self) -> None:
        flights = self._block_flights or self._window_flights
        self._driver.wait(flights[0].event)
        self._landed(flights.popleft())

    def _landed(self, flight: _Flight) -> None:
        self._idle_events.append(flight.event)
        flight.landed()

    def _flight(self, stream: int, landed: Callable[[], None]) -> _Flight:
        if not self._idle_events:
            self._events.append(self._driver.create_event())
            self._idle_events.append(self._events[-1])
        event = self._idle_events.pop()
        self._driver.record(event, stream)
        return _Flight(event, landed)

    def _stream(self, closing: contextlib.ExitStack) -> int:
        stream = self._driver.create_stream()
        closing.callback(self._driver.destroy_stream, stream)
        return stream

    def _destroy_events(self) -> None:
        with contextlib.ExitStack() as closing:
            for event in self._events:
                closing.callback(self._driver.destroy_event, event)
