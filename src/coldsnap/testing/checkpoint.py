"""Small safetensors checkpoints made of seeded bytes, for the fake engine and for tests of recovery."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

__all__ = ["DEFAULT_TENSORS", "seeded_bytes", "write_checkpoint", "write_safetensors"]

DEFAULT_TENSORS: Mapping[str, int] = {"embed": 20_000, "layers.0": 9_000, "layers.1": 9_000, "norm": 300, "empty": 0}


def seeded_bytes(seed: int, name: str, size: int) -> bytes:
    """`size` bytes that depend on nothing but the arguments."""
    return hashlib.shake_128(f"{seed}:{name}".encode()).digest(size)


def write_safetensors(path: Path, tensors: Mapping[str, bytes]) -> None:
    """A safetensors file of U8 vectors, in the order given."""
    header: dict[str, object] = {}
    end = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


def write_checkpoint(folder: Path, *, seed: int = 0, tensors: Mapping[str, int] = DEFAULT_TENSORS) -> Path:
    """A checkpoint folder of two shards, the second holding every other tensor. Returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {name: seeded_bytes(seed, name, size) for name, size in tensors.items()}
    for number in (0, 1):
        shard = {name: data for index, (name, data) in enumerate(made.items()) if index % 2 == number}
        write_safetensors(folder / f"model-{number + 1:05d}-of-00002.safetensors", shard)
    (folder / "config.json").write_text(json.dumps({"model_type": "fake", "seed": seed}), encoding="utf-8")
    return folder
