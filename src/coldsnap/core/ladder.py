"""The fall-back ladder: which ways to serve are tried, in which order, and which failure leads to which next one.

    overlay -> native -> recovery -> cold

A *rung* is one way to bring a service up. What failed decides where to go on, because a lower rung only helps when it
does without the thing that failed. ``TRY_AFTER`` is that table:

    what failed                                              may still be tried
    ------------------------------------------------------   --------------------------
    the overlay (its files, its tree, its answers)           native, recovery, cold
    a pack is not here, and nobody staged other bytes        recovery
    the artifact's own process tree (its files, CRIU, the
      engine in it, answers that differ)                     cold
    a capsule that a registry or peer does not give          cold
    the artifact is in quarantine here                       cold
    a feature of the machine (no CRIU, other processor)      cold
    the request; a staged pack of another identity           nothing
    the machine (port, disk, memory, an unsafe path)         nothing
    the pinned checkpoint                                    nothing
    a stop from outside; a bug of ours                       nothing

Why some rows lead nowhere:

- *A pack that is here and is not what its digest says* contradicts what somebody put there; the contract makes that an
  error in every mode. (Its object in the store is set aside, so that it counts as missing the next time.)
- *A busy port or a full disk* is in the way of every rung.
- *A changed checkpoint* is refused by recovery, and a cold start would serve it.
- *Differing answers* after ``native`` are not tried with ``recovery``: the same proved bytes would go into the same
  tree. A cold start shares neither, and is held to the same answers, so it may serve; nothing else may.
- *A tree that did not come back* is not tried again with other model bytes: they have no part in that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from coldsnap.core.manifest import RESIDUAL_BLOB
from coldsnap.errors import (
    AcceptanceFailed,
    ColdsnapError,
    HelperLost,
    HostError,
    IntegrityError,
    InternalError,
    MissingCapability,
    OperationInterrupted,
    PayloadRejected,
    PeerError,
    ResourceBusy,
)

__all__ = [
    "COUNTED",
    "TRY_AFTER",
    "Blame",
    "LadderStep",
    "Outcome",
    "PlannedRung",
    "Rung",
    "after_failure",
    "blame",
    "plan_rungs",
    "unavoidable",
]


class Rung(StrEnum):
    """A way to bring a service up, best first."""

    OVERLAY = "overlay"
    NATIVE = "native"
    RECOVERY = "recovery"
    COLD = "cold"


class Blame(StrEnum):
    """What a failure was about. The values are read by people, in sentences."""

    REQUEST = "the request"
    HOST = "the machine"
    FEATURE = "a feature of the machine"
    OVERLAY = "the overlay"
    CAPSULE = "the artifact's process tree"
    ANSWERS = "the answers"
    PACK_MISSING = "a pack that is missing"
    PACK_WRONG = "a pack of another identity"
    CHECKPOINT = "the pinned checkpoint"
    REMOTE = "a store elsewhere"
    QUARANTINE = "the quarantine"
    STOPPED = "a stop from outside"
    OURS = "a bug in coldsnap"


_BELOW_OVERLAY = frozenset({Rung.NATIVE, Rung.RECOVERY, Rung.COLD})
_COLD = frozenset({Rung.COLD})
_NOTHING: frozenset[Rung] = frozenset()

TRY_AFTER: Mapping[Blame, frozenset[Rung]] = MappingProxyType(
    {
        Blame.OVERLAY: _BELOW_OVERLAY,
        Blame.PACK_MISSING: frozenset({Rung.RECOVERY}),
        Blame.CAPSULE: _COLD,
        Blame.ANSWERS: _COLD,
        Blame.REMOTE: _COLD,
        Blame.QUARANTINE: _COLD,
        Blame.FEATURE: _COLD,
        Blame.REQUEST: _NOTHING,
        Blame.PACK_WRONG: _NOTHING,
        Blame.HOST: _NOTHING,
        Blame.CHECKPOINT: _NOTHING,
        Blame.STOPPED: _NOTHING,
        Blame.OURS: _NOTHING,
    }
)

COUNTED = frozenset({Blame.OVERLAY, Blame.CAPSULE, Blame.ANSWERS, Blame.OURS})
"""Failures that are the artifact's own and count towards its quarantine: not what the machine, the request, the store
or the checkpoint did."""


class Outcome(StrEnum):
    """What became of a rung."""

    USED = "used"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True, slots=True)
class LadderStep:
    """One rung of a restore and why it ended as it did. ``error`` is a class of ``coldsnap.errors``, of a failure."""

    rung: Rung
    outcome: Outcome
    reason: str
    error: str | None = None

    def document(self) -> dict[str, Any]:
        """As JSON."""
        document = {"rung": self.rung.value, "outcome": self.outcome.value, "reason": self.reason}
        return document if self.error is None else {**document, "error": self.error}

    def __str__(self) -> str:
        return f"{self.rung.value} {self.outcome.value}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRung:
    """A rung to climb (``open``) or to leave out; ``reason`` says why either way."""

    rung: Rung
    open: bool
    reason: str

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {"rung": self.rung.value, "open": self.open, "reason": self.reason}


def plan_rungs(
    *,
    provider: Rung,
    provider_reason: str,
    overlay: tuple[bool, str] | None,
    closed: str | None,
    may_recover: tuple[bool, str],
    may_start_cold: tuple[bool, str],
) -> tuple[PlannedRung, ...]:
    """The rungs of one restore, best first.

    ``provider``: what the weights policy chose for the artifact itself, native or recovery. ``overlay``: whether the
    one of this machine may be used, and why (not); None when there is none. ``closed``: why the artifact's own process
    tree may not be restored here. ``may_recover`` and ``may_start_cold``: whether policy and request allow these below.
    """
    rungs = []
    if overlay is not None:
        usable, reason = overlay
        if usable and provider is not Rung.NATIVE:
            usable, reason = False, f"it goes with the packs, and {provider_reason}"
        rungs.append(PlannedRung(rung=Rung.OVERLAY, open=usable, reason=reason))
    if closed is not None:
        rungs.append(PlannedRung(rung=provider, open=False, reason=closed))
    elif provider is Rung.NATIVE:
        recovers, why = may_recover
        rungs.append(PlannedRung(rung=Rung.NATIVE, open=True, reason=provider_reason))
        rungs.append(PlannedRung(rung=Rung.RECOVERY, open=recovers, reason=why))
    else:
        rungs.append(PlannedRung(rung=Rung.NATIVE, open=False, reason=provider_reason))
        rungs.append(PlannedRung(rung=Rung.RECOVERY, open=True, reason=provider_reason))
    starts, why = may_start_cold
    rungs.append(PlannedRung(rung=Rung.COLD, open=starts, reason=why))
    return tuple(rungs)


def after_failure(plan: Sequence[PlannedRung], failed: Rung, about: Blame) -> Rung | None:
    """The next rung below ``failed`` that is open and does without what failed."""
    return next((one.rung for one in _below(plan, failed) if one.open and one.rung in TRY_AFTER[about]), None)


def unavoidable(plan: Sequence[PlannedRung], failed: Rung, about: Blame, *, until: Rung | None) -> Iterator[LadderStep]:
    """Why the rungs between ``failed`` and ``until`` (None: all below) are left out."""
    for one in _below(plan, failed):
        if one.rung is until:
            return
        reason = one.reason if not one.open else f"it would not help against {about.value}"
        yield LadderStep(rung=one.rung, outcome=Outcome.SKIPPED, reason=reason)


def _below(plan: Sequence[PlannedRung], failed: Rung) -> Sequence[PlannedRung]:
    names = [one.rung for one in plan]
    return plan[names.index(failed) + 1 :]


def blame(error: ColdsnapError, *, rung: Rung, phase: str) -> Blame:
    """What an error that ended a rung in ``phase`` (a span of the operation) was about."""
    about = _blame(error, rung, phase)
    return Blame.OVERLAY if rung is Rung.OVERLAY and about in (Blame.CAPSULE, Blame.ANSWERS) else about


def _blame(error: ColdsnapError, rung: Rung, phase: str) -> Blame:
    if isinstance(error, OperationInterrupted):
        return Blame.STOPPED
    if isinstance(error, InternalError):
        return Blame.OURS
    if isinstance(error, MissingCapability):
        return Blame.FEATURE
    if isinstance(error, ResourceBusy) and phase == "hydrate":
        return Blame.CAPSULE  # an address inside the restored process is taken, nothing of the machine's
    if isinstance(error, HostError | HelperLost):  # a helper is lost to a driver that hangs, or to who killed it
        return Blame.HOST
    if phase == "fetch-packs":
        return Blame.PACK_WRONG if isinstance(error, IntegrityError) else Blame.PACK_MISSING
    if phase == "fetch-capsules":
        return Blame.REMOTE
    if isinstance(error, AcceptanceFailed):
        return Blame.ANSWERS
    if rung is Rung.COLD:
        return Blame.CHECKPOINT if phase == "pin" else Blame.CAPSULE if isinstance(error, PeerError) else Blame.REQUEST
    if phase == "admit" and isinstance(error, IntegrityError):
        return _pack_blame(error)
    if phase == "checkpoint":
        return Blame.CHECKPOINT
    if phase == "hydrate":
        return _hydrate_blame(error, rung)
    return Blame.CAPSULE if isinstance(error, IntegrityError | PeerError) else Blame.REQUEST


def _hydrate_blame(error: ColdsnapError, rung: Rung) -> Blame:
    """The worker's own words: it proves pack, residual and checkpoint, and compares the map of its memory."""
    if isinstance(error, PeerError):
        return Blame.CAPSULE
    if rung is Rung.RECOVERY:  # a rejected file is its residual; everything else it reads is the checkpoint
        return Blame.CAPSULE if isinstance(error, PayloadRejected) else Blame.CHECKPOINT
    is_pack = isinstance(error, PayloadRejected) and not str(error.facts.get("path")).endswith(f"/{RESIDUAL_BLOB}")
    return _pack_blame(error) if is_pack else Blame.CAPSULE


def _pack_blame(error: ColdsnapError) -> Blame:
    """Only a name with nothing behind it is a missing pack; a link or a folder there is somebody's other pack."""
    return Blame.PACK_MISSING if error.facts.get("errno") == "ENOENT" else Blame.PACK_WRONG
