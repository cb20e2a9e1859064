"""The folder that an export made by hand lies in: one folder a worker, with one model's export in it or nothing.

    <folder>/w<rank>/       model-weights.pack (a hard link to the pack in the state root, or a copy of it),
                            weights.blob, native-manifest.json, manifest.json; validation records beside the first two
    <folder>/w<rank>.lock   held, as long as it lives, by the process whose weights they are
    <folder>/.w<rank>-*     an export on its way, or one whose place a newer one has taken

An export appears under its name whole. One of the same model, left by a process that has ended, makes room for the next
one: its addresses were those of that process. One of another model is somebody's and stays. Needs neither torch nor
vllm.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from coldsnap.core.digest import Digest
from coldsnap.core.manifest import (
    MANIFEST_LIMIT_BYTES,
    MODEL_WEIGHTS_BLOB,
    RESIDUAL_BLOB,
    ModelSource,
    RecoveryManifest,
    parse_recovery_manifest,
)
from coldsnap.core.messages import Exported
from coldsnap.core.validation import Evidence
from coldsnap.engines.export import NATIVE_MANIFEST, RECOVERY_MANIFEST
from coldsnap.errors import ColdsnapError, Problem, Refused, UnsafePath
from coldsnap.store.admission import remember
from coldsnap.store.documents import read_private
from coldsnap.store.faults import translated
from coldsnap.store.locks import hold
from coldsnap.store.staging import sync_folder

__all__ = ["HandFolder"]

_PACK_MODE = 0o400


class HandFolder:
    """A worker's place in `folder`, which is made when missing. One thread at a time."""

    def __init__(self, folder: Path, *, rank: int) -> None:
        self.worker = f"w{rank}"
        self._rank = rank
        self._folder = folder
        self._held = ExitStack()

    @property
    def path(self) -> Path:
        """Where the export is, once there is one."""
        return self._folder / self.worker

    @property
    def pack(self) -> Path:
        """The pack's place there."""
        return self.path / MODEL_WEIGHTS_BLOB

    @property
    def residual(self) -> Path:
        """The residual's place there."""
        return self.path / RESIDUAL_BLOB

    @property
    def native_manifest(self) -> Path:
        """The native manifest's place there."""
        return self.path / NATIVE_MANIFEST

    @property
    def recovery_manifest(self) -> Path:
        """The recovery manifest's place there."""
        return self.path / RECOVERY_MANIFEST

    def claim(self) -> None:
        """Take the place for this process until `release`, or its end.

        Raises ResourceBusy when another process has it, UnsafePath for a folder that others can write to.
        """
        with translated("create", self._folder):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(self._folder)
        lock = self._folder / f"{self.worker}.lock"
        self._held.enter_context(hold(lock, deadline_s=0.0, purpose=f"an engine's export to {self.path}"))
        for left in self._folder.glob(f".{self.worker}-*"):
            with translated("remove", left):
                shutil.rmtree(left)

    def release(self) -> None:
        """Let another process have the place. Idempotent."""
        self._held.close()

    def check_model(self, model_id: str, pinned: Callable[[], ModelSource]) -> None:
        """Raises Refused when an export of another model is here, or something that is no export.

        `pinned` is asked for this model's identity, which may take reading all of it, only when that decides.
        """
        found = self._found()
        if found is None:
            return
        theirs = found.model_source
        rows = [("worker", found.worker, self.worker), ("rank", found.rank, self._rank)]
        rows.append(("model_source.model_id", theirs.model_id, model_id))
        if all(there == here for _, there, here in rows):
            ours = pinned()
            rows += [
                (f"model_source.{field}", getattr(theirs, field), getattr(ours, field))
                for field in ("revision", "metadata_sha256")
            ]
        problems = [
            Problem(
                field=field,
                message=f"{self.path} holds the export of another model or worker: {there}",
                value=str(here),
                cure=f"name another folder in the settings, or move {self.path} away",
            )
            for field, there, here in rows
            if there != here
        ]
        if problems:
            raise Refused("the folder of the export", problems)

    def lacks(self, exported: Exported) -> tuple[Path, ...]:
        """Which files of an export that was put here are not here any more."""
        wanted = [self.native_manifest, self.recovery_manifest]
        wanted += [self.pack] if exported.pack is not None else []
        wanted += [self.residual] if exported.residual is not None else []
        return tuple(path for path in wanted if not os.path.lexists(path))

    def put(self, name: str, export: Callable[[Path], Exported]) -> Exported:
        """Let `export` write into a new folder, link its pack there, and give it its place; what `export` returned.

        `name` is one that no other export has. When this raises, what was here is here still.
        """
        fresh, old = (self._folder / f".{self.worker}-{name}{end}" for end in ("", "-old"))
        with ExitStack() as undo:
            with translated("create", fresh):
                fresh.mkdir(mode=0o700)
            undo.callback(shutil.rmtree, fresh, ignore_errors=True)
            exported = export(fresh)
            if exported.pack is not None:
                _link(Path(exported.pack.path), fresh / MODEL_WEIGHTS_BLOB)
            if exported.residual is not None:
                _remember(fresh / RESIDUAL_BLOB, exported.residual.sha256)
            sync_folder(fresh)
            with translated("rename", self.path):
                if os.path.lexists(self.path):
                    self.path.rename(old)
                    undo.callback(_put_back, old, self.path)
                fresh.rename(self.path)
            undo.pop_all()
        sync_folder(self._folder)
        with suppress(OSError):  # it is nobody's now; the next process that comes here tries again
            shutil.rmtree(old)
        return exported

    def _found(self) -> RecoveryManifest | None:
        """The manifest of the export that is here; None for an empty place."""
        if not os.path.lexists(self.path):
            return None
        try:
            return parse_recovery_manifest(read_private(self.recovery_manifest, MANIFEST_LIMIT_BYTES))
        except ColdsnapError as error:
            if self.path.is_dir() and not self.path.is_symlink() and not any(self.path.iterdir()):
                return None
            problem = Problem(
                field=str(self.path),
                message=f"holds something that is no export of a worker: {error}",
                cure=f"name another folder in the settings, or move {self.path} away",
            )
            raise Refused("the folder of the export", [problem]) from error


