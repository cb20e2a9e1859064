"""Packs copied into memory ahead of the hydration that reads them, beside whatever else a restore does meanwhile.

    with staging(tools, prepared, wanted=True) as stage:    # looked at, mounted, copying begins
        ...                                                 # evict and thaw; what thaws sees the mounts
        prepared = stage.finish(prepared, op)               # wait; packs that were copied are read from memory

A copy that cannot be made is a reason in the receipt and no error: the pack is in the store, where it always is.
Copies stay while a service runs from them; ``stop`` and ``gc`` take away those that none does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from coldsnap.core.copies import may_copy, worth_copying
from coldsnap.core.digest import Digest
from coldsnap.core.manifest import MANIFEST_LIMIT_BYTES, parse_native_manifest
from coldsnap.core.messages import PackSource
from coldsnap.core.objects import ObjectRecord
from coldsnap.core.request import OperationRequest
from coldsnap.errors import ColdsnapError, OperationInterrupted
from coldsnap.ops.assembly import NATIVE_MANIFEST
from coldsnap.ops.copies import copies_there, take_away
from coldsnap.ops.operation import Operation
from coldsnap.ops.prepare import PreparedArtifact, worker_file
from coldsnap.ops.tools import Tools
from coldsnap.store.admission import admit_file
from coldsnap.store.copies import MemoryCopies
from coldsnap.store.documents import read_private

__all__ = ["Copied", "Stage", "staging", "wants_staging"]

_BUSY_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """What became of one pack. ``bytes`` were copied in ``seconds`` by this operation, 0 for an earlier copy."""

    digest: Digest
    there: bool
    reason: str
    bytes: int = 0
    seconds: float = 0.0

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "pack": str(self.digest),
            "in_memory": self.there,
            "reason": self.reason,
            "bytes": self.bytes,
            "seconds": self.seconds,
        }


@dataclass(kw_only=True)
class Stage:
    """The copies of one operation."""

    tools: Tools
    packs: Mapping[str, ObjectRecord]
    wanted: bool
    ahead: bool
    done: list[Copied] = field(default_factory=list)
    _cancel: threading.Event = field(default_factory=threading.Event)
    _copying: list[Future[Copied]] = field(default_factory=list)
    _pool: ThreadPoolExecutor | None = None

    def finish(self, prepared: PreparedArtifact, op: Operation) -> PreparedArtifact:
        """Wait for the copies and keep what became of them; the artifact, with packs in memory read from there.

        Span ``stage`` is the waiting, not the copying, which others did not wait for.
        """
        if not self.wanted:
            return prepared
        with op.span("stage"):
            for future in self._copying:
                self.done.append(future.result())
        self._copying.clear()
        op.keep(staging=[one.document() for one in self.done])
        return replace(prepared, staged=copies_there(self.tools, self.packs))

    def begin(self, prepared: PreparedArtifact) -> None:
        """Mount what is missing and fits, and begin to fill it."""
        workers = {pack.sha256: (worker, pack) for worker, pack in self.packs.items()}
        copies, fs = MemoryCopies(self.tools.state), self.tools.memory_fs
        coming = 0
        for digest, (worker, pack) in workers.items():
            if copies.is_there(digest, pack.bytes):
                self.done.append(Copied(digest=digest, there=True, reason="it was in memory already"))
                continue
            try:
                cached = fs.cached_fraction(prepared.packs[worker])
                refusal = self._refusal(pack.bytes, coming, cached)
                if refusal is None:
                    fs.mount(self.tools.state.make_in_memory(digest.hex), num_bytes=pack.bytes)
            except ColdsnapError as error:
                refusal = error.message
            if refusal is not None:
                self.done.append(Copied(digest=digest, there=False, reason=refusal))
                continue
            coming += pack.bytes
            self._pool = self._pool or ThreadPoolExecutor(max_workers=1, thread_name_prefix="coldsnap-stage")
            drop_behind = cached is not None and worth_copying(cached).allowed
            self._copying.append(self._pool.submit(self._copy, prepared, worker, pack, drop_behind))

    def _refusal(self, num_bytes: int, coming: int, cached: float | None) -> str | None:
        """Why a pack is not copied; ``coming``: bytes of copies that are on their way."""
        found = self.tools.memory_fs.memory()
        left = replace(found, available_bytes=max(0, found.available_bytes - coming))
        verdicts = [may_copy(num_bytes, left), *([] if self.ahead else [worth_copying(cached)])]
        return next((one.reason for one in verdicts if not one.allowed), None)

    def close(self, *, cancel: bool) -> None:
        """End the copying: at once when ``cancel``, else when it is done. Idempotent."""
        if cancel:
            self._cancel.set()
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def _copy(self, prepared: PreparedArtifact, worker: str, pack: ObjectRecord, drop_behind: bool) -> Copied:
        copies, began = MemoryCopies(self.tools.state), time.monotonic()
        digest = pack.sha256
        try:
            with self.tools.store.writing(digest, deadline_s=_BUSY_S):
                if copies.is_there(digest, pack.bytes):
                    return Copied(digest=digest, there=True, reason="another operation copied it")
                manifest = parse_native_manifest(
                    read_private(worker_file(prepared, worker, NATIVE_MANIFEST), MANIFEST_LIMIT_BYTES)
                )
                extents = [(one.offset, one.size, one.sha256) for one in manifest.model_weight_extents]
                try:
                    with admit_file(prepared.packs[worker], digest, pack.bytes, extents=extents) as admitted:
                        copies.fill(
                            digest,
                            pack.bytes,
                            admitted.fd,
                            extents=extents,
                            drop_behind=drop_behind,
                            cancel=self._cancel,
                        )
                except BaseException:
                    take_away(self.tools, digest)
                    raise
        except OperationInterrupted:
            return Copied(digest=digest, there=False, reason="the operation ended first")
        except ColdsnapError as error:
            return Copied(digest=digest, there=False, reason=error.message)
        seconds = time.monotonic() - began
        return Copied(digest=digest, there=True, reason="it was copied", bytes=pack.bytes, seconds=seconds)


def wants_staging(request: OperationRequest) -> bool:
    """Whether a request asks for packs in memory."""
    return request.extension is not None and request.extension.stage


@contextmanager
def staging(tools: Tools, prepared: PreparedArtifact, *, wanted: bool, ahead: bool = False) -> Iterator[Stage]:
    """See the module's head. Nothing is copied unless ``wanted`` and the packs are what is read.

    ``ahead``: nobody waits, so that whatever fits is worth copying.
    """
    native = prepared.source is PackSource.NATIVE
    stage = Stage(tools=tools, packs=prepared.loaded.packs() if native else {}, wanted=wanted and native, ahead=ahead)
    try:
        if stage.wanted:
            stage.begin(prepared)
        yield stage
    except BaseException:
        stage.close(cancel=True)
        raise
    finally:
        stage.close(cancel=False)
