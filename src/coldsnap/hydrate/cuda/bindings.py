"""``Driver`` through NVIDIA's ``cuda-bindings`` (the ``gpu`` extra), and the only importer of it.

The package is imported when a driver is opened, or a template wants it ahead of that, and not before: a machine without
a GPU needs none of it. Importing it touches neither the driver nor a device. Its calls release the GIL and return
``(result, value...)``.
"""

from __future__ import annotations

import uuid
from typing import Any

from coldsnap.errors import MissingCapability
from coldsnap.hydrate.cuda.driver import DeviceFacts, Driver, DriverFailure

__all__ = ["BindingsDriver", "import_bindings", "open_driver"]

_REGISTER_READ_ONLY = 0x08  # CU_MEMHOSTREGISTER_READ_ONLY
_EVENT_FLAGS = 0x1 | 0x2  # blocking wait, no timing


def import_bindings() -> Any:
    """The package's module; no call of it was made. Raises MissingCapability when it is not there."""
    try:
        from cuda.bindings import driver as api
    except ImportError as error:
        raise MissingCapability(
            f"the Python package cuda-bindings cannot be imported: {error}", cure="pip install 'coldsnap[gpu]'"
        ) from error
    return api


def open_driver() -> Driver:
    """The driver of this machine, initialised; no context is made. Raises MissingCapability without one."""
    driver = BindingsDriver(import_bindings())
    try:
        driver.initialise()
    except (DriverFailure, RuntimeError) as error:  # RuntimeError: the package finds no libcuda.so.1
        raise MissingCapability(
            f"the CUDA driver cannot be used: {error}", cure="check the device and its driver with nvidia-smi"
        ) from error
    return driver


