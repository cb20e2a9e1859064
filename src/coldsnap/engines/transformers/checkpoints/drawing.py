"""Random tensors straight into safetensors files: every core draws, and no tensor is ever held as a whole.

A tensor is drawn block by block from a generator of its own, seeded from (seed, name), and each block is written to
its place in the file. So the bytes depend neither on the number of threads nor on the order of drawing, and the memory
in use is a few MiB a thread. One thread draws 220 million values a second, and the largest tensor of a model bounds
the time: it is begun first. The caller's torch should use one thread of its own, or each of ours starts a team.

The files are, byte for byte, those of ``safetensors.torch.save_file`` with the same tensors.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["BYTES_PER_VALUE", "draw_files"]

BYTES_PER_VALUE = 2  # bfloat16
_BLOCK_VALUES = 1 << 20  # a multiple of 16: torch then draws the same numbers as for the whole tensor at once
_HEADER_ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tensor:
    """One tensor: its dimensions, and where its bytes begin in the file ``fd``."""

    name: str
    dims: tuple[int, ...]
    fd: int
    offset: int

    @property
    def num_values(self) -> int:
        return math.prod(self.dims)


def draw_files(
    files: Mapping[Path, Sequence[str]],
    dims: Mapping[str, tuple[int, ...]],
    *,
    seed: int,
    num_threads: int,
    progress: Callable[[str], None],
) -> None:
    """Write each file with the tensors it names. Raises OSError; files may then be incomplete."""
    opened: list[int] = []
    tensors: list[_Tensor] = []
    try:
        for path, names in files.items():
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            opened.append(fd)
            tensors += _lay_out(fd, {name: dims[name] for name in names})
        tensors.sort(key=lambda one: (-one.num_values, one.name))
        with ThreadPoolExecutor(max_workers=num_threads) as threads:
            for done in [threads.submit(_draw, tensor, seed) for tensor in tensors]:
                done.result()
    finally:
        for fd in opened:
            os.close(fd)
    total = sum(tensor.num_values for tensor in tensors) * BYTES_PER_VALUE
    progress(f"wrote {total} bytes of {len(tensors)} tensors into {len(files)} files")


def _lay_out(fd: int, dims: Mapping[str, tuple[int, ...]]) -> Iterator[_Tensor]:
    """Write a file's header and give it its size; where each tensor goes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places: list[tuple[str, int]] = []
    at = 0
    for name in sorted(dims):
        end = at + math.prod(dims[name]) * BYTES_PER_VALUE
        header[name] = {"dtype": "BF16", "shape": list(dims[name]), "data_offsets": [at, end]}
        places.append((name, at))
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    start = 8 + len(text)
    os.truncate(fd, start + at)
    os.pwrite(fd, len(text).to_bytes(8, "little") + text, 0)
    for name, offset in places:
        yield _Tensor(name=name, dims=dims[name], fd=fd, offset=start + offset)


def _draw(tensor: _Tensor, seed: int) -> None:
    import torch

    digest = hashlib.sha256(f"{seed}:{tensor.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    mean, deviation = _distribution(tensor)
    drawn = torch.empty(min(tensor.num_values, _BLOCK_VALUES))
    rounded = torch.empty(drawn.shape, dtype=torch.bfloat16)
    for at in range(0, tensor.num_values, _BLOCK_VALUES):
        size = min(_BLOCK_VALUES, tensor.num_values - at)
        drawn[:size].normal_(mean, deviation, generator=generator)
        rounded[:size].copy_(drawn[:size])
        _write(tensor.fd, _bytes_of(rounded[:size]), tensor.offset + at * BYTES_PER_VALUE)


def _distribution(tensor: _Tensor) -> tuple[float, float]:
    """Mean and deviation. The head of ``random_weights`` says why."""
    if len(tensor.dims) == 1:
        return 0.0 if tensor.name.endswith("bias") else 1.0, 0.1
    # A matrix is stored (out, in), an embedding (tokens, hidden), GPT-2's (in, out): near enough to
    # call the last dimension its fan-in, because what matters is that no block drowns another.
    return 0.0, 1 / math.sqrt(tensor.dims[-1])


def _bytes_of(values: "torch.Tensor") -> memoryview:
    import torch

    return memoryview(values.view(torch.uint8).numpy())


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
