"""The execution graph: which worker processes there are, and the groups and services the engine put them in.

The engine states its groups; nothing here multiplies parallel sizes. A worker's global rank is its place in its
one ``*:world`` group, whatever the environment says: ``RANK`` may only agree, ``LOCAL_RANK`` is a process slot.

Worked example, TP2 on two one-GPU hosts: units u0 and u1; workers w0 (unit u0, slot 0, devices [0]) and w1 (unit u1,
slot 0, devices [0]); one group ``vllm:world`` [w0, w1]. Both have LOCAL_RANK 0; their ranks are 0 and 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from coldsnap.core.canonical import canonical_sha256
from coldsnap.core.digest import Digest
from coldsnap.core.names import Id, Index, Items, Line, QualifiedName, SomeItems, path_fault
from coldsnap.core.parsing import Record, parsed, rule
from coldsnap.core.paths import show
from coldsnap.errors import EngineError, InvalidDocument, Problem, UsageError

__all__ = [
    "Adapter",
    "Execution",
    "Group",
    "Service",
    "Worker",
    "WorkerIdentity",
    "check_runtime_rank",
    "global_rank",
    "repeated",
    "worker_identity",
    "worker_path",
]


class Worker(Record):
    """An engine process that owns accelerators; ``device_slots`` index its unit's ``devices``."""

    id: Id
    unit: Id
    service: Id
    process_slot: Index
    device_slots: Items[Index]

    @rule
    def _slots_once(self) -> Iterator[Problem]:
        for index, slot in repeated(enumerate(self.device_slots)):
            yield Problem(
                field=f"device_slots[{index}]", message="stands twice", value=str(slot), cure="name each slot once"
            )


class Group(Record):
    """An ordered rank namespace of the engine. Without ``service`` it may span services."""

    id: Id
    kind: QualifiedName
    service: Id | None = None
    members: SomeItems[Id]

    @property
    def is_world(self) -> bool:
        """Whether this group gives its members their global rank."""
        return self.kind.endswith(":world")

    @rule
    def _members_once(self) -> Iterator[Problem]:
        for index, member in repeated(enumerate(self.members)):
            yield Problem(
                field=f"members[{index}]",
                message="is a member twice, so it would have two ranks",
                value=show(member),
                cure="name each worker once",
            )


class Service(Record):
    """An independently addressable engine or role, such as a data-parallel replica or ``prefill``."""

    id: Id
    role: Id
    workers: SomeItems[Id]

    @rule
    def _workers_once(self) -> Iterator[Problem]:
        for index, worker in repeated(enumerate(self.workers)):
            yield Problem(
                field=f"workers[{index}]", message="stands twice", value=show(worker), cure="name each worker once"
            )


class Adapter(Record):
    """The engine's own topology, opaque here, bound by the digest of its canonical JSON."""

    schema_: Line = Field(alias="schema")
    digest: Digest
    payload: Any

    @rule
    def _digest_matches(self) -> Iterator[Problem]:
        actual = canonical_sha256(self.payload)
        if actual != self.digest:
            yield Problem(
                field="digest",
                message="is not the SHA-256 of the canonical payload",
                value=str(self.digest),
                cure=f"the payload's is {actual}",
            )


