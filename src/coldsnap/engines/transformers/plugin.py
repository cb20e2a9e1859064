"""The outer half of the Transformers engine. Needs neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from coldsnap.core.canonical import canonical_sha256
from coldsnap.core.request import Adapter, Execution, Group, OperationRequest, Service, Worker
from coldsnap.engines.interpreter import look_at
from coldsnap.engines.named_model import resolve_named
from coldsnap.engines.protocol import CommandFacts, EngineSupport, Installed, ResolvedModel
from coldsnap.engines.settings import model_source_options
from coldsnap.engines.transformers.options import Device, command_arguments, parse_command, parse_options
from coldsnap.errors import Problem, UsageError

__all__ = ["PLUGIN", "TransformersPlugin"]

_ENTRY = "coldsnap.engines.transformers"
# OpenMP threads that wait by spinning make a busy machine slower by ten times and more, just when a replica starts
# beside others; after a short spin they sleep instead. The hub is never asked: the model is a local folder.
_ENVIRONMENT = {"GOMP_SPINCOUNT": "1000", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
_PACKAGES = ("torch", "transformers", "safetensors", "starlette", "uvicorn")


class TransformersPlugin:
    """Implements `coldsnap.engines.protocol.EnginePlugin`; one unit with one worker."""

    name = "transformers"
    supports = EngineSupport(
        warm=True,
        materialize=frozenset({"off", "async", "required"}),
        default_materialize="off",
        drivers=frozenset({"host", "n580", "n610"}),
    )
    resolve_model = staticmethod(resolve_named)

    def installed(self, python: str, environment: Mapping[str, str]) -> Installed:
        """See `EnginePlugin.installed`."""
        wanted = ("coldsnap", *_PACKAGES)
        found = look_at(python, {name: (name,) for name in wanted}, environment=environment)
        return Installed(
            python=python,
            versions={name: one.version for name, one in found.packages.items() if one.version is not None},
            problems=tuple(
                Problem(
                    field=name,
                    message=f"is not installed in {python}",
                    cure=f"{python} -m pip install 'coldsnap[transformers]'",
                )
                for name in wanted
                if name not in found.packages
            ),
        )

    def example_model_command(self, cache: Path, *, random: str | None = None) -> tuple[tuple[str, ...], Path] | None:
        """SmolLM2-135M-Instruct, converted from the copy a Python package carries; or a Qwen3 of random weights."""
        if random is not None:
            folder = cache / f"random-{random}"
            return ("-m", f"{_ENTRY}.checkpoints", "random", str(folder), "--size", random), folder
        out = cache / "smollm2-135m-instruct"
        return ("-m", f"{_ENTRY}.checkpoints", "smollm2", str(out), "--cache", str(cache)), out

    def options(self, serve: Mapping[str, object]) -> dict[str, object]:
        """See `EnginePlugin.options`."""
        return parse_options(serve).model_dump(mode="json")

    def unit_command(
        self, model: ResolvedModel, options: Mapping[str, object], *, host: str, port: int, python: str
    ) -> tuple[str, ...]:
        """See `EnginePlugin.unit_command`."""
        arguments = command_arguments(str(model.path), parse_options(options), host=host, port=port)
        return (python, "-m", _ENTRY, *arguments)

    def unit_environment(self, cache_paths: Sequence[str]) -> Mapping[str, str]:
        """See `EnginePlugin.unit_environment`."""
        return _ENVIRONMENT

    def capture_problems(self, request: OperationRequest) -> tuple[Problem, ...]:
        """None that the options, the model and the gates of every engine do not tell."""
        return ()

    def read_command(self, command: Sequence[str]) -> CommandFacts:
        """See `EnginePlugin.read_command`."""
        if _ENTRY not in command:
            raise UsageError(
                f"{command[0]!r} is no command of the transformers engine", cure=f"write python -m {_ENTRY} --model ..."
            )
        line = parse_command(command[command.index(_ENTRY) + 1 :])
        return CommandFacts(model=Path(line.model), host=line.host, port=line.port)

    def settings_options(self, model: ResolvedModel, options: Mapping[str, object]) -> dict[str, object]:
        """See `EnginePlugin.settings_options`."""
        return model_source_options(model)

    def execution(self, options: Mapping[str, object], *, unit: str = "u0") -> Execution:
        """One worker, alone in its world and its service, with a device if that is what computes."""
        worker, service = "w0", "api"
        slots = (0,) if parse_options(options).device is Device.CUDA else ()
        payload = {"workers": [worker]}
        return Execution(
            workers=(Worker(id=worker, unit=unit, service=service, process_slot=0, device_slots=slots),),
            groups=(Group(id="world", kind="transformers:world", service=service, members=(worker,)),),
            services=(Service(id=service, role="generate", workers=(worker,)),),
            adapter=Adapter(schema="transformers-1", digest=canonical_sha256(payload), payload=payload),
        )


PLUGIN = TransformersPlugin()
