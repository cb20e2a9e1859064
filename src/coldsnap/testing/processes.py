"""Process trees that are only objects: the unit driver's page (``capsule/driver.py``) without root, CRIU or processes.

What "runs" in a unit is a ``FakeProgram``: it starts in a run folder (a real one, so real sockets work), is frozen to
bytes and thawed from bytes. Without one, every unit is a ``CountingProcess``. Any verb can be told to fail once
(``fail_next``), and a unit to die at any moment (``crash``).
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from coldsnap.capsule.checks import spec_problems
from coldsnap.capsule.driver import DumpedFile, DumpReport, RunningUnit, UnitRecord, UnitSpec
from coldsnap.errors import CriuError, IntegrityError, InvalidDocument, PeerError, ResourceBusy, UsageError

__all__ = ["CountingProcess", "FakeProcess", "FakeProgram", "FakeUnit", "FakeUnits"]

_IMAGE = "process.img"
_UNIT_FILE = "unit.json"
_FIRST_FAKE_PID = 1 << 30  # above every real PID, so a mistake cannot hit a real process


class FakeProcess(Protocol):
    """What runs in a fake unit."""

    def alive(self) -> bool:
        """False when it ended by itself."""

    def freeze(self) -> bytes:
        """Everything it knows. It keeps running. May raise CriuError, as a dump does."""

    def stop(self) -> None:
        """End it. May be repeated."""


class FakeProgram(Protocol):
    """How a fake unit's process comes to be. ``run_dir`` stands for ``RUN_DIR`` and holds the spec's files."""

    def start(self, spec: UnitSpec, run_dir: Path) -> FakeProcess:
        """A process from nothing."""

    def thaw(self, spec: UnitSpec, run_dir: Path, frozen: bytes) -> FakeProcess:
        """A process from what ``freeze`` gave."""


class CountingProcess:
    """A process that counts how often it was asked, and prints that to its log."""

    def __init__(self, log_path: Path, asked: int = 0) -> None:
        self._log_path = log_path
        self._asked = asked
        self._running = True

    def ask(self) -> int:
        """How often it was asked, this time included."""
        if not self._running:
            raise PeerError("the process has ended")
        self._asked += 1
        with self._log_path.open("a") as log:
            log.write(f"asked {self._asked}\n")
        return self._asked

    def alive(self) -> bool:
        """Until stopped."""
        return self._running

    def freeze(self) -> bytes:
        """The count."""
        return json.dumps(self._asked).encode()

    def stop(self) -> None:
        """End it."""
        self._running = False


class _Counting:
    def start(self, spec: UnitSpec, run_dir: Path) -> CountingProcess:
        return CountingProcess(spec.log_path)

    def thaw(self, spec: UnitSpec, run_dir: Path, frozen: bytes) -> CountingProcess:
        return CountingProcess(spec.log_path, int(json.loads(frozen)))


class FakeUnit:
    """``driver.RunningUnit`` of a ``FakeUnits``."""

    def __init__(self, home: FakeUnits, record: UnitRecord) -> None:
        self._home = home
        self._record = record

    @property
    def unit(self) -> str:
        """The unit's id."""
        return self._record.unit

    @property
    def phases(self) -> Mapping[str, float]:
        """Nothing takes time here."""
        return {}

    @property
    def process(self) -> FakeProcess:
        """What runs in it. Raises PeerError when it is gone."""
        return self._home.process_of(self._record)

    def record(self) -> UnitRecord:
        """What ``attach`` needs."""
        return self._record

    def alive(self) -> bool:
        """Whether it runs."""
        return self._home.is_alive(self._record)

    def pids(self) -> tuple[int, ...]:
        """One number that no process has."""
        return (self._record.init_pid + 1,) if self.alive() else ()

    def socket_path(self, name: str) -> Path:
        """A file of its run folder."""
        return self._home.run_dir_of(self._record) / name

    def release(self) -> None:
        """Remember that it was released: ``FakeUnits.controller_dies`` spares it."""
        self._home.release(self._record)

    def kill(self, deadline_s: float = 60.0) -> None:
        """End it; may be repeated."""
        self._home.end(self._record)

    def log_tail(self, num_lines: int) -> tuple[str, ...]:
        """The last lines of its log file."""
        path = Path(self._record.log_path)
        return tuple(deque(path.read_text().splitlines(), maxlen=num_lines)) if path.exists() else ()


