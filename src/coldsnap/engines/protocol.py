"""What coldsnap needs from an engine, on one page.

An engine has two halves. The inner half (`EngineWorker`) lives in the engine process and knows the engine:
it loads the model into memory we own, answers prompts, opens and closes its listener. `coldsnap.engines.inner`
drives it and does everything else (packs, residuals, wake, the control socket), so an engine never sees a
file format. The outer half (`EnginePlugin`) lives in the controller, where the engine's own packages need not
be installed: it turns a recipe's words into a command, a model identity and an execution graph.

`coldsnap.testing.engine` is a fake of both; `coldsnap.testing.engine_suite.EngineContract` is the contract as
tests, which every engine runs. `docs/engines.md` walks through adding one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from coldsnap.core.digest import Digest
from coldsnap.core.messages import Answer, Prompt
from coldsnap.errors import Problem

if TYPE_CHECKING:
    from coldsnap.core.manifest import ModelSource
    from coldsnap.core.request import Execution, OperationRequest
    from coldsnap.engines.observer import Observer
    from coldsnap.hydrate.memory import StableMemory

__all__ = ["CommandFacts", "EnginePlugin", "EngineSupport", "EngineWorker", "Installed", "ResolvedModel"]


class EngineWorker(Protocol):
    """The inner half: one engine in one process.

    Calls come from one thread at a time, except to properties, which any thread may read. Foreign
    exceptions are translated to classes of `coldsnap.errors` before they leave.
    """

    @property
    def name(self) -> str:
        """The engine's name as recipes spell it."""
        ...

    @property
    def num_in_flight(self) -> int:
        """HTTP requests accepted and not yet answered."""
        ...

    @property
    def held_device_bytes(self) -> int:
        """What it holds on a device after `before_sleep`, beside `memory`: graphs and workspaces."""
        ...

    @property
    def model_source(self) -> ModelSource:
        """The pinned model it was started with."""
        ...

    @property
    def model_path(self) -> Path:
        """The checkpoint folder it loads from, whose files `observer.wrote` names relative to it."""
        ...

    def versions(self) -> Mapping[str, str]:
        """Name -> version of everything that decides what the engine computes.

        Callable after `load` or `prepare_template`.
        """
        ...

    def prepare_template(self) -> None:
        """Import all code that `load` and serving need, and touch no device: no context, no driver, no file of it.

        The process may be frozen afterwards and go on on another machine, where `load` or `build` comes first.
        """
        ...

    def load(self, memory: StableMemory, observer: Observer) -> None:
        """Bring the model up, once.

        Afterwards every byte that must survive a sleep is either in an allocation of `memory` or in ordinary
        process memory. Each copy of checkpoint bytes into `memory` was told to `observer.wrote`, and whatever
        else the engine keeps there to `observer.unreplayable`, with the reason. Raises UserError for a model
        that cannot be loaded and names the tensor or file.
        """
        ...

    def build(self, memory: StableMemory, observer: Observer) -> None:
        """Bring the model up without one byte of a tensor, once, instead of `load`, in a process that was a template.

        What is known is the configuration and the checkpoint's headers, read before the freeze: the folder need not
        be there. Afterwards `memory` has the allocations that `load` reserves, of the same sizes and tags, in the
        same order and at any address, all mapped, and `observer.wrote` was told each copy that `load` would have
        made there. Every byte of them is filled next, and then `after_wake` is called. So what `load` puts into
        `memory` from elsewhere is numbers that mean the same in another process: no address, no handle. Raises
        UserError for a model that cannot be built so; `load` in a template refuses it already.
        """
        ...

    def answer(self, prompt: Prompt) -> Answer:
        """Complete `prompt.text` greedily: the same tokens as a greedy request over HTTP would get.

        Depends on nothing but the model and the prompt: no state of an earlier request is used.
        """
        ...

    def start_serving(self, host: str, port: int) -> None:
        """Open the HTTP listener; when this returns a client can connect. Raises ResourceBusy on a taken port."""
        ...

    def stop_serving(self, *, drain_s: float = 30.0) -> int:
        """Close the listener, let requests in flight end, and return how many there were.

        After `drain_s` seconds the rest are cancelled. When this returns no client connection is open in this
        process. Does nothing and returns 0 when not serving.
        """
        ...

    def before_sleep(self) -> None:
        """Let go of everything that need not survive: KV, caches, mappings of the checkpoint, free heap pages.

        Called with the listener closed. `memory` is unmapped right after, so no thread of the engine may
        touch it from here on until `after_wake`. Idempotent.
        """
        ...

    def after_wake(self) -> None:
        """Called when every byte of `memory` is back and before the first compute. Idempotent.

        After `build` this is also where the engine warms up, which `load` does itself.

        The process may be a restored copy on another boot, with other file descriptors lost to it; the engine
        asks the kernel again for whatever a restored process does not have.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedModel:
    """A model somebody named, pinned: `id`, `revision`, `source` and `metadata_sha256` go into the artifact.

    `source` is `local` or `huggingface`. `path` is the local folder that holds the files now; it is
    placement, never identity.
    """

    id: str
    revision: str
    source: str
    path: Path
    metadata_sha256: Digest


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandFacts:
    """What a unit's command says: the folder of the model's files, and where people expect the engine to listen."""

    model: Path
    host: str
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSupport:
    """What an engine can be asked for. `materialize` and `drivers` hold the request's own words."""

    warm: bool
    materialize: frozenset[str]
    default_materialize: str
    drivers: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """What an interpreter has of an engine: versions by name, and why the engine cannot run there, if it cannot."""

    python: str
    versions: Mapping[str, str]
    problems: tuple[Problem, ...] = ()


