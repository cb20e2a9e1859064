"""The barrier waits for everyone, raises the cause, and leaves no step behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TypeVar

import pytest

from coldsnap.errors import DeadlineExceeded, EngineError, OperationInterrupted
from coldsnap.hosts import LocalHost, together
from coldsnap.hosts.base import Step

T = TypeVar("T")


@pytest.fixture
def host() -> Iterator[LocalHost]:
    host = LocalHost()
    yield host
    host.close()


def test_results_keep_the_order_of_the_steps(host: LocalHost) -> None:
    second_ran = threading.Event()

    def first(cancel: threading.Event) -> str:
        assert second_ran.wait(60)  # only passes when both run at the same time
        return "a"

    def second(cancel: threading.Event) -> str:
        second_ran.set()
        return "b"

    assert together("test", {"u0": (host, first), "u1": (host, second)}, deadline_s=60) == {"u0": "a", "u1": "b"}


def test_a_failure_stops_the_others_and_is_the_one_raised(host: LocalHost) -> None:
    ended = []

    def patient(cancel: threading.Event) -> None:
        assert cancel.wait(60)
        ended.append("patient")
        raise OperationInterrupted("stopped because another unit failed")

    def failing(cancel: threading.Event) -> None:
        raise EngineError("out of luck")

    with pytest.raises(EngineError, match="out of luck") as caught:
        together("test", {"u0": (host, patient), "u1": (host, failing)}, deadline_s=60)
    assert ended == ["patient"]
    assert any("u0" in note for note in caught.value.__notes__)


def test_a_deadline_names_the_phase_and_who_was_late(host: LocalHost) -> None:
    def late(cancel: threading.Event) -> None:
        cancel.wait(60)
        raise OperationInterrupted("told to stop")

    def quick(cancel: threading.Event) -> None:
        return None

    with pytest.raises(DeadlineExceeded, match=r"thaw did not end within 0.05 s for u1") as caught:
        together("thaw", {"u0": (host, quick), "u1": (host, late)}, deadline_s=0.05)
    assert caught.value.facts == {"phase": "thaw", "deadline_s": 0.05, "late": ["u1"]}


def test_a_late_step_that_failed_by_itself_is_the_cause(host: LocalHost) -> None:
    def late(cancel: threading.Event) -> None:
        cancel.wait(60)
        raise EngineError("broke while stopping")

    with pytest.raises(EngineError, match="broke while stopping"):
        together("thaw", {"u0": (host, late)}, deadline_s=0.05)


class InterruptedHost(LocalHost):
    """Ctrl-C comes while its steps are handed over."""

    def submit(self, step: Step[T], cancel: threading.Event) -> Future[T]:
        os.kill(os.getpid(), signal.SIGINT)
        return super().submit(step, cancel)


def test_an_interrupt_while_steps_are_handed_over_leaves_none_behind() -> None:
    ended = []

    def patient(cancel: threading.Event) -> None:
        assert cancel.wait(60)
        ended.append("patient")

    host = InterruptedHost()
    with pytest.raises(KeyboardInterrupt):
        together("thaw", {"u0": (host, patient), "u1": (host, patient)}, deadline_s=60)
    assert ended == ["patient", "patient"]
    host.close()


def test_the_steps_handed_over_are_stopped_when_a_later_one_cannot_be() -> None:
    ended = []

    def patient(cancel: threading.Event) -> None:
        assert cancel.wait(60)
        ended.append("patient")

    host, closed = LocalHost(), LocalHost()
    closed.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        together("thaw", {"u0": (host, patient), "u1": (closed, patient)}, deadline_s=60)
    assert ended == ["patient"]
    host.close()
