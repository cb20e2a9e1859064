"""Signals wait for the end of the block, and nothing else changes."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from coldsnap.hosts.holding import signals_held_back


def _interrupted_twice(reached: list[str]) -> None:
    with signals_held_back():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("the end")


def _interrupted_and_failing() -> None:
    with signals_held_back():
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError("first")


def test_the_interrupt_comes_at_the_end_of_the_block() -> None:
    before = signal.getsignal(signal.SIGINT)
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        _interrupted_twice(reached)
    assert reached == ["the end"]
    assert signal.getsignal(signal.SIGINT) is before


def test_the_error_of_the_block_is_the_one_raised() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="first"):
        _interrupted_and_failing()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with signals_held_back():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_off_the_main_thread_it_does_nothing() -> None:
    handlers = []

    def work() -> None:
        with signals_held_back():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
