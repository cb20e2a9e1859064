"""Materialization: a pack that is missing is written again from the model bytes in memory.

``required`` and the verb do it at once, in the caller's time. ``async`` does it beside a service, and the rule is
that nobody who waits for a token notices:

- it begins after the first request was answered, or when nothing was asked for ``IDLE_S`` seconds;
- it reads memory in pieces of 1 MiB, and looks before each whether a request is in flight. While one is, it stands
  still; after ``PATIENCE_S`` seconds without a gap it takes one piece in ``BUSY_PIECE_S`` seconds (10 MB/s), so
  that a service which is always busy gets its pack as well;
- its threads run at the lowest priority.

The writer is that of every capture (``store.pack``), the order and the digests are the native manifest's: the file
is the captured one, or there is none. A thread must not be frozen with the process, so whoever puts the worker to
sleep or exports from it calls ``settle`` first: then it hurries, and is given up only after the caller's patience.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from coldsnap.core.digest import Digest
from coldsnap.core.extents import Allocation, ModelExtent
from coldsnap.core.manifest import MANIFEST_LIMIT_BYTES, parse_native_manifest
from coldsnap.core.messages import ExportedFile, Materialization, MaterializationState, MaterializeBody, Materialized
from coldsnap.core.points import reached
from coldsnap.engines.control import Call
from coldsnap.engines.kernel import lower_priority, trim_heap
from coldsnap.engines.relocation import Relocation
from coldsnap.errors import ColdsnapError, IntegrityError, OperationInterrupted, Problem, Refused, UsageError
from coldsnap.hydrate.memory import StableMemory
from coldsnap.hydrate.transfer import read_chunks
from coldsnap.store.documents import read_private
from coldsnap.store.pack import WrittenPack, rewrite_pack
from coldsnap.store.payloads import PayloadStore
from coldsnap.store.stateroot import StateRoot

__all__ = ["Materializer", "PackPlan", "allocation_problems", "plan_pack"]

_log = logging.getLogger(__name__)

IDLE_S = 2.0
PATIENCE_S = 5.0
BUSY_PIECE_S = 0.1
_POLL_S = 0.01
_PIECE_BYTES = 1 << 20
_NOTHING = Materialization(state=MaterializationState.IDLE, reason="nobody asked for a pack")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackPlan:
    """A pack to write: its extents in its order, its digest, its size, and where the store is."""

    extents: tuple[ModelExtent, ...]
    digest: Digest
    bytes: int
    state_root: Path


def allocation_problems(own: Sequence[Allocation], manifest: Sequence[Allocation]) -> list[Problem]:
    """Every allocation that a manifest and this process see differently."""
    ours, theirs = {one.ptr: one for one in own}, {one.ptr: one for one in manifest}
    return [
        Problem(
            field=f"entries[{ptr:#x}]",
            message="is not what this process reserved at capture",
            value=f"manifest {theirs.get(ptr)}, process {ours.get(ptr)}",
            cure="use the manifest of this very capture",
        )
        for ptr in sorted(ours.keys() | theirs.keys())
        if ours.get(ptr) != theirs.get(ptr)
    ]


def plan_pack(body: MaterializeBody, memory: StableMemory, relocation: Relocation | None = None) -> PackPlan:
    """What is to be written, from the manifest that the body names; ``relocation`` as in ``fill_memory``.

    Raises UsageError when this worker has no model bytes, IntegrityError when its pack is another one than the
    body's, Refused when the manifest is of another process.
    """
    manifest = parse_native_manifest(read_private(Path(body.native_manifest), MANIFEST_LIMIT_BYTES))
    if relocation is not None:
        manifest = relocation.native(manifest)
    if problems := allocation_problems(memory.allocations, manifest.entries):
        raise Refused("materialize", problems)
    blob = manifest.model_weights
    if blob is None:
        raise UsageError(
            f"worker {manifest.worker} has no model bytes, so it has no pack {body.pack_sha256}",
            cure="leave it out",
            facts={"worker": manifest.worker, "pack": str(body.pack_sha256)},
        )
    if (blob.sha256, blob.bytes) != (body.pack_sha256, body.pack_bytes):
        raise IntegrityError(
            f"the pack to write is {body.pack_sha256} of {body.pack_bytes} bytes, and this worker's is {blob.sha256} "
            f"of {blob.bytes}",
            cure="use the pack that the artifact names for this worker",
            facts={"given": str(body.pack_sha256), "expected": str(blob.sha256)},
        )
    return PackPlan(
        extents=manifest.model_weight_extents, digest=blob.sha256, bytes=blob.bytes, state_root=Path(body.state_root)
    )


class Materializer:
    """Writes packs of one worker's memory, one at a time, and knows how the last one went.

    ``busy``: whether anybody waits for the engine now. ``serving``: whether the listener is open. Both are asked
    from other threads. Methods come from one thread at a time, but ``status`` from any.
    """

    def __init__(self, memory: StableMemory, *, busy: Callable[[], bool], serving: Callable[[], bool]) -> None:
        self._memory = memory
        self._busy = busy
        self._serving = serving
        self._lock = threading.Lock()
        self._status = _NOTHING
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()
        self._cancel = threading.Event()
        self._given_up = ""

    def status(self) -> Materialization:
        """How the last one goes or went."""
        with self._lock:
            return self._status

    def reset(self, reason: str) -> None:
        """There is none to do, for this reason."""
        self._set(Materialization(state=MaterializationState.IDLE, reason=reason))

    def run(self, plan: PackPlan, call: Call) -> Materialized:
        """Write it now. Raises as ``rewrite_pack`` does; the status says the same. A running one is finished first."""
        while self._running():
            self._hurry.set()
            if call.cancelled.wait(_POLL_S):
                raise OperationInterrupted("cancelled while another materialization went on, which still does")
        self._begin(plan, MaterializationState.RUNNING, "asked for, and waited for")
        told = call.phase("materialize", sum(one.size for one in plan.extents))
        began = time.monotonic()
        written = self._write(plan, self._read, told, call.cancelled)
        return Materialized(
            pack=ExportedFile(path=str(written.path), bytes=written.bytes, sha256=written.digest),
            shared=written.shared,
            seconds=time.monotonic() - began,
        )

    def begin(self, plan: PackPlan) -> None:
        """Write it in the background, once the service has answered or has nothing to do."""
        self.settle(0.0, reason="another one was asked for")
        self._hurry, self._cancel = threading.Event(), threading.Event()
        self._begin(plan, MaterializationState.WAITING, "it begins when the service has answered or is idle")
        self._thread = threading.Thread(target=self._background, args=(plan,), name="coldsnap-pack", daemon=True)
        self._thread.start()

    def settle(self, patience_s: float, *, reason: str) -> None:
        """Return when no thread of this is left: let it finish, without pauses, and give it up after ``patience_s``."""
        thread = self._thread
        if thread is None:
            return
        self._hurry.set()
        thread.join(patience_s)
        if thread.is_alive():
            self._given_up = f"given up after {patience_s:g} s: {reason}"
            self._cancel.set()
            thread.join()
        self._thread = None

    def _running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _background(self, plan: PackPlan) -> None:
        lower_priority()
        hurry, cancel = self._hurry, self._cancel
        try:
            pace = _Pace(busy=self._busy, serving=self._serving, hurry=hurry, cancel=cancel)
            pace.wait_to_begin()
            self._update(state=MaterializationState.RUNNING, reason="from the model bytes in memory")

            def read(extent: ModelExtent) -> Iterator[memoryview]:
                for chunk in self._read(extent):
                    pace.wait_for_gap()
                    yield chunk

            self._write(plan, read, None, cancel)
        except OperationInterrupted as error:
            self._update(state=MaterializationState.FAILED, reason=self._given_up or error.message)
        except Exception as error:  # noqa: BLE001 - the service goes on; the status tells
            _log.warning("the pack could not be written: %s", error)

    def _write(
        self,
        plan: PackPlan,
        read: Callable[[ModelExtent], Iterator[memoryview]],
        told: Callable[[int], None] | None,
        cancel: threading.Event,
    ) -> WrittenPack:
        began = time.monotonic()

        def advance(num_bytes: int) -> None:
            with self._lock:
                done = self._status.done_bytes + num_bytes
                self._status = self._status.model_copy(update={"done_bytes": done})
            if told is not None:
                told(num_bytes)

        try:
            reached("worker.materializing")
            store = PayloadStore(StateRoot.open(plan.state_root))
            written = rewrite_pack(store, plan.extents, read, digest=plan.digest, progress=advance, cancel=cancel)
            reached("worker.materialized")
        except BaseException as error:
            message = error.message if isinstance(error, ColdsnapError) else f"{type(error).__name__}: {error}"
            self._update(state=MaterializationState.FAILED, reason=message)
            raise
        finally:
            trim_heap()  # blocks held model bytes, and would land in a process image
        reason = "the store held it already" if written.shared else "written from the model bytes in memory"
        self._update(
            state=MaterializationState.DONE, reason=reason, shared=written.shared, seconds=time.monotonic() - began
        )
        _log.info("pack %s: %s, %.2f s", plan.digest, reason, time.monotonic() - began)
        return written

    def _read(self, extent: ModelExtent) -> Iterator[memoryview]:
        return read_chunks(self._memory, extent.ptr, extent.size, _PIECE_BYTES)

    def _begin(self, plan: PackPlan, state: MaterializationState, reason: str) -> None:
        self._given_up = ""
        total = sum(one.size for one in plan.extents)
        self._set(Materialization(state=state, reason=reason, pack_sha256=plan.digest, total_bytes=total))

    def _set(self, status: Materialization) -> None:
        with self._lock:
            self._status = status

    def _update(self, **changes: object) -> None:
        with self._lock:
            self._status = self._status.model_copy(update=changes)


class _Pace:
    """When the background may work; see the module's rule."""

    def __init__(
        self,
        *,
        busy: Callable[[], bool],
        serving: Callable[[], bool],
        hurry: threading.Event,
        cancel: threading.Event,
    ) -> None:
        self._busy = busy
        self._serving = serving
        self._hurry = hurry
        self._cancel = cancel
        self._busy_since: float | None = None
        self._last_piece = 0.0

    def wait_to_begin(self) -> None:
        """Return once a request was answered and none is in flight, or after ``IDLE_S`` quiet seconds."""
        quiet_since = time.monotonic()
        answered = False
        while not self._stopped_or_hurried():
            if self._busy():
                answered = answered or self._serving()
                quiet_since = time.monotonic()
            elif answered or time.monotonic() - quiet_since >= IDLE_S:
                return
            self._hurry.wait(_POLL_S)

    def wait_for_gap(self) -> None:
        """Return when nobody waits for the engine, or when it is this thread's turn all the same."""
        while not self._stopped_or_hurried():
            now = time.monotonic()
            if not self._busy():
                self._busy_since = None
                break
            if self._busy_since is None:
                self._busy_since = now
            if now - self._busy_since >= PATIENCE_S and now - self._last_piece >= BUSY_PIECE_S:
                break
            self._hurry.wait(_POLL_S)
        self._last_piece = time.monotonic()

    def _stopped_or_hurried(self) -> bool:
        if self._cancel.is_set():
            raise OperationInterrupted("cancelled: the unfinished pack was removed")
        return self._hurry.is_set()
