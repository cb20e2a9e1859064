"""When the one engine of several workers sleeps and resumes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldsnap.engines.vllm.quiet import QuietWorkers
from coldsnap.errors import EngineError

NAMES = ("w0", "w1", "w2")
ACTS = st.lists(st.tuples(st.sampled_from(["quiet", "resume"]), st.sampled_from(NAMES)), max_size=12)


def recorded() -> tuple[QuietWorkers, list[str]]:
    done: list[str] = []
    return QuietWorkers(lambda: done.append("sleep"), lambda: done.append("resume")), done


def test_the_first_puts_all_to_sleep_and_the_last_resumes_all() -> None:
    workers, done = recorded()
    for name in NAMES:
        workers.quiet(name)
        assert done == ["sleep"]
    for name in NAMES[:-1]:
        workers.resume(name)
        assert done == ["sleep"]
    assert workers.names == {"w2"}
    workers.resume("w2")
    assert (done, workers.names) == (["sleep", "resume"], frozenset())


@given(ACTS)
def test_the_engine_sleeps_exactly_while_a_worker_is_quiet(acts: list[tuple[str, str]]) -> None:
    workers, done = recorded()
    quiet: set[str] = set()
    for act, name in acts:
        getattr(workers, act)(name)
        (quiet.add if act == "quiet" else quiet.discard)(name)
        assert workers.names == quiet
        assert (done[-1:] == ["sleep"]) == bool(quiet)
    assert all(one != other for one, other in itertools.pairwise(done)), "twice the same"


def failing_once() -> Callable[[], None]:
    told: list[None] = []

    def act() -> None:
        told.append(None)
        if len(told) == 1:
            raise EngineError("no")

    return act


def test_a_sleep_that_fails_leaves_nobody_quiet_and_can_be_asked_for_again() -> None:
    workers = QuietWorkers(failing_once(), lambda: None)
    with pytest.raises(EngineError, match="no"):
        workers.quiet("w0")
    assert workers.names == frozenset()
    workers.quiet("w0")
    assert workers.names == {"w0"}


def test_a_resume_that_fails_leaves_the_last_worker_quiet_and_can_be_asked_for_again() -> None:
    workers = QuietWorkers(lambda: None, failing_once())
    workers.quiet("w0")
    workers.quiet("w1")
    workers.resume("w1")
    with pytest.raises(EngineError, match="no"):
        workers.resume("w0")
    assert workers.names == {"w0"}
    workers.resume("w0")
    assert workers.names == frozenset()
