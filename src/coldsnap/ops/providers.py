"""Where this restore takes model bytes from, given what is on this machine now.

A pack is here when it lies in the store under its digest, or when the request names a staged file for its worker.

What "here" is worth, and why: the contract says that *a staged pack with a wrong identity is always an error* and that
a missing one falls to recovery in mode auto. Both kinds of "here" are packs that somebody staged on this host, so a
file that is not what its digest promises is an error in every mode but ``recovery``, which looks at no pack: serving
from elsewhere would hide that a disk, a copy or a person changed weights. For a file that the caller staged that is
all. An object of the store has no owner who could put it right, so it is set aside as well (``quarantine/``, after a
second proof): it counts as missing from then on, and the next restore in mode auto, or ``coldsnap materialize``, goes
on.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from coldsnap.core.artifact import ObjectRecord
from coldsnap.core.digest import Digest
from coldsnap.core.policy import StagedPayload
from coldsnap.core.request import OperationRequest
from coldsnap.core.selection import Provider, ProviderDecision, select_provider
from coldsnap.errors import ColdsnapError, PayloadRejected
from coldsnap.ops.artifacts import LoadedArtifact
from coldsnap.ops.origins import pack_origin, packs_at_peers
from coldsnap.ops.tools import Tools

__all__ = ["decide_provider", "pack_paths", "set_aside_damaged", "staged_packs"]

_DAMAGE = ("size_mismatch", "digest_mismatch")


def decide_provider(tools: Tools, loaded: LoadedArtifact, request: OperationRequest) -> ProviderDecision:
    """The provider and why. Looks at names and sizes alone; admission proves the bytes later.

    Raises Refused with every reason.
    """
    here = _present(tools, loaded)
    peers = packs_at_peers(tools, loaded) if len(here) < len(loaded.packs()) else {}
    why_not = pack_origin(tools, loaded, request).why_not
    decision = select_provider(
        loaded.artifact.weights,
        request.policy.weights,
        present=here | set(peers),
        may_fetch=not why_not,
        why_not=why_not,
        rejected=dict(_rejected(request)),
    )
    if decision.provider is Provider.NATIVE and not decision.fetch and (far := set(peers) - here):
        places = ", ".join(sorted({peers[digest] for digest in far}))
        return replace(decision, reason=f"every pack is here or at {places}")
    return decision


def staged_packs(request: OperationRequest) -> Mapping[str, StagedPayload]:
    """The pack that the request staged for each worker; empty when it staged none."""
    return {entry.worker: entry for entry in request.policy.weights.native.staged}


def pack_paths(tools: Tools, loaded: LoadedArtifact, request: OperationRequest) -> dict[str, Path]:
    """Where each worker's pack is read from: its staged file, else the store."""
    staged = staged_packs(request)
    return {
        worker: Path(staged[worker].path) if worker in staged else tools.store.path(pack.sha256)
        for worker, pack in loaded.packs().items()
    }


def set_aside_damaged(tools: Tools, packs: Mapping[str, ObjectRecord], error: ColdsnapError) -> None:
    """When ``error`` says that one of these packs is damaged in the store, move it away and add a note that says so."""
    if not isinstance(error, PayloadRejected) or error.reason not in _DAMAGE:
        return
    for pack in packs.values():
        if str(error.facts.get("path")) != str(tools.store.path(pack.sha256)):
            continue
        try:
            aside = tools.store.set_aside(pack.sha256, pack.bytes)
        except ColdsnapError as failed:
            error.add_note(f"the damaged pack stays where it is: {failed.message}")
            return
        if aside is not None:
            error.add_note(
                f"the damaged pack was moved to {aside} and counts as missing now: `coldsnap materialize` writes it "
                "anew from the pinned checkpoint, and a restore with --weights auto does without it"
            )
        return


def _present(tools: Tools, loaded: LoadedArtifact) -> set[Digest]:
    return {pack.sha256 for pack in loaded.packs().values() if os.path.lexists(tools.store.path(pack.sha256))}


def _rejected(request: OperationRequest) -> Iterator[tuple[str, str]]:
    """Staged files that cannot be the announced pack, by what a look at the name tells."""
    for worker, entry in staged_packs(request).items():
        try:
            found = os.lstat(entry.path)
        except OSError as error:
            yield worker, f"{entry.path}: {error.strerror}"
            continue
        if not stat.S_ISREG(found.st_mode):
            yield worker, f"{entry.path} is not a regular file"
        elif found.st_size != entry.bytes:
            yield worker, f"{entry.path} holds {found.st_size} bytes, not {entry.bytes}"
