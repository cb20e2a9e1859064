"""What this room shows, and what it keeps in one place."""

from __future__ import annotations

import ast
from pathlib import Path

from coldsnap import hydrate


def test_public_names() -> None:
    assert sorted(hydrate.__all__) == [
        "DeviceMemory",
        "ExtentsProof",
        "ExtentsSource",
        "HostAddressable",
        "HostMemory",
        "ProvedSource",
        "Segment",
        "Source",
        "StableMemory",
        "TransferPath",
        "TransferReport",
        "UnprovedSource",
        "hash_ranges",
        "host_addressable",
        "hydrate_file",
        "read_chunks",
    ]
    assert all(hasattr(hydrate, name) for name in hydrate.__all__)


def test_foreign_calls_live_in_one_file() -> None:
    importers = set()
    for path in Path(hydrate.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "ctypes" for name in names):
                importers.add(path.name)
    assert importers == {"libc.py"}
