"""The contract of ``capsule/cuda/api.py`` as tests that every ``CheckpointApi`` runs.

A test module subclasses ``CheckpointApiContract`` and says, in a fixture ``ground``, how to make processes with and
without CUDA state, and how to let a call about one go wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import pytest

from coldsnap.capsule.cuda.api import CheckpointApi, ProcessState
from coldsnap.errors import CudaError, DeadlineExceeded, HelperLost

__all__ = ["CheckpointApiContract", "Ground"]

_DEADLINE_S = 60.0


class Ground(Protocol):
    """What the contract's tests stand on."""

    @property
    def api(self) -> CheckpointApi:
        """The api under test."""

    def cuda_process(self) -> int:
        """A running process with CUDA state; its PID."""

    def plain_process(self) -> int:
        """One without."""

    def bytes_of(self, pid: int) -> bytes | None:
        """What the process has in its device memory, None while it has none on a device."""

    def device_of(self, pid: int) -> str:
        """The UUID of the device it is on, or was on when it was checkpointed."""

    def other_device(self) -> str:
        """The UUID of another device."""

    def fail_next(self, call: str, pid: int, how: str) -> None:
        """``how``: fail, busy, hang, die or die-after, as ``coldsnap.testing.gpu.GpuRack`` has it."""


class CheckpointApiContract:
    """The promises of ``api.py``, one test each."""

    @pytest.fixture
    def ground(self) -> Ground:
        """Provided by the subclass."""
        raise NotImplementedError

    def _take_off(self, api: CheckpointApi, pid: int) -> None:
        api.lock(pid, deadline_s=_DEADLINE_S)
        api.checkpoint(pid, deadline_s=_DEADLINE_S)

    def _put_back(self, api: CheckpointApi, pid: int) -> None:
        api.restore(pid, devices={}, deadline_s=_DEADLINE_S)
        api.unlock(pid, deadline_s=_DEADLINE_S)

    def test_a_round_trip_changes_nothing(self, ground: Ground) -> None:
        pid = ground.cuda_process()
        before = ground.bytes_of(pid)
        assert before
        states = [ground.api.state(pid)]
        ground.api.lock(pid, deadline_s=_DEADLINE_S)
        states.append(ground.api.state(pid))
        ground.api.checkpoint(pid, deadline_s=_DEADLINE_S)
        states.append(ground.api.state(pid))
        assert ground.bytes_of(pid) is None
        ground.api.restore(pid, devices={}, deadline_s=_DEADLINE_S)
        states.append(ground.api.state(pid))
        ground.api.unlock(pid, deadline_s=_DEADLINE_S)
        states.append(ground.api.state(pid))
        assert states == ["running", "locked", "checkpointed", "locked", "running"]
        assert ground.bytes_of(pid) == before

    def test_a_process_without_cuda_is_not_known(self, ground: Ground) -> None:
        pid = ground.plain_process()
        assert ground.api.state(pid) is None
        with pytest.raises(CudaError) as caught:
            ground.api.lock(pid, deadline_s=_DEADLINE_S)
        assert caught.value.facts["pid"] == pid

    def test_calls_out_of_order_change_nothing(self, ground: Ground) -> None:
        pid = ground.cuda_process()
        acts: tuple[Callable[[], None], ...] = (
            lambda: ground.api.checkpoint(pid, deadline_s=_DEADLINE_S),
            lambda: ground.api.restore(pid, devices={}, deadline_s=_DEADLINE_S),
            lambda: ground.api.unlock(pid, deadline_s=_DEADLINE_S),
        )
        for act in acts:
            with pytest.raises(CudaError):
                act()
            assert ground.api.state(pid) is ProcessState.RUNNING
        self._take_off(ground.api, pid)
        with pytest.raises(CudaError):
            ground.api.unlock(pid, deadline_s=_DEADLINE_S)
        assert ground.api.state(pid) is ProcessState.CHECKPOINTED
        self._put_back(ground.api, pid)

    def test_a_lock_that_takes_too_long_leaves_the_process_running(self, ground: Ground) -> None:
        pid = ground.cuda_process()
        ground.fail_next("lock", pid, "busy")
        with pytest.raises(DeadlineExceeded) as caught:
            ground.api.lock(pid, deadline_s=0.3)
        assert caught.value.facts["phase"] == "lock"
        assert ground.api.state(pid) is ProcessState.RUNNING
        assert ground.bytes_of(pid)

    def test_it_comes_back_on_another_device(self, ground: Ground) -> None:
        pid = ground.cuda_process()
        before, old, new = ground.bytes_of(pid), ground.device_of(pid), ground.other_device()
        self._take_off(ground.api, pid)
        ground.api.restore(pid, devices={old: new}, deadline_s=_DEADLINE_S)
        ground.api.unlock(pid, deadline_s=_DEADLINE_S)
        assert (ground.device_of(pid), ground.bytes_of(pid)) == (new, before)

    def test_a_refused_call_leaves_the_state_as_it_was(self, ground: Ground) -> None:
        pid = ground.cuda_process()
        ground.api.lock(pid, deadline_s=_DEADLINE_S)
        ground.fail_next("checkpoint", pid, "fail")
        with pytest.raises(CudaError) as caught:
            ground.api.checkpoint(pid, deadline_s=_DEADLINE_S)
        assert caught.value.facts["code"]
        assert ground.api.state(pid) is ProcessState.LOCKED
        ground.api.unlock(pid, deadline_s=_DEADLINE_S)

    @pytest.mark.parametrize("how", ["die", "die-after", "hang"])
    def test_a_lost_helper_is_an_error_of_its_own_and_the_next_call_works(self, ground: Ground, how: str) -> None:
        pid = ground.cuda_process()
        ground.api.lock(pid, deadline_s=_DEADLINE_S)
        ground.fail_next("checkpoint", pid, how)
        with pytest.raises(HelperLost) as caught:
            ground.api.checkpoint(pid, deadline_s=1.0 if how == "hang" else _DEADLINE_S)
        assert (caught.value.facts["call"], caught.value.facts["pid"]) == ("checkpoint", pid)
        done = how == "die-after"
        assert ground.api.state(pid) is (ProcessState.CHECKPOINTED if done else ProcessState.LOCKED)
        if done:
            ground.api.restore(pid, devices={}, deadline_s=_DEADLINE_S)
        ground.api.unlock(pid, deadline_s=_DEADLINE_S)
        assert ground.api.state(pid) is ProcessState.RUNNING

    def test_a_closed_api_can_be_used_again(self, ground: Ground) -> None:
        pid = ground.cuda_process()
        ground.api.start()
        ground.api.close()
        ground.api.close()
        assert ground.api.state(pid) is ProcessState.RUNNING

    def test_many_threads_may_call(self, ground: Ground) -> None:
        pids = [ground.cuda_process() for _ in range(4)]
        together = threading.Barrier(len(pids))
        failed: list[BaseException] = []

        def round_trip(pid: int) -> None:
            try:
                together.wait(_DEADLINE_S)
                self._take_off(ground.api, pid)
                together.wait(_DEADLINE_S)
                self._put_back(ground.api, pid)
            except BaseException as error:
                failed.append(error)
                raise

        threads = [threading.Thread(target=round_trip, args=(pid,)) for pid in pids]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        assert {ground.api.state(pid) for pid in pids} == {ProcessState.RUNNING}
