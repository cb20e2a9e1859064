"""The memory behind a model's tensors. Needs torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["storages_of"]


def storages_of(model: torch.nn.Module) -> tuple[tuple[int, int], ...]:
    """(ptr, size) of every storage that a parameter, a buffer or a plain tensor attribute of a module uses, once."""
    found = {
        (int(storage.data_ptr()), int(storage.nbytes()))
        for tensor in _tensors(model)
        if tensor.layout is torch.strided and not tensor.is_meta
        for storage in [tensor.untyped_storage()]
    }
    return tuple(sorted(one for one in found if one[1] > 0))


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor):
                yield value
