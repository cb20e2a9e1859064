"""Named places in the code where a machine may stop: the crash points of the fault harness.

Each name stands in the code as ``reached("restore.evicted")``, at a moment when what is on disk, or what runs, has just
changed. The sentence says what is true then, and so what a process that ends there leaves behind. A production process
installs no hook, and a point costs it one comparison. The fault harness installs one that kills, interrupts, delays or
raises; it visits every name of this list, so a point that nothing reaches is found.

A point is no place for logic: nothing may depend on a hook's answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

__all__ = ["POINTS", "Hook", "install", "reached"]

Hook = Callable[[str], None]

_hook: Hook | None = None

POINTS: Mapping[str, str] = MappingProxyType(
    {
        # small documents: leases, receipts, service records, validation records, proofs, manifests
        "document.filled": "a document is in a temporary file, not synced",
        "document.synced": "the temporary file is on disk and does not have the document's name yet",
        "document.named": "the document has its name, and its folder is not synced",
        # the pack
        "pack.hashed": "every extent is hashed once and nothing is written",
        "pack.staged": "the temporary file is reserved and empty",
        "pack.written": "every byte is in the temporary file, whose digest is known and not locked",
        "pack.synced": "the digest is locked and the file is on disk under its temporary name",
        "pack.named": "the pack has its name and no validation record",
        "pack.recorded": "the pack has its name and its record, and the digest is still locked",
        "pack.proved": "a file was proved in full, and the proof is not remembered yet",
        # the capsule
        "capsule.layer": "one layer is on disk in the folder aside",
        "capsule.blobs": "every blob is in the folder aside, which has no index.json yet",
        "capsule.aside": "a capsule or an unpacked one is whole in the folder aside, not renamed",
        "capsule.named": "the folder has its name, and the folder it is in is not synced",
        "capsule.placed": "a capture's capsule is where its digest says, and no artifact names it",
        # units: seen by the controller while a unit's init reports
        "unit.init": "a unit's init lives and has been told nothing",
        "unit.mounts": "the init makes the unit's mounts",
        "unit.files": "the init writes the unit's private files",
        "unit.pids": "the init sets the next PID of the unit, and of a restored tree nothing has run yet",
        "unit.clock": "the init gives the unit a clock of its own",
        "unit.exec": "the init starts the engine's command",
        "unit.criu": "the init starts CRIU, which brings the tree back",
        "unit.memory": "the tree is back and stands still, and its large runs of memory are put back",
        "unit.started": "the tree runs, and ends with the controller",
        "unit.releasing": "the unit is about to be let go",
        "unit.released": "the unit outlives the controller",
        "dump.begun": "the images folder exists and CRIU has not started",
        "dump.dumping": "the dumping program lives and has been told what to run",
        "dump.dumped": "CRIU has written its images and the tree stands still",
        "dump.saved": "the unit's private files are saved and there is no unit.json",
        "dump.moved": "large runs of memory are out of CRIU's images, and there is no unit.json",
        "dump.described": "the images are whole and the stopped tree still exists",
        # capture
        "capture.admitted": "the gates are open and nothing was started",
        "capture.launched": "the units run and their engines load",
        "capture.loaded": "the engines have loaded and were asked nothing",
        "capture.template": "the template is frozen, runs on, and was not told its place",
        "capture.answered": "the acceptance answers are known",
        "capture.exported": "the pack is in the store, the rest of the export in the scratch folder",
        "capture.asleep": "the workers gave their memory back",
        "capture.held": "every process with CUDA state is known, and none is locked",
        "capture.suspended": "all CUDA state is off the devices, in the memory of its stopped processes",
        "capture.inspected": "the tree was found clean",
        "capture.frozen": "the images are in the scratch folder and nothing of the units runs",
        "capture.scanned": "no secret was found in the images",
        "capture.assembled": "every capsule is in place, and the artifact exists in memory alone",
        "capture.leased": "the lease exists and the descriptor does not",
        "capture.committed": "the descriptor exists and the receipt does not",
        # prepare
        "prepare.admitted": "the gates are open and no byte was moved",
        "prepare.cleared": "what was unpacked before is gone, and nothing is unpacked",
        "prepare.unpacked": "every file is unpacked and proved, and there is no record",
        "prepare.recorded": "the record is in the folder aside",
        "prepare.ready": "the capsules are unpacked, and no pack was looked at",
        "prepare.proved": "everything that a restore needs is proved",
        # restore
        "restore.leased": "the artifact has a lease here",
        "restore.prepared": "everything is ready and the old service still runs",
        "restore.evicting": "the old service is about to be ended",
        "restore.killed": "the old service is gone and its record is not",
        "restore.evicted": "the old service and its record are gone",
        "restore.recorded": "a record in the state restoring exists and nothing was started",
        "restore.seeded": "cache seeds are in place",
        "restore.thawed": "the trees run, and the record does not name them",
        "restore.resumed": "the CUDA state is back on the devices, and the workers sleep",
        "restore.named": "the record names the running trees",
        "restore.hydrated": "the workers have their memory and were asked nothing",
        "restore.accepted": "the answers are right and nobody listens",
        "restore.serving": "the engine serves, tied to the controller, and its record says restoring",
        "restore.done": "the record says that the service is there, and its units end with the controller",
        "restore.released": "the service is on its own, and the receipt is not written",
        "restore.cold": "an engine that was started cold has loaded and was asked nothing",
        # packs and overlays that are made from a temporary restore
        "materialize.admitted": "the gates are open, and damaged packs still have their names",
        "materialize.restored": "a tree that serves nobody has its memory, and its answers were right",
        "materialize.written": "the worker says that the pack is there, and nobody has proved it",
        "overlay.frozen": "the overlay's capsule is in place, and no overlay names it",
        "overlay.committed": "the overlay stands for its artifact, and the receipt is not written",
        # a live service
        "sleep.asked": "the service is about to be put to sleep",
        "sleep.done": "the workers sleep and the record says that they serve",
        "sleep.recorded": "the record says asleep, and the receipt is not written",
        "wake.prepared": "everything for the wake is proved and the workers sleep",
        "wake.done": "the engine serves and the record says asleep",
        "wake.recorded": "the record says ready, and the receipt is not written",
        "stop.killed": "the units are gone and the record is not",
        "stop.forgotten": "the record is gone",
        # tidying
        "gc.forgotten": "the sweep is over, leases of lost artifacts are gone, and dead operations' folders are not",
        "gc.shut": "every operation is shut out and nothing is removed",
        "gc.unproved": "a pack's record is gone and the pack is not",
        "gc.unnamed": "a folder has lost its name and is not emptied",
        "gc.swept": "everything of the plan is gone, and operations are still shut out",
        "delete.swept": "the artifact's own objects are gone and its lease is not",
        "delete.forgotten": "the lease is gone and the descriptor is not",
        # receipts
        "receipt.writing": "the operation has its result and its receipt is not written",
        "receipt.written": "the receipt is written, and the caller knows nothing yet",
        # inside the engine's process
        "worker.loaded": "the model is loaded and the worker still says loading",
        "worker.answered": "an answer is computed and not sent",
        "export.proved": "every model range is compared and the split is proved",
        "export.packed": "the pack is in the store, and there is no residual",
        "export.saved": "the residual is written and there is no manifest",
        "export.done": "the manifests are written and the controller knows nothing",
        "worker.drained": "the listener is closed and the memory is mapped",
        "worker.unmapped": "the memory is given back and the worker does not say asleep",
        "worker.admitted": "a wake has proved its files and mapped nothing",
        "worker.mapped": "the memory is mapped and zero",
        "worker.model": "the model's bytes are back and the residual's are not",
        "worker.filled": "every byte is back and the worker still says asleep",
        "worker.listening": "the listener is open and the controller does not know",
        "worker.materializing": "a worker is about to write its pack again from memory",
        "worker.materialized": "the pack is in the store again, and the worker does not say so",
    }
)
"""Every point by name, with what is true when it is reached."""


def reached(name: str) -> None:
    """Say that the code is at the point ``name``. Does nothing in production; see the module's head."""
    if _hook is not None:
        _hook(name)


def install(hook: Hook | None) -> None:
    """Call ``hook`` at every point of this process from now on, in the thread that reaches it; None takes it away.

    For test harnesses alone: what a hook raises goes through the code that reached the point.
    """
    global _hook
    _hook = hook
