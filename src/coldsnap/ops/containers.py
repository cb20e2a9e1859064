"""Units in containers of docker or podman: what is in their way, their images, and what they left.

The runtime pulls images by digest, with its own logins, into its own store. Beside its image a unit sees what it sees
on an image of coldsnap's own: its mounts, the state root, where packs are, and CRIU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from coldsnap.capsule.containers.answers import missing_program
from coldsnap.capsule.containers.commands import OWNER_LABEL, SERVICE_LABEL, bind_fault
from coldsnap.capsule.containers.runtime import ContainerRuntime
from coldsnap.capsule.criu import criu_prefix
from coldsnap.capsule.driver import ContainerRoot
from coldsnap.core.launch import HOST_IMAGE, Launch, Runtime, Unit
from coldsnap.errors import ColdsnapError, HostError, MissingCapability, Problem, Refused
from coldsnap.ops.devices import unit_gpus
from coldsnap.ops.operation import Operation
from coldsnap.ops.tools import Tools
from coldsnap.ship.names import ImageReference, parse_reference
from coldsnap.store.sweep import GcItem

__all__ = [
    "EndedContainer",
    "bring_images",
    "captured_elsewhere",
    "container_problems",
    "container_roots",
    "ended_containers",
    "remove_ended",
]

PULL_IMAGES = "pull-images"
_SHM = Path("/dev/shm")  # noqa: S108 - a tmpfs of the unit's own


def container_problems(tools: Tools, launch: Launch, runtime: Runtime | None) -> Iterator[Problem]:
    """Why units cannot run in containers here. Asks the runtime, and no registry."""
    if runtime is None:
        return
    try:
        _runtime(tools, runtime).version()
    except ColdsnapError as error:
        yield Problem(field="extension.runtime", message=error.message, value=runtime.value, cure=error.cure or "")
        return
    for index, unit in enumerate(launch.units):
        if unit.host == tools.host.id and unit.image != HOST_IMAGE:
            place = f"launch.units[{index}]"
            yield from _image_problems(tools, unit, runtime, place)
            yield from _bind_problems(unit, place)
    if fault := bind_fault(tools.state.path):
        cure = "use another --state-root"
        yield Problem(field="--state-root", message=f"{fault}, which no bind can name", value=str(tools.state.path), cure=cure)  # fmt: skip # noqa: E501


def captured_elsewhere(captured: Mapping[str, Runtime], launch: Launch, runtime: Runtime | None) -> Iterator[Problem]:
    """Units that were captured in another kind of container than the one that is asked for: that is their identity."""
    for index, unit in enumerate(launch.units):
        if captured.get(unit.id) != runtime:
            was = captured.get(unit.id) or "native"
            yield Problem(
                field="extension.runtime",
                message=f"was {was} when launch.units[{index}] was captured",
                value=str(runtime or "native"),
                cure=f"use {was}, or capture again with this one",
            )


def bring_images(tools: Tools, op: Operation, launch: Launch, runtime: Runtime) -> None:
    """Have the image of every unit of this host here. Idempotent. Raises Refused, UserError, HostError, OutOfSpace."""
    program = _runtime(tools, runtime)
    wanted = {unit.image: unit for unit in launch.units if unit.host == tools.host.id and unit.image != HOST_IMAGE}
    missing = {image: unit for image, unit in wanted.items() if not program.has_image(_local_name(image))}
    if not missing:
        return
    if problems := tuple(container_problems(tools, launch, runtime)):
        raise Refused("the images of the units", problems)
    with op.span(PULL_IMAGES):
        for image, unit in missing.items():
            found = parse_reference(image)
            assert found is not None  # noqa: S101 - `container_problems` refused others
            with tools.reporter.phase(f"have {runtime} pull image of {unit.id}"):
                program.pull(_local_name(image), insecure=found.repository.url.startswith("http:"))


def container_roots(tools: Tools, launch: Launch, runtime: Runtime, *, service: str) -> dict[str, ContainerRoot]:
    """The container of each unit. ``bring_images`` was there before. Raises MissingCapability as ``criu_prefix``."""
    prefix = criu_prefix()
    return {
        unit.id: ContainerRoot(
            runtime=runtime,
            image=_local_name(unit.image),
            python=unit.command[0],
            visible=((prefix, True), (tools.state.path, False)),
            devices=tuple(gpu.uuid for gpu in unit_gpus(tools, unit)),
            labels={OWNER_LABEL: str(tools.state.path), SERVICE_LABEL: service},
        )
        for unit in launch.units
        if unit.host == tools.host.id and unit.image != HOST_IMAGE
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedContainer:
    """A container of this state root that has ended, or was never started."""

    runtime: Runtime
    id: str
    name: str

    @property
    def item(self) -> GcItem:
        """As ``gc`` lists it."""
        return GcItem(kind="container", path=Path(f"{self.runtime}:{self.name}"), bytes=0, reason="it has ended")


def ended_containers(tools: Tools) -> Iterator[EndedContainer]:
    """What units left with runtimes that answer; one that does not is said, unless it is not there at all."""
    for kind, runtime in tools.runtimes.items():
        try:
            for found in runtime.find({OWNER_LABEL: str(tools.state.path)}):
                state = runtime.state(found.id)
                if state is not None and not state.is_alive:
                    yield EndedContainer(runtime=kind, id=found.id, name=found.name)
        except MissingCapability:
            continue  # nothing runs there
        except ColdsnapError as error:
            tools.reporter.warn(f"containers of {kind} were not looked at: {error.message}")


def remove_ended(tools: Tools, wanted: Iterable[EndedContainer]) -> tuple[EndedContainer, ...]:
    """Remove those of ``wanted`` that are ended still, when no operation runs; returns them.

    Raises ResourceBusy while one does.
    """
    names = {one.id for one in wanted}
    if not names:
        return ()
    removed = []
    with tools.state.not_in_use():
        for one in ended_containers(tools):
            if one.id in names:
                try:
                    tools.runtimes[one.runtime].remove(one.id)
                except HostError as error:
                    tools.reporter.warn(error.message)
                else:
                    removed.append(one)
    return tuple(removed)


def _runtime(tools: Tools, runtime: Runtime) -> ContainerRuntime:
    if runtime not in tools.runtimes:
        raise missing_program(runtime)
    return tools.runtimes[runtime]


def _image_problems(tools: Tools, unit: Unit, runtime: Runtime, place: str) -> Iterator[Problem]:
    found = parse_reference(unit.image)
    why = ""
    if not isinstance(found, ImageReference):
        why = "names no registry, and containers are made of HOST/PATH@sha256:..."
    elif tools.remotes.offline and not _runtime(tools, runtime).has_image(_local_name(unit.image)):
        why = f"is not in the store of {runtime}, and {tools.remotes.offline}"
    if why:
        cure = f"name it HOST/PATH@sha256:..., and have it here: `{runtime} pull` it, or run without offline mode once"
        yield Problem(field=f"{place}.image", message=why, value=unit.image, cure=cure)


def _bind_problems(unit: Unit, place: str) -> Iterator[Problem]:
    for number, mount in enumerate(unit.mounts):
        for end, path in (("source", Path(mount.source)), ("target", Path(mount.target))):
            fault = bind_fault(path)
            if end == "target" and _SHM in (path, *path.parents):
                fault = "is below /dev/shm, where a unit has a memory of its own"
            if fault:
                cure = "use another path, or a unit without a container runtime"
                field = f"{place}.mounts[{number}].{end}"
                yield Problem(field=field, message=f"{fault}; no container can have it", value=str(path), cure=cure)


def _local_name(image: str) -> str:
    """As the runtimes write it: without our word for a registry that has no TLS."""
    return image.removeprefix("oci+http://")
