"""Likely secrets of a frozen process tree: in its environments and in the files that will be published.

Every secret is reported by an id that a recipe can allow: the name of the variable that holds it, or its kind and a
fingerprint (`huggingface-token-1a2b3c4d5e6f`). A value found in an image that is also the value of a
variable goes under the variable's name, so that allowing `HF_TOKEN` allows the token wherever it is. No
report holds a value, and no fingerprint is made of one that could be guessed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from coldsnap.capsule.aside import num_cores
from coldsnap.capsule.hygiene import Finding, HygieneReport
from coldsnap.capsule.seams import memory_seams
from coldsnap.capsule.secretrules import environment_secrets, fingerprint
from coldsnap.capsule.secretscan import Hit, Range, scan_range
from coldsnap.core.bindings import Severity
from coldsnap.errors import HostError, OperationInterrupted

__all__ = ["ENVIRONMENT_VARIABLE", "Secret", "find_secrets", "scan_secrets"]

ENVIRONMENT_VARIABLE = "environment-variable"

_RANGE_BYTES = 32 * 1024 * 1024
_MIN_LITERAL_BYTES = 8
_SHOWN_PLACES = 4
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Secret:
    """One secret, wherever it is. ``places`` are the first few, for people; ``length`` is in characters."""

    id: str
    kind: str
    length: int
    places: tuple[str, ...]
    num_places: int


def scan_secrets(
    images_dir: Path,
    environments: Sequence[Mapping[str, str]],
    *,
    allow: Sequence[str] = (),
    findings: Sequence[Finding] = (),
    extra_files: Mapping[str, Path] | None = None,
    extra_literals: Mapping[str, str] | None = None,
    num_threads: int = 0,
    cancel: threading.Event | None = None,
) -> HygieneReport:
    """One report: the ``findings`` of before, and every secret in the images and in the tree's ``environments``.

    A secret stops the capture unless its id is in ``allow``; then the report is not publishable. Raises as
    `find_secrets`, which takes the other arguments.
    """
    files = {str(path.relative_to(images_dir)): path for path in sorted(images_dir.rglob("*")) if path.is_file()}
    with _together(images_dir) as across:
        secrets = find_secrets(
            {**files, **across, **(extra_files or {})},
            environments,
            extra_literals=extra_literals,
            num_threads=num_threads,
            cancel=cancel,
        )
    permitted = frozenset(allow)
    order = list(Severity)
    judged = [_judge(secret, allowed=secret.id in permitted) for secret in secrets]
    allowed = tuple(secret.id for secret in secrets if secret.id in permitted)
    return HygieneReport(
        findings=tuple(sorted((*findings, *judged), key=lambda finding: order.index(finding.severity))),
        allowed_secrets=allowed,
        publishable=not allowed,
    )


def find_secrets(
    files: Mapping[str, Path],
    environments: Sequence[Mapping[str, str]],
    *,
    extra_literals: Mapping[str, str] | None = None,
    num_threads: int = 0,
    cancel: threading.Event | None = None,
) -> tuple[Secret, ...]:
    """Look through ``files`` (name for people -> path) and ``environments`` (one a process), sorted by id.

    ``extra_literals`` are values that must not be there, by name; those shorter than 8 bytes are not looked for.
    ``num_threads`` 0 means one process a core. Raises HostError when a file cannot be read, OperationInterrupted.
    """
    literals = {name: value.encode("utf-8", "surrogateescape") for name, value in (extra_literals or {}).items()}
    literals = {name: value for name, value in literals.items() if len(value) >= _MIN_LITERAL_BYTES}
    names = {path: name for name, path in files.items()}
    hits = _scan_files(list(files.values()), literals, num_threads or num_cores(), cancel)
    found = _Found()
    held: dict[str, bytes] = dict(literals)
    for environment in environments:
        for name, value in environment_secrets(environment).items():
            held[name] = value.encode("utf-8", "surrogateescape")
            found.add(name, ENVIRONMENT_VARIABLE, len(value), "the environment of a process")
    for hit in sorted(hits, key=lambda hit: (names[hit.path], hit.offset)):
        owner = next((name for name, value in held.items() if _same(hit.value, value)), None)
        is_variable = hit.kind.isupper() or hit.kind in literals
        identity = owner or (hit.kind if is_variable else f"{hit.kind}-{fingerprint(hit.value)}")
        kind = ENVIRONMENT_VARIABLE if owner or is_variable else hit.kind
        found.add(identity, kind, len(hit.value), f"{names[hit.path]} at byte {hit.offset}")
    return found.secrets()


@contextlib.contextmanager
def _together(images_dir: Path) -> Iterator[Mapping[str, Path]]:
    """A file in memory alone of what lies together in a process and apart in the images; none when nothing does."""
    try:
        data = memory_seams(images_dir)
    except OSError as error:
        message = f"{error.filename} cannot be looked through for secrets: {error.strerror}"
        raise HostError(message, cure="make it readable and capture again") from error
    if not data:
        yield {}
        return
    with open(os.memfd_create("coldsnap-seams", os.MFD_CLOEXEC), "wb") as file:
        file.write(data)
        file.flush()
        yield {"memory across files": Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")}


def _judge(secret: Secret, *, allowed: bool) -> Finding:
    rest = secret.num_places - len(secret.places)
    places = ", ".join(secret.places) + (f" and {rest} more places" if rest else "")
    is_variable = secret.kind == ENVIRONMENT_VARIABLE
    what = f"the value of {secret.id}" if is_variable else f"a {secret.kind}"
    keep_out = f"start the engine without {secret.id}" if is_variable else "keep it out of the engine"
    permit = f"or list {secret.id} under allow_secrets, which makes the artifact unpublishable by default"
    return Finding(
        kind="secret",
        severity=Severity.INFO if allowed else Severity.STOP,
        subject=secret.id,
        message=f"{what} ({secret.length} characters) is in {places}",
        cure="" if allowed else f"{keep_out}, {permit}",
    )


class _Found:
    def __init__(self) -> None:
        self._kinds: dict[str, tuple[str, int]] = {}
        self._places: dict[str, list[str]] = {}

    def add(self, identity: str, kind: str, length: int, place: str) -> None:
        self._kinds.setdefault(identity, (kind, length))
        places = self._places.setdefault(identity, [])
        if place not in places[-1:]:
            places.append(place)

    def secrets(self) -> tuple[Secret, ...]:
        return tuple(
            Secret(
                id=identity,
                kind=kind,
                length=length,
                places=tuple(self._places[identity][:_SHOWN_PLACES]),
                num_places=len(self._places[identity]),
            )
            for identity, (kind, length) in sorted(self._kinds.items())
        )


def _same(found: bytes, held: bytes) -> bool:
    """Whether a value in an image is a variable's: all of it, or a part too long to be there by chance."""
    return found == held or (len(found) >= 16 and found in held) or (len(held) >= 16 and held in found)


