"""Device bytes as an object that array libraries take without a copy, a compiler or a copy of their headers.

``__cuda_array_interface__`` (version 3) is a dictionary with an address and a shape. torch reads it::

    tensor = torch.as_tensor(memory.array(ptr, size), device="cuda").view(torch.bfloat16).reshape(shape)

and keeps a reference to the object for as long as the tensor lives; so the object keeps its owner alive.
"""

from __future__ import annotations

from typing import Any

__all__ = ["DeviceArray"]


class DeviceArray:
    """``size`` bytes of device memory at ``ptr``; ``owner`` is whatever must not be collected meanwhile."""

    def __init__(self, *, ptr: int, size: int, owner: object) -> None:
        self.ptr = ptr
        self.size = size
        self.owner = owner

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Writable unsigned bytes in one row; no stream to wait for, as every copy of ours has ended."""
        return {
            "version": 3,
            "shape": (self.size,),
            "typestr": "|u1",
            "data": (self.ptr, False),
            "strides": None,
            "stream": None,
        }
