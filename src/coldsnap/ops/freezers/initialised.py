"""A process tree with initialised CUDA state: taken off the devices before the dump, put back after the thaw.

    freeze    sleep | find holders | lock all | checkpoint all | look | dump all | the trees end
    thaw      find what was captured | restore all | unlock all

Between the lock and the end of the trees a failure of any kind lets the source run again: what was checkpointed is
restored, what was locked is unlocked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

from coldsnap.capsule.cuda.api import CheckpointApi, ProcessState
from coldsnap.capsule.cuda.holders import Holder, find_holders, holder_problems, leftover_problems
from coldsnap.capsule.cuda.plan import in_rank_order
from coldsnap.capsule.cuda.suspend import bring_back, resume, suspend
from coldsnap.capsule.driver import RunningUnit
from coldsnap.capsule.tree import TreeFacts
from coldsnap.core.bindings import CudaHolder, CudaStateBinding, cuda_states_of
from coldsnap.core.launch import Launch
from coldsnap.core.points import reached
from coldsnap.errors import IntegrityError, Problem, Refused
from coldsnap.ops.devices import device_map, unit_gpus
from coldsnap.ops.freezers.acts import barrier_of, dump_all, inspect_all, put_to_sleep, telling_deaths
from coldsnap.ops.freezers.base import Running, Still
from coldsnap.ops.freezers.tree import TreeFreezer
from coldsnap.ops.prepare import PreparedArtifact
from coldsnap.ops.tools import Tools
from coldsnap.ops.workers import LiveWorker

__all__ = ["InitialisedFreezer"]

_STATUS_S = 10.0


class InitialisedFreezer(TreeFreezer):
    """Implements ``Freezer``: a ``TreeFreezer`` with CUDA state around its dump and its thaw."""

    def __enter__(self) -> Self:
        self._api = self._tools.accelerator.open_api()
        self._api.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """End the helper process."""
        self._api.close()

    def freeze(self, running: Running) -> Still:
        """See the module's head."""
        tools, op, units = self._tools, self._op, running.units
        ranks = _ranks(running.workers)  # asked while they answer; a locked process may not
        put_to_sleep(tools, op, running.workers)
        with op.span("holders"):
            holders = in_rank_order(_find(tools, self._api, units), ranks)
        reached("capture.held")
        with self._suspended(units, holders):
            _refuse_leftovers(tools, units)
            inspected = inspect_all(tools, op, units)
            dumps = dump_all(tools, op, units, running.scratch)
        reached("capture.frozen")
        cuda = {
            unit.id: CudaStateBinding(
                unit=unit.id,
                devices=tuple(gpu.uuid for gpu in unit_gpus(tools, unit)),
                holders=tuple(
                    CudaHolder(pid=one.inside_pid, command=one.command) for one in holders if one.unit == unit.id
                ),
            )
            for unit in running.launch.units
        }
        return Still(dumps=dumps, inspected=inspected, cuda=cuda)

    @contextmanager
    def _suspended(self, units: Mapping[str, RunningUnit], holders: Sequence[Holder]) -> Iterator[None]:
        """CUDA state off the devices in the block, and back on them when the block fails."""
        tools, api = self._tools, self._api
        barrier, patience = barrier_of(tools, tuple(units)), tools.deadlines.cuda
        with (
            self._op.span("suspend") as span,
            tools.reporter.phase("take CUDA state off the devices"),
            telling_deaths(tools, units, "suspend", holders),
        ):
            span.set(**suspend(api, holders, barrier=barrier, patience=patience), processes=len(holders))
        reached("capture.suspended")
        try:
            yield
        except BaseException as error:
            for line in bring_back(api, holders, barrier=barrier, patience=patience):
                error.add_note(line)
            raise

    def thaw(self, prepared: PreparedArtifact, launch: Launch, units: Mapping[str, RunningUnit]) -> None:
        """Put the CUDA state of every captured holder back, on the devices that ``launch`` gives its unit."""
        captured = {one.unit: one for one in cuda_states_of(prepared.loaded.artifact.runtime.bindings)}
        tools, api = self._tools, self._api
        with self._op.span("resume") as span:
            devices = {unit.id: device_map(captured[unit.id].devices, unit_gpus(tools, unit)) for unit in launch.units}
            barrier, patience = barrier_of(tools, tuple(units)), tools.deadlines.cuda
            holders: list[Holder] = []
            with telling_deaths(tools, units, "resume", holders):
                for name, unit in units.items():
                    holders.extend(_restored_holders(tools, api, unit, captured[name].holders))
                seconds = resume(api, holders, devices=devices, barrier=barrier, patience=patience)
            span.set(**seconds, processes=len(holders))
        reached("restore.resumed")


def _ranks(workers: Sequence[LiveWorker]) -> dict[tuple[str, int], int]:
    """(unit, PID inside it) -> global rank, as the workers say."""
    statuses = [live.client.status(deadline_s=_STATUS_S) for live in workers]
    return {(status.unit, status.pid): status.rank for status in statuses}


def _find(tools: Tools, api: CheckpointApi, units: Mapping[str, RunningUnit]) -> tuple[Holder, ...]:
    """Raises Refused with every process whose CUDA state cannot be taken off, or when there is none at all."""
    holders: list[Holder] = []
    problems: list[Problem] = []
    paths = tools.accelerator.device_paths
    for name, unit in units.items():
        tree = tools.accelerator.look(unit.pids())
        states = _states(api, tree)
        found = find_holders(name, tree, states, paths)
        holders.extend(found)
        problems.extend(holder_problems(name, tree, states, paths))
        if not found and not problems:
            problems.append(
                Problem(
                    field=f"unit {name}",
                    message="has no process with CUDA state, so there is nothing that this driver is for",
                    value=f"{len(tree.processes)} processes",
                    cure="use driver host for an engine on the processor, or see in its log why it left the GPU alone",
                )
            )
    if problems:
        raise Refused("the CUDA state of the process tree cannot be captured", problems)
    return tuple(holders)


def _states(api: CheckpointApi, tree: TreeFacts) -> dict[int, ProcessState | None]:
    return {process.pid: api.state(process.pid) for process in tree.processes}


def _refuse_leftovers(tools: Tools, units: Mapping[str, RunningUnit]) -> None:
    accelerator = tools.accelerator
    problems = [
        problem
        for name, unit in units.items()
        for problem in leftover_problems(name, accelerator.look(unit.pids()), accelerator.device_paths)
    ]
    if problems:
        raise Refused("the process tree holds devices and cannot be captured", problems)


def _restored_holders(
    tools: Tools, api: CheckpointApi, unit: RunningUnit, captured: Sequence[CudaHolder]
) -> Iterator[Holder]:
    """The restored copies of the captured holders, in their order. Raises IntegrityError when one is not there."""
    tree = tools.accelerator.look(unit.pids())
    by_inside = {process.inside_pid: process for process in tree.processes}
    for one in captured:
        process = by_inside.get(one.pid)
        state = api.state(process.pid) if process is not None else None
        if process is None or state is not ProcessState.CHECKPOINTED:
            raise IntegrityError(
                f"process {one.pid} of unit {unit.unit} ({one.command}) came back without its CUDA state: "
                + ("it is gone" if process is None else f"the driver says {state or 'that it is no CUDA process'}"),
                cure="use the NVIDIA driver that it was captured on, or capture again here",
                facts={"unit": unit.unit, "pid": one.pid, "state": state},
            )
        yield Holder(unit=unit.unit, pid=process.pid, inside_pid=one.pid, command=one.command)
