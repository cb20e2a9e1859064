"""Exit codes: the one place that maps errors to them. Printed by ``coldsnap --help`` and in the README."""

from __future__ import annotations

from coldsnap.errors import (
    AcceptanceFailed,
    ColdsnapError,
    HostError,
    IntegrityError,
    OperationInterrupted,
    PeerError,
    Refused,
    UserError,
)

__all__ = ["DIFFERS", "EXIT_CODES", "exit_code"]

DIFFERS = 1
"""What `diff` ends with when the two captures differ: an answer, no error."""

EXIT_CODES: tuple[tuple[type[BaseException], int, str], ...] = (
    (Refused, 3, "refused: a gate said no (a port in use and no CRIU are gates too); every reason is printed"),
    (UserError, 2, "the input is wrong: a flag, a recipe, a document"),
    (HostError, 4, "the machine must change: disk full, an unsafe path, something taken meanwhile"),
    (IntegrityError, 5, "bytes are not what a digest promised"),
    (AcceptanceFailed, 7, "a restored engine answered differently and was stopped"),
    (PeerError, 6, "the engine, CRIU or a server failed, or took too long"),
    (OperationInterrupted, 130, "interrupted; what was undone is printed"),
    (KeyboardInterrupt, 130, "interrupted"),
    (ColdsnapError, 70, "a bug in coldsnap: please report it"),
)


def exit_code(error: BaseException) -> int:
    """The exit code for an error; 70 for anything that is not ours."""
    return next((code for kind, code, _ in EXIT_CODES if isinstance(error, kind)), 70)
