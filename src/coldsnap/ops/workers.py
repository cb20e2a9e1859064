"""The controller's side of a started unit's workers: one client per worker, each verb asked of all at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pydantic import BaseModel

from coldsnap.capsule.driver import RunningUnit
from coldsnap.core.messages import Verb, WorkerStatus, worker_socket_name
from coldsnap.engines.control import ControlClient
from coldsnap.errors import EngineError, PeerError
from coldsnap.hosts import Host, together

__all__ = ["LOG_LINES", "LiveWorker", "ask_all", "engine_ended", "wait_until_loaded"]

R = TypeVar("R", bound=BaseModel)

LOG_LINES = 20
"""How much of a log's end an error tells."""
_BARRIER_SLACK_S = 5.0


@dataclass(frozen=True, kw_only=True)
class LiveWorker:
    """A worker of a running unit, and the way to talk to it."""

    worker: str
    unit: RunningUnit
    host: Host

    @property
    def client(self) -> ControlClient:
        """A client of the worker's private socket; it holds no connection between calls."""
        return ControlClient(self.unit.socket_path(worker_socket_name(self.worker)))

    def call(
        self,
        verb: Verb,
        body: BaseModel | None,
        reply: type[R],
        *,
        deadline_s: float,
        cancelled: Callable[[], bool] | None = None,
    ) -> R:
        """One request, one answer. Raises what the worker raised; a process that ended is told from one that failed."""
        return self._telling_death(
            verb.value,
            lambda: self.client.call(verb, body, reply=reply, deadline_s=deadline_s, cancelled=cancelled),
        )

    def wait_loaded(self, *, deadline_s: float, cancelled: Callable[[], bool]) -> WorkerStatus:
        """Wait until the model is loaded. Raises the engine's own error, or EngineError when its process ended."""

        def alive() -> bool:
            return self.unit.alive() and not cancelled()

        return self._telling_death("loading", lambda: self.client.wait_loaded(deadline_s=deadline_s, alive=alive))

    def _telling_death(self, during: str, act: Callable[[], R]) -> R:
        try:
            return act()
        except PeerError as error:
            lines = self.unit.log_tail(LOG_LINES)
            if self.unit.alive():
                error.facts.setdefault("log", list(lines))
                raise
            raise engine_ended(f"the engine process of {self.worker}", during, lines, worker=self.worker) from error


def engine_ended(who: str, during: str, lines: Sequence[str], **facts: object) -> EngineError:
    """The error for a process that ended by itself; ``lines`` are the end of its log."""
    last = f": {lines[-1].strip()}" if lines else ""
    return EngineError(
        f"{who} ended during {during}{last}",
        cure="read the log lines below; the engine itself gave up",
        facts={**facts, "log": list(lines)},
    )


def ask_all(
    workers: Sequence[LiveWorker],
    verb: Verb,
    body: Mapping[str, BaseModel] | BaseModel | None,
    reply: type[R],
    *,
    deadline_s: float,
) -> dict[str, R]:
    """The same verb to every worker at the same time; a barrier. A mapping gives each worker its own body."""

    def step(live: LiveWorker, cancel: threading.Event) -> R:
        mine = body[live.worker] if isinstance(body, Mapping) else body
        return live.call(verb, mine, reply, deadline_s=deadline_s, cancelled=cancel.is_set)

    steps = {live.worker: (live.host, partial(step, live)) for live in workers}
    return together(verb.value, steps, deadline_s=deadline_s + _BARRIER_SLACK_S)


def wait_until_loaded(workers: Sequence[LiveWorker], *, deadline_s: float) -> dict[str, WorkerStatus]:
    """Wait until every engine has loaded its model; the first that fails or ends stops the wait for all."""

    def step(live: LiveWorker, cancel: threading.Event) -> WorkerStatus:
        return live.wait_loaded(deadline_s=deadline_s, cancelled=cancel.is_set)

    steps = {live.worker: (live.host, partial(step, live)) for live in workers}
    return together("loading", steps, deadline_s=deadline_s + _BARRIER_SLACK_S)
