"""What an engine process asks of the C library and the kernel around a freeze. All ctypes of this room are here."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coldsnap.errors import MissingCapability

__all__ = ["close_nvml", "lower_priority", "request_amx", "trim_heap"]

_SYS_ARCH_PRCTL_X86_64 = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long


_NVML = "libnvidia-ml.so.1"
_MOST_OPENINGS = 1 << 16


def _loaded_nvml() -> Any:
    """NVIDIA's management library, when this process has loaded it; None otherwise."""
    try:
        return ctypes.CDLL(_NVML, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


def close_nvml(find: Callable[[], Any] = _loaded_nvml) -> int:
    """Close NVML as often as it was opened in this process; how often that was.

    torch opens it whenever it counts devices and never closes it, and a process with its descriptors of
    ``/dev/nvidiactl`` and no CUDA state can neither be dumped nor taken off the device. Whoever needs it later opens it
    himself. Call it while nobody uses it.
    """
    library = find()
    if library is None:
        return 0
    openings = 0
    while openings < _MOST_OPENINGS and library.nvmlShutdown() == 0:
        openings += 1
    return openings


def lower_priority() -> None:
    """Let the calling thread, and those it starts, run when nobody else wants to (nice 19)."""
    with contextlib.suppress(OSError):  # a kernel that refuses leaves a thread that takes its turn like others
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def trim_heap() -> None:
    """Give freed heap pages back to the kernel, so that a dump does not hold them. Only glibc can."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


def request_amx() -> bool:
    """Ask for Intel's tile registers, when this CPU has them; whether it does.

    The permission belongs to the process and is not brought back by a restore: without it the first matrix
    product in bfloat16 ends the process without a word. Asking twice is fine. Raises MissingCapability when
    the kernel refuses on a CPU that has them.
    """
    if platform.machine() != "x86_64" or " amx_tile " not in Path("/proc/cpuinfo").read_text(encoding="ascii"):
        return False
    asked = _LIBC.syscall(
        ctypes.c_long(_SYS_ARCH_PRCTL_X86_64), ctypes.c_long(_ARCH_REQ_XCOMP_PERM), ctypes.c_ulong(_XFEATURE_XTILEDATA)
    )
    if asked != 0:
        code = ctypes.get_errno()
        raise MissingCapability(
            f"the kernel refuses the AMX tile registers: {os.strerror(code)}",
            cure="use a kernel of 5.16 or newer, or a host without AMX for capture and restore",
            facts={"errno": code},
        )
    return True
