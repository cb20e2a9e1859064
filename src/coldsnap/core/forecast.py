"""How long a prepare and a restore will take: bytes to move, divided by rates that were measured on this machine.

No rate is assumed. Each comes from receipts of earlier operations here, or from a calibration, and says so; a step
without one has no time, and the total is then "at least". Pure.

Rates are of whole steps, with everything in them that goes with the bytes (checks, page faults, fsync), and for all
workers of the machine together, because that is how they run. The median is taken, so that one operation on a
busy machine does not spoil it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any

from coldsnap.core.receipt import Receipt, ReceiptState
from coldsnap.core.request import Operation
from coldsnap.core.spans import SpanStatus

__all__ = [
    "WAITS",
    "Forecast",
    "ForecastStep",
    "Phase",
    "Rate",
    "Sample",
    "Step",
    "Wait",
    "Work",
    "choose_rate",
    "choose_wait",
    "forecast",
    "samples_of",
    "waits_of",
]

WAITS = ("resume", "accept", "serve")
"""Phases of a restore whose time has little to do with bytes; ``resume`` is for drivers that keep CUDA state."""

_MAX_SAMPLES = 5
_COMPARABLE = 4
"""A sample of another artifact counts when it moved at least this part (a quarter) of the bytes in question."""


class Step(StrEnum):
    """What moves bytes."""

    UNPACK = "unpack"
    ADMIT = "admit"
    THAW = "thaw"
    FREEZE = "freeze"
    HYDRATE_CACHED = "hydrate from the page cache"
    HYDRATE_DISK = "hydrate from the disk"
    RECOVER = "hydrate from the checkpoint"


class Phase(StrEnum):
    """Which verb a step belongs to."""

    PREPARE = "prepare"
    RESTORE = "restore"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One step that was timed. ``artifact`` is the digest of what was restored, when that is known."""

    step: Step
    bytes: int
    seconds: float
    source: str
    artifact: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """A phase whose time does not depend on bytes, as it was once."""

    name: str
    seconds: float
    source: str
    artifact: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Bytes a second, and where that comes from."""

    bytes_per_s: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Bytes that a step must move, and why these."""

    phase: Phase
    step: Step
    bytes: int
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastStep:
    """One line of the forecast. ``seconds`` is None when no rate is known; ``bytes`` None when none are moved."""

    phase: Phase
    name: str
    bytes: int | None
    bytes_per_s: float | None
    seconds: float | None
    why: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """All steps, in the order they run."""

    steps: tuple[ForecastStep, ...]

    def bytes(self, phase: Phase) -> int:
        """What the phase moves."""
        return sum(step.bytes or 0 for step in self.steps if step.phase is phase)

    def seconds(self, phase: Phase) -> float:
        """What is known of the phase's time."""
        return sum(step.seconds or 0.0 for step in self.steps if step.phase is phase)

    def is_whole(self, phase: Phase) -> bool:
        """Whether every step's time is known; else ``seconds`` is a lower bound."""
        return all(step.seconds is not None for step in self.steps if step.phase is phase)


def forecast(work: Iterable[Work], rates: Mapping[Step, Rate], waits: Iterable[tuple[str, Wait | None]]) -> Forecast:
    """Put bytes, rates and waits together. ``waits`` are phases of the restore beside its bytes, by name."""
    steps = []
    for one in work:
        rate = rates.get(one.step)
        seconds = 0.0 if not one.bytes else one.bytes / rate.bytes_per_s if rate is not None else None
        steps.append(
            ForecastStep(
                phase=one.phase,
                name=one.step.value,
                bytes=one.bytes,
                bytes_per_s=rate.bytes_per_s if rate is not None and one.bytes else None,
                seconds=seconds,
                why=one.why,
                source="" if not one.bytes else rate.source if rate is not None else "no rate is known here",
            )
        )
    for name, wait in waits:
        steps.append(
            ForecastStep(
                phase=Phase.RESTORE,
                name=name,
                bytes=None,
                bytes_per_s=None,
                seconds=wait.seconds if wait is not None else None,
                why="",
                source=wait.source if wait is not None else "never timed here",
            )
        )
    return Forecast(steps=tuple(steps))


