"""``libcuda.so.1`` as small processes of ours use it: every CUDA call of this room, through ctypes, in one file.

Standard library only, and imported by nobody but such a process: ``cuInit`` opens the devices, and a process that did
it can be neither frozen nor trusted to end. A call that the driver refuses raises ``CudaCallError`` with its name.

Structures are as the CUDA 12.8 to 13 driver API documents them. The argument blocks of the checkpoint calls are 64
bytes, zero but for what is set; they are made a little longer, so that a driver that reads more finds zeros.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import uuid
from typing import Any, Final

__all__ = ["CudaCallError", "open_calls"]

_LIBRARY = "libcuda.so.1"
_STATES = ("running", "locked", "checkpointed", "failed")
_BLOCK_BYTES = 128
_NAME_BYTES = 256
_MAPPED_BYTES = 64 << 20  # a multiple of every granularity there is
_MAJOR, _MINOR, _VIRTUAL_MEMORY = 75, 76, 102  # CUdevice_attribute
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3  # CU_MEM_ALLOCATION_TYPE_, CU_MEM_LOCATION_TYPE_, CU_MEM_ACCESS_FLAGS_
_SYMBOLS: Final = ("GetState", "Lock", "Checkpoint", "Restore", "Unlock")


class CudaCallError(Exception):
    """``call`` failed with ``code``, the name that CUDA gives it (or why it could not be made at all)."""

    def __init__(self, call: str, code: str) -> None:
        self.call = call
        self.code = code
        super().__init__(f"{call}: {code}")


class _Uuid(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 16)]


class _Pair(ctypes.Structure):
    _fields_ = [("old", _Uuid), ("new", _Uuid)]


class _RestoreArgs(ctypes.Structure):
    _fields_ = [
        ("pairs", ctypes.POINTER(_Pair)),
        ("num_pairs", ctypes.c_uint),
        ("zero", ctypes.c_ubyte * (_BLOCK_BYTES - 12)),
    ]


class _LockArgs(ctypes.Structure):
    _fields_ = [("timeout_ms", ctypes.c_uint), ("zero", ctypes.c_ubyte * (_BLOCK_BYTES - 4))]


class _Location(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("ordinal", ctypes.c_int)]


class _AllocationProperties(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int),
        ("handle_kinds", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


def open_calls() -> LibCuda:
    """The driver of this machine, initialised. Raises CudaCallError without one."""
    return LibCuda(_LIBRARY)


class LibCuda:
    """The calls. Addresses, contexts and handles are whole numbers; UUIDs are spelled ``GPU-...``."""

    def __init__(self, library: str) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise CudaCallError("dlopen", str(error)) from error
        self._do("cuInit", 0)
        self._planted: tuple[int, int, int] | None = None

    def _do(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError as error:
            raise CudaCallError(name, "the driver has no such call") from error
        code = function(*arguments)
        if code:
            raise CudaCallError(name, self._name_of(code))

    def _name_of(self, code: int) -> str:
        text = ctypes.c_char_p()
        if self._library.cuGetErrorName(code, ctypes.byref(text)) == 0 and text.value:
            return text.value.decode(errors="replace")
        return f"error {code}"

    # -- what is there ----------------------------------------------------------------------------

    def version(self) -> int:
        """The CUDA version the driver speaks, as 1000 * major + 10 * minor."""
        found = ctypes.c_int()
        self._do("cuDriverGetVersion", ctypes.byref(found))
        return found.value

    def checkpoint_calls(self) -> list[str]:
        """The checkpoint calls that this driver lacks."""
        names = [f"cuCheckpointProcess{name}" for name in _SYMBOLS]
        return [name for name in names if not hasattr(self._library, name)]

    def devices(self) -> list[dict[str, Any]]:
        """Every device that this process sees: ``index``, ``uuid``, ``name``, ``compute_capability``."""
        count = ctypes.c_int()
        self._do("cuDeviceGetCount", ctypes.byref(count))
        return [self._device(index) for index in range(count.value)]

    def _device(self, index: int) -> dict[str, Any]:
        device = self._ordinal(index)
        name = ctypes.create_string_buffer(_NAME_BYTES)
        self._do("cuDeviceGetName", name, _NAME_BYTES, device)
        found = _Uuid()
        self._do("cuDeviceGetUuid_v2", ctypes.byref(found), device)
        capability = f"{self._attribute(_MAJOR, device)}.{self._attribute(_MINOR, device)}"
        return {
            "index": index,
            "uuid": f"GPU-{uuid.UUID(bytes=bytes(found.bytes))}",
            "name": name.value.decode(errors="replace"),
            "compute_capability": capability,
        }

    def _ordinal(self, index: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self._do("cuDeviceGet", ctypes.byref(device), index)
        return device

    def _attribute(self, number: int, device: ctypes.c_int) -> int:
        found = ctypes.c_int()
        self._do("cuDeviceGetAttribute", ctypes.byref(found), number, device)
        return found.value

    # -- other processes --------------------------------------------------------------------------

    def state(self, pid: int) -> str | None:
        """One of the four states; None when the driver says that this is no CUDA process."""
        found = ctypes.c_int(-1)
        try:
            self._do("cuCheckpointProcessGetState", pid, ctypes.byref(found))
        except CudaCallError as error:
            # What a driver says of a process without CUDA is not specified, and differs; but these are about ours.
            if error.code in ("CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_DEINITIALIZED") or "no such call" in error.code:
                raise
            return None
        return _STATES[found.value] if 0 <= found.value < len(_STATES) else f"state {found.value}"

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Raises CUDA_ERROR_NOT_READY when it does not come to rest in time."""
        arguments = _LockArgs(timeout_ms=timeout_ms)
        self._do("cuCheckpointProcessLock", pid, ctypes.byref(arguments))

    def checkpoint(self, pid: int) -> None:
        """Its device state goes into its own memory."""
        self._do("cuCheckpointProcessCheckpoint", pid, None)

    def restore(self, pid: int, devices: dict[str, str]) -> None:
        """Its device state comes back, on the devices it was on unless ``devices`` names others."""
        if not devices:
            self._do("cuCheckpointProcessRestore", pid, None)
            return
        pairs = (_Pair * len(devices))(*(_Pair(_uuid(old), _uuid(new)) for old, new in devices.items()))
        arguments = _RestoreArgs(pairs=pairs, num_pairs=len(devices))
        self._do("cuCheckpointProcessRestore", pid, ctypes.byref(arguments))

    def unlock(self, pid: int) -> None:
        """It computes again."""
        self._do("cuCheckpointProcessUnlock", pid, None)

    # -- this process: for probes alone -----------------------------------------------------------

    def plant(self, index: int, num_bytes: int) -> str:
        """Make a context on the device and fill memory of it with random bytes; their SHA-256."""
        self.use_device(index)
        data = os.urandom(num_bytes)
        self._planted = (index, self.allocate(num_bytes), num_bytes)
        self.write(self._planted[1], data)
        return hashlib.sha256(data).hexdigest()

    def harvest(self) -> str:
        """The SHA-256 of what is there now."""
        if self._planted is None:
            raise CudaCallError("harvest", "nothing was planted")
        index, ptr, num_bytes = self._planted
        self.use_device(index)
        return hashlib.sha256(self.read(ptr, num_bytes)).hexdigest()

    def map_at(self, index: int, hint: int) -> int:
        """Reserve addresses at ``hint`` (0: anywhere), put memory behind them, write and read it, and tidy up.

        Returns where they were.
        """
        self.use_device(index)
        if not self.has_virtual_memory(index):
            raise CudaCallError("cuDeviceGetAttribute", "the device has no virtual memory management")
        ptr = self.reserve(_MAPPED_BYTES, hint)
        try:
            handle = self.map_memory(index, ptr, _MAPPED_BYTES)
            try:
                data = os.urandom(4096)
                self.write(ptr, data)
                if self.read(ptr, len(data)) != data:
                    raise CudaCallError("cuMemcpyDtoH", "other bytes came back than were written")
            finally:
                self.unmap_memory(handle, ptr, _MAPPED_BYTES)
        finally:
            self.unreserve(ptr, _MAPPED_BYTES)
        return ptr

    def use_device(self, index: int) -> None:
        """Make the device's primary context, for this thread."""
        context = ctypes.c_void_p()
        self._do("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._ordinal(index))
        self._do("cuCtxSetCurrent", context)

    def allocate(self, num_bytes: int) -> int:
        """Device memory."""
        found = ctypes.c_uint64()
        self._do("cuMemAlloc_v2", ctypes.byref(found), ctypes.c_size_t(num_bytes))
        return found.value

    def write(self, ptr: int, data: bytes) -> None:
        """Copy to the device, and wait."""
        self._do("cuMemcpyHtoD_v2", ctypes.c_uint64(ptr), data, ctypes.c_size_t(len(data)))

    def read(self, ptr: int, num_bytes: int) -> bytes:
        """Copy from the device, and wait."""
        data = ctypes.create_string_buffer(num_bytes)
        self._do("cuMemcpyDtoH_v2", data, ctypes.c_uint64(ptr), ctypes.c_size_t(num_bytes))
        return data.raw

    def has_virtual_memory(self, index: int) -> bool:
        """Whether the device's memory can be mapped at chosen addresses."""
        return bool(self._attribute(_VIRTUAL_MEMORY, self._ordinal(index)))

    def reserve(self, num_bytes: int, hint: int) -> int:
        """Addresses with nothing behind them, perhaps at ``hint``."""
        found = ctypes.c_uint64()
        size, zero = ctypes.c_size_t(num_bytes), ctypes.c_uint64(0)
        self._do("cuMemAddressReserve", ctypes.byref(found), size, ctypes.c_size_t(0), ctypes.c_uint64(hint), zero)
        return found.value

    def unreserve(self, ptr: int, num_bytes: int) -> None:
        """Give them back."""
        self._do("cuMemAddressFree", ctypes.c_uint64(ptr), ctypes.c_size_t(num_bytes))

    def map_memory(self, index: int, ptr: int, num_bytes: int) -> int:
        """New device memory behind reserved addresses, to read and write; its handle."""
        where = _Location(_ON_DEVICE, index)
        properties = _AllocationProperties(kind=_PINNED, location=where)
        handle, size, zero = ctypes.c_uint64(), ctypes.c_size_t(num_bytes), ctypes.c_uint64(0)
        self._do("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), zero)
        self._do("cuMemMap", ctypes.c_uint64(ptr), size, ctypes.c_size_t(0), handle, zero)
        access = _Access(where, _READ_WRITE)
        self._do("cuMemSetAccess", ctypes.c_uint64(ptr), size, ctypes.byref(access), ctypes.c_size_t(1))
        return handle.value

    def unmap_memory(self, handle: int, ptr: int, num_bytes: int) -> None:
        """Take it away again."""
        self._do("cuMemUnmap", ctypes.c_uint64(ptr), ctypes.c_size_t(num_bytes))
        self._do("cuMemRelease", ctypes.c_uint64(handle))


def _uuid(text: str) -> _Uuid:
    return _Uuid((ctypes.c_ubyte * 16)(*uuid.UUID(text.removeprefix("GPU-")).bytes))
