"""What an operation acquired, let go in reverse unless the operation was committed.

    with UndoStack() as undo:
        unit = driver.launch(spec)
        undo.push("stopped unit u0", unit.kill)
        ...
        undo.commit()       # from here on the acquired things stay

Clean-up survives a second interruption, never hides the first error, and says what it did: the
descriptions of the steps that ran are attached to the error as notes and kept in ``undone``. A step that
fails is its own note ("done but not tidy") and does not stop the others.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

__all__ = ["UndoStack"]


class UndoStack:
    """See the module's head."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, Callable[[], object]]] = []
        self.undone: list[str] = []
        self.untidy: list[str] = []

    def push(self, description: str, undo: Callable[[], object]) -> None:
        """Remember ``undo``; ``description`` is what the user reads once it has run, in the past tense."""
        self._steps.append((description, undo))

    def commit(self) -> None:
        """Forget every step: what was acquired stays."""
        self._steps.clear()

    def run(self) -> None:
        """Undo everything now, in reverse. Idempotent."""
        interrupted: BaseException | None = None
        while self._steps:
            description, undo = self._steps[-1]
            try:
                undo()
                self.undone.append(description)
            except (KeyboardInterrupt, SystemExit) as error:
                if interrupted is None:  # finish tidying once; a second Ctrl-C in the same step gives it up
                    interrupted = error
                    continue
                self.untidy.append(f"{description}: interrupted twice")
            except Exception as error:  # noqa: BLE001 - a failing clean-up step must not stop the others
                self.untidy.append(f"not done: {description}: {error}")
            self._steps.pop()
        if interrupted is not None:
            raise interrupted

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.run()
            return
        try:
            self.run()
        finally:
            for line in (*self.undone, *self.untidy):
                error.add_note(line)