def _check_private(folder: Path) -> None:
    found = folder.stat()
    facts = {"path": str(folder), "mode": f"{stat.S_IMODE(found.st_mode):#o}", "owner": found.st_uid}
    if found.st_uid != os.geteuid():
        raise UnsafePath(f"{folder} belongs to user {found.st_uid}, not to us", cure="name another folder", facts=facts)
    if found.st_mode & 0o022:
        message = f"{folder} can be changed by other users (mode {facts['mode']}), who could replace weights"
        raise UnsafePath(message, cure=f"chmod go-w {folder}, if you trust what it holds now", facts=facts)


def _remember(residual: Path, sha256: Digest) -> None:
    """Leave a validation record: the digest was counted while these bytes were written."""
    with translated("read", residual), residual.open("rb", buffering=0) as file:
        remember(residual, file.fileno(), sha256, Evidence.FULL_SHA256, provider="native")


def _link(pack: Path, there: Path) -> None:
    """The same file under a second name; a copy where the file system takes no link. The first wake proves a copy."""
    try:
        os.link(pack, there, follow_symlinks=False)
        return
    except OSError:  # another file system, or one without links, or with too many of them
        pass
    with translated("write", there), pack.open("rb") as source, there.open("xb") as copy:
        shutil.copyfileobj(source, copy, 1 << 22)
        copy.flush()
        os.fchmod(copy.fileno(), _PACK_MODE)
        os.fsync(copy.fileno())


def _put_back(old: Path, path: Path) -> None:
    with suppress(OSError):
        old.rename(path)
