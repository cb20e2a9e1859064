"""The images folder of one dumped tree: CRIU's files and one of ours, ``unit.json``.

``unit.json`` holds what CRIU does not: which PID is the root, which pipe was stdout, and the files that lay in the
unit's private tmpfs (what is in them is ``private-N.bin`` beside it), and the memory that was taken out of CRIU's
images (``runs-PID.bin``; `pageruns` says which). It is written last, so a folder without it is not a finished dump, and
it names every other file and its size: CRIU 4.1 takes a missing file for an empty one, and spins for ever on a page
file that is too short. The folder is private (0700): it holds a process's memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from coldsnap.capsule.driver import DumpedFile
from coldsnap.errors import HostError, IntegrityError

__all__ = [
    "PROVED_BYTES",
    "UNIT_FILE",
    "DumpedUnit",
    "ImageFile",
    "MovedMemory",
    "PrivateEntry",
    "list_images",
    "read_dumped_unit",
    "write_dumped_unit",
]

UNIT_FILE = "unit.json"
PROVED_BYTES: Final = 8 * 1024 * 1024
"""How much of a runs file one digest is for."""

_PREPARE_AGAIN = "prepare the capsule again, or capture again"
_LIMIT_BYTES = 64 * 1024 * 1024  # some two million pieces of memory


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class PrivateEntry(_Record):
    """A folder (``bytes`` None) or file of a private tmpfs; ``path`` is relative to ``root``.

    ``pieces`` are (offset, size) of what is in the file, in order; the rest are holes. ``content`` is the file of the
    images folder that holds the pieces, one after the other, and None when there are none.
    """

    root: Literal["run", "shm"]
    path: str
    mode: int = Field(ge=0, le=0o7777)
    bytes: int | None = Field(default=None, ge=0)
    pieces: tuple[tuple[int, int], ...] = ()
    content: str | None = Field(default=None, pattern=r"^private-\d+\.bin$")

    @property
    def saved_bytes(self) -> int:
        """The size of ``content``."""
        return sum(size for _, size in self.pieces)

    @field_validator("path")
    @classmethod
    def _clean(cls, path: str) -> str:
        if any(part in ("", ".", "..") for part in path.split("/")) or "\0" in path:
            raise ValueError("a private path is relative, and has no '.' or '..'")
        return path

    @model_validator(mode="after")
    def _sound(self) -> PrivateEntry:
        end = 0
        for offset, size in self.pieces:
            if offset < end or size <= 0 or offset + size > (self.bytes or 0):
                raise ValueError(f"the piece of {size} bytes at {offset} is not in the file, or is out of order")
            end = offset + size
        if bool(self.pieces) != (self.content is not None):
            raise ValueError(f"a file has {len(self.pieces)} pieces and its content in {self.content}")
        return self


class ImageFile(_Record):
    """A file of the folder."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    bytes: int = Field(ge=0)


_Hex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_PAGE_BYTES = 4096


class MovedMemory(_Record):
    """Memory of one process that is in a file of ours, ``runs-PID.bin``, and not in CRIU's.

    ``pieces`` are (address, size), in the order in which the file holds them, without gaps; ``sha256`` are the digests
    of the file's every ``PROVED_BYTES``.
    """

    pid: int = Field(gt=1)
    pieces: tuple[tuple[int, int], ...] = Field(min_length=1)
    sha256: tuple[_Hex, ...]

    @property
    def name(self) -> str:
        """The file's name."""
        return f"runs-{self.pid}.bin"

    @property
    def bytes(self) -> int:
        """The file's size."""
        return sum(size for _, size in self.pieces)

    @model_validator(mode="after")
    def _sound(self) -> MovedMemory:
        end = 0
        for address, size in sorted(self.pieces):
            if address < end or size <= 0 or address % _PAGE_BYTES or size % _PAGE_BYTES or address + size > 1 << 64:
                raise ValueError(f"the piece of {size} bytes at {address:#x} is no memory, or is there twice")
            end = address + size
        if len(self.sha256) != -(-self.bytes // PROVED_BYTES):
            raise ValueError(f"{len(self.sha256)} digests are not those of {self.bytes} bytes")
        return self


class DumpedUnit(_Record):
    """What a restore needs besides CRIU's own files. ``stopped`` are processes that stood still before the dump."""

    format: Literal[3] = 3
    kind: Literal["coldsnap-dumped-unit"] = "coldsnap-dumped-unit"
    unit: str
    root_pid: int = Field(gt=1)
    log_pipe: int = Field(gt=0)
    criu_version: str
    files: tuple[ImageFile, ...]
    private: tuple[PrivateEntry, ...] = ()
    memory: tuple[MovedMemory, ...] = ()
    stopped: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _named(self) -> DumpedUnit:
        sizes = {file.name: file.bytes for file in self.files}
        if len({one.pid for one in self.memory}) != len(self.memory):
            raise ValueError("a process's memory is there twice")
        for one in self.memory:
            if sizes.get(one.name) != one.bytes:
                raise ValueError(f"{one.name} is no file of {one.bytes} bytes")
        for entry in self.private:
            if entry.content is not None and sizes.get(entry.content) != entry.saved_bytes:
                raise ValueError(f"{entry.content} is no file of {entry.saved_bytes} bytes")
        return self


def write_dumped_unit(images_dir: Path, dumped: DumpedUnit) -> None:
    """Mark the folder as finished. Raises HostError for a record that no reader would take."""
    text = dumped.model_dump_json() + "\n"
    if len(text.encode()) > _LIMIT_BYTES:
        num_pieces = sum(len(one.pieces) for one in dumped.memory)
        raise HostError(
            f"the memory of unit {dumped.unit} lies in {num_pieces} pieces, more than {UNIT_FILE} can name",
            cure="give memory back before the capture; this is far more than any engine is known to need",
        )
    path = images_dir / UNIT_FILE
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(text)


def read_dumped_unit(images_dir: Path) -> DumpedUnit:
    """The folder's own record. Raises IntegrityError when it, or a file that it names, is missing or damaged."""
    path = images_dir / UNIT_FILE
    try:
        with path.open("rb") as file:
            data = file.read(_LIMIT_BYTES + 1)
        dumped = DumpedUnit.model_validate_json(data[:_LIMIT_BYTES])
    except (OSError, ValidationError) as error:
        raise IntegrityError(
            f"{path} is missing or damaged, so {images_dir} is no finished dump",
            cure=_PREPARE_AGAIN,
            facts={"path": str(path), "reason": str(error)},
        ) from error
    for image in dumped.files:
        _check_size(images_dir / image.name, image.bytes)
    return dumped


def _check_size(path: Path, expected_bytes: int) -> None:
    try:
        found = path.stat().st_size
    except OSError:
        found = -1
    if found != expected_bytes:
        what = "is missing" if found < 0 else f"has {found} bytes instead of {expected_bytes}"
        raise IntegrityError(
            f"the process image {path} {what}",
            cure=_PREPARE_AGAIN,
            facts={"path": str(path), "expected_bytes": expected_bytes, "found_bytes": max(0, found)},
        )


def list_images(images_dir: Path) -> tuple[DumpedFile, ...]:
    """Every file of the folder by name."""
    return tuple(
        DumpedFile(name=path.name, bytes=path.stat().st_size) for path in sorted(images_dir.iterdir()) if path.is_file()
    )