class EnginePlugin(Protocol):
    """The outer half. Importing it must not import the engine."""

    @property
    def name(self) -> str:
        """The engine's name as recipes spell it."""
        ...

    @property
    def supports(self) -> EngineSupport:
        """What may be asked of this engine."""
        ...

    def installed(self, python: str, environment: Mapping[str, str]) -> Installed:
        """What ``python``, started with ``environment`` alone, has of this engine; found without importing it."""
        ...

    def example_model_command(self, cache: Path, *, random: str | None = None) -> tuple[tuple[str, ...], Path] | None:
        """Python's arguments to make a small real model below `cache`, and its folder then. None: there is none.

        `random` asks for random weights of a real architecture instead; it names their size in the engine's words.
        """
        ...

    def resolve_model(
        self,
        model: str,
        revision: str | None = None,
        *,
        num_threads: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> ResolvedModel:
        """Pin `model`: a local folder, or a name the engine's hub knows together with an exact revision.

        Reads every byte of a local folder (`progress` gets bytes done since its last call; 0 threads: one a
        core). Raises UserError for a model or revision that cannot be pinned.
        """
        ...

    def options(self, serve: Mapping[str, object]) -> dict[str, object]:
        """The engine's options with every default filled in, from a recipe's `serve` block.

        Raises InvalidDocument naming every unknown or wrong option. Idempotent: its own result is accepted.
        """
        ...

    def unit_command(
        self, model: ResolvedModel, options: Mapping[str, object], *, host: str, port: int, python: str
    ) -> tuple[str, ...]:
        """The command of the engine process, which ``python`` runs: the interpreter that has the engine and coldsnap.

        It is the one source of truth for the model's folder and the engine's options, because the command is
        what the artifact binds and compares. `--port` is what people read: the settings record and `serve`
        decide where the engine listens.
        """
        ...

    def unit_environment(self, cache_paths: Sequence[str]) -> Mapping[str, str]:
        """Variables the engine process should have unless a recipe says otherwise; never credentials.

        ``cache_paths``: folders whose files travel in the capsule, where compiled things are to be kept.
        """
        ...

    def capture_problems(self, request: OperationRequest) -> Iterable[Problem]:
        """Why this engine cannot be captured as ``request`` says; every reason, before anything starts.

        For what only this engine knows: its commands, its variables, and what the interpreters of units without an
        image have installed. Paths begin with ``launch``, ``policy`` or ``extension``.
        """
        ...

    def read_command(self, command: Sequence[str]) -> CommandFacts:
        """What `unit_command` put into a command, read back. Raises UserError for a command of another shape."""
        ...

    def settings_options(self, model: ResolvedModel, options: Mapping[str, object]) -> dict[str, object]:
        """What goes into `WorkerSettings.options`: the model's identity, nothing that the command says."""
        ...

    def execution(self, options: Mapping[str, object], *, unit: str = "u0") -> Execution:
        """The units' workers, their groups and services, and the adapter payload."""
        ...
