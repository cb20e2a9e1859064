"""Every kind of file that coldsnap keeps or reads, and every way a file goes wrong under it."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from coldsnap.capsule.layout import ANNOTATION_LAYER
from coldsnap.testing.faults.case import Case, Struck
from coldsnap.testing.faults.invariants import Violation
from coldsnap.testing.faults.lane import NAME, Lane
from coldsnap.testing.faults.operations import Operation

__all__ = ["EMPTY", "HOWS", "KINDS", "MATTERS", "OF_EMPTY", "damaged"]

NOBODY = 65534


def damaged(lane: Lane, operation: Operation, case: Case, chance: random.Random) -> Struck:
    """``file`` is a kind of file, ``how`` what happens to one of them before the verb."""
    path = chance.choice(sorted(KINDS[case.params["file"]](lane)))
    harm = _Harm.do(lane, path, HOWS[case.params["how"]], chance)
    outcome = lane.run(operation.verb)
    if case.params["file"] in _MEMORY and outcome.status == "broken" and outcome.kind == "InternalError":
        outcome = replace(outcome, status="raised")  # by a process whose own memory was damaged
    # `gc --forget-missing` is asked to take away what a descriptor named that is gone, and what no lease names.
    forgotten = operation.name == "gc" and case.params["how"] == "gone" and case.params["file"] in _REMEMBERS
    wrong = []
    must_see = operation.name == "verify" and case.params["file"] in PROVED and case.params["how"] in _CONTENT
    if must_see and outcome.status == "done" and not outcome.result["problems"]:
        wrong.append(Violation("damage", f"verify did not see it in {path.relative_to(lane.yard)}"))
    return Struck(
        outcome=outcome,
        happened=harm.happened,
        restored=operation.restored or "unit.criu" in lane.points(),
        gone=forgotten,
        repair=(lambda: operation.world(lane)) if forgotten else harm.undo,
        wrong=tuple(wrong),
    )


# -- kinds of file ------------------------------------------------------------------------------------


def _globbed(pattern: str) -> Callable[[Lane], list[Path]]:
    return lambda lane: [path for path in lane.state.glob(pattern) if path.is_file()]


def _blob(layer: str) -> Callable[[Lane], list[Path]]:
    """A blob of the capsule: its manifest, its config, or a layer by name."""

    def find(lane: Lane) -> list[Path]:
        folder = next(path for path in (lane.state / "capsules").iterdir() if path.name[0] != ".")
        blobs = folder / "blobs" / "sha256"
        manifest = json.loads((blobs / folder.name).read_bytes())
        if layer == "manifest":
            return [blobs / folder.name]
        parts = {"config": manifest["config"]}
        parts |= {one["annotations"][ANNOTATION_LAYER]: one for one in manifest["layers"]}
        return [blobs / str(parts[layer]["digest"]).removeprefix("sha256:")]

    return find


KINDS: Mapping[str, Callable[[Lane], list[Path]]] = {
    "artifact": lambda lane: [lane.artifact],
    "lease": _globbed("artifacts/*.json"),
    "receipt": _globbed("receipts/*.json"),
    "overlay": _globbed("overlays/*.json"),
    "failures": _globbed("failures/*.json"),
    "service-record": _globbed(f"services/{NAME}/service.json"),
    "service-lock": _globbed(f"services/{NAME}/lock"),
    "use-lock": _globbed("locks/in-use.lock"),
    "pack-lock": _globbed("locks/[0-9a-f]*.lock"),
    "pack": _globbed("model-payloads/sha256/*.pack"),
    "validation-record": _globbed("model-payloads/sha256/*.json"),
    "oci-layout": _globbed("capsules/*/oci-layout"),
    "oci-index": _globbed("capsules/*/index.json"),
    "capsule-manifest": _blob("manifest"),
    "capsule-config": _blob("config"),
    "capsule-index": _blob("index"),
    "capsule-process": _blob("process"),
    "capsule-payload": _blob("payload"),
    "capsule-cache": _blob("cache"),
    "prepared-record": _globbed("prepared/*/prepared.json"),
    "process-image": _globbed("prepared/*/process/*.img"),
    "process-pages": _globbed("prepared/*/process/pages-*.img"),
    "process-memory": _globbed("prepared/*/process/runs-*.bin"),
    "unit-file": _globbed("prepared/*/process/unit.json"),
    "cache-seed": lambda lane: [path for path in lane.state.glob("prepared/*/cache/**/*") if path.is_file()],
    "residual": _globbed("prepared/*/workers/*/weights.blob"),
    "residual-record": _globbed("prepared/*/workers/*/weights.blob.coldsnap-validation.json"),
    "native-manifest": _globbed("prepared/*/workers/*/native-manifest.json"),
    "recovery-manifest": _globbed("prepared/*/workers/*/manifest.json"),
    "library-proofs": _globbed("prepared/host-files.json"),
    "feature-proofs": _globbed("feature-probes.json"),
    "checkpoint": lambda lane: list(lane.model.glob("*.safetensors")),
    "checkpoint-config": lambda lane: [lane.model / "config.json"],
}
"""Kinds of file, each with how its files are found in a lane."""

PROVED = frozenset(
    {
        "pack",
        "capsule-manifest",
        "capsule-config",
        "capsule-index",
        "capsule-process",
        "capsule-payload",
        "capsule-cache",
    }
)
"""What ``verify`` must find changed, whatever records and times say."""


_MEMORY = frozenset({"process-image", "process-pages", "process-memory"})

_REMEMBERS = frozenset({"artifact", "lease"})
"""Kinds that say what is kept here: who removes one has said that nothing of its artifact is needed any more."""

# -- ways to go wrong ---------------------------------------------------------------------------------


def _flip(path: Path, chance: random.Random) -> None:
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if size:
            at = chance.randrange(size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << chance.randrange(8)]))


def _flip_quietly(path: Path, chance: random.Random) -> None:
    """As a dying disk does it: no time changes."""
    before = path.stat()
    _flip(path, chance)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _cut(path: Path, chance: random.Random) -> None:
    size = path.stat().st_size
    os.truncate(path, chance.randrange(size) if size else 0)


def _empty(path: Path, chance: random.Random) -> None:
    os.truncate(path, 0)


def _grow(path: Path, chance: random.Random) -> None:
    with path.open("ab") as file:
        file.write(chance.randbytes(1 + chance.randrange(5000)))


def _gone(path: Path, chance: random.Random) -> None:
    path.unlink()


def _folder(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _link(path: Path, chance: random.Random) -> None:
    """A link to the very same bytes: they would be right, and are not to be trusted."""
    other = path.with_name(f"{path.name}.elsewhere")
    path.rename(other)
    path.symlink_to(other)


def _pipe(path: Path, chance: random.Random) -> None:
    """Who opens it without care waits for ever."""
    path.unlink()
    os.mkfifo(path)


def _public(path: Path, chance: random.Random) -> None:
    path.chmod(0o666)


def _foreign(path: Path, chance: random.Random) -> None:
    os.chown(path, NOBODY, NOBODY)


def _noise(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.randbytes(path.stat().st_size))


def _deep(path: Path, chance: random.Random) -> None:
    """JSON that a careless parser dies of."""
    path.write_bytes(b'{"a":' + b"[" * 100_000)


HOWS: Mapping[str, Callable[[Path, random.Random], None]] = {
    "flip": _flip,
    "flip-quiet": _flip_quietly,
    "cut": _cut,
    "empty": _empty,
    "grow": _grow,
    "gone": _gone,
    "folder": _folder,
    "link": _link,
    "pipe": _pipe,
    "public": _public,
    "foreign": _foreign,
    "noise": _noise,
    "deep": _deep,
}
"""Ways a file goes wrong."""

EMPTY = frozenset({"service-lock", "use-lock", "pack-lock"})
"""Kinds whose bytes nobody reads: only what kind of file it is, and whose, can be wrong."""

OF_EMPTY = ("gone", "folder", "link", "pipe", "public", "foreign", "grow")
"""What can be wrong with them."""

_CONTENT = frozenset({"flip", "flip-quiet", "cut", "empty", "grow", "gone", "noise", "deep"})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Harm:
    """A damaged path, what it was, and what was left of it.

    A large file is one inode with the base's, and is damaged in place: proofs that name the inode are still there then,
    as they are on a dying disk. Undoing it gives the base its bytes back first.
    """

    path: Path
    base: Path | None
    backup: Path
    others: frozenset[Path]
    before: tuple[object, ...]
    after: tuple[object, ...]

    @classmethod
    def do(cls, lane: Lane, path: Path, how: Callable[[Path, random.Random], None], chance: random.Random) -> _Harm:
        backup = lane.desk / "backup"
        backup.unlink(missing_ok=True)
        shutil.copy2(path, backup)
        base = lane.base / path.relative_to(lane.state) if lane.state in path.parents else None
        shared = base is not None and base.exists() and base.samefile(path)
        there, before = set(path.parent.iterdir()), _look(path)
        how(path, chance)
        return cls(
            path=path,
            base=base if shared else None,
            backup=backup,
            others=frozenset(set(path.parent.iterdir()) - there - {path}),
            before=before,
            after=_look(path),
        )

    @property
    def happened(self) -> bool:
        return self.before != self.after

    def undo(self) -> None:
        """Put the file back, unless the verb has put something of its own there."""
        untouched = _look(self.path) in (self.after, ())
        if self.base is not None:
            self._heal(self.base)
        if untouched:
            if self.path.is_dir() and not self.path.is_symlink():
                shutil.rmtree(self.path)
            else:
                self.path.unlink(missing_ok=True)
            if self.base is not None:
                os.link(self.base, self.path)
            else:
                shutil.copy2(self.backup, self.path)
        for other in self.others:
            other.unlink(missing_ok=True)

    def _heal(self, path: Path) -> None:
        found = self.backup.stat()
        with path.open("r+b") as file:
            file.truncate(0)
            file.write(self.backup.read_bytes())
        os.chown(path, found.st_uid, found.st_gid)
        path.chmod(stat.S_IMODE(found.st_mode))
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def _look(path: Path) -> tuple[object, ...]:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return ()
    kind = stat.S_IFMT(found.st_mode)
    data: object = path.read_bytes() if kind == stat.S_IFREG else str(path.readlink()) if kind == stat.S_IFLNK else None
    return kind, stat.S_IMODE(found.st_mode), found.st_uid, data


MATTERS: Mapping[str, tuple[str, ...]] = {
    "artifact": ("restore", "prepare", "verify", "explain", "delete", "replace", "sleep", "wake", "gc"),
    "lease": ("restore", "prepare", "gc", "delete"),
    "receipt": ("restore", "gc"),
    "overlay": ("restore-overlay",),
    "failures": ("restore-once-failed",),
    "service-record": ("replace", "sleep", "wake", "stop", "status"),
    "service-lock": ("replace", "sleep", "stop"),
    "use-lock": ("restore", "gc", "prepare"),
    "pack-lock": ("recapture", "restore-unprepared"),
    "pack": ("restore", "restore-unprepared", "verify", "wake", "recapture", "wake-warm", "restore-overlay"),
    "validation-record": ("restore", "wake", "recapture"),
    "oci-layout": ("restore-unprepared", "verify"),
    "oci-index": ("restore-unprepared", "verify"),
    "capsule-manifest": ("restore", "restore-unprepared", "verify"),
    "capsule-config": ("restore-unprepared", "verify"),
    "capsule-index": ("restore-unprepared", "verify"),
    "capsule-process": ("restore", "restore-unprepared", "verify"),
    "capsule-payload": ("restore-unprepared", "verify"),
    "capsule-cache": ("restore-unprepared", "verify"),
    "cache-seed": ("restore",),
    "prepared-record": ("restore", "wake"),
    "process-image": ("restore", "replace"),
    "process-pages": ("restore",),
    "process-memory": ("restore",),
    "unit-file": ("restore",),
    "residual": ("restore", "wake", "recover"),
    "residual-record": ("restore", "wake"),
    "native-manifest": ("restore", "wake"),
    "recovery-manifest": ("recover", "materialize"),
    "library-proofs": ("restore", "explain", "recapture"),
    "feature-proofs": ("restore", "recapture"),
    "checkpoint": ("recover", "capture", "materialize", "recover-required", "cold"),
    "checkpoint-config": ("recover", "capture"),
}
"""By kind of file: the operations that read it."""
