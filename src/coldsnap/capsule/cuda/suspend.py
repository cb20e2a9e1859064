"""Take CUDA state off the devices and put it back, for all processes of all units together.

``suspend`` either ends with every holder checkpointed, or raises with every holder running again, as far as anybody
can bring it there: what cannot be brought back is a note on the error. ``resume`` is for restored trees and does not
try to save one that fails: the caller ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from coldsnap.capsule.cuda.api import CheckpointApi, ProcessState
from coldsnap.capsule.cuda.holders import Holder
from coldsnap.capsule.cuda.plan import Phase, Step, bring_back_phases, resume_phases, suspend_phases
from coldsnap.errors import ColdsnapError

__all__ = ["Barrier", "Patience", "bring_back", "resume", "suspend"]

_PAUSE_S = 0.1


class Barrier(Protocol):
    """Does several things about units at the same time; returns, or raises the first failure, once all have ended."""

    def __call__(self, phase: str, acts: Sequence[tuple[str, Callable[[], None]]], *, deadline_s: float) -> None:
        """``acts``: (unit, what to do). Every act ends by itself within ``deadline_s``."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long one call about one process may take, and how long bringing all back may, in seconds."""

    lock_s: float = 30.0
    checkpoint_s: float = 600.0
    restore_s: float = 600.0
    unlock_s: float = 30.0
    bring_back_s: float = 120.0

    def of(self, step: Step) -> float:
        """For one call of a step."""
        by_step = {
            Step.LOCK: self.lock_s,
            Step.CHECKPOINT: self.checkpoint_s,
            Step.RESTORE: self.restore_s,
            Step.UNLOCK: self.unlock_s,
        }
        return by_step[step]


def suspend(api: CheckpointApi, holders: Sequence[Holder], *, barrier: Barrier, patience: Patience) -> dict[str, float]:
    """Lock all, then checkpoint all; returns the seconds of each phase.

    Raises DeadlineExceeded, CudaError, HelperLost; the holders run again then (see the module's head).
    """
    try:
        return _run(api, suspend_phases(holders), barrier, patience, devices={})
    except BaseException as error:
        for line in bring_back(api, holders, barrier=barrier, patience=patience):
            error.add_note(line)
        raise


def resume(
    api: CheckpointApi,
    holders: Sequence[Holder],
    *,
    devices: Mapping[str, Mapping[str, str]],
    barrier: Barrier,
    patience: Patience,
) -> dict[str, float]:
    """Restore all, then unlock all; returns the seconds of each phase.

    ``devices``: unit -> the UUID of each device it was captured on -> the one it has here; nothing for equal ones.
    Raises CudaError, HelperLost.
    """
    return _run(api, resume_phases(holders), barrier, patience, devices=devices)


def bring_back(
    api: CheckpointApi, holders: Sequence[Holder], *, barrier: Barrier, patience: Patience
) -> tuple[str, ...]:
    """Let every holder run again on the devices it was on, whatever state it is in; says what was done, or could not.

    Never raises an error of ours: it goes on trying until all run or its time is over. A call that was lost with its
    helper may be carried out late, so all must be seen running twice.
    """
    ends = time.monotonic() + patience.bring_back_s
    done: list[str] = []
    why: dict[Holder, str] = {}
    seen_running = False
    while True:
        trouble: dict[Holder, str] = {}
        states: dict[Holder, ProcessState | None] = {}
        for holder in holders:
            try:
                states[holder] = api.state(holder.pid)
            except ColdsnapError as error:
                trouble[holder] = error.message
        phases = bring_back_phases(states)
        if not phases and not trouble:
            if not seen_running:
                seen_running = True
                time.sleep(_PAUSE_S)
                continue
            lost = [holder for holder in holders if states[holder] is not ProcessState.RUNNING]
            return (*dict.fromkeys(done), *(f"not brought back: {one} is {states[one] or 'gone'}" for one in lost))
        if time.monotonic() > ends:
            left = [holder for holder in holders if states.get(holder) is not ProcessState.RUNNING]
            return (
                *dict.fromkeys(done),
                *(f"not brought back: {one} is {states.get(one) or 'gone'}: {why.get(one, 'no time')}" for one in left),
            )
        seen_running = False
        for phase in phases:
            done += _try(api, phase, barrier, patience, trouble)
        if trouble:
            why.update(trouble)
            time.sleep(_PAUSE_S)


def _try(
    api: CheckpointApi, phase: Phase, barrier: Barrier, patience: Patience, trouble: dict[Holder, str]
) -> list[str]:
    """One phase of bringing back; a process that fails keeps no other from it."""
    done: list[str] = []

    def act(holder: Holder) -> None:
        try:
            _call(api, phase.step, holder, patience, devices={})
        except ColdsnapError as error:
            trouble[holder] = error.message
        else:
            done.append(f"{'restored' if phase.step is Step.RESTORE else 'unlocked'} the CUDA state of {holder}")

    acts = [(holder.unit, partial(act, holder)) for holder in phase.holders if holder not in trouble]
    if acts:
        barrier(f"bring back ({phase.step})", acts, deadline_s=patience.of(phase.step) + patience.bring_back_s)
    return done


def _run(
    api: CheckpointApi,
    phases: Sequence[Phase],
    barrier: Barrier,
    patience: Patience,
    *,
    devices: Mapping[str, Mapping[str, str]],
) -> dict[str, float]:
    seconds = {}
    for phase in phases:
        began = time.monotonic()
        acts = [
            (one.unit, partial(_call, api, phase.step, one, patience, devices=devices.get(one.unit, {})))
            for one in phase.holders
        ]
        barrier(f"cuda {phase.step}", acts, deadline_s=patience.of(phase.step) + patience.bring_back_s)
        seconds[phase.step.value] = time.monotonic() - began
    return seconds


def _call(api: CheckpointApi, step: Step, holder: Holder, patience: Patience, *, devices: Mapping[str, str]) -> None:
    try:
        if step is Step.LOCK:
            api.lock(holder.pid, deadline_s=patience.lock_s)
        elif step is Step.CHECKPOINT:
            api.checkpoint(holder.pid, deadline_s=patience.checkpoint_s)
        elif step is Step.RESTORE:
            api.restore(holder.pid, devices=devices, deadline_s=patience.restore_s)
        else:
            api.unlock(holder.pid, deadline_s=patience.unlock_s)
    except ColdsnapError as error:
        error.facts.update(unit=holder.unit, command=holder.command)
        raise
