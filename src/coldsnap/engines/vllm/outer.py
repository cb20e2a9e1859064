"""The outer half of the vLLM engine. Needs neither torch nor vllm: those are in the interpreter that a recipe names.

The command is ``PYTHON -m coldsnap.engines.vllm serve MODEL ...`` with vLLM's own options. Whoever has vLLM in an
environment of its own installs coldsnap there and names that Python (``python`` of the recipe); what is there is asked
before anything starts, and what is missing is told: `capture_problems`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from coldsnap.core.canonical import canonical_sha256
from coldsnap.core.request import Adapter, Execution, Group, OperationRequest, Service, Worker
from coldsnap.engines.named_model import resolve_named
from coldsnap.engines.protocol import CommandFacts, EngineSupport, Installed, ResolvedModel
from coldsnap.engines.settings import model_source_options
from coldsnap.engines.vllm.admission import capture_problems
from coldsnap.engines.vllm.arguments import ENVIRONMENT
from coldsnap.engines.vllm.installed import look_for_vllm
from coldsnap.engines.vllm.options import (
    ENTRY,
    Device,
    command_arguments,
    number_of,
    parse_options,
    read_command,
)
from coldsnap.errors import Problem

__all__ = ["PLUGIN", "VllmPlugin"]

_SERVICE = "api"
_CACHE = "/var/cache/coldsnap/vllm"
# Where compiled things are kept, below a folder that outlives the unit: its home is memory, and would be in the image.
_CACHES: Mapping[str, str] = {
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
}


class VllmPlugin:
    """Implements `coldsnap.engines.protocol.EnginePlugin`; one unit, with a worker for each tensor-parallel rank."""

    name = "vllm"
    supports = EngineSupport(
        warm=True,
        materialize=frozenset({"off", "async", "required"}),
        default_materialize="async",
        drivers=frozenset({"host", "n580", "n610"}),
    )
    resolve_model = staticmethod(resolve_named)

    def installed(self, python: str, environment: Mapping[str, str]) -> Installed:
        """See `EnginePlugin.installed`."""
        return look_for_vllm(python, environment).told

    def example_model_command(self, cache: Path, *, random: str | None = None) -> tuple[tuple[str, ...], Path] | None:
        """There is none: a checkpoint that another engine made will do."""
        return None

    def options(self, serve: Mapping[str, object]) -> dict[str, object]:
        """See `EnginePlugin.options`."""
        return parse_options(serve)

    def unit_command(
        self, model: ResolvedModel, options: Mapping[str, object], *, host: str, port: int, python: str
    ) -> tuple[str, ...]:
        """See `EnginePlugin.unit_command`."""
        words = command_arguments(str(model.path), parse_options(options), name=model.id, host=host, port=port)
        return (python, "-m", ENTRY, "serve", *words)

    def unit_environment(self, cache_paths: Sequence[str]) -> Mapping[str, str]:
        """See `EnginePlugin.unit_environment`: below the first of them, so that what is compiled travels."""
        root = Path(cache_paths[0] if cache_paths else _CACHE)
        return {**ENVIRONMENT, **{name: str(root / folder) for name, folder in _CACHES.items()}}

    def read_command(self, command: Sequence[str]) -> CommandFacts:
        """See `EnginePlugin.read_command`."""
        line = read_command(command)
        return CommandFacts(model=Path(line.model), host=line.host, port=line.port)

    def settings_options(self, model: ResolvedModel, options: Mapping[str, object]) -> dict[str, object]:
        """See `EnginePlugin.settings_options`."""
        return model_source_options(model)

    def capture_problems(self, request: OperationRequest) -> Iterator[Problem]:
        """See `EnginePlugin.capture_problems`."""
        return capture_problems(request)

    def execution(self, options: Mapping[str, object], *, unit: str = "u0") -> Execution:
        """A worker for each rank of vLLM's world, all of it tensor parallel: vLLM's groups `world` and `tensor`."""
        given = parse_options(options)
        size = number_of(given, "tensor_parallel_size", 1)
        on_gpus = given["device"] == Device.CUDA
        names = tuple(f"w{rank}" for rank in range(size))
        payload = {"device": given["device"], "tensor_parallel_size": size, "workers": list(names)}
        return Execution(
            workers=tuple(
                Worker(id=name, unit=unit, service=_SERVICE, process_slot=rank, device_slots=(rank,) if on_gpus else ())
                for rank, name in enumerate(names)
            ),
            groups=tuple(
                Group(id=kind, kind=f"vllm:{kind}", service=_SERVICE, members=names)
                for kind in (("world", "tensor") if size > 1 else ("world",))
            ),
            services=(Service(id=_SERVICE, role="generate", workers=names),),
            adapter=Adapter(schema="vllm-1", digest=canonical_sha256(payload), payload=payload),
        )


PLUGIN = VllmPlugin()
