"""How each rung of the ladder brings a service up: a frozen tree with one provider, or a cold start.

A rung prepares before it evicts, and undoes everything it started when it fails, so that the next one begins from
nothing. Nobody outside can be answered before acceptance has passed: it is asked over the private worker socket, and
the HTTP listener opens afterwards. Units are tied to this process until the end, so a controller that is killed on the
way takes everything it started with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from coldsnap.capsule.driver import RunningUnit
from coldsnap.core.ladder import COUNTED, Blame, Rung
from coldsnap.core.lifecycle import ServiceState, ServiceVerb, next_state
from coldsnap.core.messages import PackSource, WakeReport
from coldsnap.core.points import reached
from coldsnap.core.request import ActivationState, OperationRequest
from coldsnap.core.selection import Provider
from coldsnap.errors import ColdsnapError, InternalError, reason_of
from coldsnap.ops.artifacts import LoadedArtifact
from coldsnap.ops.devices import device_environment
from coldsnap.ops.distrust import forget_proofs
from coldsnap.ops.freezers import Freezer, freezer_for
from coldsnap.ops.ladder import Route
from coldsnap.ops.operation import Operation
from coldsnap.ops.planning import choose_engine, resolve_launch
from coldsnap.ops.prepare import PreparedArtifact, make_ready
from coldsnap.ops.providers import set_aside_damaged
from coldsnap.ops.quarantine import clear_failures, remember_failure
from coldsnap.ops.roots import bring_roots, unit_roots
from coldsnap.ops.seeds import place_seeds
from coldsnap.ops.services import ServiceRecord
from coldsnap.ops.staging import staging, wants_staging
from coldsnap.ops.starting import cold_specs, restored_specs
from coldsnap.ops.steps import (
    accept,
    kill_service,
    launch_all,
    live_workers,
    open_listeners,
    service_units,
    service_workers,
    thaw_all,
)
from coldsnap.ops.tools import Tools
from coldsnap.ops.undo import UndoStack
from coldsnap.ops.workers import LiveWorker, wait_until_loaded

__all__ = ["COLD_SOURCE", "Brought", "RungAttempts", "bring_up"]

COLD_SOURCE = "cold"


@dataclass(frozen=True, kw_only=True, slots=True)
class Brought:
    """What a rung brought up. ``prepared_from_record``: every proof was an earlier one; never for a cold start."""

    state: ServiceState
    rung: Rung
    source: str
    reason: str
    prepared_from_record: bool
    wake: Mapping[str, WakeReport]


@dataclass(kw_only=True)
class RungAttempts:
    """The ways to bring up one service. Each is tried at most once, and raises with nothing left of it."""

    tools: Tools
    op: Operation
    loaded: LoadedArtifact
    request: OperationRequest
    route: Route
    host: str
    port: int
    negative_control: bool = False
    evicted: bool = False
    _reasons: list[str] = field(default_factory=list)

    def table(self) -> dict[Rung, Callable[[str], Brought]]:
        """An attempt for each rung, given why it is tried."""
        return {
            Rung.OVERLAY: partial(self._frozen, Rung.OVERLAY, Provider.NATIVE),
            Rung.NATIVE: partial(self._frozen, Rung.NATIVE, Provider.NATIVE),
            Rung.RECOVERY: partial(self._frozen, Rung.RECOVERY, Provider.RECOVERY),
            Rung.COLD: self._cold,
        }

    def failed(self, rung: Rung, about: Blame, error: ColdsnapError) -> None:
        """Keep the reason; count what is the artifact's own fault; set a damaged pack aside."""
        self._reasons.append(f"{rung.value} failed: {reason_of(error)}")
        if self.negative_control or rung is Rung.COLD:
            return
        loaded = self._artifact_of(rung)
        if about in (Blame.CAPSULE, Blame.OVERLAY, Blame.ANSWERS):
            forget_proofs(self.tools, loaded)
        if about is Blame.PACK_WRONG:
            set_aside_damaged(self.tools, loaded.packs(), error)
        if about not in COUNTED:
            return
        try:
            record = remember_failure(
                self.tools, loaded.digest, loaded.path, operation_id=self.request.id, rung=rung, error=error
            )
        except ColdsnapError as failure:
            error.add_note(f"the failure could not be recorded: {failure.message}")
            return
        if record.is_quarantined:
            text = f"{loaded.path} failed {len(record.failures)} times here and is in quarantine now"
            self.tools.reporter.warn(text)
            error.add_note(f"{text}; `coldsnap clear-quarantine {self.loaded.path}` lets it out")

    # -- a frozen tree ----------------------------------------------------------------------------

    def _artifact_of(self, rung: Rung) -> LoadedArtifact:
        if rung is Rung.OVERLAY and self.route.overlay is not None and self.route.overlay.loaded is not None:
            return self.route.overlay.loaded
        return self.loaded

    def _frozen(self, rung: Rung, provider: Provider, reason: str) -> Brought:
        tools, op = self.tools, self.op
        loaded = self._artifact_of(rung)
        prepared = make_ready(
            tools,
            op,
            loaded,
            self.request,
            provider=provider,
            reason=reason,
            read_checkpoint=tools.services.load(self.request.workload.cluster_id) is not None,
        )
        reached("restore.prepared")
        warm = self.request.lifecycle.activation_state is ActivationState.WARM
        with freezer_for(tools, op, loaded.artifact.snapshot_driver.id) as freezer, UndoStack() as undo:
            self._evict()
            record = self._recorded(rung, prepared.source.value, reason, undo)
            with staging(tools, prepared, wanted=wants_staging(self.request)) as stage:
                workers, record = self._thaw(prepared, freezer, record, undo)
                prepared = stage.finish(prepared, op)
            reports: dict[str, WakeReport] = {}
            if not warm:
                source = PackSource.NONE if self.negative_control else None
                fill = partial(freezer.fill, prepared, self.request.launch, workers, source=source)
                reports = bring_up(tools, op, prepared, workers, fill, host=self.host, port=self.port, source=source)
                if self.negative_control:
                    raise InternalError(
                        "the negative control passed acceptance: answers do not depend on hydration",
                        cure="choose other acceptance prompts, and report this",
                    )
            done = next_state(ServiceState.RESTORING, ServiceVerb.DONE_WARM if warm else ServiceVerb.DONE)
            self._release(record, done, {id(live.unit): live.unit for live in workers}.values(), undo)
        if not warm:
            clear_failures(tools, loaded.digest)
        return Brought(
            state=done,
            rung=rung,
            source=prepared.source.value,
            reason=reason,
            prepared_from_record=prepared.from_record,
            wake=reports,
        )

    def _thaw(
        self, prepared: PreparedArtifact, freezer: Freezer, record: ServiceRecord, undo: UndoStack
    ) -> tuple[list[LiveWorker], ServiceRecord]:
        tools, launch = self.tools, prepared.loaded.artifact.launch
        roots = unit_roots(tools, self.request.launch, self.request.runtime, service=record.name)
        specs = restored_specs(self.request.launch, tools.services.folder(record.name), roots=roots)
        images = {unit: capsule.images_dir for unit, capsule in prepared.capsules.items()}
        with self.op.span("seed"):
            for unit, capsule in prepared.capsules.items():
                place_seeds(prepared.loaded, capsule.path, unit, self.request.policy.cache.paths)
        reached("restore.seeded")
        with self.op.span("thaw") as span:
            span.set(bytes=sum(capsule.image_bytes for capsule in prepared.capsules.values()))
            units = thaw_all(tools, specs, images, undo)
        reached("restore.thawed")
        freezer.thaw(prepared, self.request.launch, units)
        record = tools.services.save(record.model_copy(update={"units": service_units(units)}))
        reached("restore.named")
        return live_workers(tools, launch, units), record

    # -- a cold start -----------------------------------------------------------------------------

    def _cold(self, reason: str) -> Brought:
        """Start the launch's command as this service. It is held to the captured answers like any other."""
        tools, op, launch = self.tools, self.op, self.request.launch
        plugin = choose_engine(tools.engines, launch.engine, field="launch.engine")
        prompts, expected = self.loaded.acceptance()
        with op.span("pin"), tools.reporter.phase("pin the model") as advance:
            model = resolve_launch(plugin, launch, progress=advance)
        bring_roots(tools, op, launch, self.request.runtime)
        with UndoStack() as undo:
            self._evict()
            record = self._recorded(Rung.COLD, COLD_SOURCE, reason, undo)
            devices = {unit.id: device_environment(tools, unit) for unit in launch.units}
            logs = tools.services.folder(record.name)
            roots = unit_roots(tools, launch, self.request.runtime, service=record.name)
            specs = cold_specs(launch, plugin, model, logs, port=None, devices=devices, roots=roots)
            with op.span("launch"):
                units = launch_all(tools, specs, undo)
            record = tools.services.save(record.model_copy(update={"units": service_units(units)}))
            workers = live_workers(tools, launch, units)
            with op.span("load"), tools.reporter.phase(f"start {launch.engine} cold and load {launch.model.id}"):
                wait_until_loaded(workers, deadline_s=tools.deadlines.load_s)
            reached("restore.cold")
            with op.span("accept"):
                accept(tools, workers, prompts, expected)
            with op.span("serve"):
                open_listeners(tools, workers, host=self.host, port=self.port)
            done = next_state(ServiceState.RESTORING, ServiceVerb.DONE)
            self._release(record, done, units.values(), undo)
        return Brought(
            state=done, rung=Rung.COLD, source=COLD_SOURCE, reason=reason, prepared_from_record=False, wake={}
        )

    # -- what both do -----------------------------------------------------------------------------

    def _evict(self) -> None:
        """End the service of this name that runs; the first rung that gets here does it."""
        name = self.request.workload.cluster_id
        previous = self.tools.services.load(name)
        if previous is None:
            return
        with self.op.span("evict"):
            reached("restore.evicting")
            kill_service(self.tools, previous)
            reached("restore.killed")
            self.tools.services.forget(name)
            reached("restore.evicted")
        self.evicted = True

    def _recorded(self, rung: Rung, source: str, reason: str, undo: UndoStack) -> ServiceRecord:
        """The service's record, in state restoring; gone again when the rung fails.

        A service that started cold has no artifact to sleep to, or to wake from.
        """
        cold = rung is Rung.COLD
        overlay = self.route.overlay if rung is Rung.OVERLAY else None
        name = self.request.workload.cluster_id
        record = self.tools.services.save(
            ServiceRecord(
                name=name,
                engine=self.request.launch.engine,
                state=ServiceState.RESTORING.value,
                operation_id=self.request.id,
                artifact_path=None if cold else str(self.loaded.path),
                artifact_digest=None if cold else self.loaded.digest,
                overlay=overlay.digest if overlay is not None else None,
                host=self.host,
                port=self.port,
                health_path=self.loaded.artifact.acceptance.health_path,
                source=source,
                rung=rung.value,
                reasons=tuple(dict.fromkeys((*self._reasons, reason))),
                workers=service_workers(self.request.launch),
            )
        )
        undo.push("forgot the unfinished service record", lambda: self.tools.services.forget(name))
        reached("restore.recorded")
        return record

    def _release(
        self, record: ServiceRecord, done: ServiceState, units: Iterable[RunningUnit], undo: UndoStack
    ) -> None:
        """The point of no return: the record says that the service is there, and from now on it stays."""
        with self.op.span("release"):
            self.tools.services.save(record.model_copy(update={"state": done.value}))
            reached("restore.done")
            for unit in units:
                unit.release()
        undo.commit()
        self.op.stays = f"service {record.name} was {done.value} before that, and stays"
        reached("restore.released")


def bring_up(
    tools: Tools,
    op: Operation,
    prepared: PreparedArtifact,
    workers: list[LiveWorker],
    fill: Callable[[], dict[str, WakeReport]],
    *,
    host: str,
    port: int,
    source: PackSource | None = None,
) -> dict[str, WakeReport]:
    """Fill the memory, compare the answers, open the listener. Shared with ``wake``."""
    prompts, expected = prepared.loaded.acceptance()
    reports = fill()
    reached("restore.hydrated")
    with op.span("accept"):
        accept(tools, workers, prompts, expected)
    reached("restore.accepted")
    if source is not PackSource.NONE:
        with op.span("serve"):
            open_listeners(tools, workers, host=host, port=port)
        reached("restore.serving")
    return reports
