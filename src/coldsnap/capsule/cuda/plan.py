"""In which order the CUDA state of many processes is taken off and put back. Pure: holders in, phases out.

Within a phase the processes are handled at the same time; a phase begins when the one before has ended for all.

    suspend     lock all | checkpoint all
    resume      restore all | unlock all
    bring back  restore those that are checkpointed | unlock all that are not running       (in reverse order)

The barrier between lock and checkpoint is not for tidiness: a rank that is locked no longer answers its peers, so
one that still computes would wait for it for ever. The one between restore and unlock is its mirror image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from coldsnap.capsule.cuda.api import ProcessState
from coldsnap.capsule.cuda.holders import Holder

__all__ = ["Phase", "Step", "bring_back_phases", "in_rank_order", "resume_phases", "suspend_phases"]


class Step(StrEnum):
    """One call about one process."""

    LOCK = "lock"
    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    UNLOCK = "unlock"


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """The same step for several processes."""

    step: Step
    holders: tuple[Holder, ...]


def in_rank_order(holders: Sequence[Holder], ranks: Mapping[tuple[str, int], int]) -> tuple[Holder, ...]:
    """Workers by global rank, then the others. ``ranks``: (unit, PID inside it) -> rank of the worker there."""
    last = len(ranks)

    def place(item: tuple[int, Holder]) -> tuple[int, int]:
        position, holder = item
        return ranks.get((holder.unit, holder.inside_pid), last), position

    return tuple(holder for _, holder in sorted(enumerate(holders), key=place))


def suspend_phases(holders: Sequence[Holder]) -> tuple[Phase, ...]:
    """How to take all of it off."""
    return _phases((Step.LOCK, holders), (Step.CHECKPOINT, holders))


def resume_phases(holders: Sequence[Holder]) -> tuple[Phase, ...]:
    """How to put all of it back."""
    return _phases((Step.RESTORE, holders), (Step.UNLOCK, holders))


def bring_back_phases(states: Mapping[Holder, ProcessState | None]) -> tuple[Phase, ...]:
    """What is left to do until all run again, from the state that each is in now; empty when there is nothing.

    A process that is gone, or that the driver gave up (``failed``), is nobody's to bring back.
    """
    backwards = list(reversed(tuple(states)))
    off = [holder for holder in backwards if states[holder] is ProcessState.CHECKPOINTED]
    held = [holder for holder in backwards if states[holder] in (ProcessState.CHECKPOINTED, ProcessState.LOCKED)]
    return _phases((Step.RESTORE, off), (Step.UNLOCK, held))


def _phases(*steps: tuple[Step, Sequence[Holder]]) -> tuple[Phase, ...]:
    return tuple(Phase(step=step, holders=tuple(holders)) for step, holders in steps if holders)