class Execution(Record):
    """The workers, the groups that give them ranks, their services, and the adapter's payload."""

    workers: SomeItems[Worker]
    groups: SomeItems[Group]
    services: SomeItems[Service]
    adapter: Adapter

    @rule
    def _worker_ids_once(self) -> Iterator[Problem]:
        yield from _ids_once("workers", self.workers)

    @rule
    def _group_ids_once(self) -> Iterator[Problem]:
        yield from _ids_once("groups", self.groups)

    @rule
    def _service_ids_once(self) -> Iterator[Problem]:
        yield from _ids_once("services", self.services)

    @rule
    def _process_slots_once(self) -> Iterator[Problem]:
        keyed = ((i, (w.unit, w.process_slot)) for i, w in parsed(self.workers, "unit", "process_slot"))
        for index, (unit, slot) in repeated(keyed):
            yield Problem(
                field=f"workers[{index}].process_slot",
                message=f"is taken by another worker of unit {unit}",
                value=str(slot),
                cure="give each worker of a unit its own slot",
            )

    @rule
    def _device_slots_not_shared(self) -> Iterator[Problem]:
        taken: dict[tuple[str, int], int] = {}
        for index, worker in parsed(self.workers, "unit", "device_slots"):
            for place, slot in enumerate(worker.device_slots):
                first = taken.setdefault((worker.unit, slot), index)
                if first != index:
                    yield Problem(
                        field=f"workers[{index}].device_slots[{place}]",
                        message=f"is a device of unit {worker.unit} that workers[{first}] owns",
                        value=str(slot),
                        cure="give each worker its own devices",
                    )

    @rule
    def _members_exist(self) -> Iterator[Problem]:
        known = {worker.id for worker in self.workers}
        for index, group in parsed(self.groups, "members"):
            for place, member in enumerate(group.members):
                if member not in known:
                    yield _unknown(f"groups[{index}].members[{place}]", "worker", member)

    @rule
    def _group_services_exist(self) -> Iterator[Problem]:
        known = {service.id for service in self.services}
        for index, group in parsed(self.groups, "service"):
            if group.service is not None and group.service not in known:
                yield _unknown(f"groups[{index}].service", "service", group.service)

    @rule
    def _members_in_the_groups_service(self) -> Iterator[Problem]:
        home, known = _home(self.workers), {service.id for service in self.services}
        for index, group in parsed(self.groups, "members", "service"):
            if group.service not in known:
                continue  # it spans services, or names one that is reported elsewhere
            for place, member in enumerate(group.members):
                if home.get(member, group.service) != group.service:
                    yield Problem(
                        field=f"groups[{index}].members[{place}]",
                        message=f"belongs to service {home[member]}, and the group to {group.service}",
                        value=show(member),
                        cure="leave the group's service out if it spans services",
                    )

    @rule
    def _worker_services_exist(self) -> Iterator[Problem]:
        known = {service.id for service in self.services}
        for index, worker in parsed(self.workers, "service"):
            if worker.service not in known:
                yield _unknown(f"workers[{index}].service", "service", worker.service)

    @rule
    def _services_list_their_workers(self) -> Iterator[Problem]:
        listed = {service.id: set(service.workers) for service in self.services}
        for index, worker in parsed(self.workers, "id", "service"):
            if worker.id not in listed.get(worker.service, {worker.id}):
                yield Problem(
                    field=f"workers[{index}].service",
                    message=f"names service {worker.service}, which does not list worker {worker.id}",
                    value=show(worker.service),
                    cure="list the worker there, or name its real service",
                )

    @rule
    def _listed_workers_agree(self) -> Iterator[Problem]:
        home = _home(self.workers)
        for index, service in parsed(self.services, "id", "workers"):
            for place, worker in enumerate(service.workers):
                if worker not in home:
                    yield _unknown(f"services[{index}].workers[{place}]", "worker", worker)
                elif home[worker] != service.id:
                    yield Problem(
                        field=f"services[{index}].workers[{place}]",
                        message=f"is a worker that names service {home[worker]}",
                        value=show(worker),
                        cure="list it in the service that it names",
                    )

    @rule
    def _one_world_each(self) -> Iterator[Problem]:
        worlds = Counter(member for group in self.groups if group.is_world for member in set(group.members))
        for index, worker in parsed(self.workers, "id"):
            if worlds[worker.id] != 1:
                yield Problem(
                    field=f"workers[{index}].id",
                    message=f"is in {worlds[worker.id]} groups whose kind ends in :world, and its rank comes from one",
                    value=show(worker.id),
                    cure="put every worker into exactly one world group",
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerIdentity:
    """Who a worker is, from the graph alone."""

    worker: str
    unit: str
    rank: int
    process_slot: int
    world_group: str


def worker_identity(execution: Execution, worker_id: str) -> WorkerIdentity:
    """The identity of ``worker_id``. Raises InvalidDocument when the graph does not give it exactly one."""
    workers = [worker for worker in execution.workers if worker.id == worker_id]
    worlds = [group for group in execution.groups if group.is_world and worker_id in group.members]
    if len(workers) != 1 or len(worlds) != 1:
        raise InvalidDocument(
            "the execution graph",
            [
                Problem(
                    field="workers",
                    message=f"has {len(workers)} workers of that id, in {len(worlds)} world groups",
                    value=show(worker_id),
                    cure="name a worker that is in exactly one group whose kind ends in :world",
                )
            ],
        )
    return WorkerIdentity(
        worker=worker_id,
        unit=workers[0].unit,
        rank=worlds[0].members.index(worker_id),
        process_slot=workers[0].process_slot,
        world_group=worlds[0].id,
    )


def global_rank(execution: Execution, worker_id: str) -> int:
    """The worker's position in its world group. Raises as ``worker_identity``."""
    return worker_identity(execution, worker_id).rank


def check_runtime_rank(identity: WorkerIdentity, environ: Mapping[str, str]) -> None:
    """Raises EngineError when ``RANK`` is set, to anything, and is not the worker's global rank.

    No other variable is looked at: an environment without rank variables changes nothing.
    """
    claimed = environ.get("RANK")
    if claimed is None or claimed == str(identity.rank):
        return
    raise EngineError(
        f"worker {identity.worker} has global rank {identity.rank} in group {identity.world_group}, "
        f"and its environment says RANK={show(claimed)}",
        cure="start each worker with the rank of the execution graph, or without RANK",
        facts={"worker": identity.worker, "rank": identity.rank, "environment_rank": claimed},
    )


def worker_path(identity: WorkerIdentity, name: str) -> str:
    """Where the worker's file ``name`` lives: ``workers/<id>/<name>``.

    Depends on the worker's id alone, so that it is the same after the environment lost its rank variables.
    Raises UsageError when ``name`` is not a clean relative path.
    """
    fault = path_fault(name, absolute=False)
    if fault is not None:
        raise UsageError(f"a worker's file name {fault}: {show(name)}", cure="name a file inside the worker's folder")
    return f"workers/{identity.worker}/{name}"


def repeated(keyed: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """The (index, key) pairs whose key an earlier pair had."""
    seen: set[Any] = set()
    for index, key in keyed:
        if key in seen:
            yield index, key
        seen.add(key)


def _ids_once(name: str, items: Iterable[Worker | Group | Service]) -> Iterator[Problem]:
    for index, key in repeated((i, item.id) for i, item in parsed(items, "id")):
        yield Problem(
            field=f"{name}[{index}].id", message="is taken by an earlier entry", value=show(key), cure="use another id"
        )


def _home(workers: Iterable[Worker]) -> dict[str, str]:
    """Worker id -> its service; of two workers with one id the first counts, the second is reported elsewhere."""
    home: dict[str, str] = {}
    for worker in workers:
        home.setdefault(worker.id, worker.service)
    return home


def _unknown(field: str, noun: str, name: str) -> Problem:
    return Problem(
        field=field, message=f"names no {noun} of this graph", value=show(name), cure=f"name one of its {noun}s"
    )
