"""Transfers take memory for pieces, never for objects: children with little memory move objects many times as large."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from coldsnap.core.digest import Digest
from coldsnap.ship.base import Item, Kind, Outgoing
from coldsnap.testing.hub import HubServer
from coldsnap.testing.moving import move_both_ways
from coldsnap.testing.registry import real_registry

MIB = 1 << 20
SIZE = int(os.environ.get("COLDSNAP_LARGE_MIB", "192")) * MIB
MORE_MEMORY = 128 * MIB


@pytest.fixture
def large(tmp_path: Path) -> Outgoing:
    """A file of zeros with a few bytes that are none, which takes no disk here."""
    path = tmp_path / "large"
    state = hashlib.sha256()
    with path.open("wb") as file:
        file.truncate(SIZE)
        for offset in range(0, SIZE, 16 * MIB):
            file.seek(offset)
            file.write(offset.to_bytes(8, "big"))
    with path.open("rb") as file:
        while piece := file.read(MIB):
            state.update(piece)
    return Outgoing(item=Item(Kind.PACK, Digest.from_hash(state)), bytes=SIZE, path=path)


@pytest.mark.parametrize("where", ["hub", "registry"])
def test_a_large_object_needs_little_memory(large: Outgoing, tmp_path: Path, where: str) -> None:
    with ProcessPoolExecutor(1, get_context("forkserver")) as child:
        if where == "hub":
            with HubServer(tmp_path / "hub", part_bytes=64 * MIB) as server:
                peak = child.submit(
                    move_both_ways, f"{server.url}", "", large, tmp_path / "scratch", MORE_MEMORY
                ).result()
        else:
            with real_registry(tmp_path / "registry") as registry:
                peak = child.submit(
                    move_both_ways, "", registry.host, large, tmp_path / "scratch", MORE_MEMORY
                ).result()
    assert peak < 512 * MIB
    assert (tmp_path / "scratch" / "back").stat().st_size == SIZE
