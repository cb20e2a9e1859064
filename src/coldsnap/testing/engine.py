"""A fake engine that behaves like a real one and needs nothing but the standard library.

Its "model" is the bytes of a safetensors checkpoint in stable memory, plus a table it computes itself. An answer
is arithmetic over every one of those bytes, so one wrong byte anywhere gives wrong tokens. Everything around
the model is real: the observer is told each copy, requests come over HTTP, sleep lets go of the memory.
"""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from coldsnap.core.canonical import canonical_sha256
from coldsnap.core.execution import Adapter, Execution, Group, Service, Worker
from coldsnap.core.extents import padded
from coldsnap.core.manifest import ModelSource
from coldsnap.core.messages import Answer, Prompt
from coldsnap.core.request import OperationRequest
from coldsnap.engines.kernel import trim_heap
from coldsnap.engines.local_model import checkpoint_files, resolve_local
from coldsnap.engines.observer import Observer
from coldsnap.engines.protocol import CommandFacts, EngineSupport, Installed, ResolvedModel
from coldsnap.engines.safetensors import SafetensorsFile
from coldsnap.engines.settings import model_source_options
from coldsnap.errors import EngineError, InvalidDocument, Problem, UsageError
from coldsnap.hydrate.memory import HostAddressable, StableMemory, host_addressable
from coldsnap.testing.engine_http import FakeListener

__all__ = ["PLUGIN", "FakeEngine", "FakePlugin", "fake_execution"]

_TABLE_BYTES = 1000
_GRAPH_BYTES = 4096
_ALIGNMENT = 64


class DeviceMemory(Protocol):
    """What the engine has on a device, if it has one."""

    def write(self, data: bytes) -> None:
        """Fill it from its beginning."""

    def read(self) -> bytes:
        """All of it."""


