"""Work shared by threads: progress, cancellation, and which of several errors is told."""

from __future__ import annotations

import os
import threading

import pytest

from coldsnap.errors import IntegrityError, OperationInterrupted
from coldsnap.store.meter import Meter, num_threads_or_cores, run_all


def meter(cancel: threading.Event | None = None) -> Meter:
    return Meter(None, cancel, undone="nothing was kept")


def test_results_come_in_the_order_of_the_tasks() -> None:
    second_ran = threading.Event()

    def first() -> int:
        second_ran.wait(60)
        return 1

    def second() -> int:
        second_ran.set()
        return 2

    assert run_all([first, second], num_threads=2, meter=meter()) == [1, 2]


def test_no_task_is_no_result() -> None:
    assert run_all([], num_threads=1, meter=meter()) == []


def test_the_first_error_stops_the_others_and_is_the_one_told() -> None:
    shared = meter()
    both = threading.Barrier(2, timeout=60)

    def fails() -> None:
        both.wait()
        raise IntegrityError("the real reason")

    def goes_on() -> None:
        both.wait()
        while True:
            shared.check()

    with pytest.raises(IntegrityError, match="the real reason"):
        run_all([goes_on, fails], num_threads=2, meter=shared)


def test_tasks_that_did_not_begin_never_do() -> None:
    ran: list[int] = []

    def fails() -> None:
        raise IntegrityError("first")

    with pytest.raises(IntegrityError):
        run_all([fails, *[lambda: ran.append(1)] * 1000], num_threads=1, meter=meter())
    assert len(ran) < 1000


def test_cancel_says_what_became_of_the_work() -> None:
    cancel = threading.Event()
    shared = meter(cancel)
    shared.check()
    cancel.set()
    with pytest.raises(OperationInterrupted, match="cancelled: nothing was kept"):
        run_all([shared.check], num_threads=1, meter=shared)


def test_progress_is_told_before_the_next_check() -> None:
    told: list[int] = []
    Meter(told.append, None, undone="").advance(5)
    assert told == [5]


def test_an_interrupt_while_waiting_stops_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = meter()
    started = threading.Event()

    def goes_on() -> None:
        started.set()
        while True:
            shared.check()

    def interrupted(*_: object, **__: object) -> object:
        started.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr("coldsnap.store.meter.wait", interrupted)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        run_all([goes_on], num_threads=1, meter=shared)
    assert threading.active_count() == before


def test_zero_threads_mean_one_per_usable_core() -> None:
    assert num_threads_or_cores(0) == len(os.sched_getaffinity(0))
    assert num_threads_or_cores(3) == 3
