"""Which model a plain vLLM was started with, when nobody has pinned it: a local folder, or a snapshot of the hub.

A snapshot is pinned by its commit. A local folder's revision is the digest of all its bytes, which is computed when
somebody has to know, and once. Needs neither torch nor vllm.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from coldsnap.core.manifest import ModelSource
from coldsnap.engines.local_model import checkpoint_files, resolve_local
from coldsnap.engines.safetensors import SafetensorsFile, metadata_sha256
from coldsnap.errors import IntegrityError, MissingCapability, UserError

__all__ = ["HandModel"]

_COMMIT = re.compile(r"[0-9a-f]{40}")


class HandModel:
    """`id` is the folder's name, or the repository's; `path` the folder of its files, `files` their headers."""

    def __init__(self, id: str, path: Path, *, revision: str | None = None) -> None:  # noqa: A002 - the record's own word
        """`revision` None: that of the folder's bytes. Raises UserError for a folder without a checkpoint."""
        self.id = id
        self.path = path
        self.files: tuple[SafetensorsFile, ...] = tuple(checkpoint_files(path))
        self._revision = revision
        self._source: ModelSource | None = None

    @classmethod
    def find(
        cls,
        model: str,
        *,
        revision: str | None,
        cache: str | None,
        snapshot: Callable[[str, str | None, str | None], str] | None = None,
    ) -> HandModel:
        """What vLLM calls `model`. `cache` is the hub's folder, None for the usual one; nothing is fetched.

        Raises UserError for what is neither, MissingCapability without huggingface_hub.
        """
        if Path(model).is_dir():
            folder = Path(model).resolve()
            return cls(folder.name, folder)
        try:
            folder = Path((snapshot or _snapshot)(model, revision, cache))
        except (OSError, ValueError) as error:
            raise UserError(
                f"model {model!r} is neither a folder nor in the hub's cache: {error}",
                cure="give vLLM a local folder with safetensors files",
            ) from error
        if _COMMIT.fullmatch(folder.name) is None:
            raise UserError(f"{folder} is no snapshot of a commit", cure="give vLLM a local folder")
        return cls(model, folder, revision=folder.name)

    def pinned(self) -> ModelSource:
        """Its identity. The first call for a local folder reads every byte of it.

        Raises IntegrityError when its headers are not those that were there at the start.
        """
        if self._source is None:
            headers, revision = metadata_sha256(self.files), self._revision
            if revision is None:
                found = resolve_local(self.path)
                revision = found.revision
                if found.metadata_sha256 != headers:
                    raise IntegrityError(
                        f"the checkpoint in {self.path} is not the one that was loaded: its headers are "
                        f"{found.metadata_sha256}, and were {headers}",
                        cure="restart the engine, and keep the checkpoint as it is",
                        facts={"found": str(found.metadata_sha256), "expected": str(headers)},
                    )
            self._source = ModelSource(model_id=self.id, revision=revision, metadata_sha256=headers)
        return self._source


def _snapshot(repository: str, revision: str | None, cache: str | None) -> str:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingCapability("huggingface_hub is not installed", cure="give vLLM a local folder") from error
    return str(snapshot_download(repository, revision=revision, cache_dir=cache, local_files_only=True))
