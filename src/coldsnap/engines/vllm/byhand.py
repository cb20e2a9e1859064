"""An export without a controller: plain `vllm serve --enable-sleep-mode`, told by two variables to write at its sleep.

    COLDSNAP_EXPORT_MODEL_PAYLOAD=1
    COLDSNAP_SETTINGS=/path/to/settings.json    {"format": 1, "kind": "coldsnap-vllm-by-hand", "folder": F,
                                                 "state_root": S}

The first sleep at level 1 writes each worker's files (`handfolder`) and lets the weights go without a copy in host
memory; a wake brings them back from the pack, or from the checkpoint when the pack is gone. What comes back is what was
written: a sleep writes again only after weights were loaded once more, or when a file is not there any more. Level 2
writes nothing and wakes as level 1. A pack that is damaged is refused, and the engine stays asleep.

Needs neither torch nor vllm.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Any

from coldsnap.core.digest import Digest
from coldsnap.core.manifest import MANIFEST_LIMIT_BYTES
from coldsnap.core.messages import ExportBody, Exported, ExportedFile, PackSource, Request, Verb, WakeBody, WakeReport
from coldsnap.engines.control import Call
from coldsnap.engines.export import export_memory
from coldsnap.engines.kernel import trim_heap
from coldsnap.engines.observer import Observer
from coldsnap.engines.vllm.handfolder import HandFolder
from coldsnap.engines.vllm.handmodel import HandModel
from coldsnap.engines.vllm.handsettings import HandSettings
from coldsnap.engines.vllm.loading import Load, WeightMemory, watch_reloads
from coldsnap.engines.vllm.sleeping import BACKEND, put_in_charge
from coldsnap.engines.wake import fill_memory
from coldsnap.errors import EngineError, IntegrityError, PayloadRejected, Refused, UsageError, UserError
from coldsnap.store.documents import read_private
from coldsnap.store.stateroot import StateRoot

__all__ = ["ByHand", "by_hand", "supplied"]

_log = logging.getLogger(__name__)

_WEIGHTS, _KV = "weights", "kv_cache"


class ByHand:
    """One worker: its weights, the model they are of, and where they are written. vLLM's sleep-mode backend calls it.

    Any thread may call; one call at a time is served.
    """

    def __init__(self, settings: HandSettings, *, rank: int, model: HandModel, memory: WeightMemory) -> None:
        """Takes the folder. Raises ResourceBusy when another process has it, UnsafePath, and Refused for a folder with
        the export of another model in it."""
        self.observer = Observer()
        self._rank = rank
        self._model = model
        self._memory = memory
        self._state_root = settings.state_root
        self._lock = threading.Lock()
        self._exported: Exported | None = None
        self._is_stale = False
        StateRoot.open(Path(settings.state_root))
        self._folder = HandFolder(Path(settings.folder), rank=rank)
        self._folder.claim()
        try:
            self._folder.check_model(model.id, model.pinned)
        except BaseException:
            self._folder.release()
            raise

    def load(self) -> Load:
        """For the loader."""
        return Load(observer=self.observer, memory=self._memory, files=self._model.files)

    def reloaded(self) -> None:
        """Weights were loaded once more: what is written is not what is in memory."""
        self._is_stale = True

    def suspend(self, level: int) -> None:
        """Write what has to be written (level 1), and let go of weights, keys and values. Idempotent.

        Raises UsageError for a level 2 before anything was written, Refused for what somebody else's sleep has left,
        and as `export_memory`; the engine is awake then.
        """
        with self._lock:
            if not self._memory.mapped:
                return
            if problems := self._memory.leftovers():
                raise Refused("putting vLLM to sleep", list(problems))
            if level == 1:
                self._export_if_needed()
            elif self._exported is None:
                raise UsageError(
                    f"level {level} lets go of weights that were never written, so no wake could bring them back",
                    cure="sleep at level 1 once, which writes them",
                )
            self._memory.discard_kv()
            self._memory.unmap()
            trim_heap()

    def resume(self, tags: Collection[str] | None) -> None:
        """Bring back weights, keys and values, or what `tags` names of them. Idempotent.

        Raises PayloadRejected or IntegrityError for files that are not those that were written, OutOfSpace and more as
        `fill_memory`; the weights are asleep then.
        """
        with self._lock:
            if (tags is None or _WEIGHTS in tags) and not self._memory.mapped:
                self._fill()
            if tags is None or _KV in tags:
                self._memory.restore_kv()
            elif _WEIGHTS in tags:
                self._memory.discard_kv()  # they come beside the weights, and nobody wants them yet

    def discard(self, tags: Collection[str]) -> None:
        """Let go of what `tags` names, without keeping it. Raises UsageError for more than keys and values."""
        if set(tags) - {_KV}:
            raise UsageError(
                f"only keys and values can be discarded by themselves, not {', '.join(sorted(tags))}",
                cure="sleep at level 1 or 2",
            )
        with self._lock:
            self._memory.discard_kv()

    def close(self) -> None:
        """Let another process have the folder."""
        self._folder.release()

    def _export_if_needed(self) -> None:
        exported = self._exported
        if exported is None or self._is_stale or self._folder.lacks(exported):
            self._memory.complete()
            self._exported = self._folder.put(uuid.uuid4().hex, self._export)
            self._is_stale = False

    def _export(self, out: Path) -> Exported:
        body = ExportBody(state_root=self._state_root, out_dir=str(out), capture_id=uuid.uuid4().hex)
        exported = export_memory(
            body,
            memory=self._memory,
            observation=self.observer.observation(self._memory.allocations),
            source=self._model.pinned(),
            model_path=self._model.path,
            worker=self._folder.worker,
            rank=self._rank,
            call=_call(Verb.EXPORT),
        )
        model, residual = exported.model_bytes, exported.residual_bytes
        _log.info("wrote %d model bytes and %d others to %s", model, residual, self._folder.path)
        return exported

    def _fill(self) -> None:
        exported = self._exported
        if exported is None:
            raise EngineError("the weights are asleep and nothing was written", cure="restart the engine")
        try:
            report = self._filled(exported)
        except BaseException:
            self._memory.unmap()
            raise
        finally:
            trim_heap()
        seconds = sum(report.seconds.values())
        _log.info("woke from %s: %d bytes, %.2f s", report.source, report.model_bytes + report.residual_bytes, seconds)

    def _filled(self, exported: Exported) -> WakeReport:
        _check_document(self._folder.native_manifest, exported.native_manifest)
        _check_document(self._folder.recovery_manifest, exported.recovery_manifest)
        pack, wanted = self._pack(exported), exported.pack
        source = PackSource.NATIVE if pack is not None or wanted is None else PackSource.RECOVERY
        body = WakeBody(
            source=source,
            native_manifest=str(self._folder.native_manifest),
            recovery_manifest=str(self._folder.recovery_manifest),
            pack=str(pack) if pack is not None else None,
            pack_sha256=wanted.sha256 if wanted is not None else None,
            pack_bytes=wanted.bytes if wanted is not None else None,
            residual=str(self._folder.residual),
            residual_sha256=exported.residual.sha256 if exported.residual is not None else None,
            model_path=str(self._model.path),
            state_root=self._state_root,
        )
        try:
            return fill_memory(
                body,
                memory=self._memory,
                call=_call(Verb.WAKE),
                started_with=self._model.pinned(),
                known=self._model.files,
            )
        except PayloadRejected as error:
            if pack is None or error.facts.get("path") != str(pack):
                raise
            cure = f"remove {self._folder.pack}: without it the weights come from the checkpoint {self._model.path}"
            raise PayloadRejected(error.reason, error.message, cure=cure, facts=error.facts) from error

    def _pack(self, exported: Exported) -> Path | None:
        """The pack in the folder, by the name that it has in the store while that is the same file: the store knows
        whether it was proved. None when it is gone from the folder."""
        if exported.pack is None or self._folder.pack in self._folder.lacks(exported):
            return None
        stored = Path(exported.pack.path)
        return stored if stored.exists() and stored.samefile(self._folder.pack) else self._folder.pack


_starting = threading.Lock()
_hand: ByHand | None = None


def by_hand() -> ByHand | None:
    """This process's; None where nothing was loaded by hand."""
    return _hand


