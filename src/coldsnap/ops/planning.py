"""From a recipe to the full format-4 request it stands for; ``coldsnap plan`` prints the result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coldsnap.core.request import HOST_IMAGE, DriverId, Execution, Launch, ModelSource, OperationRequest, request_from
from coldsnap.engines.protocol import EnginePlugin, ResolvedModel
from coldsnap.errors import InvalidDocument, Problem, Refused, UserError
from coldsnap.ops.places import MountLike, outside
from coldsnap.ops.recipe import IMAGE_PYTHON, Recipe

__all__ = [
    "BASE_ENVIRONMENT",
    "UNIT_ID",
    "PlannedCapture",
    "choose_engine",
    "engine_options",
    "plan_capture",
    "resolve_launch",
    "uses_devices",
]

UNIT_ID = "u0"
EXTENSION_SCHEMA = "coldsnap-extension-1"
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000

# What an engine process gets beside the recipe's own variables. Nothing of the caller's environment is
# inherited: it would end up in the process image, and it often holds credentials.
BASE_ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/run/coldsnap",
    "LANG": "C.UTF-8",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCapture:
    """A request, and where the model's files are on this machine now (placement, not identity)."""

    request: OperationRequest
    model: ResolvedModel


def choose_engine(engines: Mapping[str, EnginePlugin], name: str, *, field: str = "engine") -> EnginePlugin:
    """The plugin called ``name``. Raises UserError that lists what is installed."""
    if name not in engines:
        known = ", ".join(sorted(engines)) or "none"
        raise UserError(f"{field}: no engine is called {name!r}", cure=f"installed engines: {known}")
    return engines[name]


