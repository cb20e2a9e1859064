"""From a launch's units to what the unit driver starts: settings records, environment, mounts, logs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from coldsnap.capsule.driver import RUN_DIR, BindMount, ContainerRoot, UnitRoot, UnitSpec
from coldsnap.core.canonical import canonical_json
from coldsnap.core.execution import worker_identity
from coldsnap.core.messages import Prompt, WorkerSettings, worker_socket_name
from coldsnap.core.request import Launch, OperationRequest, Unit
from coldsnap.engines.protocol import EnginePlugin, ResolvedModel

__all__ = ["SETTINGS_VARIABLE", "cold_specs", "request_prompts", "restored_specs"]

SETTINGS_VARIABLE = "COLDSNAP_SETTINGS"


def cold_specs(
    launch: Launch,
    plugin: EnginePlugin,
    model: ResolvedModel,
    logs: Path,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    template: bool = False,
    devices: Mapping[str, Mapping[str, str]] | None = None,
    roots: Mapping[str, UnitRoot | ContainerRoot] | None = None,
) -> dict[str, UnitSpec]:
    """What to start for each unit: the launch's command, and one settings file per worker.

    ``port`` None leaves the engine loaded but not serving until it is told to. ``template``: it imports, and waits to
    be placed. ``devices``: unit -> the variables that tell a process which devices it has. ``roots``: of units that
    have an image.
    """
    options = plugin.settings_options(model, {})
    specs = {}
    for unit in launch.units:
        workers = [worker for worker in launch.execution.workers if worker.unit == unit.id]
        settings = {
            _settings_name(worker.process_slot): WorkerSettings(
                worker=worker.id,
                unit=unit.id,
                rank=worker_identity(launch.execution, worker.id).rank,
                socket=str(RUN_DIR / worker_socket_name(worker.id)),
                host=host,
                port=port,
                template=template,
                options=options,
            )
            for worker in workers
        }
        files = {name: canonical_json(record.model_dump(mode="json")) for name, record in settings.items()}
        visible = devices.get(unit.id, {}) if devices is not None else {}
        environment = {**unit.environment, **visible, SETTINGS_VARIABLE: str(RUN_DIR / _settings_name(0))}
        specs[unit.id] = UnitSpec(
            unit=unit.id,
            command=unit.command,
            environment=environment,
            mounts=_mounts(unit),
            root=(roots or {}).get(unit.id),
            files=files,
            log_path=logs / f"{unit.id}.log",
        )
    return specs


def restored_specs(
    launch: Launch, logs: Path, *, roots: Mapping[str, UnitRoot | ContainerRoot] | None = None
) -> dict[str, UnitSpec]:
    """What to bring back for each unit: the tree has its own command; mounts and the log are placement."""
    return {
        unit.id: UnitSpec(
            unit=unit.id, mounts=_mounts(unit), root=(roots or {}).get(unit.id), log_path=logs / f"{unit.id}.log"
        )
        for unit in launch.units
    }


def request_prompts(request: OperationRequest) -> tuple[Prompt, ...]:
    """The acceptance prompts of a request: the extension's, else the validation's one."""
    if request.extension is not None and request.extension.prompts:
        return tuple(Prompt(text=p.text, max_tokens=p.max_tokens) for p in request.extension.prompts)
    return (Prompt(text=request.validation.prompt, max_tokens=8),) if request.validation.prompt else ()


def _settings_name(process_slot: int) -> str:
    return "settings.json" if process_slot == 0 else f"settings-{process_slot}.json"


def _mounts(unit: Unit) -> tuple[BindMount, ...]:
    return tuple(
        BindMount(source=Path(mount.source), target=Path(mount.target), read_only=mount.read_only)
        for mount in unit.mounts
    )