def supplied(settings: HandSettings, vllm_config: Any) -> Load | None:
    """The loader's supplier in a process of a plain vLLM.

    The first model is written. None for another one beside it (of a draft): vLLM loads it alone, and what of it is
    among the weights goes into the residual. Raises UserError for engines that share ranks, and as `memory_maker`,
    `HandModel.find` and `ByHand`.
    """
    global _hand
    from coldsnap.engines.vllm.device import memory_maker

    with _starting:
        if _hand is not None:
            return None
        config, parallel = vllm_config.model_config, vllm_config.parallel_config
        if parallel.data_parallel_size > 1:
            raise UserError(
                f"{parallel.data_parallel_size} engines of one command would write into one folder",
                cure="start each by a command of its own, with a folder of its own",
                facts={"data_parallel_size": parallel.data_parallel_size},
            )
        make_memory, _ = memory_maker(vllm_config)
        cache = vllm_config.load_config.download_dir
        model = HandModel.find(config.model, revision=config.revision, cache=cache)
        hand = ByHand(settings, rank=int(parallel.rank), model=model, memory=make_memory())
        config.sleep_mode_backend = BACKEND  # read by the worker when it sleeps for the first time
        put_in_charge(hand)
        watch_reloads(hand.reloaded)
        _hand = hand
        return hand.load()


def _check_document(path: Path, written: ExportedFile) -> None:
    found = Digest.of(read_private(path, MANIFEST_LIMIT_BYTES))
    if found != written.sha256:
        raise IntegrityError(
            f"{path} is not the manifest that was written: it has the digest {found}, not {written.sha256}",
            cure="put it back as it was, or restart the engine",
            facts={"path": str(path), "found": str(found), "expected": str(written.sha256)},
        )


def _call(verb: Verb) -> Call:
    """Nobody waits at a socket."""
    return Call(Request(id=1, verb=verb), lambda _frame: None)
