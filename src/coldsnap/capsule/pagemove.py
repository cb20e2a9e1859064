"""Taking large runs of memory out of the images that CRIU has just written; `pageruns` decides which, and why.

A process whose images are not understood, as a newer CRIU may write them, keeps its memory in them: slower, and right.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from coldsnap.capsule import criuimages, pageruns
from coldsnap.capsule.aside import num_cores
from coldsnap.capsule.copying import copy_range
from coldsnap.capsule.criuimages import BadImage, PageMap
from coldsnap.capsule.dumped import PROVED_BYTES, MovedMemory
from coldsnap.capsule.pageruns import Part, Span

__all__ = ["MovedPages", "move_pages"]

_CORE = re.compile(r"^core-\d+\.img$")
_LOOK_BYTES: Final = 64
_ZEROS: Final = bytes(pageruns.ZERO_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class MovedPages:
    """What is in runs files now, and what a restore must know besides.

    ``stopped`` are processes that stood still by a signal; ``left`` says, by PID, why a process was not understood.
    """

    memory: tuple[MovedMemory, ...]
    stopped: tuple[int, ...]
    left: Mapping[int, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Process:
    """One process: ``held`` of its memory goes, and ``zeros`` hold nothing."""

    pid: int
    pagemap: PageMap
    held: tuple[Part, ...]
    zeros: tuple[Part, ...]


def move_pages(images_dir: Path, *, pace: Callable[[], object] = lambda: None) -> MovedPages:
    """Move what `pageruns` lets go into ``runs-<pid>.bin`` files. ``pace`` is called often, and may raise.

    The images are CRIU's own before, and whole again after; in between they are not. Raises OSError.
    """
    left: dict[int, str] = {}
    try:
        parents = criuimages.read_parents((images_dir / "pstree.img").read_bytes())
        cores = {
            int(path.stem.removeprefix("core-")): criuimages.read_core(path.read_bytes())
            for path in sorted(images_dir.iterdir())
            if _CORE.match(path.name)
        }
    except BadImage as error:
        return MovedPages(memory=(), stopped=(), left={0: str(error)})
    kept = [(core.start, core.start + core.size) for core in cores.values()]
    memory = []
    for pid in parents:
        if not (images_dir / f"pagemap-{pid}.img").exists():  # a zombie has none
            continue
        try:
            process = _read(images_dir, pid, kept, pace)
        except BadImage as error:
            left[pid] = str(error)
            continue
        if process.held or process.zeros:
            pieces = _move(images_dir, process)
            pace()
            if pieces:
                memory.append((pid, pieces))
    digests = _digests([images_dir / f"runs-{pid}.bin" for pid, _ in memory], pace)
    return MovedPages(
        memory=tuple(
            MovedMemory(pid=pid, pieces=pieces, sha256=sha256)
            for (pid, pieces), sha256 in zip(memory, digests, strict=True)
        ),
        stopped=tuple(sorted(pid for pid, core in cores.items() if core.stopped)),
        left=left,
    )


def _read(images_dir: Path, pid: int, kept: Sequence[Span], pace: Callable[[], object]) -> _Process:
    try:
        pagemap = criuimages.read_pagemap((images_dir / f"pagemap-{pid}.img").read_bytes())
        mappings = criuimages.read_mappings((images_dir / f"mm-{pid}.img").read_bytes())
    except FileNotFoundError as error:
        raise BadImage(f"there is no {error.filename}") from error
    size = sum(run.size for run in pagemap.runs)
    held: list[Part] = []
    zeros: list[Part] = []
    with (images_dir / f"pages-{pagemap.pages_id}.img").open("rb") as file:
        if os.fstat(file.fileno()).st_size != size:
            raise BadImage(f"{file.name} has not the {size} bytes of its pagemap")
        parts = pageruns.private_parts(pagemap, mappings, kept)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else contextlib.nullcontext(b"") as pages:
            for part in parts:
                full, empty = pageruns.split_zeros(part, partial(_is_zero, pages))
                zeros += empty
                if part.size >= pageruns.RUN_BYTES:
                    held += full
                pace()
    return _Process(pid=pid, pagemap=pagemap, held=tuple(held), zeros=tuple(zeros))


def _is_zero(pages: mmap.mmap | bytes, offset: int, length: int) -> bool:
    # Most blocks differ in their first bytes, and then nothing is copied to be compared.
    return pages[offset : offset + _LOOK_BYTES] == _ZEROS[:_LOOK_BYTES] and pages[offset : offset + length] == _ZEROS


def _move(images_dir: Path, process: _Process) -> tuple[tuple[int, int], ...]:
    """Rewrite one process's images; what its runs file holds, in order."""
    pages = images_dir / f"pages-{process.pagemap.pages_id}.img"
    runs = images_dir / f"runs-{process.pid}.bin"
    aside = images_dir / f"pages-{process.pagemap.pages_id}.new"
    plan = pageruns.lay_out(sum(run.size for run in process.pagemap.runs), process.held, process.zeros)
    left = pageruns.remaining(process.pagemap, (*process.held, *process.zeros))
    with pages.open("r+b", buffering=0) as old, open(aside, "xb", buffering=0, opener=_private) as new:
        target = 0
        for offset, size in plan.staying:
            target = copy_range(old.fileno(), new.fileno(), offset, target, size)
        for copy in plan.copies:
            copy_range(old.fileno(), old.fileno(), copy.source, copy.target, copy.size)
        old.truncate(plan.size)
    if plan.size:
        pages.rename(runs)
    aside.rename(pages)
    (images_dir / f"pagemap-{process.pid}.img").write_bytes(criuimages.pagemap_image(left))
    return plan.pieces


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _digests(paths: Sequence[Path], pace: Callable[[], object]) -> list[tuple[str, ...]]:
    """The digests of every ``PROVED_BYTES`` of each file, by as many threads as there are cores."""
    with ExitStack() as stack:
        views = []
        for path in paths:
            with path.open("rb") as file:
                views.append(stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
        workers = stack.enter_context(ThreadPoolExecutor(num_cores(), thread_name_prefix="page-runs"))
        tasks = [[workers.submit(_digest, view, at) for at in range(0, len(view), PROVED_BYTES)] for view in views]
        digests: list[list[str]] = []
        try:
            for of_file in tasks:
                digests.append([])
                for task in of_file:
                    digests[-1].append(task.result())
                    pace()
        except BaseException:
            workers.shutdown(cancel_futures=True)
            raise
        return [tuple(one) for one in digests]


def _digest(view: mmap.mmap, at: int) -> str:
    with memoryview(view) as whole, whole[at : at + PROVED_BYTES] as piece:
        return hashlib.sha256(piece).hexdigest()
