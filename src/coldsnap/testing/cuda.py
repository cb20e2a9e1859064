"""A CUDA driver without a GPU: it keeps books, moves real bytes, and refuses what CUDA refuses.

Where CUDA is free to choose, this chooses the least convenient. A copy that was sent happens as late as it may: when
somebody waits for it. New device memory holds ``GARBAGE``. A copy whose buffer or mapping went away before it
happened is what a GPU would end a process for: it breaks the context for good, and its story is in ``violations``.

    driver = FakeDriver()
    driver.fail("cuMemMap", "CUDA_ERROR_OUT_OF_MEMORY", after=1)   # the second call
    driver.elsewhere = True                                        # reservations ignore their hint
    driver.calls                                                   # ["retain_context(0)", ...]
    driver.leftovers()                                             # {} when all was given back
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from coldsnap.hydrate import libc
from coldsnap.hydrate.cuda.driver import DeviceFacts, DriverFailure
from coldsnap.testing.cuda_streams import FakeStreams

__all__ = ["GARBAGE", "FakeDriver"]

GARBAGE = 0xA5
"""Every byte of device memory that nobody has written to."""

_HOST_PAGE = 4096
_SMALL_RESERVATION_BYTES = 32 << 20  # driver 580 puts smaller ones where it likes


@dataclass(slots=True)
class _Mapping:
    size: int
    data: bytearray | None  # None: mapped by somebody else
    handle: int = 0
    allowed: bool = False


class FakeDriver(FakeStreams):
    """``Driver`` in name and behaviour. One device, 0. Safe to call from several threads."""

    def __init__(
        self,
        *,
        granularity_bytes: int = 2 << 20,
        total_bytes: int = 1 << 40,
        integrated: bool = False,
        virtual_memory: bool = True,
        read_only_register: bool = True,
    ) -> None:
        super().__init__()
        self.facts = DeviceFacts(
            name="Fake GPU",
            uuid="GPU-00000000-0000-0000-0000-000000000000",
            total_bytes=total_bytes,
            granularity_bytes=granularity_bytes,
            compute_capability=(9, 0),
            num_multiprocessors=132,
            integrated=integrated,
            virtual_memory=virtual_memory,
            read_only_register=read_only_register,
        )
        self.elsewhere = False
        self.pageable_copies = 0
        self._handles: dict[int, int] = {}
        self._reserved: dict[int, int] = {}
        self._occupied: dict[int, int] = {}
        self._mappings: dict[int, _Mapping] = {}
        self._registered: dict[int, tuple[int, bool]] = {}

    # What tests say and ask.

    @contextlib.contextmanager
    def occupied(self, ptr: int, size: int) -> Iterator[None]:
        """Somebody else holds a range: has mapped into a reservation, or reserved addresses that nobody had."""
        with self._lock:
            inside = any(start <= ptr and ptr + size <= start + length for start, length in self._reserved.items())
            if inside:
                self._mappings[ptr] = _Mapping(size=size, data=None)
            else:
                self._occupied[ptr] = size
        yield
        with self._lock:
            self._occupied.pop(ptr, None)
            if inside:
                self._mappings.pop(ptr, None)

    def leftovers(self) -> dict[str, int]:
        """What was taken and not given back, by kind; kinds with nothing are left out."""
        with self._lock:
            counts = {
                "contexts": self._contexts,
                "handles": len(self._handles),
                "reservations": len(self._reserved),
                "mappings": len(self._mappings),
                "registrations": len(self._registered),
                "streams": len(self._streams),
                "events": len(self._events),
            }
            return {kind: count for kind, count in counts.items() if count}

    @property
    def registered_bytes(self) -> int:
        """Host bytes that are registered now."""
        with self._lock:
            return sum(size for size, _ in self._registered.values())

    def peek(self, ptr: int, size: int) -> bytes:
        """Device bytes, as they are now. Raises KeyError where nothing is mapped."""
        with self._lock:
            start, mapping = self._find(ptr, size)
            if mapping.data is None:
                raise KeyError(hex(ptr))
            return bytes(memoryview(mapping.data)[ptr - start : ptr - start + size])

    # The driver's own calls.

    def version(self) -> int:
        """See ``Driver.version``."""
        return 13000

    def device_facts(self, ordinal: int) -> DeviceFacts:
        """See ``Driver.device_facts``."""
        with self._lock:
            self._enter("cuDeviceGet", f"device_facts({ordinal})", context=False)
            if ordinal != 0:
                raise DriverFailure("cuDeviceGet", "CUDA_ERROR_INVALID_DEVICE")
            return self.facts

    def retain_context(self, ordinal: int) -> int:
        """See ``Driver.retain_context``."""
        with self._lock:
            self._enter("cuDevicePrimaryCtxRetain", f"retain_context({ordinal})", context=False)
            self._contexts += 1
            return 0xC0

    def release_context(self, ordinal: int) -> None:
        """See ``Driver.release_context``."""
        with self._lock:
            self._enter("cuDevicePrimaryCtxRelease", f"release_context({ordinal})", context=False)
            self._require(self._contexts > 0, "cuDevicePrimaryCtxRelease", "CUDA_ERROR_INVALID_CONTEXT")
            self._contexts -= 1

    def use_context(self, context: int) -> None:
        """See ``Driver.use_context``."""
        with self._lock:
            self._enter("cuCtxSetCurrent", None, context=False)
            self._require(context == 0xC0 and self._contexts > 0, "cuCtxSetCurrent", "CUDA_ERROR_INVALID_CONTEXT")
            self._here.context = context

    def settle(self) -> None:
        """See ``Driver.settle``."""
        with self._lock:
            self._enter("cuCtxSynchronize", "settle()")
            for stream in list(self._streams.values()):
                self._run(stream, stream.sent)
            self._enter_broken("cuCtxSynchronize")

    def reserve(self, size: int, *, alignment: int, hint: int) -> int:
        """See ``Driver.reserve``."""
        with self._lock:
            self._enter("cuMemAddressReserve", f"reserve({hint:#x}, {size})")
            grain = self.facts.granularity_bytes
            self._require(
                size > 0 and size % grain == 0 and alignment % grain == 0,
                "cuMemAddressReserve",
                "CUDA_ERROR_INVALID_VALUE",
            )
            ptr = hint
            small = size < _SMALL_RESERVATION_BYTES
            if self.elsewhere or small or not hint or hint % grain or self._taken(hint, size):
                ptr = 0x7E00_0000_0000
                while self._taken(ptr, size):
                    ptr += grain
            self._reserved[ptr] = size
            return ptr

    def unreserve(self, ptr: int, size: int) -> None:
        """See ``Driver.unreserve``."""
        with self._lock:
            self._enter("cuMemAddressFree", f"unreserve({ptr:#x}, {size})")
            ours = self._reserved.get(ptr) == size and not any(ptr <= at < ptr + size for at in self._mappings)
            self._require(ours, "cuMemAddressFree", "CUDA_ERROR_INVALID_VALUE")
            del self._reserved[ptr]

    def create(self, ordinal: int, size: int) -> int:
        """See ``Driver.create``."""
        with self._lock:
            self._enter("cuMemCreate", f"create({size})")
            self._require(size % self.facts.granularity_bytes == 0, "cuMemCreate", "CUDA_ERROR_INVALID_VALUE")
            let_go = (mapping.size for mapping in self._mappings.values() if mapping.handle not in self._handles)
            used = sum(let_go) + sum(self._handles.values())
            self._require(used + size <= self.facts.total_bytes, "cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY")
            handle = self._new()
            self._handles[handle] = size
            return handle

    def destroy(self, handle: int) -> None:
        """See ``Driver.destroy``."""
        with self._lock:
            self._enter("cuMemRelease", "destroy()")
            self._require(handle in self._handles, "cuMemRelease", "CUDA_ERROR_INVALID_VALUE")
            del self._handles[handle]

    def map(self, ptr: int, size: int, handle: int) -> None:
        """See ``Driver.map``."""
        with self._lock:
            self._enter("cuMemMap", f"map({ptr:#x}, {size})")
            reserved = any(at <= ptr and ptr + size <= at + length for at, length in self._reserved.items())
            sound = reserved and self._handles.get(handle) == size
            self._require(sound, "cuMemMap", "CUDA_ERROR_INVALID_VALUE")
            free = all(at + one.size <= ptr or ptr + size <= at for at, one in self._mappings.items())
            self._require(free, "cuMemMap", "CUDA_ERROR_INVALID_VALUE")  # as driver 580 says it
            self._mappings[ptr] = _Mapping(size=size, data=bytearray([GARBAGE]) * size, handle=handle)

    def allow(self, ordinal: int, ptr: int, size: int) -> None:
        """See ``Driver.allow``."""
        with self._lock:
            self._enter("cuMemSetAccess", f"allow({ptr:#x}, {size})")
            mapping = self._mappings.get(ptr)
            sound = mapping is not None and mapping.size == size and mapping.data is not None
            self._require(sound, "cuMemSetAccess", "CUDA_ERROR_INVALID_VALUE")
            if mapping is not None:
                mapping.allowed = True

    def unmap(self, ptr: int, size: int) -> None:
        """See ``Driver.unmap``."""
        with self._lock:
            self._enter("cuMemUnmap", f"unmap({ptr:#x}, {size})")
            mapping = self._mappings.get(ptr)
            self._require(mapping is not None and mapping.size == size, "cuMemUnmap", "CUDA_ERROR_INVALID_VALUE")
            del self._mappings[ptr]

    def register_host(self, address: int, size: int, *, read_only: bool) -> None:
        """See ``Driver.register_host``."""
        with self._lock:
            self._enter("cuMemHostRegister", f"register_host({size}, read_only={read_only})")
            whole = size > 0 and address % _HOST_PAGE == 0 and size % _HOST_PAGE == 0
            self._require(whole, "cuMemHostRegister", "CUDA_ERROR_INVALID_VALUE")
            self._require(
                self.facts.read_only_register or not read_only, "cuMemHostRegister", "CUDA_ERROR_NOT_SUPPORTED"
            )
            apart = all(at + length <= address or address + size <= at for at, (length, _) in self._registered.items())
            self._require(apart, "cuMemHostRegister", "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED")
            self._registered[address] = (size, read_only)

    def unregister_host(self, address: int) -> None:
        """See ``Driver.unregister_host``."""
        with self._lock:
            self._enter("cuMemHostUnregister", "unregister_host()")
            known = address in self._registered
            self._require(known, "cuMemHostUnregister", "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED")
            del self._registered[address]

    def copy_in(self, ptr: int, address: int, size: int, stream: int) -> None:
        """See ``Driver.copy_in``."""
        with self._lock:
            self._enter("cuMemcpyHtoDAsync", f"copy_in({ptr:#x}, {size})")
            self._send_copy("cuMemcpyHtoDAsync", ptr, address, size, stream, into_device=True)

    def copy_out(self, address: int, ptr: int, size: int, stream: int) -> None:
        """See ``Driver.copy_out``."""
        with self._lock:
            self._enter("cuMemcpyDtoHAsync", f"copy_out({ptr:#x}, {size})")
            self._send_copy("cuMemcpyDtoHAsync", ptr, address, size, stream, into_device=False)

    def fill_zero(self, ptr: int, size: int, stream: int) -> None:
        """See ``Driver.fill_zero``."""
        with self._lock:
            self._enter("cuMemsetD8Async", f"fill_zero({ptr:#x}, {size})")
            self._device_bytes("cuMemsetD8Async", ptr, size)

            def act() -> None:
                data, start = self._device_bytes("fill_zero", ptr, size)
                data[start : start + size] = bytes(size)

            self._send("cuMemsetD8Async", stream, act)

    def _send_copy(self, call: str, ptr: int, address: int, size: int, stream: int, *, into_device: bool) -> None:
        self._device_bytes(call, ptr, size)
        registered = self._is_registered(address, size)
        if not registered:
            self.pageable_copies += 1  # CUDA would copy it there and then, slowly

        def act() -> None:
            data, start = self._device_bytes(call, ptr, size)
            if registered and not self._is_registered(address, size):
                raise LookupError(f"{call} of {size} bytes found its host pages unregistered")
            host = libc.view_at(address, size)
            if into_device:
                data[start : start + size] = host
            else:
                host[:] = data[start : start + size]

        self._send(call, stream, act)

    def _device_bytes(self, call: str, ptr: int, size: int) -> tuple[bytearray, int]:
        try:
            start, mapping = self._find(ptr, size)
        except KeyError:
            raise DriverFailure(call, "CUDA_ERROR_INVALID_VALUE") from None
        if mapping.data is None or not mapping.allowed:
            raise DriverFailure(call, "CUDA_ERROR_INVALID_VALUE")
        return mapping.data, ptr - start

    def _find(self, ptr: int, size: int) -> tuple[int, _Mapping]:
        for start, mapping in self._mappings.items():
            if start <= ptr and ptr + size <= start + mapping.size:
                return start, mapping
        raise KeyError(hex(ptr))

    def _is_registered(self, address: int, size: int) -> bool:
        return any(at <= address and address + size <= at + length for at, (length, _) in self._registered.items())

    def _taken(self, ptr: int, size: int) -> bool:
        held = (*self._reserved.items(), *self._occupied.items())
        return any(at < ptr + size and ptr < at + length for at, length in held)
