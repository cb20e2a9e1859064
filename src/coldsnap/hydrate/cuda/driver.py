"""What this room needs of the CUDA driver, and not a call more.

``bindings.BindingsDriver`` is the real one (the only importer of ``cuda``), ``coldsnap.testing.cuda.FakeDriver``
keeps books instead of moving electrons and refuses what CUDA refuses. Handles, device addresses and host
addresses are plain integers. A call either succeeds or raises ``DriverFailure``; saying what that means to the
caller is the business of the file that knows what was being done.

Contexts are per thread in CUDA: whoever starts a thread calls ``use_context`` in it first. Every call that can
take long (registering, copying, waiting) releases the GIL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from coldsnap.errors import HostError, MissingCapability, OutOfSpace, ResourceBusy

__all__ = ["DeviceFacts", "Driver", "DriverFailure", "translated_failure"]


class DriverFailure(Exception):
    """A driver call that failed: ``call`` such as ``cuMemMap``, ``code`` such as ``CUDA_ERROR_OUT_OF_MEMORY``."""

    def __init__(self, call: str, code: str) -> None:
        self.call = call
        self.code = code
        super().__init__(f"{call}: {code}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """One device, as the driver describes it.

    ``granularity_bytes``: what is mapped at once. ``integrated``: it shares the host's memory.
    ``read_only_register``: host pages may be registered that this process can only read.
    """

    name: str
    uuid: str
    total_bytes: int
    granularity_bytes: int
    compute_capability: tuple[int, int]
    num_multiprocessors: int
    integrated: bool
    virtual_memory: bool
    read_only_register: bool


class Driver(Protocol):
    """The calls. Addresses and sizes in bytes; a stream orders what is sent to it and nothing else."""

    def version(self) -> int:
        """The CUDA version the driver speaks, as 1000 * major + 10 * minor."""
        ...

    def device_facts(self, ordinal: int) -> DeviceFacts:
        """The device with this number among the visible ones."""
        ...

    def retain_context(self, ordinal: int) -> int:
        """The device's primary context, the one that the CUDA runtime and thus torch use, kept alive for us."""
        ...

    def release_context(self, ordinal: int) -> None:
        """One ``retain_context`` less."""
        ...

    def use_context(self, context: int) -> None:
        """Make it the calling thread's."""
        ...

    def settle(self) -> None:
        """Wait until the device has done everything that was sent to the thread's context, by anybody."""
        ...

    def reserve(self, size: int, *, alignment: int, hint: int) -> int:
        """Addresses with nothing behind them. ``hint`` is a wish: the answer may lie anywhere."""
        ...

    def unreserve(self, ptr: int, size: int) -> None:
        """Give a whole reservation back; nothing may be mapped in it."""
        ...

    def create(self, ordinal: int, size: int) -> int:
        """Device memory without an address, content unknown; a handle."""
        ...

    def destroy(self, handle: int) -> None:
        """Let go of it; what is mapped keeps the memory until it is unmapped."""
        ...

    def map(self, ptr: int, size: int, handle: int) -> None:
        """Put the memory behind reserved addresses; nobody may touch it before ``allow``."""
        ...

    def allow(self, ordinal: int, ptr: int, size: int) -> None:
        """Let the device read and write mapped addresses."""
        ...

    def unmap(self, ptr: int, size: int) -> None:
        """Take the memory away from the addresses, which stay reserved."""
        ...

    def register_host(self, address: int, size: int, *, read_only: bool) -> None:
        """Lock host pages and let the device copy straight from them. Whole pages, registered once."""
        ...

    def unregister_host(self, address: int) -> None:
        """Undo the registration that began at ``address``."""
        ...

    def create_stream(self) -> int:
        """A stream that waits for no other."""
        ...

    def destroy_stream(self, stream: int) -> None:
        """Let go of it."""
        ...

    def synchronize(self, stream: int) -> None:
        """Wait until everything sent to it is done. Raises what any of it failed with."""
        ...

    def create_event(self) -> int:
        """An event that threads can sleep on."""
        ...

    def destroy_event(self, event: int) -> None:
        """Let go of it."""
        ...

    def record(self, event: int, stream: int) -> None:
        """The event happens when everything sent to the stream so far is done."""
        ...

    def wait(self, event: int) -> None:
        """Sleep until the event has happened; at once if it was never recorded."""
        ...

    def done(self, event: int) -> bool:
        """Whether ``wait`` would return at once."""
        ...

    def copy_in(self, ptr: int, address: int, size: int, stream: int) -> None:
        """Send a copy from host to device; from registered pages it runs on its own."""
        ...

    def copy_out(self, address: int, ptr: int, size: int, stream: int) -> None:
        """Send a copy from device to host."""
        ...

    def fill_zero(self, ptr: int, size: int, stream: int) -> None:
        """Send a clearing of device memory."""
        ...


_BUSY = frozenset({"CUDA_ERROR_ALREADY_MAPPED", "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"})
_ABSENT = frozenset({"CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_INVALID_DEVICE", "CUDA_ERROR_NOT_SUPPORTED"})


def translated_failure(failure: DriverFailure, what: str, **facts: object) -> HostError:
    """The error of ours for a failed call while doing ``what``; raise it ``from`` the failure."""
    known: dict[str, object] = {"call": failure.call, "code": failure.code, **facts}
    message = f"{what} failed: {failure}"
    if failure.code == "CUDA_ERROR_OUT_OF_MEMORY":
        cure = "stop what else uses the device, or take a larger one"
        return OutOfSpace(message, cure=cure, facts=known)
    if failure.code in _BUSY:
        cure = "find what else in this process uses these addresses; an allocation never moves"
        return ResourceBusy(message, cure=cure, facts=known)
    if failure.code in _ABSENT:
        return MissingCapability(message, cure="check the device and its driver with nvidia-smi", facts=known)
    return HostError(message, cure="look for Xid lines in the kernel log; a new process may be needed", facts=known)
