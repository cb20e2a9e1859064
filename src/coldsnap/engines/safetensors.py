"""The headers of safetensors files: which tensor lies where.

Engines need them to copy bytes without a library in between, the plugin to pin a model, recovery to prove that
the checkpoint is the one that was captured. A file is 8 bytes of little-endian header length, the header (a JSON
object: name -> dtype, shape, `[begin, end]` relative to the data), and the data. Everything is checked here
once: sizes agree with shapes, ranges lie in the file and do not overlap.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldsnap.core.canonical import canonical_sha256
from coldsnap.core.digest import Digest
from coldsnap.errors import InvalidDocument, Problem, UserError

__all__ = ["SafetensorsFile", "StoredTensor", "metadata_sha256", "read_header"]

HEADER_LIMIT_BYTES = 256 * 1024 * 1024
_LENGTH_BYTES = 8
_DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor of a file: `size` bytes from byte `offset` of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SafetensorsFile:
    """A parsed header. `name` is the file's path relative to its checkpoint, `tensors` are in file order."""

    name: str
    path: Path
    bytes: int
    header_sha256: Digest
    tensors: tuple[StoredTensor, ...]


def read_header(path: Path, *, name: str | None = None) -> SafetensorsFile:
    """Read and check the header of the file at `path`.

    Raises UserError when the file cannot be read, InvalidDocument naming everything that is wrong with it.
    """
    subject = name if name is not None else path.name
    try:
        # Unbuffered: a buffer would read on into the first tensor, and stay in the heap of a process to be frozen.
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(_LENGTH_BYTES)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < _LENGTH_BYTES or length > min(HEADER_LIMIT_BYTES, size - _LENGTH_BYTES):
                raise _invalid(subject, "header", "does not fit in the file", f"{length} bytes in a file of {size}")
            header = file.read(length)
    except OSError as error:
        raise UserError(
            f"cannot read the safetensors file {path}: {error.strerror}",
            cure="check the checkpoint folder",
            facts={"path": str(path)},
        ) from error
    if len(header) != length:
        raise _invalid(subject, "header", "ends early", f"{len(header)} of {length} bytes")
    try:
        document = json.loads(header, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise _invalid(subject, "header", f"is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise _invalid(subject, "header", "is not an object")
    document.pop("__metadata__", None)
    start = _LENGTH_BYTES + length
    problems: list[Problem] = []
    tensors = [
        tensor for key, value in document.items() if (tensor := _tensor(key, value, start, size, problems)) is not None
    ]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.size))
    end = start
    for tensor in tensors:
        if tensor.offset < end and tensor.size:
            problems.append(Problem(field=tensor.name, message="overlaps the tensor before it"))
        end = max(end, tensor.offset + tensor.size)
    if problems:
        raise InvalidDocument(f"safetensors file {subject}", problems)
    return SafetensorsFile(name=subject, path=path, bytes=size, header_sha256=Digest.of(header), tensors=tuple(tensors))


def metadata_sha256(files: Sequence[SafetensorsFile]) -> Digest:
    """The digest that binds a checkpoint's headers: canonical `[[file, sha256 of its header], ...]` by file."""
    return canonical_sha256([[file.name, str(file.header_sha256)] for file in sorted(files, key=lambda f: f.name)])


def _tensor(name: str, value: Any, start: int, file_bytes: int, problems: list[Problem]) -> StoredTensor | None:
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        bits = _DTYPE_BITS[dtype] * math.prod(shape) if whole else -1
    except (KeyError, TypeError, ValueError):
        whole, bits = False, -1
    if not whole:
        problems.append(
            Problem(field=name, message="needs dtype, shape and data_offsets of known kinds", value=str(value)[:120])
        )
        return None
    if end < begin or (end - begin) * 8 != bits:
        problems.append(
            Problem(field=name, message=f"holds {end - begin} bytes, its shape and dtype need {bits / 8:g}")
        )
        return None
    if start + end > file_bytes:
        problems.append(
            Problem(
                field=name, message=f"ends at byte {start + end} of a file of {file_bytes}", cure="fetch the file again"
            )
        )
        return None
    return StoredTensor(name=name, dtype=dtype, shape=tuple(shape), offset=start + begin, size=end - begin)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name appears twice")
    return members


def _invalid(subject: str, field: str, message: str, value: str | None = None) -> InvalidDocument:
    problem = Problem(field=field, message=message, value=value, cure="fetch the file again")
    return InvalidDocument(f"safetensors file {subject}", [problem])
