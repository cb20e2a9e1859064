"""The order in which the CUDA state of several ranks is taken off and put back, and what a failure leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldsnap.capsule.cuda.api import ProcessState
from coldsnap.capsule.cuda.holders import Holder
from coldsnap.capsule.cuda.plan import (
    Step,
    bring_back_phases,
    in_rank_order,
    resume_phases,
    suspend_phases,
)
from coldsnap.capsule.cuda.suspend import Patience, bring_back, resume, suspend
from coldsnap.errors import CudaError, DeadlineExceeded, HelperLost, OperationInterrupted
from coldsnap.testing.cuda_checkpoint import FakeCheckpoints, FakeCudaProcess, fake_inventory

PATIENT = Patience()
RANKS = (1, 2, 8)


def holder(number: int, unit: str = "u0") -> Holder:
    return Holder(unit=unit, pid=100 + number, inside_pid=10 + number, command=f"worker {number}")


def world(num_ranks: int) -> tuple[FakeCheckpoints, tuple[Holder, ...]]:
    """One unit a rank."""
    holders = tuple(holder(number, f"u{number}") for number in range(num_ranks))
    device = fake_inventory().gpus[0].uuid
    return FakeCheckpoints({one.pid: FakeCudaProcess(device=device) for one in holders}), holders


def one_after_another(phase: str, acts: Sequence[tuple[str, Callable[[], None]]], *, deadline_s: float) -> None:
    """A barrier on one thread: every act is made, and the first failure raised."""
    assert acts
    assert deadline_s > 0
    failed: list[BaseException] = []
    for _, act in acts:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)
    if failed:
        raise failed[0]


def at_once(phase: str, acts: Sequence[tuple[str, Callable[[], None]]], *, deadline_s: float) -> None:
    """A barrier on threads."""
    failed: list[BaseException] = []

    def run(act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    threads = [threading.Thread(target=run, args=(act,)) for _, act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def steps(call: str, *numbers: int) -> list[tuple[str, str]]:
    return [(call, str(100 + number)) for number in numbers]


def states(api: FakeCheckpoints) -> set[ProcessState]:
    return {process.state for process in api.processes.values()}


# -- the plan ----------------------------------------------------------------------------------------------


def test_workers_come_in_rank_order_and_the_others_after_them() -> None:
    server, first, second = holder(0, "u0"), holder(1, "u0"), holder(2, "u1")
    ranks = {("u0", 11): 1, ("u1", 12): 0}
    assert in_rank_order([server, first, second], ranks) == (second, first, server)
    assert in_rank_order([server, first], {}) == (server, first)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_all_are_locked_before_any_is_checkpointed_and_restored_before_any_is_unlocked(num_ranks: int) -> None:
    _, holders = world(num_ranks)
    lock, checkpoint = suspend_phases(holders)
    assert (lock.step, lock.holders) == (Step.LOCK, holders)
    assert (checkpoint.step, checkpoint.holders) == (Step.CHECKPOINT, holders)
    restore, unlock = resume_phases(holders)
    assert (restore.step, restore.holders) == (Step.RESTORE, holders)
    assert (unlock.step, unlock.holders) == (Step.UNLOCK, holders)


@given(st.lists(st.sampled_from([*ProcessState, None]), max_size=8))
def test_bringing_back_touches_exactly_what_is_off_or_locked(found: list[ProcessState | None]) -> None:
    by_holder = {holder(number): state for number, state in enumerate(found)}
    phases = {phase.step: phase.holders for phase in bring_back_phases(by_holder)}
    off = [one for one, state in by_holder.items() if state is ProcessState.CHECKPOINTED]
    held = [one for one, state in by_holder.items() if state in (ProcessState.CHECKPOINTED, ProcessState.LOCKED)]
    assert phases == {step: tuple(reversed(ones)) for step, ones in ((Step.RESTORE, off), (Step.UNLOCK, held)) if ones}


# -- suspend and resume ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", RANKS)
def test_the_exact_calls_of_a_freeze_and_a_thaw(num_ranks: int) -> None:
    api, holders = world(num_ranks)
    numbers = range(num_ranks)
    seconds = suspend(api, holders, barrier=one_after_another, patience=PATIENT)
    assert list(seconds) == ["lock", "checkpoint"]
    assert api.log == steps("lock", *numbers) + steps("checkpoint", *numbers)
    assert states(api) == {ProcessState.CHECKPOINTED}
    api.log.clear()
    seconds = resume(api, holders, devices={}, barrier=one_after_another, patience=PATIENT)
    assert list(seconds) == ["restore", "unlock"]
    assert api.log == steps("restore", *numbers) + steps("unlock", *numbers)
    assert states(api) == {ProcessState.RUNNING}


@pytest.mark.parametrize("num_ranks", RANKS)
def test_the_phases_stay_apart_when_ranks_are_handled_at_once(num_ranks: int) -> None:
    api, holders = world(num_ranks)
    suspend(api, holders, barrier=at_once, patience=PATIENT)
    resume(api, holders, devices={}, barrier=at_once, patience=PATIENT)
    calls = [call for call, _ in api.log]
    assert calls == [call for call in ("lock", "checkpoint", "restore", "unlock") for _ in range(num_ranks)]


def test_each_unit_goes_to_its_own_devices() -> None:
    api, holders = world(2)
    old, new = (gpu.uuid for gpu in fake_inventory(2).gpus)
    suspend(api, holders, barrier=one_after_another, patience=PATIENT)
    resume(api, holders, devices={"u1": {old: new}}, barrier=one_after_another, patience=PATIENT)
    assert [api.processes[one.pid].device for one in holders] == [old, new]


# -- failures ----------------------------------------------------------------------------------------------


def test_a_rank_that_cannot_be_locked_leaves_all_running_and_restores_nothing() -> None:
    api, holders = world(8)
    api.fail_next("lock", 103, DeadlineExceeded("rank 3 does not come to rest", facts={"phase": "lock"}))
    with pytest.raises(DeadlineExceeded) as caught:
        suspend(api, holders, barrier=one_after_another, patience=PATIENT)
    assert (caught.value.facts["unit"], caught.value.facts["command"]) == ("u3", "worker 3")
    locks, unlocks = api.log[:8], api.log[8:]
    assert locks == steps("lock", *range(8))
    assert unlocks == steps("unlock", 7, 6, 5, 4, 2, 1, 0), "in reverse order, and only those that were locked"
    assert states(api) == {ProcessState.RUNNING}
    assert len(caught.value.__notes__) == 7


@pytest.mark.parametrize("failing", [0, 4, 7])
def test_a_rank_whose_checkpoint_fails_brings_all_back(failing: int) -> None:
    api, holders = world(8)
    api.refuse_next("checkpoint", 100 + failing)
    with pytest.raises(CudaError):
        suspend(api, holders, barrier=one_after_another, patience=PATIENT)
    back = api.log[16:]
    others = [number for number in reversed(range(8)) if number != failing]
    assert back == steps("restore", *others) + steps("unlock", *reversed(range(8)))
    assert states(api) == {ProcessState.RUNNING}


@pytest.mark.parametrize("carried_out", [False, True])
@pytest.mark.parametrize("call", ["lock", "checkpoint"])
def test_a_lost_helper_leaves_nobody_stopped_whatever_became_of_its_call(call: str, carried_out: bool) -> None:
    api, holders = world(2)
    api.fail_next(call, 101, HelperLost("killed", facts={"call": call}), carried_out=carried_out)
    with pytest.raises(HelperLost):
        suspend(api, holders, barrier=one_after_another, patience=PATIENT)
    assert states(api) == {ProcessState.RUNNING}


def test_an_interruption_brings_all_back_too() -> None:
    api, holders = world(2)
    api.fail_next("checkpoint", 100, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        suspend(api, holders, barrier=one_after_another, patience=PATIENT)
    assert states(api) == {ProcessState.RUNNING}


def test_bringing_back_goes_on_trying_after_failures_of_its_own() -> None:
    api, holders = world(2)
    suspend(api, holders, barrier=one_after_another, patience=PATIENT)
    api.fail_next("restore", 101, HelperLost("killed"), carried_out=False)
    api.fail_next("unlock", 100, HelperLost("killed"), carried_out=True)
    api.refuse_next("unlock", 101)
    said = bring_back(api, holders, barrier=one_after_another, patience=PATIENT)
    assert states(api) == {ProcessState.RUNNING}
    assert said
    assert not any("not brought back" in line for line in said)


def test_what_cannot_be_brought_back_is_said_and_the_others_are() -> None:
    api, holders = world(3)
    suspend(api, holders, barrier=one_after_another, patience=PATIENT)
    api.processes[101].state = ProcessState.FAILED
    del api.processes[102]
    said = bring_back(api, holders, barrier=one_after_another, patience=PATIENT)
    assert api.processes[100].state is ProcessState.RUNNING
    left = [line for line in said if line.startswith("not brought back")]
    assert len(left) == 2
    assert "process 101 of unit u1 (worker 1) is failed" in left[0]
    assert "process 102 of unit u2 (worker 2) is gone" in left[1]


def test_bringing_back_gives_up_in_time() -> None:
    api, holders = world(1)
    suspend(api, holders, barrier=one_after_another, patience=PATIENT)
    for _ in range(100):
        api.refuse_next("restore", 100)
    said = bring_back(api, holders, barrier=one_after_another, patience=Patience(bring_back_s=0.5))
    (line,) = said
    assert line.startswith("not brought back: process 100 of unit u0 (worker 0) is checkpointed: ")
    assert line.endswith("restore of process 100 failed: the driver says no")


def test_nothing_to_suspend_is_nothing_to_do() -> None:
    api = FakeCheckpoints()
    assert suspend(api, (), barrier=one_after_another, patience=PATIENT) == {}
    assert bring_back(api, (), barrier=one_after_another, patience=PATIENT) == ()
    assert api.log == []


def test_the_first_error_stays_the_first() -> None:
    api, holders = world(1)
    api.fail_next("checkpoint", 100, OperationInterrupted("stop"))
    api.refuse_next("unlock", 100)
    with pytest.raises(OperationInterrupted, match="stop"):
        suspend(api, holders, barrier=one_after_another, patience=PATIENT)
    assert states(api) == {ProcessState.RUNNING}