class _Running:
    def __init__(self, unit: str, process: FakeProcess, run_dir: Path, *, tied: bool) -> None:
        self.unit = unit
        self.process = process
        self.run_dir = run_dir
        self.tied = tied


class FakeUnits:
    """``driver.UnitDriver``. ``calls`` lists every verb with its unit, for tests that care about order."""

    def __init__(self, program: FakeProgram | None = None) -> None:
        self.calls: list[tuple[str, str]] = []
        self._program: FakeProgram = program or _Counting()
        self._running: dict[int, _Running] = {}
        self._next_pid = _FIRST_FAKE_PID
        self._failures: dict[str, list[BaseException]] = {}
        self._lock = threading.RLock()

    # -- the driver -------------------------------------------------------------------------------

    def launch(self, spec: UnitSpec, *, deadline_s: float, tied: bool = False) -> FakeUnit:
        """Start a unit."""
        self._begin("launch", spec.unit)
        if problems := tuple(spec_problems(spec, needs_command=True)):
            raise InvalidDocument(f"unit {spec.unit}", problems)
        run_dir = self._new_run_dir(spec)
        return self._add(spec, run_dir, lambda: self._program.start(spec, run_dir), tied=tied)

    def dump(
        self, unit: RunningUnit, images_dir: Path, *, deadline_s: float, leave_running: bool = False
    ) -> DumpReport:
        """Freeze a unit into ``images_dir``, which must not exist."""
        started = time.monotonic()
        self._begin("dump", unit.unit)
        process = self.process_of(unit.record())
        try:
            images_dir.mkdir(mode=0o700)
        except FileExistsError as error:
            raise ResourceBusy(f"the images folder {images_dir} exists", cure="name one that does not exist") from error
        try:
            frozen = process.freeze()
            (images_dir / _IMAGE).write_bytes(frozen)
            (images_dir / _UNIT_FILE).write_text(json.dumps({"unit": unit.unit, "bytes": len(frozen)}))
        except BaseException:
            shutil.rmtree(images_dir)
            raise
        if not leave_running:
            unit.kill()
        files = tuple(DumpedFile(name=path.name, bytes=path.stat().st_size) for path in sorted(images_dir.iterdir()))
        total = sum(file.bytes for file in files)
        seconds = time.monotonic() - started
        return DumpReport(images_dir=images_dir, seconds=seconds, bytes=total, files=files, phases={"freeze": seconds})

    def restore(self, spec: UnitSpec, images_dir: Path, *, deadline_s: float, tied: bool = False) -> FakeUnit:
        """Bring a frozen tree back."""
        self._begin("restore", spec.unit)
        if problems := tuple(spec_problems(spec, needs_command=False)):
            raise InvalidDocument(f"unit {spec.unit}", problems)
        frozen = _read_image(images_dir)
        run_dir = self._new_run_dir(spec)
        return self._add(spec, run_dir, lambda: self._program.thaw(spec, run_dir, frozen), tied=tied)

    def attach(self, record: UnitRecord) -> FakeUnit | None:
        """The unit of a record, or None when it is gone."""
        return FakeUnit(self, record) if self.is_alive(record) else None

    def clear(self, record: UnitRecord) -> None:
        """Nothing outlives a unit."""

    # -- what tests may do to it ------------------------------------------------------------------

    def fail_next(self, verb: str, error: BaseException) -> None:
        """Let the next ``launch``, ``dump`` or ``restore`` raise ``error`` and change nothing."""
        if verb not in ("launch", "dump", "restore"):
            raise UsageError(f"no such verb: {verb!r}", cure="launch, dump or restore")
        self._failures.setdefault(verb, []).append(error)

    def crash(self, unit: RunningUnit) -> None:
        """Let a unit end by itself."""
        self.end(unit.record())

    def controller_dies(self) -> None:
        """What a SIGKILL of the controller does: every unit that is still tied ends."""
        with self._lock:
            for pid in [pid for pid, running in self._running.items() if running.tied]:
                self._end(pid)

    def running(self) -> tuple[str, ...]:
        """Ids of all living units; empty means that nothing is left."""
        return tuple(running.unit for running in self._running.values())

    def end_all(self) -> None:
        """End every unit and take its run folder away: the last step of a test."""
        with self._lock:
            for pid in list(self._running):
                self._end(pid)

    # -- what the handles ask ---------------------------------------------------------------------

    def is_alive(self, record: UnitRecord) -> bool:
        """Whether the unit of a record runs."""
        running = self._find(record)
        if running is not None and not running.process.alive():
            self.end(record)
            return False
        return running is not None

    def process_of(self, record: UnitRecord) -> FakeProcess:
        """What runs in it. Raises PeerError when it is gone."""
        running = self._find(record)
        if running is None:
            raise PeerError(f"unit {record.unit} is gone", cure="read its log to see why it ended")
        return running.process

    def run_dir_of(self, record: UnitRecord) -> Path:
        """Its run folder, or where it was."""
        running = self._find(record)
        return running.run_dir if running is not None else Path("/proc/0/root")

    def release(self, record: UnitRecord) -> None:
        """Untie it. Raises PeerError when it is gone."""
        self.process_of(record)
        self._running[record.init_pid].tied = False

    def end(self, record: UnitRecord) -> None:
        """End it; nothing to do when it is gone."""
        with self._lock:
            if self._find(record) is not None:
                self._end(record.init_pid)

    # -- inside -----------------------------------------------------------------------------------

    def _begin(self, verb: str, unit: str) -> None:
        self.calls.append((verb, unit))
        if failures := self._failures.get(verb):
            raise failures.pop(0)

    def _find(self, record: UnitRecord) -> _Running | None:
        if record.boot_id != self._boot_id or record.init_start_ticks != record.init_pid:
            return None
        return self._running.get(record.init_pid)

    @property
    def _boot_id(self) -> str:
        return f"fake-{id(self):x}"

    def _new_run_dir(self, spec: UnitSpec) -> Path:
        # Short, whatever the test's own folder is called: a Unix socket's path has 107 bytes.
        run_dir = Path(tempfile.mkdtemp(prefix="cs-"))
        for name, data in spec.files.items():
            (run_dir / name).write_bytes(data)
        return run_dir

    def _add(self, spec: UnitSpec, run_dir: Path, make: _Make, *, tied: bool) -> FakeUnit:
        try:
            spec.log_path.touch(mode=0o600)
            process = make()
        except BaseException:
            shutil.rmtree(run_dir)
            raise
        with self._lock:
            pid, self._next_pid = self._next_pid, self._next_pid + 2
            self._running[pid] = _Running(spec.unit, process, run_dir, tied=tied)
        record = UnitRecord(
            unit=spec.unit,
            init_pid=pid,
            init_start_ticks=pid,
            boot_id=self._boot_id,
            root_pid=1001,
            log_pipe=pid,
            log_path=str(spec.log_path),
        )
        return FakeUnit(self, record)

    def _end(self, pid: int) -> None:
        running = self._running.pop(pid)
        running.process.stop()
        shutil.rmtree(running.run_dir, ignore_errors=True)


class _Make(Protocol):
    def __call__(self) -> FakeProcess: ...


def _read_image(images_dir: Path) -> bytes:
    try:
        expected = json.loads((images_dir / _UNIT_FILE).read_text())["bytes"]
        frozen = (images_dir / _IMAGE).read_bytes()
    except (OSError, ValueError, KeyError) as error:
        raise IntegrityError(f"{images_dir} is no finished dump", cure="prepare the capsule again") from error
    if len(frozen) != expected:
        raise CriuError(f"the restore of {images_dir} failed", facts={"log": ["an image file is damaged"]})
    return frozen
