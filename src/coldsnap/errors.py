"""Every error coldsnap raises, as one tree that says who must act.

    ColdsnapError
    +-- UserError               the caller's input or request is wrong
    |   +-- UsageError              flags or arguments that make no sense together
    |   +-- InvalidDocument         a document breaks its contract; carries every problem
    |   +-- Refused                 a gate said no; carries every reason
    +-- HostError               the machine or its set-up must change
    |   +-- MissingCapability       no root, no CRIU, kernel feature absent
    |   +-- ResourceBusy            a port, name, address or lock is taken
    |   +-- OutOfSpace              disk or memory is full
    |   +-- UnsafePath              a path is a link, world-writable, owned by another user
    +-- IntegrityError          bytes are not what a digest or record promised
    |   +-- PayloadRejected         a pack or file failed admission; carries the contract's reason
    |   +-- SignatureRejected       a required signature is missing, damaged, another key's or another artifact's
    +-- PeerError               a process we started or talk to misbehaved
    |   +-- EngineError             the engine refused, crashed or answered nonsense
    |   +-- CriuError               a dump or restore failed; carries the log's telling lines
    |   +-- CudaError               the driver refused to lock, checkpoint, restore or unlock a process
    |   +-- HelperLost              a small process of ours that makes such calls was killed, or hangs
    |   +-- DeadlineExceeded        a bounded phase took too long
    |   +-- RemoteError             a registry, hub or store refused or misbehaved; carries a reason
    |   +-- AcceptanceFailed        a restored engine answered differently from its capture
    +-- OperationInterrupted    Ctrl-C or SIGTERM; what was undone is in the message
    +-- InternalError           our own bug

Only ``cli`` maps these to exit codes. Foreign exceptions are translated at the border of the room
that caught them, with the cause kept (``raise ... from``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "AcceptanceFailed",
    "ColdsnapError",
    "CriuError",
    "CudaError",
    "DeadlineExceeded",
    "EngineError",
    "HelperLost",
    "HostError",
    "IntegrityError",
    "InternalError",
    "InvalidDocument",
    "MissingCapability",
    "OperationInterrupted",
    "OutOfSpace",
    "PayloadRejected",
    "PeerError",
    "Problem",
    "Refused",
    "RemoteError",
    "ResourceBusy",
    "SignatureRejected",
    "UnsafePath",
    "UsageError",
    "UserError",
    "reason_of",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong: where, what value, why, and the way out.

    ``field`` is a path such as ``launch.units[1].image_digest`` (or the name of a gate or file),
    ``value`` the offending value as short text, ``cure`` what the reader can do about it.
    """

    field: str
    message: str
    value: str | None = None
    cure: str | None = None

    def document(self) -> dict[str, str | None]:
        """As JSON."""
        return {"field": self.field, "message": self.message, "value": self.value, "cure": self.cure}

    def __str__(self) -> str:
        value = f" (got {self.value})" if self.value is not None else ""
        cure = f"; {self.cure}" if self.cure else ""
        return f"{self.field}: {self.message}{value}{cure}"


class ColdsnapError(Exception):
    """Base of everything this package raises on purpose.

    ``message`` is one sentence. ``cure`` is what the reader can do next. ``facts`` are the values
    a program would want (paths, digests, numbers), never only inside the prose.
    """

    def __init__(self, message: str, *, cure: str | None = None, facts: Mapping[str, object] | None = None) -> None:
        self.message = message
        self.cure = cure
        self.facts: dict[str, object] = dict(facts or {})
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.message}; {self.cure}" if self.cure else self.message


class UserError(ColdsnapError):
    """The caller's input or request is wrong."""


class UsageError(UserError):
    """Flags or arguments that make no sense, alone or together."""