def _scan_files(
    files: Sequence[Path], literals: Mapping[str, bytes], num_processes: int, cancel: threading.Event | None
) -> list[Hit]:
    try:
        ranges = [one for path in files for one in _ranges(path)]
        total = sum(one.end - one.start for one in ranges)
        num_processes = min(num_processes, -(-total // _RANGE_BYTES))
        if num_processes > 1:
            return _scan_in_processes(ranges, literals, num_processes, cancel)
        hits = []
        for one in ranges:
            _stop_if(cancel)
            hits.extend(scan_range(one, literals))
    except OSError as error:
        message = f"{error.filename} cannot be looked through for secrets: {error.strerror}"
        raise HostError(message, cure="make it readable and capture again") from error
    return hits


def _ranges(path: Path) -> Iterator[Range]:
    size = path.stat().st_size
    for start in range(0, size, _RANGE_BYTES):
        yield Range(path=path, start=start, end=min(start + _RANGE_BYTES, size))


def _scan_in_processes(
    ranges: Sequence[Range], literals: Mapping[str, bytes], num_processes: int, cancel: threading.Event | None
) -> list[Hit]:
    head = json.dumps({name: value.hex() for name, value in literals.items()}) + "\n"
    argv = [sys.executable, "-m", "coldsnap.capsule.secretscan", str(os.getpid())]
    running: list[subprocess.Popen[str]] = []
    pipe = subprocess.PIPE
    hits: list[Hit] = []
    with ThreadPoolExecutor(num_processes, thread_name_prefix="secrets") as talkers:
        try:
            talks = []
            for number in range(num_processes):
                lines = [json.dumps([os.fspath(one.path), one.start, one.end]) for one in ranges[number::num_processes]]
                process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, encoding="ascii")
                running.append(process)
                talks.append(talkers.submit(process.communicate, head + "\n".join(lines) + "\n"))
            while wait(talks, timeout=_POLL_S).not_done:
                _stop_if(cancel)
            for process, talk in zip(running, talks, strict=True):
                output, complaint = talk.result()
                if process.returncode:
                    raise _failure(complaint)
                for line in output.splitlines():
                    kind, path, offset, value = json.loads(line)
                    hits.append(Hit(kind=kind, path=Path(path), offset=offset, value=bytes.fromhex(value)))
        finally:
            for process in running:
                process.kill()
    return hits


def _failure(complaint: str) -> HostError:
    reason = complaint.strip().splitlines()[-1] if complaint.strip() else "it ended without a word"
    return HostError(
        f"the images cannot be looked through for secrets: {reason}", cure="see the reason and capture again"
    )


def _stop_if(cancel: threading.Event | None) -> None:
    if cancel is not None and cancel.is_set():
        raise OperationInterrupted("looking for secrets was stopped; nothing was changed")