class BindingsDriver:
    """See ``Driver``; ``api`` is the module ``cuda.bindings.driver``."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self._success = api.CUresult.CUDA_SUCCESS
        self._not_ready = api.CUresult.CUDA_ERROR_NOT_READY

    def initialise(self) -> None:
        """``cuInit``."""
        self._do("cuInit", 0)

    def _do(self, call: str, *arguments: Any) -> Any:
        result, *values = getattr(self._api, call)(*arguments)
        if result != self._success:
            raise DriverFailure(call, result.name)
        return values[0] if values else None

    def version(self) -> int:
        """See ``Driver.version``."""
        return int(self._do("cuDriverGetVersion"))

    def device_facts(self, ordinal: int) -> DeviceFacts:
        """See ``Driver.device_facts``."""
        device = self._do("cuDeviceGet", ordinal)
        names = self._api.CUdevice_attribute
        prefix = "CU_DEVICE_ATTRIBUTE_"

        def attribute(name: str) -> int:
            return int(self._do("cuDeviceGetAttribute", getattr(names, prefix + name), device))

        granularity = self._do(
            "cuMemGetAllocationGranularity",
            self._properties(ordinal),
            self._api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
        )
        name: bytes = self._do("cuDeviceGetName", 256, device)
        return DeviceFacts(
            name=name.split(b"\0", 1)[0].decode(),
            uuid=f"GPU-{uuid.UUID(bytes=bytes(self._do('cuDeviceGetUuid', device).bytes))}",
            total_bytes=int(self._do("cuDeviceTotalMem", device)),
            granularity_bytes=int(granularity),
            compute_capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
            num_multiprocessors=attribute("MULTIPROCESSOR_COUNT"),
            integrated=bool(attribute("INTEGRATED")),
            virtual_memory=bool(attribute("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED")),
            read_only_register=bool(attribute("READ_ONLY_HOST_REGISTER_SUPPORTED")),
        )

    def retain_context(self, ordinal: int) -> int:
        """See ``Driver.retain_context``."""
        return int(self._do("cuDevicePrimaryCtxRetain", self._do("cuDeviceGet", ordinal)))

    def release_context(self, ordinal: int) -> None:
        """See ``Driver.release_context``."""
        self._do("cuDevicePrimaryCtxRelease", self._do("cuDeviceGet", ordinal))

    def use_context(self, context: int) -> None:
        """See ``Driver.use_context``."""
        self._do("cuCtxSetCurrent", self._api.CUcontext(context))

    def settle(self) -> None:
        """See ``Driver.settle``."""
        self._do("cuCtxSynchronize")

    def reserve(self, size: int, *, alignment: int, hint: int) -> int:
        """See ``Driver.reserve``."""
        return int(self._do("cuMemAddressReserve", size, alignment, hint, 0))

    def unreserve(self, ptr: int, size: int) -> None:
        """See ``Driver.unreserve``."""
        self._do("cuMemAddressFree", ptr, size)

    def create(self, ordinal: int, size: int) -> int:
        """See ``Driver.create``."""
        return int(self._do("cuMemCreate", size, self._properties(ordinal), 0))

    def destroy(self, handle: int) -> None:
        """See ``Driver.destroy``."""
        self._do("cuMemRelease", handle)

    def map(self, ptr: int, size: int, handle: int) -> None:
        """See ``Driver.map``."""
        self._do("cuMemMap", ptr, size, 0, handle, 0)

    def allow(self, ordinal: int, ptr: int, size: int) -> None:
        """See ``Driver.allow``."""
        access = self._api.CUmemAccessDesc()
        access.location = self._location(ordinal)
        access.flags = self._api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._do("cuMemSetAccess", ptr, size, [access], 1)

    def unmap(self, ptr: int, size: int) -> None:
        """See ``Driver.unmap``."""
        self._do("cuMemUnmap", ptr, size)

    def register_host(self, address: int, size: int, *, read_only: bool) -> None:
        """See ``Driver.register_host``."""
        self._do("cuMemHostRegister", address, size, _REGISTER_READ_ONLY if read_only else 0)

    def unregister_host(self, address: int) -> None:
        """See ``Driver.unregister_host``."""
        self._do("cuMemHostUnregister", address)

    def create_stream(self) -> int:
        """See ``Driver.create_stream``."""
        return int(self._do("cuStreamCreate", self._api.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def destroy_stream(self, stream: int) -> None:
        """See ``Driver.destroy_stream``."""
        self._do("cuStreamDestroy", stream)

    def synchronize(self, stream: int) -> None:
        """See ``Driver.synchronize``."""
        self._do("cuStreamSynchronize", stream)

    def create_event(self) -> int:
        """See ``Driver.create_event``."""
        return int(self._do("cuEventCreate", _EVENT_FLAGS))

    def destroy_event(self, event: int) -> None:
        """See ``Driver.destroy_event``."""
        self._do("cuEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        """See ``Driver.record``."""
        self._do("cuEventRecord", event, stream)

    def wait(self, event: int) -> None:
        """See ``Driver.wait``."""
        self._do("cuEventSynchronize", event)

    def done(self, event: int) -> bool:
        """See ``Driver.done``."""
        (result,) = self._api.cuEventQuery(event)
        if result == self._not_ready:
            return False
        if result != self._success:
            raise DriverFailure("cuEventQuery", result.name)
        return True

    def copy_in(self, ptr: int, address: int, size: int, stream: int) -> None:
        """See ``Driver.copy_in``."""
        self._do("cuMemcpyHtoDAsync", ptr, address, size, stream)

    def copy_out(self, address: int, ptr: int, size: int, stream: int) -> None:
        """See ``Driver.copy_out``."""
        self._do("cuMemcpyDtoHAsync", address, ptr, size, stream)

    def fill_zero(self, ptr: int, size: int, stream: int) -> None:
        """See ``Driver.fill_zero``."""
        self._do("cuMemsetD8Async", ptr, 0, size, stream)

    def _location(self, ordinal: int) -> Any:
        location = self._api.CUmemLocation()
        location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = ordinal
        return location

    def _properties(self, ordinal: int) -> Any:
        properties = self._api.CUmemAllocationProp()
        properties.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._location(ordinal)
        return properties
