"""Are weights in a process image? Random windows of the packs are looked for in every file of it."""

from __future__ import annotations

import mmap
import os
import random
import sys
from collections.abc import Sequence

from coldsnap.core.digest import Digest
from coldsnap.ops.tools import Tools

__all__ = ["NUM_WINDOWS", "WINDOW_BYTES", "windows_in", "windows_in_images"]

NUM_WINDOWS = 200
WINDOW_BYTES = 64
_MAX_TRIES = 50
_MIN_VALUES = 8  # a window of fewer different bytes, zeros say, proves nothing wherever it is found


def windows_in_images(tools: Tools, packs: Sequence[Digest], capsules: Sequence[Digest]) -> tuple[int, int]:
    """How many random windows of the packs were looked for in the prepared process images of the capsules, and found.

    ``NUM_WINDOWS`` are looked for, fewer where a pack has not as many that are worth it.
    """
    chooser = random.Random(0)  # noqa: S311 - which windows are looked for is no secret
    windows: set[bytes] = set()
    for _ in range(NUM_WINDOWS * _MAX_TRIES):  # a pack of zeros has no window worth looking for
        if len(windows) == NUM_WINDOWS:
            break
        with tools.store.path(chooser.choice(packs)).open("rb") as pack:
            pack.seek(chooser.randrange(os.fstat(pack.fileno()).st_size - WINDOW_BYTES))
            window = pack.read(WINDOW_BYTES)
        if len(set(window)) > _MIN_VALUES:
            windows.add(window)
    found: set[bytes] = set()
    for digest in capsules:
        for path in (tools.state.prepared / digest.hex / "process").iterdir():
            if path.stat().st_size >= WINDOW_BYTES:
                with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                    found |= windows_in(view, windows)
    return len(windows), len(found)


def windows_in(data: mmap.mmap | bytes, windows: set[bytes]) -> set[bytes]:
    """Which of the 64-byte ``windows`` stand anywhere in ``data``.

    Wherever a window lies, one of its first 32 offsets falls on a multiple of 32 there. So it is enough to look at
    8 bytes in every 32 of the data, and to search in earnest for the windows of which one was seen.
    """
    owners: dict[int, set[bytes]] = {}
    for window in windows:
        for i in range(32):
            owners.setdefault(int.from_bytes(window[i : i + 8], sys.byteorder), set()).add(window)
    whole = len(data) - len(data) % 32
    with memoryview(data) as view, view[:whole].cast("Q") as words, words[::4] as probes:
        if owners.keys().isdisjoint(probes):
            return set()
        seen = {probe for probe in probes if probe in owners}
    return {window for window in set().union(*(owners[word] for word in seen)) if data.find(window) >= 0}
