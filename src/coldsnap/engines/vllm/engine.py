"""The inner half's engine: implements `coldsnap.engines.protocol.EngineWorker` in the process that has the weights.

vLLM runs this process. What it does on its main thread is asked for through a `Handover`, and what the API process
owns (requests, the listener, the whole engine's sleep) by the front's socket. Imports neither torch nor vllm: what is
done to them is `Surroundings`, so all of this is tested without.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from coldsnap.core.extents import Allocation
from coldsnap.core.manifest import ModelSource
from coldsnap.core.messages import Answer, Prompt, WorkerSettings
from coldsnap.engines.kernel import request_amx
from coldsnap.engines.local_model import pinned_files
from coldsnap.engines.observer import Observer
from coldsnap.engines.safetensors import SafetensorsFile
from coldsnap.engines.settings import model_source_from
from coldsnap.engines.vllm.handover import Handover
from coldsnap.engines.vllm.link import FrontClient
from coldsnap.engines.vllm.loading import Load, Way, WeightMemory, remembered_files
from coldsnap.engines.vllm.pools import GRAPHS_TAG
from coldsnap.errors import ColdsnapError, DeadlineExceeded, EngineError, InternalError, Refused
from coldsnap.hydrate.memory import StableMemory

__all__ = ["GRAPHS", "LATE", "Surroundings", "VllmWorker"]

LATE = "made beside the loader"
GRAPHS = "used by CUDA graphs"
_PATIENCE_S = 6 * 3600.0
"""Of one thread with the other, and of both with a large checkpoint on a slow disk. Whoever waits hears of failures."""
_COUNT_S = 0.05


class Surroundings(Protocol):
    """What is asked of torch and vLLM around a sleep. Any thread may call."""

    def versions(self) -> Mapping[str, str]:
        """As `EngineWorker.versions`."""
        ...

    def let_go(self) -> None:
        """Collect garbage, and give back what is kept for later: blocks of the device and of the heap."""
        ...


class VllmWorker:
    """One worker of a served vLLM. See the protocol for what each method promises."""

    name = "vllm"

    def __init__(
        self,
        settings: WorkerSettings,
        model_path: Path,
        *,
        handover: Handover,
        front: FrontClient,
        surroundings: Surroundings,
    ) -> None:
        """Raises InvalidDocument for settings whose options name no pinned model."""
        self.model_source: ModelSource = model_source_from(settings.options)
        self.model_path = model_path
        self._worker = settings.worker
        self._is_template = settings.template
        self._handover = handover
        self._front = front
        self._surroundings = surroundings
        self._memory: WeightMemory | None = None
        self._is_up = False
        self._counting = threading.Lock()
        self._counted = (float("-inf"), 0)
        self._versions: Mapping[str, str] = {}
        self._files: tuple[SafetensorsFile, ...] = ()

    @property
    def memory(self) -> WeightMemory | None:
        """Where the weights are, or will be; None before anybody has asked for them."""
        return self._memory

    @property
    def num_in_flight(self) -> int:
        """HTTP requests of the whole engine, as the front counted them at most `_COUNT_S` seconds ago.

        A front that is too busy to answer is asked again later; raises EngineError for one that is gone.
        """
        with self._counting:
            at, count = self._counted
            if time.monotonic() - at >= _COUNT_S:
                try:
                    count = self._front.state().in_flight
                except DeadlineExceeded:
                    count = max(count, 1)
                self._counted = (time.monotonic(), count)
            return count

    @property
    def held_device_bytes(self) -> int:
        """Graphs and workspaces."""
        return self._memory.held_bytes() if self._memory is not None else 0

    def versions(self) -> Mapping[str, str]:
        """Everything that decides what the engine computes."""
        if not self._versions:
            self._versions = self._surroundings.versions()
        return self._versions

    def prepare_template(self) -> None:
        """Nothing, where the front has read the headers and imported everything before it made this process."""
        self._files = self._pinned_files()

    def load(self, memory: StableMemory, observer: Observer) -> None:
        """Let vLLM load the model, and wait until the whole engine is up. Raises what either says."""
        self._bring_up(Way.LOAD, memory, observer)
        for one in self._come_up():
            observer.unreplayable(one.ptr, one.size, GRAPHS if one.tag.startswith(GRAPHS_TAG) else LATE)

    def build(self, memory: StableMemory, observer: Observer) -> None:
        """Let vLLM build the model. It waits then, before anything is computed, for `after_wake`."""
        self._bring_up(Way.BUILD, memory, observer)
        self._loaded().clear()  # what nobody fills must not be right by chance

    def answer(self, prompt: Prompt) -> Answer:
        """Greedy, from nothing but the prompt."""
        return self._front.answer(prompt)

    def start_serving(self, host: str, port: int) -> None:
        """Open the front's listener."""
        self._front.open(host, port)

    def stop_serving(self, *, drain_s: float = 30.0) -> int:
        """Close it, after the requests in flight or after `drain_s` seconds."""
        return self._front.close(drain_s=drain_s)

    def before_sleep(self) -> None:
        """The whole engine sleeps when this returns, and this worker holds no keys and values.

        Raises Refused, with nothing done, for what would land in the image and must not.
        """
        memory = self._loaded()
        self._surroundings.let_go()
        if problems := memory.leftovers():
            raise Refused("putting vLLM to sleep", problems)
        self._front.quiet(self._worker)
        try:
            memory.discard_kv()  # is done on a GPU, where vLLM told our backend; a processor has no sleep mode
        except ColdsnapError:
            with suppress(ColdsnapError):  # the first error is the one to tell
                memory.restore_kv()
                self._front.resume(self._worker)
            raise
        self._surroundings.let_go()

    def after_wake(self) -> None:
        """Let the engine go on: after a build to profiling and graphs, after a sleep when every worker is back."""
        request_amx()  # of the process, and lost by a restore
        memory = self._loaded()
        if not self._is_up:
            self._handover.go_on()
            self._come_up()
        memory.restore_kv()
        self._front.resume(self._worker)

    def suspend(self, level: int) -> None:
        """See `Sleeper.suspend`. Weights are the control thread's, which keeps no copy, whatever the level."""
        self._loaded().discard_kv()

    def resume(self, tags: Sequence[str] | None) -> None:
        """See `Sleeper.resume`. Weights are back by now: nobody resumes the engine before."""
        self._loaded().restore_kv()

    def discard(self, tags: Sequence[str]) -> None:
        """See `Sleeper.discard`. Never asked of an engine whose front we are."""
        raise EngineError(f"tags {', '.join(tags)} cannot be discarded alone", cure="put the whole engine to sleep")

    def give_up(self, error: Exception) -> None:
        """There will be no model: whoever waits for it is told, and the front, which says so to controllers."""
        told = error if isinstance(error, ColdsnapError) else None
        if told is None:
            told = EngineError(f"vLLM could not load the model: {type(error).__name__}: {error}")
        with suppress(ColdsnapError):  # gone, or too busy: it sees this process end
            self._front.fail(told)
        self._handover.fail(told)

    def _bring_up(self, way: Way, memory: StableMemory, observer: Observer) -> None:
        try:
            if not isinstance(memory, WeightMemory):
                raise InternalError(f"{type(memory).__name__} is no memory for vLLM's weights")
            self._memory = memory
            load = Load(
                observer=observer,
                memory=memory,
                files=self._files or self._pinned_files(),
                way=way,
                is_template=self._is_template,
                laid_out=self._laid_out if way is Way.LOAD else self._laid_out_and_filled,
                failed=self.give_up,
            )
            self._handover.offer(load)
        except ColdsnapError as error:
            self.give_up(error)
            raise
        self._handover.wait_laid_out(deadline_s=_PATIENCE_S)

    def _pinned_files(self) -> tuple[SafetensorsFile, ...]:
        return remembered_files() or tuple(pinned_files(self.model_path, self.model_source))

    def _laid_out(self) -> None:
        self._handover.laid_out()

    def _laid_out_and_filled(self) -> None:
        self._handover.laid_out()
        self._handover.wait_go_on(deadline_s=_PATIENCE_S)

    def _come_up(self) -> Sequence[Allocation]:
        """Wait until the whole engine is up; what came to the weights meanwhile."""
        self._front.wait_up(deadline_s=_PATIENCE_S)
        self._is_up = True
        return self._loaded().complete()

    def _loaded(self) -> WeightMemory:
        if self._memory is None:
            raise EngineError("the model is not loaded")
        return self._memory
