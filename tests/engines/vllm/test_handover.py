"""Two threads and one model: who waits for whom, and how both hear of a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from coldsnap.engines.observer import Observer
from coldsnap.engines.vllm.handover import Handover
from coldsnap.engines.vllm.loading import Load
from coldsnap.errors import ColdsnapError, DeadlineExceeded, EngineError, InternalError, UserError

LONG_S = 60.0


def a_load() -> Load:
    return Load(observer=Observer(), memory=None, files=())  # type: ignore[arg-type]


class Beside:
    """A call on a thread of its own, and what came of it."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act
        self.result: object = None
        self.error: ColdsnapError | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._act()
        except ColdsnapError as error:
            self.error = error

    def done(self) -> Beside:
        self._thread.join(LONG_S)
        assert not self._thread.is_alive()
        return self

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()


def test_what_is_offered_is_taken_whoever_comes_first() -> None:
    for taker_first in (True, False):
        handover, load = Handover(), a_load()
        if taker_first:
            taking = Beside(lambda handover=handover: handover.take(deadline_s=LONG_S))  # type: ignore[misc]
            handover.offer(load)
        else:
            handover.offer(load)
            taking = Beside(lambda handover=handover: handover.take(deadline_s=LONG_S))  # type: ignore[misc]
        assert taking.done().result is load


def test_each_side_goes_on_when_the_other_says_so() -> None:
    handover = Handover()
    order: list[str] = []

    def vllm() -> None:
        handover.take(deadline_s=LONG_S)
        order.append("built")
        handover.laid_out()
        handover.wait_go_on(deadline_s=LONG_S)
        order.append("profiled")

    beside = Beside(vllm)
    handover.offer(a_load())
    handover.wait_laid_out(deadline_s=LONG_S)
    order.append("filled")
    assert beside.waits
    handover.go_on()
    handover.go_on()
    beside.done()
    assert order == ["built", "filled", "profiled"]


@pytest.mark.parametrize("where", ["take", "wait_laid_out", "wait_go_on"])
def test_a_failure_ends_every_wait_and_the_first_one_counts(where: str) -> None:
    handover, error = Handover(), UserError("no such file")
    waiting = Beside(lambda: getattr(handover, where)(deadline_s=LONG_S))
    handover.fail(error)
    handover.fail(EngineError("and then it died"))
    assert waiting.done().error is error
    with pytest.raises(UserError, match="no such file"):
        handover.offer(a_load())
    for say in (handover.laid_out, handover.go_on):
        with pytest.raises(UserError, match="no such file"):
            say()


@pytest.mark.parametrize("where", ["take", "wait_laid_out", "wait_go_on"])
def test_nobody_waits_for_ever(where: str) -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        getattr(Handover(), where)(deadline_s=0.0)
    assert caught.value.facts == {"phase": "load", "deadline_s": 0.0}


def test_one_process_has_one_model() -> None:
    handover = Handover()
    handover.offer(a_load())
    with pytest.raises(InternalError, match="second model"):
        handover.offer(a_load())
    handover.take(deadline_s=LONG_S)
    with pytest.raises(UserError, match="speculative"):
        handover.take(deadline_s=LONG_S)
