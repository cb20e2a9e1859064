"""What a machine looks like before an operation: each function makes a lane so."""

from __future__ import annotations

import shutil

from coldsnap.store.pack import PackSource, write_pack
from coldsnap.store.payloads import PayloadStore
from coldsnap.store.stateroot import StateRoot
from coldsnap.testing.faults import verbs
from coldsnap.testing.faults.lane import Lane

__all__ = [
    "asleep",
    "blank",
    "capsuleless",
    "captured",
    "failed_once",
    "littered",
    "overlaid",
    "packless",
    "serving",
    "unprepared",
    "warm",
]


def captured(lane: Lane) -> None:
    """An artifact, prepared, and no service."""
    lane.reset()


def blank(lane: Lane) -> None:
    """A machine that has proved its features and its libraries, and has no artifact."""
    lane.reset()
    lane.artifact.unlink()
    for name in ("artifacts", "receipts", "services", "locks", "capsules", "model-payloads/sha256"):
        shutil.rmtree(lane.state / name)
        (lane.state / name).mkdir(mode=0o700)
    _unprepare(lane)


def unprepared(lane: Lane) -> None:
    """An artifact of which nothing is unpacked or proved."""
    lane.reset()
    _unprepare(lane)
    for record in (lane.state / "model-payloads" / "sha256").glob("*.json"):
        record.unlink()


def packless(lane: Lane) -> None:
    """A prepared artifact whose pack is lost."""
    lane.reset()
    for path in (lane.state / "model-payloads" / "sha256").iterdir():
        path.unlink()


def overlaid(lane: Lane) -> None:
    """An artifact that has an overlay here."""
    lane.reset()
    lane.must(verbs.do_overlay)


def failed_once(lane: Lane) -> None:
    """An artifact that failed here once; after two times it is in quarantine."""
    lane.reset()
    lane.must(verbs.do_remember_failure)


def capsuleless(lane: Lane) -> None:
    """An artifact whose capsule is not here, packed or unpacked."""
    lane.reset()
    _unprepare(lane)
    for path in (lane.state / "capsules").iterdir():
        shutil.rmtree(path)


def serving(lane: Lane) -> None:
    """A service that was restored."""
    lane.reset()
    lane.must(verbs.do_restore)


def asleep(lane: Lane) -> None:
    """A service that sleeps."""
    serving(lane)
    lane.must(verbs.do_sleep)


def warm(lane: Lane) -> None:
    """A service that lacks only its memory."""
    lane.reset()
    lane.must(verbs.do_warm)


def littered(lane: Lane) -> None:
    """One of everything that gc collects, beside the artifact."""
    lane.reset()
    store = PayloadStore(StateRoot(path=lane.state))
    write_pack(store, [PackSource(ptr=0, size=5000, semantic_id="00" * 32, read=lambda: iter([b"g" * 5000]))])
    capsules, other = lane.state / "capsules", "f" * 64
    shutil.copytree(next(capsules.iterdir()), capsules / other)
    (lane.state / "prepared" / other).mkdir()
    (lane.state / "staging" / "dead.partial").mkdir()
    (lane.state / "staging" / "pack.0123.partial").write_bytes(b"half")
    (lane.state / "locks" / f"{'e' * 64}.lock").touch()
    (lane.state / "quarantine" / f"{'d' * 64}.pack.0").write_bytes(b"bad")
    lost = next((lane.state / "artifacts").iterdir())
    text = lost.read_text().replace(lost.stem, "c" * 64).replace("artifact.json", "lost.json")
    (lost.parent / f"{'c' * 64}.json").write_text(text)


def _unprepare(lane: Lane) -> None:
    for path in (lane.state / "prepared").iterdir():
        if path.is_dir():
            shutil.rmtree(path)
