"""A checkpoint folder as a pinned model: which bytes it holds, by content and not by name or time.

The revision of a local folder is the digest of the canonical `[[file, size, sha256], ...]` of its files, so
equal folders are one model wherever they lie, and a changed byte anywhere is another model.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from coldsnap.core.canonical import canonical_sha256
from coldsnap.core.digest import Digest
from coldsnap.core.manifest import ModelSource
from coldsnap.engines.protocol import ResolvedModel
from coldsnap.engines.safetensors import SafetensorsFile, metadata_sha256, read_header
from coldsnap.errors import IntegrityError, UserError
from coldsnap.store.buffers import transit_buffer
from coldsnap.store.faults import host_error, translated

__all__ = ["checkpoint_files", "model_files", "pinned_files", "resolve_local"]

_CHUNK_BYTES = 4 << 20


def model_files(folder: Path) -> list[str]:
    """Every file under `folder` as a relative path, sorted; names that begin with a dot are not the model's.

    Raises UserError when there is no such folder, or something in it is no file; HostError when one cannot be listed.
    """
    if not folder.is_dir():
        raise UserError(f"model folder {folder} does not exist", cure="give the path of a local checkpoint folder")
    found: list[str] = []
    for root, folders, names in os.walk(folder, onerror=_refuse_unlisted):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [str(Path(root, name).relative_to(folder)) for name in names if not name.startswith(".")]
    for name in found:
        _check_file(folder / name)
    return sorted(found)


def checkpoint_files(folder: Path) -> list[SafetensorsFile]:
    """The parsed headers of the safetensors files directly in `folder`, by name.

    Raises UserError when there is none, InvalidDocument when a header is damaged, HostError when it cannot be listed.
    """
    if not folder.is_dir():
        raise UserError(f"model folder {folder} does not exist", cure="give the path of a local checkpoint folder")
    with translated("list", folder):
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors" and path.name[0] != ".")
    if not paths:
        raise UserError(
            f"model folder {folder} holds no .safetensors file",
            cure="convert the checkpoint to safetensors first; other formats cannot be replayed byte by byte",
        )
    for path in paths:
        _check_file(path)
    return [read_header(path) for path in paths]


def pinned_files(folder: Path, source: ModelSource) -> list[SafetensorsFile]:
    """`checkpoint_files`, when they are those of the pinned model. Raises IntegrityError when they are not."""
    files = checkpoint_files(folder)
    found = metadata_sha256(files)
    if found != source.metadata_sha256:
        raise IntegrityError(
            f"the checkpoint in {folder} changed since it was pinned: its headers are {found}, "
            f"expected {source.metadata_sha256}",
            cure="plan the operation again",
            facts={"found": str(found), "expected": str(source.metadata_sha256)},
        )
    return files


def resolve_local(
    folder: Path,
    *,
    revision: str | None = None,
    model_id: str | None = None,
    num_threads: int = 0,
    progress: Callable[[int], None] | None = None,
) -> ResolvedModel:
    """Pin the checkpoint in `folder`, reading every byte of it. `model_id` defaults to the folder's name.

    `progress` gets bytes hashed since its last call, from several threads. Raises UserError for a folder that
    is no checkpoint, and when `revision` is given and the folder is another one.
    """
    root = folder.resolve()
    headers = checkpoint_files(root)
    names = model_files(root)

    def row(name: str) -> list[object]:
        digest, size = _hash(root / name, progress)
        return [name, size, str(digest)]

    with ThreadPoolExecutor(max_workers=num_threads or os.cpu_count() or 1) as threads:
        rows = list(threads.map(row, names))
    found = str(canonical_sha256(rows))
    if revision is not None and revision != found:
        raise UserError(
            f"model folder {root} is at revision {found}, and {revision} is wanted",
            cure="give the folder that was meant, or drop the revision: a local folder's is computed from its files",
            facts={"found": found, "wanted": revision},
        )
    return ResolvedModel(
        id=model_id if model_id is not None else root.name,
        revision=found,
        source="local",
        path=root,
        metadata_sha256=metadata_sha256(headers),
    )


def _refuse_unlisted(error: OSError) -> None:
    """A folder that is passed over would make the model another one."""
    raise host_error(error, "list", str(error.filename)) from error


def _check_file(path: Path) -> None:
    """A hub's cache is made of links, which are fine; a pipe would be waited on for ever."""
    if not path.is_file():
        raise UserError(
            f"{path} is no file", cure="take it out of the checkpoint folder, or fetch the checkpoint again"
        )


def _hash(path: Path, progress: Callable[[int], None] | None) -> tuple[Digest, int]:
    state, size = hashlib.sha256(), 0
    buffer = transit_buffer(_CHUNK_BYTES)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                state.update(buffer[:count])
                size += count
                if progress is not None:
                    progress(count)
    except OSError as error:
        raise UserError(
            f"cannot read model file {path}: {error.strerror}", cure="check the checkpoint folder"
        ) from error
    return Digest.from_hash(state), size
