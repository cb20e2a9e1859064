"""What CRIU's log says, in plain language."""

from __future__ import annotations

import re
from typing import Final

from coldsnap.capsule.tree import FdKind, TreeFacts
from coldsnap.errors import CriuError, OutOfSpace

__all__ = ["criu_error", "explain", "explained", "telling_lines"]

_MAX_LINES: Final = 30
_COMMAND_CHARS: Final = 100
_TELLING = re.compile(r"\bError\b|\bWarn\b.*(?:fail|bad|unable)|Unable to|cannot", re.IGNORECASE)

# Said by every run without CAP_SYS_RESOURCE, with no effect.
_NOISE = re.compile(r"rlimit: Can't setup RLIMIT_NOFILE for self")

# The same for what is nobody's fault but the machine's.
_FULL: Final[tuple[tuple[re.Pattern[str], str, str], ...]] = (
    (
        re.compile(r"No space left on device|Disk quota exceeded"),
        "the disk that holds the images is full",
        "free some space ('coldsnap gc --dry-run' shows what could go), or put the images elsewhere",
    ),
    (re.compile(r"Cannot allocate memory"), "the machine has too little free memory", "free some memory"),
)

# pattern -> (what it means, what to do). First match in this order; groups fill the sentence.
_CAUSES: Final[tuple[tuple[re.Pattern[str], str, str], ...]] = tuple(
    (re.compile(pattern), cause, cure)
    for pattern, cause, cure in (
        (
            r"io_uring",
            "a process of the tree uses io_uring, which CRIU cannot dump",
            "switch it off in the engine (uvloop and libuv make such rings)",
        ),
        (
            r"File (\S+) has bad size (\d+) \(expect (\d+)\)",
            "{0} has {1} bytes here and had {2} when the process was dumped",
            "restore with the same files as at the capture, or capture again",
        ),
        (
            r"File (\S+) has bad build-ID",
            "{0} is not the library it was when the process was dumped",
            "restore with the same files as at the capture, or capture again",
        ),
        (
            r"Can't open file (\S+) on restore: No such file",
            "{0}, which the process had open or mapped, does not exist here",
            "bring the file back, or capture again without it",
        ),
        (
            r"(?:Can't|Unable to) open (?:file )?(\S+).*No such file or directory",
            "{0} does not exist here",
            "bring the file back; when it is an image file the images folder is damaged: prepare it again",
        ),
        (
            r"Can't bind (?:inet )?socket.*: Address already in use",
            "a port that the process listened on is taken",
            "stop its owner, or restore on another port",
        ),
        (
            r"[Cc]an't fork for (\d+): File exists|Pid (\d+) do not match",
            "PID {0} of the tree is taken inside the new unit",
            "report this: the unit's own processes should never use the tree's PIDs",
        ),
        (
            r"(?i)cpu(?:info)?\b.*(?:not supported|mismatch|incompatible|feature|instruction)",
            "this processor lacks something the dumped process may use",
            "restore on a processor with at least the features of the capture's",
        ),
        (
            r"Connected TCP socket|In-flight connection|unexpected_connection",
            "a process of the tree holds an open TCP connection",
            "close it before the dump: the engine stops serving and its clients disconnect",
        ),
        (
            r"(?:External socket is used|Can't dump half of stream unix connection|peer is not)",
            "a process of the tree is connected over a Unix socket to a process outside it",
            "close the connection before the dump",
        ),
        (
            r"(/dev/nvidia\S*)",
            "a process of the tree holds the accelerator's device {0}",
            "release the accelerator (checkpoint it) before the dump",
        ),
        (
            r"Can't dump file \d+ of that type \[\w+\] \((.*)\)",
            "a process of the tree holds a file of a kind CRIU cannot dump ({0})",
            "close it before the dump",
        ),
        (
            r"is already traced|ptrace.*Operation not permitted|seize.*(?:Operation not permitted|traced)",
            "a debugger or tracer holds a process of the tree",
            "detach it first",
        ),
        (
            r"Magic doesn't match|Image file .* corrupt|[Uu]nexpected EOF|Failed unpacking|Can't read|Bad magic",
            "an image file is missing or damaged",
            "prepare the capsule again",
        ),
        (
            r"session leader .* outside of its pid namespace",
            "the tree's root is not the leader of its own session",
            "report this: the unit's init makes it one",
        ),
        (
            r"error while loading shared libraries|cannot run ",
            "CRIU itself does not start",
            "run scripts/install-criu again",
        ),
    )
)


def telling_lines(log: str) -> tuple[str, ...]:
    """The lines a person would look for: errors, and the very last ones. In order, at most 30."""
    lines = [line for line in log.splitlines() if line.strip() and not _NOISE.search(line)]
    last = len(lines) - 3
    return tuple(line for number, line in enumerate(lines) if number >= last or _TELLING.search(line))[-_MAX_LINES:]


def explain(log: str) -> tuple[str, str] | None:
    """Cause and cure for a log, None when it is none of the known ones."""
    for pattern, cause, cure in _CAUSES:
        if match := pattern.search(log):
            return cause.format(*(group for group in match.groups() if group is not None)), cure
    return None


def explained(error: CriuError, what: str, tree: TreeFacts) -> CriuError:
    """A failed dump's error once more, with a cause that the tree shows and CRIU's log does not.

    The kernel refuses to pass an io_uring descriptor to another process (Linux 6.7), so all that CRIU can say about
    one is that passing descriptors failed.
    """
    rings = [(process, fd) for process, fd in tree.descriptors() if fd.kind is FdKind.IO_URING]
    if not rings:
        return error
    process, fd = rings[0]
    who = f"process {process.pid} ({' '.join(process.cmdline)[:_COMMAND_CHARS]})"
    return CriuError(
        f"{what} failed: {who} uses io_uring (descriptor {fd.number}), which CRIU cannot dump",
        cure="switch it off in the engine (uvloop and libuv make such rings)",
        facts={**error.facts, "pids": sorted({process.pid for process, _ in rings})},
    )


def criu_error(what: str, reason: str, log: str) -> CriuError | OutOfSpace:
    """The error for a failed ``what`` ("dump of unit u0"), with cause, cure and the log's telling lines."""
    lines = telling_lines(log)
    for pattern, cause, cure in _FULL:
        if pattern.search(log):
            return OutOfSpace(f"{what} failed: {cause}", cure=cure, facts={"log": list(lines), "reason": reason})
    known = explain(log)
    cause, cure = known or (
        f"{reason}, see the log lines",
        "the cause is unknown to coldsnap; CRIU's log lines say more",
    )
    return CriuError(f"{what} failed: {cause}", cure=cure, facts={"log": list(lines), "reason": reason})
