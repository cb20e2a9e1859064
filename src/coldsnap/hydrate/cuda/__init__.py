"""Device memory on NVIDIA GPUs, and the ways bytes take there and back."""

from coldsnap.hydrate.cuda.adopted import AdoptedMemory, Pages
from coldsnap.hydrate.cuda.arrays import DeviceArray
from coldsnap.hydrate.cuda.bindings import import_bindings, open_driver
from coldsnap.hydrate.cuda.driver import DeviceFacts, Driver, DriverFailure
from coldsnap.hydrate.cuda.memory import DEFAULT_DEVICE_BASE, CudaMemory
from coldsnap.hydrate.cuda.registered import RegisteredFile
from coldsnap.hydrate.cuda.window import DeviceWindow

__all__ = [
    "DEFAULT_DEVICE_BASE",
    "AdoptedMemory",
    "CudaMemory",
    "DeviceArray",
    "DeviceFacts",
    "DeviceWindow",
    "Driver",
    "DriverFailure",
    "Pages",
    "RegisteredFile",
    "import_bindings",
    "open_driver",
]
