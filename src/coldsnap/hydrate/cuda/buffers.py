"""Locked host memory on loan: slots for transfers from files, lanes for reading back what a device holds.

Making 128 MiB of it takes as long as moving half a gigabyte, so what came back whole is kept: a residual goes through
the slots of the pack before it, and a capture uses the same lanes for thousands of extents. ``trim`` lets go of it
all, so that no locked page is left when a process serves, or is dumped.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from coldsnap.core.extents import padded
from coldsnap.hydrate.cuda.driver import Driver, DriverFailure, translated_failure
from coldsnap.hydrate.cuda.slots import Slots

__all__ = ["Buffers", "Lane"]


class Lane:
    """One stream and ``num_slots`` buffers of ``slot_bytes``, for one thread at a time.

    Take a slot with ``next_slot``, fill it, ``send`` from it as often as needed, and ``sent`` it.
    """

    def __init__(self, driver: Driver, *, slot_bytes: int, num_slots: int) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self._driver = driver
        self._next = 0
        with contextlib.ExitStack() as undo:
            self._slots = undo.enter_context(Slots(driver, slot_bytes=padded(slot_bytes), num_slots=num_slots))
            self._stream = driver.create_stream()
            undo.callback(driver.destroy_stream, self._stream)
            self._events = []
            for slot in range(num_slots):
                self._slots.lock(slot)
                self._events.append(driver.create_event())
                undo.callback(driver.destroy_event, self._events[-1])
            self._undo = undo.pop_all()

    def next_slot(self) -> int:
        """The number of a slot whose earlier copies are done; waits for the oldest."""
        slot = self._next
        self._next = (slot + 1) % self.num_slots
        self._driver.wait(self._events[slot])
        return slot

    def view(self, slot: int) -> memoryview:
        """The slot's bytes."""
        return self._slots.slot(slot).view

    def send(self, slot: int, ptr: int, size: int) -> None:
        """Copy the slot's first ``size`` bytes to device address ``ptr``; done when the slot comes again."""
        self._driver.copy_in(ptr, self._slots.slot(slot).address, size, self._stream)
        self._driver.record(self._events[slot], self._stream)

    def fetch(self, slot: int, ptr: int, size: int) -> None:
        """Copy from device address ``ptr`` to the start of the slot; there after ``arrived``."""
        self._driver.copy_out(self._slots.slot(slot).address, ptr, size, self._stream)
        self._driver.record(self._events[slot], self._stream)

    def arrived(self, slot: int) -> None:
        """Wait for the copies of this slot."""
        self._driver.wait(self._events[slot])

    def drain(self) -> None:
        """Wait for every copy."""
        self._driver.synchronize(self._stream)

    def close(self) -> None:
        """Let go of everything; the device must be done with it, or broken."""
        self._undo.close()


class Buffers:
    """Lends lanes and slots, making what is not there. Thread-safe; the caller's thread has the context."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._lanes: list[Lane] = []
        self._slots: list[Slots] = []

    @contextlib.contextmanager
    def lane(self, *, slot_bytes: int, num_slots: int = 2) -> Iterator[Lane]:
        """A lane for one thread. When it is over, the lane's copies are done.

        Raises HostError for copies that failed, once the block has ended; the block's own error goes first.
        """
        lane = self._idle_lane(slot_bytes, num_slots)
        if lane is None:
            try:
                lane = Lane(self._driver, slot_bytes=slot_bytes, num_slots=num_slots)
            except DriverFailure as failure:
                raise translated_failure(failure, "making a copy buffer") from failure
        try:
            yield lane
            lane.drain()
        except BaseException as error:
            _abandon(lane)
            if isinstance(error, DriverFailure):
                raise translated_failure(error, "copying between host and device") from error
            raise
        with self._lock:
            self._lanes.append(lane)

    @contextlib.contextmanager
    def slots(self, *, slot_bytes: int, num_slots: int) -> Iterator[Slots]:
        """At least ``num_slots``; no copy may be on its way when the block ends. Raises OutOfSpace."""
        slots = self._idle_slots(slot_bytes, num_slots) or Slots(
            self._driver, slot_bytes=slot_bytes, num_slots=num_slots
        )
        try:
            yield slots
        except BaseException:
            slots.close()
            raise
        with self._lock:
            self._slots.append(slots)

    def trim(self) -> None:
        """Let go of everything that is not on loan."""
        with self._lock:
            idle: list[Lane | Slots] = [*self._lanes, *self._slots]
            self._lanes, self._slots = [], []
        with contextlib.ExitStack() as closing:
            for one in idle:
                closing.callback(one.close)

    def _idle_lane(self, slot_bytes: int, num_slots: int) -> Lane | None:
        with self._lock:
            for lane in self._lanes:
                if lane.slot_bytes == slot_bytes and lane.num_slots == num_slots:
                    self._lanes.remove(lane)
                    return lane
        return None

    def _idle_slots(self, slot_bytes: int, num_slots: int) -> Slots | None:
        with self._lock:
            for slots in self._slots:
                if slots.slot_bytes == slot_bytes and slots.num_slots >= num_slots:
                    self._slots.remove(slots)
                    return slots
        return None


def _abandon(lane: Lane) -> None:
    """After an error: the device may still copy, so wait for it, and never hide that error behind another."""
    with contextlib.suppress(DriverFailure):
        lane.drain()
    with contextlib.suppress(DriverFailure, OSError):
        lane.close()