def plan_capture(
    recipe: Recipe,
    plugin: EnginePlugin,
    *,
    operation_id: str,
    output: Path,
    driver: DriverId,
    host_id: str = "local",
    port: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> PlannedCapture:
    """Pin the recipe's model and lay out the whole capture request.

    ``driver`` is already chosen (the caller's task when the recipe says ``auto``). Raises InvalidDocument
    with every wrong option, UserError for a model that cannot be pinned.
    """
    host, wanted_port, engine_serve = _serve(recipe)
    options = plugin.options(engine_serve)
    model = _seen_through(
        recipe.model, recipe.mounts, lambda name: plugin.resolve_model(name, recipe.revision, progress=progress)
    )
    if recipe.image != HOST_IMAGE:
        _refuse_unseen_model(recipe)
    command = plugin.unit_command(model, options, host=host, port=port or wanted_port, python=_python(recipe))
    materialize = recipe.weights.materialize or plugin.supports.default_materialize
    weights: dict[str, Any] = {
        "mode": recipe.weights.mode,
        "native": {"materialize": materialize},
    }
    if recipe.weights.repository is not None:
        weights["native"] |= {"repository": recipe.weights.repository, "revision": recipe.weights.revision or ""}
    execution = plugin.execution(options, unit=UNIT_ID)
    _refuse_driver(driver, execution, plugin.name)
    document: dict[str, Any] = {
        "format": 4,
        "kind": "coldsnap-operation-request",
        "operation": "capture",
        "id": operation_id,
        "snapshot_driver": {"id": driver.value},
        "output": str(output),
        "launch": {
            "engine": plugin.name,
            "model": {"id": model.id, "revision": model.revision, "source": model.source},
            "units": [
                {
                    "id": UNIT_ID,
                    "index": 0,
                    "host": host_id,
                    "devices": _devices(recipe, execution),
                    "image": recipe.image,
                    **({"image_digest": recipe.image.rpartition("@")[2]} if recipe.image != HOST_IMAGE else {}),
                    "command": list(command),
                    "environment": {
                        **BASE_ENVIRONMENT,
                        **plugin.unit_environment(recipe.cache_seeds),
                        **recipe.environment,
                    },
                    "mounts": [mount.model_dump() for mount in recipe.mounts],
                }
            ],
            "execution": execution.model_dump(mode="json"),
        },
        "policy": {"weights": weights, "cache": {"seed": True, "paths": list(recipe.cache_seeds)}},
        "validation": {
            "health_path": recipe.validation.health_path,
            "prompt": recipe.validation.prompts[0].text,
        },
        "workload": {"cluster_id": recipe.name},
        "extension": {
            "schema": EXTENSION_SCHEMA,
            "prompts": [prompt.model_dump() for prompt in recipe.validation.prompts],
            "allow_secrets": list(recipe.allow_secrets),
            "cold_start": recipe.cold_start,
            "stage": recipe.stage,
            "port": port or wanted_port,
            **({} if recipe.runtime == "native" else {"runtime": recipe.runtime}),
        },
    }
    return PlannedCapture(request=request_from(document), model=model)


def resolve_launch(
    plugin: EnginePlugin, launch: Launch, *, progress: Callable[[int], None] | None = None
) -> ResolvedModel:
    """The model a strict request names, found on this machine and pinned again.

    Raises Refused when the files are not those of ``launch.model``, naming what differs.
    """
    folder = plugin.read_command(launch.units[0].command).model
    hub = launch.model.source != ModelSource.LOCAL
    name, revision = (launch.model.id, launch.model.revision) if hub else (str(folder), None)
    found = _seen_through(
        name, launch.units[0].mounts, lambda place: plugin.resolve_model(place, revision, progress=progress)
    )
    problems = [
        Problem(
            field=f"launch.model.{field}",
            message=f"is not what {folder} holds",
            value=wanted,
            cure=f"it holds {have}: name that, or give the right folder",
        )
        for field, wanted, have in (
            ("id", launch.model.id, found.id),
            ("revision", launch.model.revision, found.revision),
            ("source", launch.model.source, found.source),
        )
        if wanted != have
    ]
    if problems:
        raise Refused("the model of the request", problems)
    return found


def _python(recipe: Recipe) -> str:
    """The interpreter that runs the engine: the recipe's, the image's usual one, or ours."""
    return recipe.python or (sys.executable if recipe.image == HOST_IMAGE else IMAGE_PYTHON)


def _refuse_unseen_model(recipe: Recipe) -> None:
    """Raises InvalidDocument for a model that a unit with an image would not see."""
    if outside(Path(recipe.model), recipe.mounts) == Path(recipe.model):
        problem = Problem(
            field="model",
            message="is not below the target of a mount, and a unit with an image sees nothing else of this machine",
            value=recipe.model,
            cure="mount its folder, and name it by its place in the unit",
        )
        raise InvalidDocument("the recipe", [problem])


def _seen_through(model: str, mounts: Iterable[MountLike], resolve: Callable[[str], ResolvedModel]) -> ResolvedModel:
    """The model of a unit that sees it at ``model``: looked at below the source of its mount, kept by the unit's path.

    So a command names a place inside the unit, and where that is on a host stays placement.
    """
    place = outside(Path(model), mounts)
    return resolve(model) if place == Path(model) else replace(resolve(str(place)), path=Path(model))


def uses_devices(execution: Execution) -> bool:
    """Whether any worker computes on an accelerator."""
    return any(worker.device_slots for worker in execution.workers)


def _refuse_driver(driver: DriverId, execution: Execution, engine: str) -> None:
    """Raises Refused for a driver that the engine's options leave nothing to do, or that would lose its devices."""
    if uses_devices(execution) == (driver is not DriverId.HOST):
        return
    if driver is DriverId.HOST:
        message, cure = f"is for engines on the processor, and {engine} computes on a GPU as asked", "use n610 or n580"
    else:
        message = f"is for engines on a GPU, and {engine} computes on the processor as asked"
        cure = "use driver host, or ask the engine for a device (serve: {device: cuda})"
    raise Refused("the recipe", [Problem(field="driver", message=message, value=driver.value, cure=cure)])


def _devices(recipe: Recipe, execution: Execution) -> list[str]:
    """The recipe's selectors, or the first GPUs; as many as the workers have slots. Raises InvalidDocument."""
    needed = max((slot + 1 for worker in execution.workers for slot in worker.device_slots), default=0)
    if recipe.devices and len(recipe.devices) != needed:
        problem = Problem(
            field="devices",
            message=f"names another number of devices than the {needed} that the engine's workers use",
            value=str(len(recipe.devices)),
            cure=f"name {needed}, or leave it out" if needed else "leave it out",
        )
        raise InvalidDocument("the recipe", [problem])
    return list(recipe.devices) or [str(slot) for slot in range(needed)]


def engine_options(recipe: Recipe) -> dict[str, Any]:
    """The part of a recipe's ``serve`` that is the engine's own. Raises InvalidDocument for a wrong address."""
    return _serve(recipe)[2]


def _serve(recipe: Recipe) -> tuple[str, int, dict[str, Any]]:
    serve = dict(recipe.serve)
    host = serve.pop("host", DEFAULT_HOST)
    port = serve.pop("port", DEFAULT_PORT)
    problems = []
    if not isinstance(host, str) or not host:
        problems.append(
            Problem(field="serve.host", message="is an address", value=repr(host), cure="write 127.0.0.1 or 0.0.0.0")
        )
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        problems.append(
            Problem(field="serve.port", message="is a port from 1 to 65535", value=repr(port), cure="write port: 8000")
        )
    if problems:
        raise InvalidDocument("the recipe", problems)
    return host, port, serve
