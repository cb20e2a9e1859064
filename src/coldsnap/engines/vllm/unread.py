"""The tensors of a checkpoint by name, shape and number type, and nothing in them. Needs torch.

Each lies in a private mapping of its own, of which no page exists until somebody touches it, and reads as zero then. So
every byte of it has an address, by which a tracer follows it, and costs nothing.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import torch

from coldsnap.engines.safetensors import SafetensorsFile, StoredTensor
from coldsnap.engines.vllm.sources import dtype_name
from coldsnap.errors import UserError

__all__ = ["unread_tensors"]

_NO_RESERVE = 0x4000  # MAP_NORESERVE: nothing is to be kept ready for pages that nobody will touch


def unread_tensors(files: Sequence[SafetensorsFile]) -> Iterator[tuple[str, torch.Tensor]]:
    """In the order of the files and of their data. Raises UserError for a number type that torch has not."""
    for file in files:
        for stored in file.tensors:
            yield stored.name, _unread(stored)


def _unread(stored: StoredTensor) -> torch.Tensor:
    name = dtype_name(stored.dtype)
    if name is None:
        raise UserError(
            f"{stored.name} is of number type {stored.dtype}, and torch has none such",
            cure="use a snapshot driver that loads the checkpoint",
            facts={"tensor": stored.name, "dtype": stored.dtype},
        )
    dtype: torch.dtype = getattr(torch, name)
    if stored.size == 0:
        return torch.empty(stored.shape, dtype=dtype)
    pages = mmap.mmap(-1, stored.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    return torch.frombuffer(pages, dtype=dtype).reshape(stored.shape)
