"""What must not be frozen: judgement on the facts of a process tree, and the report that goes into the artifact.

`inspect_tree` is pure: facts in, findings out, before a dump. A finding *stops* a capture when the tree could not
be dumped or a restored one would be wrong or speak to strangers, *warns* when a restore depends on something
outside the capsule, and *informs* otherwise. Descriptors of one process that lead to the same place are one
finding. `secrets.py` adds what it finds in the images, after the dump.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TypeAlias

from coldsnap.capsule.tree import FdFacts, FdKind, MapFacts, ProcessFacts, TreeFacts, outside_peers
from coldsnap.core.bindings import HygieneBinding, HygieneFinding, Severity
from coldsnap.errors import Problem

__all__ = ["Finding", "HygieneReport", "inspect_tree"]

Finding: TypeAlias = HygieneFinding

_PLAIN_DEVICES = frozenset({"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"})
_PRIVATE_FOLDERS = ("/run/coldsnap", "/dev/shm", "/proc", "/sys")  # noqa: S108 - read from facts, never written
_SHARED_MEMORY = ("/memfd:", "/dev/zero", "/SYSV", "/dev/shm/", "/anon_hugepage", "/[aio]")  # noqa: S108 - as above
_KNOWN_KINDS = frozenset(FdKind) - {FdKind.OTHER, FdKind.IO_URING, FdKind.CHARACTER, FdKind.BLOCK}


@dataclass(frozen=True, kw_only=True, slots=True)
class HygieneReport:
    """Everything found in one unit. ``publishable`` is false while the images hold secrets that were allowed."""

    findings: tuple[Finding, ...]
    allowed_secrets: tuple[str, ...]
    publishable: bool

    def stop_problems(self) -> tuple[Problem, ...]:
        """Every reason not to capture; empty when there is none."""
        return tuple(
            Problem(field=finding.subject, message=finding.message, cure=finding.cure or None)
            for finding in self.findings
            if finding.severity is Severity.STOP
        )

    def binding(self, unit: str) -> HygieneBinding:
        """The report as the artifact keeps it."""
        return HygieneBinding(
            unit=unit, findings=self.findings, allowed_secrets=self.allowed_secrets, publishable=self.publishable
        )


def inspect_tree(tree: TreeFacts, *, known_pipes: Iterable[int] = ()) -> tuple[Finding, ...]:
    """Judge a tree's descriptors and mappings. ``known_pipes`` are inodes of pipes that may lead out, as the log's."""
    found = _Findings()
    for process in tree.processes:
        if not process.dumpable:
            found.add(
                "unreadable-process",
                Severity.WARN,
                process,
                "",
                "its descriptors and mappings could not be read",
                "see whether it just ended, and inspect again",
            )
        for fd in process.fds:
            _judge_descriptor(found, process, fd)
        for mapping in process.maps:
            _judge_mapping(found, process, mapping)
    for peer in outside_peers(tree, known_pipes=known_pipes):
        process = next(process for process in tree.processes if process.pid == peer.pid)
        found.add(
            "outside-peer",
            Severity.STOP,
            process,
            f"fd {peer.fd.number} {peer.fd.target}",
            f"leads out of the tree: {peer.what}; a restored process would find nobody or a stranger there",
            "close it before the capture, or start the other end inside the unit",
        )
    unknown = {fd.inode for _, fd in tree.descriptors() if fd.kind is FdKind.SOCKET} - {*tree.inet, *tree.unix}
    for process, fd in tree.descriptors():
        if fd.kind is FdKind.SOCKET and fd.inode in unknown:
            found.add(
                "unknown-socket",
                Severity.WARN,
                process,
                f"fd {fd.number} {fd.target}",
                "is a socket that is neither TCP, UDP nor Unix (netlink, packet, ...), which CRIU may not restore",
                "close it before the capture",
            )
    if tree.unix and tree.unix_peers is None:
        found.add(
            "unknown-peers",
            Severity.WARN,
            None,
            "unix sockets",
            "the kernel did not say who holds their other ends, so connections out of the tree cannot be seen",
            "load the unix_diag module (modprobe unix_diag) and inspect again",
        )
    return found.findings()


class _Findings:
    def __init__(self) -> None:
        self._found: dict[tuple[str, int, str], HygieneFinding] = {}
        self._again: dict[tuple[str, int, str], int] = {}

    def add(
        self, kind: str, severity: Severity, process: ProcessFacts | None, target: str, message: str, cure: str
    ) -> None:
        name = PurePosixPath(process.cmdline[0]).name if process is not None and process.cmdline else ""
        who = "" if process is None else f"process {process.pid}" + (f" ({name})" if name else "")
        subject = " ".join(part for part in (who, target) if part)
        # The same target through many descriptors is one thing to do something about.
        place = target.split(" ", 2)[-1] if target.startswith("fd ") else target
        key = (kind, process.pid if process is not None else 0, place)
        if key in self._found:
            self._again[key] = self._again.get(key, 0) + 1
            return
        self._found[key] = HygieneFinding(kind=kind, severity=severity, subject=subject, message=message, cure=cure)

    def findings(self) -> tuple[Finding, ...]:
        return tuple(
            finding
            if key not in self._again
            else finding.model_copy(update={"message": f"{finding.message} (and {self._again[key]} more like it)"})
            for key, finding in self._found.items()
        )


def _judge_descriptor(found: _Findings, process: ProcessFacts, fd: FdFacts) -> None:
    target = f"fd {fd.number} {fd.target}"
    if fd.kind is FdKind.IO_URING:
        found.add(
            "io-uring",
            Severity.STOP,
            process,
            target,
            "is an io_uring, which CRIU cannot dump",
            "start the engine without it: asyncio instead of uvloop, USE_LIBUV=0 for PyTorch's store",
        )
    elif fd.kind is FdKind.BLOCK or (fd.kind is FdKind.CHARACTER and fd.target not in _PLAIN_DEVICES):
        terminal = fd.target.startswith(("/dev/pts/", "/dev/tty", "/dev/console"))
        found.add(
            "terminal" if terminal else "device-file",
            Severity.STOP,
            process,
            target,
            "is a terminal" if terminal else "is a device, whose state is not in any image",
            "start the engine without a terminal" if terminal else "release the device before the capture",
        )
    elif fd.kind not in _KNOWN_KINDS and fd.kind is not FdKind.CHARACTER:
        found.add(
            "unknown-descriptor",
            Severity.WARN,
            process,
            target,
            "is of a kind that coldsnap does not know, which CRIU may not dump",
            "close it before the capture",
        )
    elif fd.deleted and fd.kind is FdKind.REGULAR:
        found.add(
            "deleted-file",
            Severity.WARN,
            process,
            target,
            "is open and deleted; its content goes into the images",
            "close it before the capture when it is large or private",
        )
    elif fd.kind is FdKind.REGULAR and fd.writes and not _is_private(fd.target):
        found.add(
            "open-for-writing",
            Severity.WARN,
            process,
            target,
            "is a file of the host, open for writing; a restore needs it with the same size",
            "log to stdout, or keep the file under /run/coldsnap",
        )


def _judge_mapping(found: _Findings, process: ProcessFacts, mapping: MapFacts) -> None:
    path = mapping.path
    if path is None or not path.startswith("/"):
        return
    if path.startswith("/dev/") and path not in _PLAIN_DEVICES and not path.startswith("/dev/shm/"):  # noqa: S108
        found.add(
            "device-mapping",
            Severity.STOP,
            process,
            f"mapping {path}",
            "maps a device, whose memory is not in any image",
            "release the device before the capture",
        )
    elif path.startswith(_SHARED_MEMORY):
        return
    elif mapping.deleted:
        runs = "x" in mapping.perms
        found.add(
            "deleted-mapping",
            Severity.STOP if runs else Severity.WARN,
            process,
            f"mapping {path}",
            "maps a file that was replaced or deleted since; a restore would not find "
            + ("its code" if runs else "it"),
            "start the engine again, after whatever upgrades the file has ended",
        )
    elif mapping.perms[3:4] == "s" and "w" in mapping.perms and not _is_private(path):
        found.add(
            "shared-writable-mapping",
            Severity.WARN,
            process,
            f"mapping {path}",
            "shares writable memory with a file of the host, whose content is not in any image",
            "keep the file under /run/coldsnap",
        )


def _is_private(path: str) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in _PRIVATE_FOLDERS)
