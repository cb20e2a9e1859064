"""Other loaders on the same bytes: a safetensors file with tensors of the pack, page cache warm, into GPU memory.

Each is called as its own documentation shows, with its defaults, and keeps every tensor until the clock stops. A
loader that is not installed, or fails, is named with the reason; nothing is measured for it. Ours reads the same
tensors of the same file into stable memory, through ``hydrate_file``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.harness import interleave, summary, timed

from coldsnap.hydrate import ProvedSource, Segment, hydrate_file
from coldsnap.hydrate.cuda import CudaMemory
from coldsnap.store.pack import PackedExtent

__all__ = ["compare_loaders"]

MIB = 1 << 20


def compare_loaders(
    memory: CudaMemory, pack: Path, extents: Sequence[PackedExtent], folder: Path, *, total: int
) -> dict[str, Any]:
    """Rates of every loader that is there, and why the others are not."""
    path = folder / "model.safetensors"
    segments = _write(path, pack, extents, total)
    payload = sum(one.size for one in segments)
    fd = os.open(path, os.O_RDONLY)
    try:
        source = ProvedSource(fd=fd, bytes=path.stat().st_size, evidence="written by this benchmark")
        cases: dict[str, Callable[[], float]] = {
            "coldsnap": lambda: timed(lambda: hydrate_file(source, segments, memory))
        }
        absent: dict[str, str] = {}
        versions: dict[str, str] = {}
        for name, package, load in (
            ("safetensors", "safetensors", _safetensors),
            ("fastsafetensors", "fastsafetensors", _fastsafetensors),
            ("instanttensor", "instanttensor", _instanttensor),
            ("runai", "runai-model-streamer", _runai),
        ):
            try:
                versions[name] = version(package)
                load(path)  # once, for what is compiled, imported or allocated first
            except Exception as error:  # noqa: BLE001 - theirs, whatever it is
                absent[name] = f"{type(error).__name__}: {error}"[:300]
                continue
            cases[name] = partial(timed, partial(load, path))
        samples = interleave(cases, rounds=3, budget_s=40)
    finally:
        os.close(fd)
        path.unlink()
    return {
        "payload_bytes": payload,
        "num_tensors": len(segments),
        "gb_per_s": {name: summary([payload / s / 1e9 for s in seconds]) for name, seconds in samples.items()},
        "versions": versions,
        "not_measured": absent,
    }


def _write(path: Path, pack: Path, extents: Sequence[PackedExtent], total: int) -> list[Segment]:
    """Extents of the pack, from its front, as bf16 tensors of a safetensors file; and where they go."""
    chosen, size = [], 0
    for one in extents:
        if one.size % 2 == 0 and size + one.size <= total:
            chosen.append(one)
            size += one.size
    header, at = {}, 0
    for number, one in enumerate(chosen):
        header[f"t{number:04d}"] = {"dtype": "BF16", "shape": [one.size // 2], "data_offsets": [at, at + one.size]}
        at += one.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    segments, offset = [], 8 + len(text)
    source = os.open(pack, os.O_RDONLY)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for one in chosen:
            for start in range(0, one.size, 8 * MIB):
                file.write(os.pread(source, min(8 * MIB, one.size - start), one.offset + start))
            segments.append(Segment(ptr=one.ptr, size=one.size, file_offset=offset))
            offset += one.size
    os.close(source)
    return segments


def _done(tensors: dict[str, Any]) -> None:
    import torch

    if not all(tensor.is_cuda for tensor in tensors.values()):
        raise RuntimeError("it left tensors on the host")
    torch.cuda.synchronize()


def _safetensors(path: Path) -> None:
    from safetensors.torch import load_file

    _done(load_file(path, device="cuda:0"))


def _fastsafetensors(path: Path) -> None:
    from fastsafetensors import fastsafe_open

    with fastsafe_open([str(path)], nogds=True, device="cuda:0") as file:
        _done({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - not a mapping


def _instanttensor(path: Path) -> None:
    from instanttensor import safe_open

    with safe_open(str(path), framework="pt", device=0) as file:
        _done(dict(file.tensors()))


def _runai(path: Path) -> None:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path))
        _done({name: tensor.to("cuda:0") for name, tensor in streamer.get_tensors()})
