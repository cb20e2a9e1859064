"""Where in the checkpoint a tensor comes from that a loader yields by name.

Pure, and careful: a name counts when exactly one file has it and the yielded tensor has its number type and shape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from coldsnap.engines.safetensors import SafetensorsFile, StoredTensor
from coldsnap.engines.vllm.provenance import Stored

__all__ = ["Sources", "dtype_name"]

_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "int64": "I64",
    "uint64": "U64",
    "float64": "F64",
    "complex64": "C64",
}


_NAMES = {stored: name for name, stored in _DTYPES.items()}


def dtype_name(stored: str) -> str | None:
    """What torch calls a file's number type, without `torch.`; None for one that it has not."""
    return _NAMES.get(stored)


class Sources:
    """The tensors of a checkpoint by name."""

    def __init__(self, files: Sequence[SafetensorsFile]) -> None:
        named: dict[str, list[tuple[SafetensorsFile, StoredTensor]]] = defaultdict(list)
        for file in files:
            for tensor in file.tensors:
                named[tensor.name].append((file, tensor))
        self._named = named

    @property
    def ambiguous(self) -> tuple[str, ...]:
        """Names that several files have, so that nobody can say from which a loader took them."""
        return tuple(sorted(name for name, found in self._named.items() if len(found) > 1))

    def find(self, name: str, dtype: str, shape: Sequence[int]) -> Stored | None:
        """The stored tensor that `name` is; `dtype` as torch spells it, with or without `torch.`.

        None when there is none of that name, number type and shape, or more than one.
        """
        found = self._named.get(name, ())
        if len(found) != 1:
            return None
        file, tensor = found[0]
        if tensor.shape != tuple(shape) or tensor.dtype != _DTYPES.get(dtype.removeprefix("torch.")):
            return None
        return Stored(tensor=name, file=file.name, offset=tensor.offset, size=tensor.size)
