"""Every gate an operation must pass, asked before a byte moves and answered all at once.

A gate has a name, the one who must act when it says no, and its problems. ``explain`` prints all of them;
``restore`` and ``prepare`` raise Refused with every problem of every gate.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from coldsnap.capsule.hostfiles import PROOFS_NAME, check_host_files
from coldsnap.capsule.ports import check_port_free
from coldsnap.capsule.prepared import is_prepared
from coldsnap.core.bindings import HostFile, containers_of, cuda_states_of, host_files_of
from coldsnap.core.compat import compatibility_problems
from coldsnap.core.drivers import DriverId, admit_features, required_features
from coldsnap.core.request import Launch, OperationRequest
from coldsnap.core.selection import Provider
from coldsnap.engines.protocol import EnginePlugin
from coldsnap.errors import ColdsnapError, InvalidDocument, Problem, Refused, ResourceBusy
from coldsnap.ops.artifacts import LoadedArtifact
from coldsnap.ops.assembly import capsule_folder
from coldsnap.ops.containers import captured_elsewhere, container_problems
from coldsnap.ops.devices import launch_device_problems, unit_facts
from coldsnap.ops.fetching import missing_bytes
from coldsnap.ops.origins import capsule_origin
from coldsnap.ops.planning import choose_engine
from coldsnap.ops.providers import decide_provider
from coldsnap.ops.quarantine import quarantine_problems
from coldsnap.ops.roots import root_problems
from coldsnap.ops.tools import Tools

__all__ = ["Actor", "Gate", "check_capture", "refuse_unless_open", "restore_gates"]

_SPARE_BYTES = 64 * 1024 * 1024


class Actor(StrEnum):
    """Who must act when a gate says no."""

    CALLER = "you, in the request"
    HOST = "whoever keeps this machine"
    ARTIFACT = "whoever captured or copied the artifact"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """One gate and its answer: open when it has no problems. ``detail`` says what was looked at."""

    name: str
    actor: Actor
    problems: tuple[Problem, ...]
    detail: str = ""

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "name": self.name,
            "open": not self.problems,
            "who_must_act": self.actor.value,
            "detail": self.detail,
            "problems": [p.document() for p in self.problems],
        }


def check_capture(tools: Tools, request: OperationRequest) -> None:
    """What can be said of a capture before it starts. Raises Refused with every reason."""
    problems = list(_capture_problems(tools, request))
    if problems:
        raise Refused(f"capture {request.id}", problems)


def _capture_problems(tools: Tools, request: OperationRequest) -> Iterator[Problem]:
    output = Path(request.output)
    if output.is_symlink() or output.exists():
        yield Problem(
            field="output",
            message="exists; a committed artifact is never overwritten",
            value=str(output),
            cure="name another file, or `coldsnap delete` the old artifact first",
        )
    elif not output.is_absolute():
        yield Problem(field="output", message="is not absolute", value=str(output), cure="write the full path")
    elif not output.parent.is_dir():
        yield Problem(
            field="output", message="is in no folder that exists", value=str(output), cure=f"mkdir -p {output.parent}"
        )
    elif not os.access(output.parent, os.W_OK):
        yield Problem(field="output", message="cannot be written", value=str(output), cure="choose another folder")
    plugin = choose_engine(tools.engines, request.launch.engine, field="launch.engine")
    driver = request.snapshot_driver.id
    if driver.value not in plugin.supports.drivers:
        yield Problem(
            field="snapshot_driver.id",
            message=f"is not supported by engine {plugin.name}",
            value=driver.value,
            cure=f"use {' or '.join(sorted(plugin.supports.drivers))}",
        )
    yield from _materialize_problems(plugin, request)
    yield from root_problems(tools, request.launch, request.runtime)
    yield from _placement_problems(tools, request.launch)
    yield from launch_device_problems(tools, request.launch)
    yield from plugin.capture_problems(request)
    for index, folder in enumerate(request.policy.cache.paths if request.policy.cache.seed else ()):
        if not Path(folder).is_dir():
            yield Problem(
                field=f"policy.cache.paths[{index}]",
                message="is no folder",
                value=folder,
                cure="start the engine once so that it fills its caches, or take the path out",
            )
    features = required_features(driver, request.launch.execution)
    yield from admit_features(features, tools.probe(features))


def _materialize_problems(plugin: EnginePlugin | None, request: OperationRequest) -> tuple[Problem, ...]:
    """An engine without the writer of packs cannot write them beside its service. (No engine at all: another gate.)"""
    materialize = request.policy.weights.native.materialize.value
    if plugin is None or materialize in plugin.supports.materialize:
        return ()
    return (
        Problem(
            field="policy.weights.native.materialize",
            message=f"is not supported by engine {plugin.name}",
            value=materialize,
            cure=f"use {' or '.join(sorted(plugin.supports.materialize))}",
        ),
    )


def _placement_problems(tools: Tools, launch: Launch) -> Iterator[Problem]:
    """Units of other hosts: nothing here can start them, and starting them on this one would be a guess."""
    for index, unit in enumerate(launch.units):
        if unit.host != tools.host.id:
            yield Problem(
                field=f"launch.units[{index}].host",
                message="is another host than this one, and units are started here so far",
                value=unit.host,
                cure=f"write {tools.host.id}",
            )


def _mount_problems(tools: Tools, launch: Launch) -> Iterator[Problem]:
    """Sources of mounts that are not here: better said before a byte moves than by a unit that cannot start."""
    for index, unit in enumerate(launch.units):
        for number, mount in enumerate(unit.mounts):
            if unit.host == tools.host.id and not os.path.exists(mount.source):  # noqa: PTH110 - no error counts
                yield Problem(
                    field=f"launch.units[{index}].mounts[{number}].source",
                    message="is not on this machine",
                    value=mount.source,
                    cure=f"say where it is: --mount {mount.target}=FOLDER",
                )


def restore_gates(
    tools: Tools,
    loaded: LoadedArtifact,
    request: OperationRequest,
    *,
    address: tuple[str, int] | None,
    ignore_quarantine: bool = False,
) -> tuple[Gate, ...]:
    """Every gate of a restore, in the order a reader would fix them. Reads no extent manifest, moves nothing.

    Without an ``address`` to serve at, the port is not looked at.
    """
    artifact, launch = loaded.artifact, request.launch
    features = tools.probe(tuple(artifact.requires.features))
    units = [unit.id for unit in artifact.launch.units]
    hosts = {unit.id: unit_facts(tools, unit) for unit in launch.units}
    facts = tools.host_facts()
    compatible = compatibility_problems(
        artifact,
        launch=launch,
        hosts=hosts,
        features=dict.fromkeys(units, features),
        policy=request.policy.compatibility,
        driver=request.snapshot_driver.id,
    )
    prepared = {
        unit: is_prepared(tools.state, loaded.capsule_digest(unit), loaded.expected_files(unit)) for unit in units
    }
    wanted = tuple(p for p in compatible if p.field.startswith(("launch", "snapshot_driver")))
    placed = (
        *wanted,
        *_placement_problems(tools, launch),
        *_mount_problems(tools, launch),
        *(root_problems(tools, launch) if request.runtime is None else ()),
        *launch_device_problems(tools, launch),
    )
    return (
        _gate("engine", Actor.HOST, lambda: _no_problem(choose_engine(tools.engines, artifact.launch.engine))),
        Gate(name="launch", actor=Actor.CALLER, problems=placed, detail="what may change at restore"),
        Gate(
            name="machine",
            actor=Actor.HOST,
            problems=tuple(p for p in compatible if p not in wanted),
            detail=f"{facts.architecture}, kernel {facts.kernel}, CRIU {facts.criu_version or 'missing'}",
        ),
        Gate(
            name="host files",
            actor=Actor.HOST,
            problems=_host_file_problems(tools, loaded),
            detail=f"{sum(len(one.files) for one in host_files_of(artifact.runtime.bindings))} files that it maps",
        ),
        _gate(
            "container",
            Actor.HOST,
            lambda: (
                *captured_elsewhere(containers_of(artifact.runtime.bindings), launch, request.runtime),
                *container_problems(tools, launch, request.runtime),
            ),
            detail=str(request.runtime or "none: coldsnap's own namespaces"),
        ),
        _gate(
            "capsule",
            Actor.ARTIFACT,
            lambda: (*_capsule_problems(tools, loaded, prepared), *_cuda_state_problems(loaded)),
            detail=f"{sum(prepared.values())} of {len(units)} prepared",
        ),
        _gate(
            "quarantine",
            Actor.HOST,
            lambda: () if ignore_quarantine else quarantine_problems(tools, loaded.digest),
        ),
        _gate("acceptance", Actor.ARTIFACT, lambda: _acceptance_problems(loaded)),
        _gate("weights", Actor.ARTIFACT, lambda: _no_problem(decide_provider(tools, loaded, request))),
        _gate(
            "materialize",
            Actor.CALLER,
            lambda: (
                _materialize_problems(tools.engines[artifact.launch.engine], request)
                if artifact.launch.engine in tools.engines
                else ()  # the engine's own gate says so
            ),
        ),
        _gate(
            "port",
            Actor.HOST,
            lambda: _port_problems(tools, address, request.workload.cluster_id),
            detail="not looked at" if address is None else f"{address[0]}:{address[1]}",
        ),
        _gate("space", Actor.HOST, lambda: _space_problems(tools, loaded, request, prepared)),
    )


def _acceptance_problems(loaded: LoadedArtifact) -> tuple[Problem, ...]:
    """Without answers to compare nothing may serve; better said before a running service makes room."""
    prompts, answers = loaded.acceptance()
    if not answers:
        cure = "capture again with at least one prompt"
        return (Problem(field="runtime.bindings", message="hold no acceptance answers to compare with", cure=cure),)
    shown = loaded.artifact.acceptance
    return tuple(
        Problem(
            field=f"acceptance.{name}",
            message="is not that of the first acceptance answer, which is what a restore compares",
            value=found[:80],
            cure="take the descriptor as its capture wrote it",
        )
        for name, found, wanted in (
            ("prompt", shown.prompt, prompts[0].text),
            ("expected", shown.expected, answers[0].text),
        )
        if found != wanted
    )


def refuse_unless_open(subject: str, gates: tuple[Gate, ...]) -> None:
    """Raise Refused with every problem of every closed gate."""
    problems = [problem for gate in gates for problem in gate.problems]
    if problems:
        raise Refused(subject, problems, facts={"gates": [gate.name for gate in gates if gate.problems]})


def _gate(name: str, actor: Actor, look: Callable[[], tuple[Problem, ...]], *, detail: str = "") -> Gate:
    """A gate whose look may itself raise: the error is then its problem."""
    try:
        problems = look()
    except (Refused, InvalidDocument) as error:
        problems = error.problems
    except ColdsnapError as error:
        problems = (Problem(field=name, message=error.message, cure=error.cure),)
    return Gate(name=name, actor=actor, problems=problems, detail=detail)


def _no_problem(found: object) -> tuple[Problem, ...]:
    return ()


def _host_file_problems(tools: Tools, loaded: LoadedArtifact) -> tuple[Problem, ...]:
    """Units of one machine map the same libraries: each file is looked at, and reported, once."""
    proofs = tools.state.prepared / PROOFS_NAME  # only the first look at a library pays for hashing it
    seen: set[HostFile] = set()
    problems: list[Problem] = []
    for binding in host_files_of(loaded.artifact.runtime.bindings):
        files = tuple(file for file in binding.files if file not in seen)
        seen.update(files)
        if files:
            problems += check_host_files(binding.model_copy(update={"files": files}), proofs=proofs)
    return tuple(problems)


def _capsule_problems(tools: Tools, loaded: LoadedArtifact, prepared: Mapping[str, bool]) -> tuple[Problem, ...]:
    problems = []
    for unit in loaded.artifact.launch.units:
        digest = loaded.capsule_digest(unit.id)
        folder = capsule_folder(tools, digest)
        if folder.is_dir() or prepared[unit.id]:
            continue
        origin = capsule_origin(tools, loaded, unit.id)
        if origin.why_not:
            problems.append(
                Problem(
                    field=f"capsule.images[{unit.id}]",
                    message=f"is not on this machine, and {origin.why_not}",
                    value=str(digest),
                    cure=f"`coldsnap prepare` fetches it from {origin.place} once that is allowed"
                    if origin.place
                    else f"copy its image layout to {folder}, `coldsnap publish` it where it is, or capture here",
                )
            )
    return tuple(problems)


def _cuda_state_problems(loaded: LoadedArtifact) -> Iterator[Problem]:
    """A tree with CUDA state comes back only where the artifact says which processes had it, and on which devices."""
    if loaded.artifact.snapshot_driver.id is not DriverId.N610:
        return
    states = {one.unit: one for one in cuda_states_of(loaded.artifact.runtime.bindings)}
    for unit in loaded.artifact.launch.units:
        state = states.get(unit.id)
        if state is None or not state.holders or len(state.devices) != len(unit.devices):
            yield Problem(
                field="runtime.bindings",
                message=f"do not say which processes of unit {unit.id} have CUDA state on which of its devices",
                value="nothing" if state is None else f"{len(state.holders)} processes, {len(state.devices)} devices",
                cure="take the descriptor as its capture wrote it, or capture again",
            )


def _port_problems(tools: Tools, address: tuple[str, int] | None, name: str) -> tuple[Problem, ...]:
    if address is None:
        return ()
    host, port = address
    owner = next(
        (
            record
            for record in map(tools.services.load, tools.services.names())
            if record is not None and record.port == port and record.state == "ready"
        ),
        None,
    )
    if owner is not None and owner.name == name:
        return ()  # ours: this restore replaces it
    try:
        check_port_free(host, port)
    except ResourceBusy as error:
        whose = f", service {owner.name}" if owner is not None else ""
        return (
            Problem(
                field="port",
                message=f"{error.message}{whose}",
                value=str(port),
                cure="use --port with a free port, or stop its owner",
            ),
        )
    return ()


def _space_problems(
    tools: Tools, loaded: LoadedArtifact, request: OperationRequest, prepared: Mapping[str, bool]
) -> tuple[Problem, ...]:
    try:
        native = decide_provider(tools, loaded, request).provider is Provider.NATIVE
    except ColdsnapError:
        native = False  # a gate of its own says so
    needed = fetching = missing_bytes(tools, loaded, request, packs=native)
    for unit in loaded.artifact.launch.units:
        if not prepared[unit.id]:
            needed += sum(size for size, _ in loaded.expected_files(unit.id).values()) + _SPARE_BYTES
    free = shutil.disk_usage(tools.state.path).free
    if needed <= free:
        return ()
    return (
        Problem(
            field="space",
            message=f"{'fetching and ' if fetching else ''}unpacking needs {needed} bytes and {free} are free",
            value=str(tools.state.path),
            cure="free some space (`coldsnap gc --dry-run` shows what can go), or use another --state-root",
        ),
    )