class _ManyProblems(UserError):
    def __init__(
        self,
        subject: str,
        problems: Sequence[Problem],
        *,
        cure: str | None = None,
        facts: Mapping[str, object] | None = None,
    ) -> None:
        self.subject = subject
        self.problems = tuple(problems)
        super().__init__(f"{subject}: {self._count()}", cure=cure, facts=facts)

    def _count(self) -> str:
        return "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"

    def __str__(self) -> str:
        lines = [super().__str__(), *(f"  {problem}" for problem in self.problems)]
        return "\n".join(lines)


class InvalidDocument(_ManyProblems):
    """A document breaks its contract. ``problems`` holds all of them, in document order."""


class Refused(_ManyProblems):
    """A gate said no. ``problems`` holds every reason, not only the first."""

    def _count(self) -> str:
        return "1 reason" if len(self.problems) == 1 else f"{len(self.problems)} reasons"


class HostError(ColdsnapError):
    """The machine, or how it is set up, must change."""


class MissingCapability(HostError):
    """Root, CRIU, a kernel feature or a program is missing."""


class ResourceBusy(HostError):
    """A port, a name, an address range or a lock is taken by somebody else."""


class OutOfSpace(HostError):
    """Disk or memory is full."""


class UnsafePath(HostError):
    """A path is a link, is writable by others, or belongs to another user."""


class IntegrityError(ColdsnapError):
    """Bytes are not what a digest or a record promised."""


class PayloadRejected(IntegrityError):
    """A file failed admission.

    ``reason`` is one of the contract's: ``invalid_expected_digest``, ``unusable_path``,
    ``size_mismatch``, ``changed_during_validation``, ``digest_mismatch``.
    """

    def __init__(
        self, reason: str, message: str, *, cure: str | None = None, facts: Mapping[str, object] | None = None
    ) -> None:
        self.reason = reason
        super().__init__(message, cure=cure, facts={"reason": reason, **(facts or {})})


class SignatureRejected(IntegrityError):
    """An artifact is not signed as it must be.

    ``reason``: ``missing_signature``, ``damaged_signature``, ``foreign_signature``, ``other_artifact``.
    """

    def __init__(
        self, reason: str, message: str, *, cure: str | None = None, facts: Mapping[str, object] | None = None
    ) -> None:
        self.reason = reason
        super().__init__(message, cure=cure, facts={"reason": reason, **(facts or {})})


class PeerError(ColdsnapError):
    """A process we started, or talk to, misbehaved."""


class EngineError(PeerError):
    """The engine refused, crashed, or sent something outside the protocol."""


class CriuError(PeerError):
    """A CRIU dump or restore failed. ``facts['log']`` holds the telling lines of its log."""


class CudaError(PeerError):
    """The CUDA driver refused a call about a process. ``facts``: ``call``, ``code`` as CUDA names it, ``pid``."""


class HelperLost(PeerError):
    """A helper process was killed or hangs, so nobody knows what became of its call. ``facts``: ``call``, ``pid``."""


class DeadlineExceeded(PeerError):
    """A bounded phase took longer than its deadline. ``facts``: ``phase``, ``deadline_s``."""


class RemoteError(PeerError):
    """A registry, a hub or another store refused, lied or did not answer.

    ``reason`` is one word of ``coldsnap.ship.faults.REASONS``; ``place`` is its address, without credentials.
    """

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        place: str,
        cure: str | None = None,
        facts: Mapping[str, object] | None = None,
    ) -> None:
        self.reason = reason
        self.place = place
        super().__init__(message, cure=cure, facts={"reason": reason, "place": place, **(facts or {})})


class AcceptanceFailed(PeerError):
    """A restored engine's answer differs from its capture's. It was stopped, never served."""


class OperationInterrupted(ColdsnapError):
    """Ctrl-C or SIGTERM. The message says what was undone."""


class InternalError(ColdsnapError):
    """A promise of our own code is broken: please report it."""


def reason_of(error: ColdsnapError) -> str:
    """What an error says, in one line: its message, and every problem of one that carries many."""
    if isinstance(error, InvalidDocument | Refused):
        return f"{error.subject}: " + "; ".join(str(problem) for problem in error.problems)
    return error.message