class FakeEngine:
    """Implements `coldsnap.engines.protocol.EngineWorker`.

    `shuffle` changes the order in which tensors are placed, `arena_base` the address. `before_token` runs before
    each token, where a test can hold a request. With `open_gpu` every token also depends on a "graph" in device
    memory, made once from the model's bytes.
    """

    name = "fake"
    held_device_bytes = 0

    def __init__(
        self,
        folder: Path,
        source: ModelSource,
        *,
        shuffle: int | None = None,
        arena_base: int | None = None,
        before_token: Callable[[], None] = lambda: None,
        open_gpu: Callable[[], DeviceMemory] | None = None,
    ) -> None:
        self.model_source = source
        self._open_gpu = open_gpu
        self._gpu: DeviceMemory | None = None
        self._has_graph = False
        self.model_path = folder
        self._shuffle = shuffle
        self._arena_base = arena_base
        self._before_token = before_token
        self._memory: HostAddressable | None = None
        self._files: tuple[SafetensorsFile, ...] | None = None
        self._ranges: list[tuple[int, int]] = []
        self._listener: FakeListener | None = None
        self._compute = threading.Lock()

    @property
    def num_in_flight(self) -> int:
        """See `EngineWorker.num_in_flight`."""
        return self._listener.num_in_flight if self._listener is not None else 0

    @property
    def is_serving(self) -> bool:
        """Whether its listener is open."""
        return self._listener is not None

    def versions(self) -> Mapping[str, str]:
        """See `EngineWorker.versions`."""
        return {"fake": "1"}

    def prepare_template(self) -> None:
        """There is nothing to import; the headers are read now, so that `build` needs no file."""
        self._files = tuple(checkpoint_files(self.model_path))

    def load(self, memory: StableMemory, observer: Observer) -> None:
        """Copy every tensor of the checkpoint into one allocation, and compute the table behind them."""
        self._bring_up(memory, observer, address=self._arena_base, with_bytes=True)

    def build(self, memory: StableMemory, observer: Observer) -> None:
        """The same places, anywhere, and nothing in them."""
        self._bring_up(memory, observer, address=None, with_bytes=False)

    def _bring_up(self, memory: StableMemory, observer: Observer, *, address: int | None, with_bytes: bool) -> None:
        files = checkpoint_files(self.model_path) if self._files is None else self._files
        tensors = [(file, stored) for file in files for stored in file.tensors]
        placed = list(tensors)
        if self._shuffle is not None:
            random.Random(self._shuffle).shuffle(placed)  # noqa: S311 - order, not secrecy
        offsets: dict[str, int] = {}
        gaps: list[tuple[int, int]] = []
        end = 0
        for _, stored in placed:
            offsets[stored.name] = end
            used = end + stored.size
            end = -(-used // _ALIGNMENT) * _ALIGNMENT
            gaps.append((used, end - used))
        host = host_addressable(memory)
        arena = memory.reserve(padded(end + _TABLE_BYTES), tag="weights", address=address)
        for file, stored in tensors:
            if stored.size:
                ptr = arena.ptr + offsets[stored.name]
                if with_bytes:
                    with file.path.open("rb", buffering=0) as opened:  # a buffer would keep weights in the heap
                        opened.seek(stored.offset)
                        _read_all(opened, host.view(ptr, stored.size))
                observer.wrote(ptr, stored.size, tensor=stored.name, file=file.name, file_offset=stored.offset)
                self._ranges.append((ptr, stored.size))
        table = arena.ptr + end
        if with_bytes:
            host.view(table, _TABLE_BYTES)[:] = bytes((7 * i + 3) % 251 for i in range(_TABLE_BYTES))
        observer.unreplayable(table, _TABLE_BYTES, "computed when the model was built")
        gaps.append((end + _TABLE_BYTES, arena.size - end - _TABLE_BYTES))
        for offset, size in gaps:
            observer.unreplayable(arena.ptr + offset, size, "padding between tensors")
        self._ranges.append((table, _TABLE_BYTES))
        self._memory = host
        if self._open_gpu is not None:
            self._gpu = self._open_gpu()
        if with_bytes:
            self._make_graph()

    def answer(self, prompt: Prompt) -> Answer:
        """A token is the low byte of a running CRC-32 over the prompt and every byte of the model."""
        tokens: list[int] = []
        with self._compute:
            if self._memory is None or not self._memory.mapped:
                raise EngineError("the fake engine was asked while its memory is unmapped", cure="wake it first")
            state = zlib.crc32(prompt.text.encode())
            for _ in range(prompt.max_tokens):
                self._before_token()
                if self._gpu is not None:
                    state = zlib.crc32(self._gpu.read(), state)
                for ptr, size in self._ranges:
                    state = zlib.crc32(self._memory.view(ptr, size), state)
                tokens.append(state & 0xFF)
        return Answer(token_ids=tuple(tokens), text="".join(f" {token:02x}" for token in tokens))

    def start_serving(self, host: str, port: int) -> None:
        """See `EngineWorker.start_serving`."""
        self._listener = FakeListener(host, port, model=self.model_source.model_id, answer=self.answer)

    def stop_serving(self, *, drain_s: float = 30.0) -> int:
        """See `EngineWorker.stop_serving`."""
        listener, self._listener = self._listener, None
        return listener.close(drain_s) if listener is not None else 0

    def before_sleep(self) -> None:
        """Nothing to let go of beside the memory itself and what was freed."""
        trim_heap()

    def after_wake(self) -> None:
        """What was in device memory is either still there, or was never there: a placed template has no graph yet."""
        self._make_graph()

    def _make_graph(self) -> None:
        """Once in a process's life, from every byte of the model."""
        if self._gpu is None or self._has_graph or self._memory is None:
            return
        seed = 0
        for ptr, size in self._ranges:
            seed = zlib.crc32(self._memory.view(ptr, size), seed)
        self._gpu.write(random.Random(seed).randbytes(_GRAPH_BYTES))  # noqa: S311 - bytes, not secrecy
        self._has_graph = True


def _read_all(file: FileIO, view: memoryview) -> None:
    done = 0
    while done < len(view):
        num_bytes = file.readinto(view[done:])
        if not num_bytes:
            raise UsageError(f"{file.name!r} ends {len(view) - done} bytes too early", cure="fetch it again")
        done += num_bytes


def fake_execution(unit: str, *, device_slots: tuple[int, ...] = ()) -> Execution:
    """One worker, alone in its world and its service."""
    payload = {"workers": ["w0"]}
    return Execution(
        workers=(Worker(id="w0", unit=unit, service="api", process_slot=0, device_slots=device_slots),),
        groups=(Group(id="world", kind="fake:world", service="api", members=("w0",)),),
        services=(Service(id="api", role="generate", workers=("w0",)),),
        adapter=Adapter(schema="fake-1", digest=canonical_sha256(payload), payload=payload),
    )


class FakePlugin:
    """Implements `coldsnap.engines.protocol.EnginePlugin`.

    Options: `shuffle` and `arena_base`, whole numbers; `gpu`, the folder of a `coldsnap.testing.gpu.GpuRack` to compute
    on; `companion`, what else its tree is to hold of a GPU: `spawn` (a process with CUDA state of its own), `fork` (one
    that inherited the engine's), `nvml` (a handle that nobody takes off) or `early` (one from before any load).
    """

    name = "fake"
    supports = EngineSupport(
        warm=True,
        materialize=frozenset({"off", "async", "required"}),
        default_materialize="off",
        drivers=frozenset({"host", "n580", "n610"}),
    )

    def installed(self, python: str, environment: Mapping[str, str]) -> Installed:
        """All of it: the standard library is enough."""
        return Installed(python=python, versions={"fake": "1"})

    def example_model_command(self, cache: Path, *, random: str | None = None) -> tuple[tuple[str, ...], Path] | None:
        """There is none."""
        return None

    def resolve_model(
        self,
        model: str,
        revision: str | None = None,
        *,
        num_threads: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> ResolvedModel:
        """A local folder only."""
        return resolve_local(Path(model), revision=revision, num_threads=num_threads, progress=progress)

    def options(self, serve: Mapping[str, object]) -> dict[str, object]:
        """See `EnginePlugin.options`."""
        known: dict[str, object] = {"shuffle": None, "arena_base": None, "gpu": None, "companion": None}
        problems = [
            Problem(field=f"serve.{name}", message="is no option of the fake engine", cure=f"use {', '.join(known)}")
            for name, value in serve.items()
            if name not in known
            or not (value is None or isinstance(value, str if name in ("gpu", "companion") else int))
            or isinstance(value, bool)
        ]
        if problems:
            raise InvalidDocument("options of the fake engine", problems)
        return {**known, **serve}

    def unit_command(
        self, model: ResolvedModel, options: Mapping[str, object], *, host: str, port: int, python: str
    ) -> tuple[str, ...]:
        """See `EnginePlugin.unit_command`."""
        command = [python, "-m", "coldsnap.testing.engine_main", "--model", str(model.path)]
        command += ["--host", host, "--port", str(port)]
        for name, value in self.options(options).items():
            if value is not None:
                command += [f"--{name.replace('_', '-')}", str(value)]
        return tuple(command)

    def unit_environment(self, cache_paths: Sequence[str]) -> Mapping[str, str]:
        """Nothing beside what every unit gets."""
        return {}

    def capture_problems(self, request: OperationRequest) -> tuple[Problem, ...]:
        """None."""
        return ()

    def read_command(self, command: Sequence[str]) -> CommandFacts:
        """See `EnginePlugin.read_command`."""
        said = dict(pairwise(command))
        try:
            return CommandFacts(model=Path(said["--model"]), host=said["--host"], port=int(said["--port"]))
        except (KeyError, ValueError) as error:
            raise UsageError(
                f"no command of the fake engine: {error}", cure="write what `unit_command` makes"
            ) from error

    def settings_options(self, model: ResolvedModel, options: Mapping[str, object]) -> dict[str, object]:
        """See `EnginePlugin.settings_options`."""
        return model_source_options(model)

    def execution(self, options: Mapping[str, object], *, unit: str = "u0") -> Execution:
        """See `EnginePlugin.execution`."""
        return fake_execution(unit, device_slots=(0,) if options.get("gpu") is not None else ())


PLUGIN = FakePlugin()
