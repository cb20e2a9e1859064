"""How fast this machine is, by doing for a second what a prepare and a restore do: with the same code, on this disk.

    <state root>/calibration.json    rates, the boot they were measured in, and the device the state root is on

Another boot may be another machine, and another device another disk; then it is measured anew. A process tree is
not thawed here: that takes root and CRIU. Everything happens in a scratch folder that is removed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from pydantic import Field

from coldsnap.capsule.identity import boot_id
from coldsnap.capsule.image import PROCESS_IMAGE, CapsuleFile, unpack_capsule, write_capsule
from coldsnap.core.canonical import canonical_json
from coldsnap.core.digest import Digest
from coldsnap.core.forecast import Rate, Step
from coldsnap.core.names import Choice, Items
from coldsnap.core.parsing import Record, parse_document
from coldsnap.errors import ColdsnapError
from coldsnap.hydrate import HostMemory, ProvedSource, Segment, Source, TransferPath, UnprovedSource, hydrate_file
from coldsnap.ops.scratch import scratch_folder
from coldsnap.store.admission import admit_file
from coldsnap.store.documents import read_private, try_replace
from coldsnap.store.stateroot import StateRoot

__all__ = ["CALIBRATION_NAME", "Calibration", "calibrate", "known_calibration"]

CALIBRATION_NAME = "calibration.json"
_LIMIT_BYTES = 64 * 1024
_MIB = 1024 * 1024
_PART_BYTES = _MIB
_PAGE = 4096


class CalibratedStep(Record):
    """One step, as it was measured."""

    step: Choice[Step]
    bytes: int = Field(ge=1)
    seconds: float = Field(gt=0)


class Calibration(Record):
    """The document ``calibration.json``."""

    format: Literal[1] = 1
    kind: Literal["coldsnap-calibration"] = "coldsnap-calibration"
    boot_id: str
    device: int
    measured_unix_ns: int
    steps: Items[CalibratedStep]

    def rates(self) -> dict[Step, Rate]:
        """A rate for each step that could be measured."""
        when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(self.measured_unix_ns // 1_000_000_000))
        return {
            one.step: Rate(
                bytes_per_s=one.bytes / one.seconds,
                source=f"calibration of {when} UTC, this boot, this disk, {one.bytes // _MIB} MiB",
            )
            for one in self.steps
        }


def known_calibration(state: StateRoot) -> Calibration | None:
    """The stored calibration when it is of this boot and this device; None when there is none to be believed."""
    try:
        data = read_private(state.path / CALIBRATION_NAME, _LIMIT_BYTES, only_ours=True)
        found = parse_document(Calibration, data, subject=CALIBRATION_NAME, limit_bytes=_LIMIT_BYTES)
    except ColdsnapError:
        return None
    return found if (found.boot_id, found.device) == (boot_id(), _device(state)) else None


def calibrate(state: StateRoot, *, num_bytes: int = 64 * _MIB) -> Calibration:
    """Measure every step with ``num_bytes``, a multiple of 1 MiB, and store the result.

    Memory is touched once before: in a virtual machine the first touch of a page may cost more than all that follows.
    Raises OutOfSpace, HostError.
    """
    with scratch_folder(state, "calibrate") as scratch:
        steps = [
            CalibratedStep(step=step, bytes=num_bytes, seconds=max(seconds, 1e-6))
            for step, seconds in _measure(scratch, num_bytes)
        ]
    record = Calibration(boot_id=boot_id(), device=_device(state), measured_unix_ns=time.time_ns(), steps=tuple(steps))
    try_replace(state.path / CALIBRATION_NAME, canonical_json(record.model_dump(mode="json")) + b"\n")
    return record


def _device(state: StateRoot) -> int:
    return state.path.stat().st_dev


def _measure(scratch: Path, num_bytes: int) -> Iterator[tuple[Step, float]]:
    pack = scratch / "model-weights.pack"
    digest, extents = _write_pack(pack, num_bytes)
    yield Step.ADMIT, _timed(lambda: _admit(pack, digest, num_bytes, extents))
    images = scratch / "pages-1.img"
    images.write_bytes(_image(num_bytes))
    files = [CapsuleFile(role=PROCESS_IMAGE, owner="unit/u0", path="process/pages-1.img", source=images)]
    made = write_capsule(scratch / "layout", unit="u0", files=files, annotations={})
    unpacked = scratch / "unpacked"
    yield Step.UNPACK, _timed(lambda: unpack_capsule(scratch / "layout", made.digest, unpacked, expected=None))
    with ExitStack() as stack:
        memory = HostMemory()
        stack.callback(memory.release)
        base = memory.reserve(num_bytes, tag="calibration").ptr
        fd = os.open(pack, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        segments = [
            Segment(ptr=base + offset, size=size, file_offset=offset, sha256=sha256) for offset, size, sha256 in extents
        ]

        def fill(source: Source, path: TransferPath) -> TransferPath:
            memory.unmap()
            memory.remap()
            return hydrate_file(source, segments, memory, path=path).path

        proved = ProvedSource(fd=fd, bytes=num_bytes, evidence="written by this calibration")
        fill(proved, TransferPath.BUFFERED)
        yield Step.HYDRATE_CACHED, _timed(lambda: fill(proved, TransferPath.BUFFERED))
        yield Step.RECOVER, _timed(lambda: fill(UnprovedSource(fd=fd, bytes=num_bytes), TransferPath.BUFFERED))
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        taken: list[TransferPath] = []
        seconds = _timed(lambda: taken.append(fill(proved, TransferPath.DIRECT)))
        if taken == [TransferPath.DIRECT]:  # a tmpfs has no disk to read from
            yield Step.HYDRATE_DISK, seconds


def _write_pack(path: Path, num_bytes: int) -> tuple[Digest, list[tuple[int, int, Digest]]]:
    data = os.urandom(num_bytes)
    path.write_bytes(data)
    path.chmod(0o600)
    view = memoryview(data)
    extents = [
        (offset, _PART_BYTES, Digest.of(view[offset : offset + _PART_BYTES]))
        for offset in range(0, num_bytes, _PART_BYTES)
    ]
    return Digest.of(data), extents


def _admit(path: Path, digest: Digest, num_bytes: int, extents: list[tuple[int, int, Digest]]) -> None:
    with admit_file(path, digest, num_bytes, extents=extents, record=False):
        pass


def _image(num_bytes: int) -> bytes:
    """Memory pages of which one in four is random: it compresses about as well as a real process image."""
    pages = [os.urandom(_PAGE) if number % 4 == 0 else bytes([number % 251]) * _PAGE for number in range(256)]
    return b"".join(pages) * (num_bytes // (256 * _PAGE))


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
