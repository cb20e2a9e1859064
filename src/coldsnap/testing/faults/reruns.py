"""The same operation again, without a fault: each function yields what did not work, and proves what did."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from coldsnap.testing.faults import verbs
from coldsnap.testing.faults.invariants import Violation, is_serving, record_of
from coldsnap.testing.faults.lane import Lane, Verb
from coldsnap.testing.faults.processes import newest_init, wait_gone

__all__ = [
    "Rerun",
    "again_capture",
    "again_cold",
    "again_delete",
    "again_explain",
    "again_gc",
    "again_materialize",
    "again_overlay",
    "again_prepare",
    "again_recover",
    "again_restore",
    "again_restore_cleared",
    "again_sleep",
    "again_status",
    "again_stop",
    "again_verify",
    "again_wake",
    "again_warm",
]

Rerun = Callable[[Lane], Iterator[Violation]]


def again_capture(lane: Lane) -> Iterator[Violation]:
    """What is committed stays and is whole; a capture works, and what it captured can be restored."""
    for path, verify in ((lane.artifact, verbs.do_verify), (lane.second, verbs.do_verify_second)):
        if path.exists():
            yield from _verified(lane, verify)
    yield from _runs(lane, verbs.do_capture_third, "capture")
    yield from _verified(lane, verbs.do_verify_third)
    yield from _runs(lane, verbs.do_restore_third, "restore of the capture")
    yield from _serves(lane)


def again_prepare(lane: Lane) -> Iterator[Violation]:
    """It works, and a restore after it."""
    yield from _runs(lane, verbs.do_prepare, "prepare")
    yield from again_restore(lane)


def again_restore(lane: Lane) -> Iterator[Violation]:
    """It works, and the service is right."""
    yield from _runs(lane, verbs.do_restore, "restore")
    yield from _serves(lane)


def again_restore_cleared(lane: Lane) -> Iterator[Violation]:
    """As ``again_restore``; a second failure put the artifact into quarantine, out of which somebody lets it first."""
    yield from _runs(lane, verbs.do_clear_quarantine, "clear-quarantine")
    yield from again_restore(lane)


def again_recover(verb: Verb) -> Rerun:
    """The restore works, the service is right, and the pack is there again before anybody asks for it twice."""

    def again(lane: Lane) -> Iterator[Violation]:
        yield from _runs(lane, verb, "recovery")
        yield from _serves(lane)
        yield from _runs(lane, verbs.do_sleep, "sleep, which waits for the pack")
        yield from _verified(lane, verbs.do_verify)

    return again


def again_cold(lane: Lane) -> Iterator[Violation]:
    """It works, and the service is right."""
    yield from _runs(lane, verbs.do_cold, "cold start")
    yield from _serves(lane)


def again_materialize(lane: Lane) -> Iterator[Violation]:
    """It works, the pack is proved, and a restore is right."""
    yield from _runs(lane, verbs.do_materialize, "materialize")
    yield from _verified(lane, verbs.do_verify)
    yield from again_restore(lane)


def again_overlay(lane: Lane) -> Iterator[Violation]:
    """It works, and a restore is right."""
    yield from _runs(lane, verbs.do_overlay, "materialize --overlay")
    yield from again_restore(lane)


def again_warm(lane: Lane) -> Iterator[Violation]:
    """It works, and a wake makes it right."""
    yield from _runs(lane, verbs.do_warm, "warm")
    yield from _runs(lane, verbs.do_wake, "wake")
    yield from _serves(lane)


def again_sleep(lane: Lane) -> Iterator[Violation]:
    """It works unless the service sleeps already, or is gone and was restored; then a wake makes it right."""
    yield from _lives(lane)
    if _state(lane) != "asleep":
        yield from _runs(lane, verbs.do_sleep, "sleep")
    yield from _runs(lane, verbs.do_wake, "wake after sleep")
    yield from _serves(lane)


def again_wake(lane: Lane) -> Iterator[Violation]:
    """It works unless the service is awake already, or is gone and was restored."""
    yield from _lives(lane)
    if _state(lane) != "ready":
        yield from _runs(lane, verbs.do_wake, "wake")
    yield from _serves(lane)


def again_stop(lane: Lane) -> Iterator[Violation]:
    """It works unless there is nothing to stop."""
    if record_of(lane) is not None:
        yield from _runs(lane, verbs.do_stop, "stop")
    if record_of(lane) is not None or lane.ask() is not None:
        yield Violation("stuck", "stop does not stop")


def again_gc(lane: Lane) -> Iterator[Violation]:
    """It works, nothing is left to collect, and the artifact can be restored."""
    yield from _runs(lane, verbs.do_gc, "gc")
    for name in ("staging", "quarantine"):
        for path in (lane.state / name).iterdir():
            yield Violation("leftover", f"{name}/{path.name} after gc")
    for digit in "cdef":
        for path in lane.state.rglob(f"{digit * 64}*"):
            yield Violation("leftover", f"{path.relative_to(lane.state)} after gc")
    yield from again_restore(lane)


def again_delete(lane: Lane) -> Iterator[Violation]:
    """It works unless the descriptor is gone; then nothing of the artifact is there. Nobody deletes what is in use."""
    if record_of(lane) is not None:
        yield from _runs(lane, verbs.do_stop, "stop")
    if lane.artifact.exists():
        yield from _runs(lane, verbs.do_delete, "delete")
    yield from _runs(lane, verbs.do_gc, "gc")
    for name in ("artifacts", "capsules", "model-payloads/sha256"):
        for path in (lane.state / name).iterdir():
            yield Violation("leftover", f"{name}/{path.name} after delete")


def again_verify(lane: Lane) -> Iterator[Violation]:
    """It works and finds nothing wrong."""
    yield from _verified(lane, verbs.do_verify)


def again_explain(lane: Lane) -> Iterator[Violation]:
    """It works and every gate is open."""
    outcome = lane.run(verbs.do_explain)
    if outcome.status != "done" or outcome.result["problems"]:
        yield Violation("stuck", f"explain: {outcome.reason} {outcome.result}")


def again_status(lane: Lane) -> Iterator[Violation]:
    """It works."""
    yield from _runs(lane, verbs.do_status, "status")
    yield from again_restore(lane)


def _runs(lane: Lane, verb: Verb, what: str) -> Iterator[Violation]:
    outcome = lane.run(verb)
    if outcome.status != "done":
        yield Violation("stuck", f"{what}, run again: {outcome.status}: {outcome.reason}")


def _serves(lane: Lane) -> Iterator[Violation]:
    if not is_serving(lane):
        yield Violation("stuck", "the service is not there after a rerun that succeeded")


def _verified(lane: Lane, verb: Verb) -> Iterator[Violation]:
    outcome = lane.run(verb)
    if outcome.status != "done" or outcome.result["problems"]:
        yield Violation("damage", f"verify: {outcome.reason} {outcome.result.get('problems')}")


def _state(lane: Lane) -> str | None:
    outcome = lane.run(verbs.do_status)
    return outcome.result.get("state") if outcome.status == "done" else None


def _lives(lane: Lane) -> Iterator[Violation]:
    """A service that the fault took down is restored first: nobody can put to sleep what is not there.

    A unit ends soon after its engine, and until then a person who looks sees a worker that does not answer.
    """
    init = newest_init()
    workers = lane.run(verbs.do_status).result.get("workers", {})
    if init is not None and any(isinstance(one, str) for one in workers.values()):
        wait_gone(init, lane.patience_s)
    if _state(lane) not in ("ready", "asleep", "warm"):
        yield from _runs(lane, verbs.do_restore, "restore")
