"""A model as people name it: a folder of their own, or a repository of Hugging Face's. For engines that take both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from coldsnap.engines.hub import resolve_pinned
from coldsnap.engines.local_model import resolve_local
from coldsnap.engines.protocol import ResolvedModel

__all__ = ["resolve_named"]


def resolve_named(
    model: str,
    revision: str | None = None,
    *,
    num_threads: int = 0,
    progress: Callable[[int], None] | None = None,
) -> ResolvedModel:
    """See `EnginePlugin.resolve_model`. A folder that exists is a local checkpoint; anything else is a repository.

    Raises as `resolve_local` and `resolve_pinned` do.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return resolve_local(folder, revision=revision, num_threads=num_threads, progress=progress)
    return resolve_pinned(model, revision)
