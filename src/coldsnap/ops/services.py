"""The services of this machine: who runs under which name, from which artifact, on which port.

One folder a name, ``<state-root>/services/<name>/``:

    service.json    the record, replaced atomically at each step; absent when nothing runs
    lock            held (flock) by the one operation that may change this name

The record is written *before* the first process of an operation starts (state ``restoring``) and after
each step, so that a controller killed at any moment leaves a record from which the next operation
finds and ends what was started.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from coldsnap.core.canonical import canonical_json
from coldsnap.core.digest import Digest
from coldsnap.core.lifecycle import ServiceState
from coldsnap.core.names import Unfit, is_id
from coldsnap.core.parsing import NEWER, Record, parse_document
from coldsnap.errors import InvalidDocument, Problem, ResourceBusy, UsageError, UserError
from coldsnap.store.documents import read_private, replace
from coldsnap.store.faults import translated
from coldsnap.store.locks import hold, try_hold
from coldsnap.store.stateroot import StateRoot

__all__ = ["ServiceRecord", "ServiceUnit", "ServiceWorker", "Services", "damaged_record"]

_LIMIT_BYTES = 4 * 1024 * 1024
_GLANCE_S = 0.5  # so that an operation does not fail because `status` was just looking


def _known_state(text: str) -> str:
    if text not in ServiceState.__members__.values():
        raise Unfit("is not one of the known states", f"use {', '.join(ServiceState)}")
    return text


class ServiceUnit(Record):
    """A started unit: the driver's own record, opaque here."""

    unit: str
    record: dict[str, Any]


class ServiceWorker(Record):
    """Where a worker's control socket is: the unit and the file name in its run folder."""

    worker: str
    unit: str
    socket: str


class ServiceRecord(Record):
    """One named service on this machine."""

    format: Literal[1] = 1
    kind: Literal["coldsnap-service"] = "coldsnap-service"
    name: str
    engine: str
    state: Annotated[str, AfterValidator(_known_state)]
    operation_id: str
    artifact_path: str | None = None
    artifact_digest: Digest | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    health_path: str = "/health"
    source: str | None = None
    rung: str | None = None
    overlay: Digest | None = None
    reasons: tuple[str, ...] = Field(default=(), strict=False)
    units: tuple[ServiceUnit, ...] = Field(default=(), strict=False)
    workers: tuple[ServiceWorker, ...] = Field(default=(), strict=False)
    controller_pid: int = 0
    updated_unix_ns: int = 0


def damaged_record(path: Path, problems: Sequence[Problem]) -> InvalidDocument:
    """The error for a record from which the service's processes cannot be found; each problem says how else."""
    cure = f"end what still runs of it (a coldsnap-init that has {path.parent}/*.log open), then remove {path}"
    told = [
        Problem(
            field=f"{path}: {one.field}",
            message=one.message,
            value=one.value,
            cure=one.cure if one.message == NEWER else cure,
        )
        for one in problems
    ]
    return InvalidDocument(str(path), told, facts={"path": str(path)})


class Services:
    """Reads and writes service records below one state root."""

    def __init__(self, state: StateRoot) -> None:
        self._root = state.services

    def folder(self, name: str) -> Path:
        """The private folder of a name; its unit logs are kept here too. Raises UsageError for what is no name."""
        if not is_id(name):  # it comes from a command line, and must not lead out of the state root
            raise UsageError(
                f"{name!r} is no service name",
                cure="a name begins with a letter or digit and goes on with those, and with . _ -",
            )
        return self._root / name

    def names(self) -> tuple[str, ...]:
        """Names with a record, sorted."""
        with translated("list", self._root):
            return tuple(sorted(p.name for p in self._root.iterdir() if os.path.lexists(p / "service.json")))

    def load(self, name: str) -> ServiceRecord | None:
        """The record, or None when nothing is recorded under ``name``."""
        path = self.folder(name) / "service.json"
        if not os.path.lexists(path):
            return None
        data = read_private(path, _LIMIT_BYTES)
        try:
            return parse_document(ServiceRecord, data, subject=str(path), limit_bytes=_LIMIT_BYTES)
        except InvalidDocument as error:
            raise damaged_record(path, error.problems) from error

    def must_load(self, name: str) -> ServiceRecord:
        """As ``load``, but a missing record is a UserError that lists the known names."""
        record = self.load(name)
        if record is None:
            known = ", ".join(self.names()) or "none"
            raise UserError(f"no service is named {name!r} here", cure=f"known names: {known}")
        return record

    def save(self, record: ServiceRecord) -> ServiceRecord:
        """Write the record, stamped with this process and time; returns what was written."""
        stamped = record.model_copy(update={"controller_pid": os.getpid(), "updated_unix_ns": time.time_ns()})
        folder = self.folder(record.name)
        with translated("create", folder):
            folder.mkdir(mode=0o700, exist_ok=True)
        replace(folder / "service.json", canonical_json(stamped.model_dump(mode="json")) + b"\n")
        return stamped

    def forget(self, name: str) -> None:
        """Remove the record; logs stay until ``remove``."""
        with contextlib.suppress(FileNotFoundError):
            (self.folder(name) / "service.json").unlink()

    def remove(self, name: str) -> None:
        """Remove the name's folder with its logs."""
        shutil.rmtree(self.folder(name), ignore_errors=True)

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold the name for one operation. Raises ResourceBusy when another operation has it."""
        folder = self.folder(name)
        with translated("lock", folder / "lock"):
            folder.mkdir(mode=0o700, exist_ok=True)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(hold(folder / "lock", deadline_s=_GLANCE_S, purpose=f"an operation on {name!r}"))
            except ResourceBusy as error:
                record = self.load(name)
                state = f"{record.state}, " if record else ""
                raise ResourceBusy(
                    f"another operation is working on {name!r} ({state}process {error.facts['holder']})",
                    cure="wait for it to end, or use another --name",
                    facts={"name": name, "holder": error.facts["holder"]},
                ) from error
            yield

    def is_locked(self, name: str) -> bool:
        """Whether an operation works on the name now. One that was killed holds nothing any more."""
        lock = self.folder(name) / "lock"
        with try_hold(lock) as free:
            return not free and lock.exists()