def choose_rate(step: Step, samples: Sequence[Sample], *, artifact: str, wanted_bytes: int) -> Rate | None:
    """The median rate of the newest samples of this artifact, else of comparable ones; None when there are none.

    ``samples`` are the newest first.
    """
    mine = [one for one in samples if one.step is step and one.artifact == artifact][:_MAX_SAMPLES]
    others = [one for one in samples if one.step is step and one.bytes * _COMPARABLE >= wanted_bytes][:_MAX_SAMPLES]
    chosen, of = (mine, "of this artifact") if mine else (others, "of other artifacts")
    if not chosen:
        return None
    noun = "receipt" if len(chosen) == 1 else f"median of {len(chosen)} receipts"
    return Rate(
        bytes_per_s=median(one.bytes / one.seconds for one in chosen), source=f"{noun} {of}, newest {chosen[0].source}"
    )


def choose_wait(name: str, waits: Sequence[Wait], *, artifact: str) -> Wait | None:
    """The median of a phase over the newest receipts of this artifact; other artifacts say nothing about it."""
    chosen = [one for one in waits if one.name == name and one.artifact == artifact][:_MAX_SAMPLES]
    if not chosen:
        return None
    noun = "receipt" if len(chosen) == 1 else f"median of {len(chosen)} receipts"
    return Wait(
        name=name,
        seconds=median(one.seconds for one in chosen),
        source=f"{noun} of this artifact, newest {chosen[0].source}",
    )


def samples_of(receipt: Receipt) -> Iterator[Sample]:
    """What a receipt says about rates. Spans that moved nothing, or do not say how much, say nothing."""
    if receipt.state is not ReceiptState.SUCCEEDED or receipt.timing is None:
        return
    artifact = _artifact(receipt)
    steps = {"unpack": Step.UNPACK, "admit": Step.ADMIT, "thaw": Step.THAW}
    moved: dict[Step, tuple[int, float]] = {}
    for span in receipt.timing.spans:
        size = span.attributes.get("bytes")
        if span.status is SpanStatus.OK and span.name in steps and type(size) is int:
            before = moved.get(steps[span.name], (0, 0.0))
            moved[steps[span.name]] = (before[0] + size, before[1] + span.duration_seconds)
    seconds = _seconds(receipt)
    if receipt.operation is Operation.CAPTURE:
        moved[Step.FREEZE] = (_count(receipt.result.get("image_bytes")), seconds.get("freeze", 0.0))
    if (hydrated := _hydrated(receipt)) is not None:
        moved[hydrated[0]] = (hydrated[1], seconds.get("hydrate", 0.0))
    for step, (size, took) in moved.items():
        if size > 0 and took > 0:
            yield Sample(step=step, bytes=size, seconds=took, source=receipt.operation_id, artifact=artifact)


def waits_of(receipt: Receipt) -> Iterator[Wait]:
    """Phases of a restore whose time has nothing to do with bytes."""
    if receipt.state is not ReceiptState.SUCCEEDED or receipt.operation is not Operation.RESTORE:
        return
    seconds = _seconds(receipt)
    for name in WAITS:
        if name in seconds:
            yield Wait(name=name, seconds=seconds[name], source=receipt.operation_id, artifact=_artifact(receipt))


def _artifact(receipt: Receipt) -> str | None:
    spans = receipt.timing.spans if receipt.timing is not None else ()
    found = [span.attributes["artifact"] for span in spans if "artifact" in span.attributes]
    if not found:
        found = [receipt.result.get("artifact_digest")]
    return str(found[-1]) if found[-1] is not None else None


def _hydrated(receipt: Receipt) -> tuple[Step, int] | None:
    workers = receipt.result.get("workers")
    if not isinstance(workers, Mapping) or not workers:
        return None
    reports = [one for one in workers.values() if isinstance(one, Mapping)]
    size = sum(_count(one.get("model_bytes")) + _count(one.get("residual_bytes")) for one in reports)
    if any(one.get("source") == "recovery" for one in reports):
        return Step.RECOVER, size
    paths = [str(path) for one in reports for path in _values(one.get("transfer_path"))]
    return (Step.HYDRATE_DISK if any(path.startswith("direct") for path in paths) else Step.HYDRATE_CACHED), size


def _values(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else ()


def _count(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0


def _seconds(receipt: Receipt) -> dict[str, float]:
    found = receipt.result.get("seconds")
    items = found.items() if isinstance(found, Mapping) else ()
    return {name: float(value) for name, value in items if isinstance(value, int | float) and value >= 0}
