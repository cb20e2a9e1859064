"""vLLM's own call that maps memory, made without Python's lock.

`vllm.cumem_allocator` keeps the lock while the driver maps: 0.16 s for 112 GB of keys and values on an H200, in which
no thread that fills the weights can go on. Its file also exports the C function below the Python one:

    void create_and_map(unsigned long long device, ssize_t size, CUdeviceptr ptr, CUmemGenericAllocationHandle *slot)
    CUresult error_code; char error_msg[10240];

and ctypes releases the lock. Nothing in a file says what a function takes, so those of 0.26.0, 0.32.0 and 0.33.0 were
read: they differ in the number of a line, and get from the Python one what is above. On a GPU 0.26.0 was run.

Errors are told as the Python one tells them. Several threads at once are no faster (28 mappings of 4 GiB: 0.16 s with
1, 4 and 8), and there is one `error_code` for all, so calls go one after the other. The other call of vLLM's, which
unmaps, takes 0.03 s for as much and stays Python's. It uses the same `error_code` and does not know our lock: whoever
maps and unmaps does one at a time (`Pages`). What torch allocates meanwhile uses it too, as it always did without
Python's lock; an engine that wakes computes nothing yet.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from coldsnap.engines.vllm.pools import Handle

__all__ = ["Calls", "loaded", "mapping"]

_MESSAGE_BYTES = 10240
_LOCK = threading.Lock()
"""Of `error_code` and `error_msg`, of which a process has one, however many models it loads."""


class Calls(Protocol):
    """What is used of vLLM's file."""

    @property
    def create_and_map(self) -> Callable[[int, int, int, int], object]:
        """Memory behind the addresses of a handle."""
        ...

    @property
    def error_code(self) -> ctypes.c_int:
        """0, or the driver's number of what went wrong."""
        ...

    @property
    def error_msg(self) -> ctypes.Array[ctypes.c_char]:
        """What went wrong, in CUDA's words."""
        ...


class _File:
    """Implements `Calls`. Raises OSError, ValueError or AttributeError for a file that has not all of it."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.create_and_map = library.create_and_map
        self.create_and_map.argtypes = (ctypes.c_ulonglong, ctypes.c_ssize_t, ctypes.c_ulonglong, ctypes.c_void_p)
        self.create_and_map.restype = None
        self.error_code = ctypes.c_int.in_dll(library, "error_code")
        self.error_msg = (ctypes.c_char * _MESSAGE_BYTES).in_dll(library, "error_msg")


def loaded(path: Path) -> Calls | None:
    """The calls of vLLM's file, which is loaded already; None for one that does not have them."""
    try:
        return _File(path)
    except (OSError, ValueError, AttributeError):
        return None


def mapping(calls: Calls) -> Callable[[Handle], None]:
    """What maps a row of vLLM's. It raises RuntimeError with CUDA's words, as vLLM's own does."""

    def create_and_map(handle: Handle) -> None:
        device, size, ptr, slot = handle
        with _LOCK:
            calls.error_code.value = 0
            calls.create_and_map(device, size, ptr, slot)
            if calls.error_code.value != 0:
                words = calls.error_msg.value.decode(errors="replace")
                calls.error_code.value = 0
                calls.error_msg[0] = b"\0"
                raise RuntimeError(words)

    return create_and_map
