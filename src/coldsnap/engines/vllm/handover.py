"""A model on its way between two threads of an engine process: ours, which wants it, and vLLM's, which makes it.

vLLM's main thread goes through its own start and comes to our loader in the middle of it. Our control thread is told
by a controller, or by the settings, what is to happen. They meet here:

    control thread                    vLLM's main thread, in the loader
    offer(load)            ---->      take() -> load
    wait_laid_out()        <----      laid_out()        every tensor is where it stays
    (fills the bytes)
    go_on()                ---->      wait_go_on()      goes on to profiling and graphs; of a build only

`fail`, by either, ends every wait of both with that error. Neither torch nor vllm is imported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from coldsnap.engines.vllm.loading import Load
from coldsnap.errors import ColdsnapError, DeadlineExceeded, InternalError, UserError

__all__ = ["Handover"]


class Handover:
    """One model, once. Any thread may call."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._load: Load | None = None
        self._was_taken = False
        self._is_laid_out = False
        self._may_go_on = False
        self._error: ColdsnapError | None = None

    def offer(self, load: Load) -> None:
        """Here is the model that is wanted. Raises InternalError for a second one, and what `fail` was given."""
        with self._changed:
            self._check()
            if self._load is not None:
                raise InternalError("a second model was offered to one engine process")
            self._load = load
            self._changed.notify_all()

    def take(self, *, deadline_s: float) -> Load:
        """Wait for the model. Raises UserError when it was taken before, DeadlineExceeded, what `fail` was given."""
        with self._changed:
            if self._was_taken:
                raise UserError(
                    "vLLM loads a second model in this process, and only one can be captured",
                    cure="serve without speculative decoding and other options that need a model of their own",
                )
            self._was_taken = True
            self._wait(lambda: self._load is not None, "to be told what to load", deadline_s)
            if self._load is None:
                raise InternalError("there is no model after it was waited for")
            return self._load

    def laid_out(self) -> None:
        """Every tensor is where it stays. Raises what `fail` was given."""
        self._set("_is_laid_out")

    def wait_laid_out(self, *, deadline_s: float) -> None:
        """Wait for that. Raises DeadlineExceeded, and what `fail` was given."""
        with self._changed:
            self._wait(lambda: self._is_laid_out, "for the model's layout", deadline_s)

    def go_on(self) -> None:
        """The bytes are there. Idempotent. Raises what `fail` was given."""
        self._set("_may_go_on")

    def wait_go_on(self, *, deadline_s: float) -> None:
        """Wait for that. Raises DeadlineExceeded, and what `fail` was given."""
        with self._changed:
            self._wait(lambda: self._may_go_on, "for the model's bytes", deadline_s)

    def fail(self, error: ColdsnapError) -> None:
        """There will be no model. The first error counts."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    def _set(self, name: str) -> None:
        with self._changed:
            self._check()
            setattr(self, name, True)
            self._changed.notify_all()

    def _wait(self, come: Callable[[], bool], what: str, deadline_s: float) -> None:
        if not self._changed.wait_for(lambda: self._error is not None or come(), deadline_s):
            raise DeadlineExceeded(
                f"an engine process waited {deadline_s:g} s {what}",
                cure="look at the engine's log",
                facts={"phase": "load", "deadline_s": deadline_s},
            )
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
