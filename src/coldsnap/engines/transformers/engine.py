"""The Transformers engine's inner half: implements `coldsnap.engines.protocol.EngineWorker`.

torch and transformers are imported when the model is loaded and not before, so that the control socket answers
from the process's first moment.
"""

from __future__ import annotations

import gc
import logging
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from coldsnap.core.manifest import ModelSource
from coldsnap.core.messages import Answer, Prompt
from coldsnap.engines.kernel import request_amx, trim_heap
from coldsnap.engines.local_model import pinned_files
from coldsnap.engines.observer import Observer
from coldsnap.engines.transformers.options import Device, TransformersOptions
from coldsnap.errors import EngineError
from coldsnap.hydrate.cuda import import_bindings
from coldsnap.hydrate.memory import StableMemory

if TYPE_CHECKING:
    import torch

    from coldsnap.engines.transformers.app import Api
    from coldsnap.engines.transformers.listener import Listener
    from coldsnap.engines.transformers.runtime import Metadata, Runtime

__all__ = ["TransformersEngine"]

_log = logging.getLogger(__name__)
_PACKAGES = ("torch", "transformers", "tokenizers")


class TransformersEngine:
    """One model in one process. See the protocol for what each method promises."""

    name = "transformers"

    def __init__(self, folder: Path, source: ModelSource, options: TransformersOptions) -> None:
        self.model_path = folder
        self.model_source = source
        self._options = options
        self._metadata: Metadata | None = None
        self._runtime: Runtime | None = None
        self._api: Api | None = None
        self._listener: Listener | None = None
        self._versions: dict[str, str] = {}

    @property
    def num_in_flight(self) -> int:
        """HTTP requests accepted and not yet answered."""
        return self._api.num_in_flight if self._api is not None else 0

    def versions(self) -> Mapping[str, str]:
        """Everything that decides what the engine computes."""
        return self._versions

    def prepare_template(self) -> None:
        """Import everything, and read all of the checkpoint that `build` needs. Raises as `load` does."""
        from coldsnap.engines.transformers.loading import import_architecture

        self._metadata = self._read_metadata()
        import_architecture(self.model_path)
        if self._options.device is Device.CUDA:
            import_bindings()

    def load(self, memory: StableMemory, observer: Observer) -> None:
        """Raises IntegrityError when the checkpoint is not the pinned one, and as `load_model` does."""
        metadata = self._metadata or self._read_metadata()
        from coldsnap.engines.transformers.loading import load_model

        runtime = self._start(
            metadata,
            memory,
            lambda: load_model(
                self.model_path,
                metadata.config,
                metadata.files,
                self._options,
                memory,
                observer,
                short_way_only=self._metadata is not None,
            ),
        )
        runtime.warm_up(check=True)

    def build(self, memory: StableMemory, observer: Observer) -> None:
        """Raises UserError for a model that needs more than the copies `load_model` makes."""
        metadata = self._metadata or self._read_metadata()
        from coldsnap.engines.transformers.loading import build_model

        self._start(
            metadata,
            memory,
            lambda: build_model(self.model_path, metadata.config, metadata.files, self._options, memory, observer),
        )

    def _read_metadata(self) -> Metadata:
        files = pinned_files(self.model_path, self.model_source)
        from coldsnap.engines.transformers import app, listener, runtime  # noqa: F401 - imported while there is time

        # Read now: after a restore the packages' files may be elsewhere.
        self._versions = {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}
        return runtime.read_metadata(self.model_path, files)

    def _start(self, metadata: Metadata, memory: StableMemory, make_model: Callable[[], torch.nn.Module]) -> Runtime:
        from coldsnap.engines.transformers.app import Api
        from coldsnap.engines.transformers.device import accelerator_for
        from coldsnap.engines.transformers.runtime import start_runtime

        request_amx()  # which a template lost when it was restored, and another process has not asked for yet
        runtime = start_runtime(metadata, self._options, make_model, lambda: accelerator_for(memory))
        self._runtime = runtime
        self._api = Api(runtime, model=self._options.served_model_name or self.model_source.model_id)
        return runtime

    def answer(self, prompt: Prompt) -> Answer:
        """Greedy, from nothing but the prompt."""
        return self._loaded().answer(prompt)

    def start_serving(self, host: str, port: int) -> None:
        """Open the HTTP listener."""
        from coldsnap.engines.transformers.listener import Listener

        self._loaded()
        if self._api is not None:
            self._api.draining = False
            self._listener = Listener(self._api, host, port)

    def stop_serving(self, *, drain_s: float = 30.0) -> int:
        """Close it, after the requests in flight or after `drain_s` seconds."""
        listener, self._listener = self._listener, None
        if listener is None or self._api is None:
            return 0
        self._api.draining = True
        in_flight = self._api.num_in_flight
        listener.close(drain_s)
        return in_flight

    @property
    def held_device_bytes(self) -> int:
        """Graph pools and workspaces, as of the last `before_sleep`."""
        return self._runtime.held_bytes if self._runtime is not None else 0

    def before_sleep(self) -> None:
        """Keys and values, garbage, blocks kept for later, and freed heap go."""
        gc.collect()
        # Behind every other piece of work: a cancelled generation has let go of the memory when this returns.
        self._loaded().let_go()
        trim_heap()

    def after_wake(self) -> None:
        """A restored process has lost its permission to use AMX; keys and values need their memory."""
        request_amx()
        self._loaded().come_back()

    def _loaded(self) -> Runtime:
        if self._runtime is None:
            raise EngineError("the model is not loaded")
        return self._runtime
