"""Whatever an operation acquired is let go in reverse, whatever happens meanwhile, and the error says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coldsnap.errors import PeerError
from coldsnap.ops.undo import UndoStack


def fail_after(**steps: Callable[[], object]) -> None:
    """An operation that acquired these things in this order, and failed."""
    with UndoStack() as undo:
        for name, step in steps.items():
            undo.push(f"undid {name}", step)
        raise PeerError("the cause")


def test_steps_run_in_reverse_and_become_notes() -> None:
    order: list[str] = []
    with pytest.raises(PeerError) as caught:
        fail_after(
            first=lambda: order.append("first"),
            second=lambda: order.append("second"),
            third=lambda: order.append("third"),
        )
    assert order == ["third", "second", "first"]
    assert caught.value.__notes__ == ["undid third", "undid second", "undid first"]
    assert caught.value.message == "the cause"


def test_committed_steps_do_not_run() -> None:
    order: list[str] = []
    with UndoStack() as undo:
        undo.push("undid it", lambda: order.append("undone"))
        undo.commit()
    assert order == []
    assert undo.undone == []


def test_leaving_without_commit_undoes_even_without_an_error() -> None:
    order: list[str] = []
    with UndoStack() as undo:
        undo.push("undid it", lambda: order.append("undone"))
    assert order == ["undone"]
    undo.run()
    assert order == ["undone"], "running again must not undo twice"


def test_a_failing_step_hides_neither_the_cause_nor_the_other_steps() -> None:
    order: list[str] = []

    def fail() -> None:
        raise OSError("the disk is gone")

    with pytest.raises(PeerError, match="the cause") as caught:
        fail_after(first=lambda: order.append("first"), second=fail, third=lambda: order.append("third"))
    assert order == ["third", "first"]
    assert caught.value.__notes__ == ["undid third", "undid first", "not done: undid second: the disk is gone"]


def test_one_interruption_does_not_stop_the_tidying() -> None:
    order: list[str] = []

    def interrupted_once() -> None:
        order.append("second")
        if order.count("second") == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        fail_after(first=lambda: order.append("first"), second=interrupted_once)
    assert order == ["second", "second", "first"], "the interrupted step is tried again, then the rest"
    assert isinstance(caught.value.__context__, PeerError), "the first error stays visible"
    assert caught.value.__context__.__notes__ == ["undid second", "undid first"]


def test_a_second_interruption_gives_up_that_step_alone() -> None:
    order: list[str] = []

    def interrupted() -> None:
        order.append("second")
        raise KeyboardInterrupt

    undo = UndoStack()
    undo.push("undid first", lambda: order.append("first"))
    undo.push("undid second", interrupted)
    with pytest.raises(KeyboardInterrupt):
        undo.run()
    assert order == ["second", "second", "first"]
    assert undo.undone == ["undid first"]
    assert undo.untidy == ["undid second: interrupted twice"]
