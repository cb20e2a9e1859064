"""The half of coldsnap that lives in a process with weights of vLLM's: made by our loader, found by it and the backend.

vLLM's main thread comes to our loader and asks what to load. The first time, that begins this half: a control thread
with the worker of `engines/` (an `InnerWorker`, or the `TemplateWorker` that becomes one), on a socket that the front
relays to. Then both threads meet in a `Handover`. Everything here belongs to one process: it is begun after the fork.

Imports neither torch nor vllm before it begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from coldsnap.core.messages import WorkerSettings, WorkerState
from coldsnap.engines.control import Call, ControlServer
from coldsnap.engines.inner import InnerWorker
from coldsnap.engines.template import TemplateWorker, make_worker
from coldsnap.engines.vllm.engine import Surroundings, VllmWorker
from coldsnap.engines.vllm.handover import Handover
from coldsnap.engines.vllm.link import FRONT_SOCKET, FrontClient, inner_socket_name
from coldsnap.engines.vllm.loading import Load, WeightMemory
from coldsnap.engines.vllm.records import run_folder, settings_of_rank
from coldsnap.engines.vllm.sleeping import BACKEND, put_in_charge
from coldsnap.errors import ColdsnapError

__all__ = ["WorkerHalf", "begin", "supplied", "worker_half"]

_TAKE_S = 3600.0
"""A template's engine process is made when it is placed, and told its place at once."""


class WorkerHalf:
    """One worker of one process: its socket, its engine and its control thread."""

    def __init__(
        self,
        settings: WorkerSettings,
        model_path: Path,
        folder: Path,
        *,
        make_memory: Callable[[], WeightMemory],
        surroundings: Surroundings,
        set_environment: Callable[[Mapping[str, str]], None] = lambda placed: None,
    ) -> None:
        """`set_environment`: a template's engine process has what the front was told, for it was forked after that."""
        self.handover = Handover()
        self.engine = VllmWorker(
            settings,
            model_path,
            handover=self.handover,
            front=FrontClient(folder / FRONT_SOCKET),
            surroundings=surroundings,
        )
        self._make = make_memory
        self.worker: InnerWorker | TemplateWorker = make_worker(
            settings, self.engine, self.make_memory, set_environment=set_environment
        )
        self._server = ControlServer(folder / inner_socket_name(settings.worker), self._served)

    @property
    def memory(self) -> WeightMemory | None:
        """Where the weights are; None before they were asked for."""
        return self.engine.memory

    def start(self) -> None:
        """Open the socket and let the worker come up on a thread of its own. Raises as `ControlServer.start`."""
        self._server.start()
        threading.Thread(target=self.worker.load, name="coldsnap-inner", daemon=True).start()

    def next_load(self) -> Load:
        """What vLLM's main thread is to load. Raises as `Handover.take`."""
        return self.handover.take(deadline_s=_TAKE_S)

    def close(self) -> None:
        """Close the socket and the listener. Used by tests: an engine process of vLLM's ends without a word."""
        self._server.close()
        self.worker.close()

    def make_memory(self) -> WeightMemory:
        """Asked for at once, or when a template is placed. A failure is told to vLLM's main thread, which waits."""
        try:
            return self._make()
        except ColdsnapError as error:
            self.engine.give_up(error)
            raise

    def _served(self, call: Call) -> BaseModel:
        """As the worker. Once it has failed nobody fills a model: a loader that waits for its bytes is told, and ends.

        Else that process, and with it the front, could be ended by force alone.
        """
        try:
            return self.worker(call)
        except ColdsnapError as error:
            if self.worker.state is WorkerState.FAILED:
                self.engine.give_up(error)
            raise


_lock = threading.Lock()
_half: WorkerHalf | None = None


def worker_half() -> WorkerHalf | None:
    """This process's; None where there is none: by hand, or no weights."""
    return _half


def begin(vllm_config: Any, environment: Mapping[str, str]) -> WorkerHalf:
    """This process's half, begun when there is none yet. Called by vLLM's main thread, in our loader.

    `environment` names the settings. Raises ColdsnapError for settings that are not those of this worker, or a device
    that cannot be used.
    """
    global _half
    from coldsnap.engines.vllm.device import memory_maker

    with _lock:
        if _half is None:
            settings = settings_of_rank(environment, int(vllm_config.parallel_config.rank))
            make_memory, surroundings = memory_maker(vllm_config)
            half = WorkerHalf(
                settings,
                Path(vllm_config.model_config.model),
                run_folder(environment),
                make_memory=make_memory,
                surroundings=surroundings,
            )
            half.start()
            put_in_charge(half.engine)
            _half = half
        return _half


def supplied(vllm_config: Any, environment: Mapping[str, str]) -> Load:
    """The loader's supplier (`loading.supply`) in a process of a unit of coldsnap's. Raises as `begin`, `next_load`."""
    try:
        half = begin(vllm_config, environment)
    except ColdsnapError as error:
        with suppress(ColdsnapError):  # it sees this process end
            FrontClient(run_folder(environment) / FRONT_SOCKET).fail(error)
        raise
    if vllm_config.model_config.enable_sleep_mode:
        vllm_config.model_config.sleep_mode_backend = BACKEND  # read by the worker when it sleeps for the first time
    return half.next_load()
