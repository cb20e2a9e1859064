"""Derived caches that travel in a capsule: compiled kernels and the like, with their modification times.

A capture takes the files below the folders its request lists (``policy.cache.paths``). A restore puts back what is
missing below the folders *its own* request lists and nowhere else: an artifact cannot choose where it writes. A
file that is there already is the host's own and is left alone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from coldsnap.capsule.image import CACHE_SEED, CapsuleFile
from coldsnap.core.owners import Owner
from coldsnap.core.request import OperationRequest
from coldsnap.ops.artifacts import LoadedArtifact
from coldsnap.store.faults import translated
from coldsnap.store.staging import PARTIAL_SUFFIX, remove_leftovers, stage_file

__all__ = ["SEED_FOLDER", "place_seeds", "seed_files"]

SEED_FOLDER = "cache"


def seed_files(request: OperationRequest, unit: str) -> Iterator[CapsuleFile]:
    """Every regular file below the request's cache folders; links are left out."""
    for text in request.policy.cache.paths if request.policy.cache.seed else ():
        for base, _, names in os.walk(text):
            for name in sorted(names):
                path = Path(base, name)
                if path.is_file() and not path.is_symlink() and not name.endswith(PARTIAL_SUFFIX):
                    inside = f"{SEED_FOLDER}/{path.relative_to('/')}"
                    yield CapsuleFile(role=CACHE_SEED, owner=Owner.parse(f"unit/{unit}"), path=inside, source=path)


def place_seeds(loaded: LoadedArtifact, prepared: Path, unit: str, allowed: Sequence[str]) -> int:
    """Put the unit's seeds that are missing below the ``allowed`` folders there; returns how many were written."""
    num_written = 0
    for entry in loaded.artifact.capsule.objects:
        if entry.role != CACHE_SEED or str(entry.owner) != f"unit/{unit}":
            continue
        target = Path("/", entry.path.removeprefix(f"{SEED_FOLDER}/"))
        if not any(target.is_relative_to(folder) for folder in allowed) or os.path.lexists(target):
            continue
        with translated("seed", target):
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(target.parent, stem=f".{target.name}")
            with stage_file(target.parent, entry.bytes, stem=f".{target.name}") as staged:
                with (prepared / entry.path).open("rb") as seed, open(staged.fd, "wb", closefd=False) as file:
                    shutil.copyfileobj(seed, file)
                shutil.copystat(prepared / entry.path, staged.path)  # with the time: caches are compared by it
                staged.path.rename(target)
        num_written += 1
    return num_written
