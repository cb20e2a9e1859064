"""Acts that freezers share: sleep, look, dump, end; each for all units at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from coldsnap.capsule.cuda.holders import Holder
from coldsnap.capsule.cuda.suspend import Barrier
from coldsnap.capsule.driver import DumpReport, RunningUnit
from coldsnap.core.messages import SleepReport, Verb
from coldsnap.core.points import reached
from coldsnap.errors import EngineError, HelperLost, IntegrityError, MissingCapability, PeerError
from coldsnap.hosts import together
from coldsnap.ops.inspection import Inspected, inspect_unit, refuse_unless_clean
from coldsnap.ops.operation import Operation
from coldsnap.ops.tools import Tools
from coldsnap.ops.workers import LOG_LINES, LiveWorker, ask_all, engine_ended

__all__ = ["barrier_of", "dump_all", "end_all", "inspect_all", "put_to_sleep", "telling_deaths"]


@contextmanager
def telling_deaths(
    tools: Tools, units: Mapping[str, RunningUnit], during: str, holders: Collection[Holder] = ()
) -> Iterator[None]:
    """What fails in the block because a process of ``units`` has ended is told as that: EngineError with the log's end.

    A call about a process that is gone is refused with whatever the callee has for it, which nobody can read. Units of
    which one of the ``holders`` has ended count too. A helper that was lost stays one.
    """
    try:
        yield
    except (PeerError, IntegrityError, MissingCapability) as error:
        living = {pid for unit in units.values() for pid in _living(tools, unit)} if holders else set()
        gone = [(str(one), one.unit) for one in holders if one.pid not in living]
        gone += [(f"the engine process of unit {name}", name) for name, unit in units.items() if not unit.alive()]
        if not gone or isinstance(error, HelperLost | EngineError):
            raise
        who, name = gone[0]
        ended = engine_ended(who, during, units[name].log_tail(LOG_LINES), unit=name)
        for note in getattr(error, "__notes__", ()):
            ended.add_note(note)
        raise ended from error


def _living(tools: Tools, unit: RunningUnit) -> Iterator[int]:
    """PIDs of the unit's processes, without those that ended and that nobody has waited for."""
    return (process.pid for process in tools.accelerator.look(unit.pids()).processes if process.dumpable)


def put_to_sleep(tools: Tools, op: Operation, workers: Sequence[LiveWorker]) -> None:
    """Every worker gives its memory back."""
    with op.span("sleep"), tools.reporter.phase("put to sleep"):
        ask_all(workers, Verb.SLEEP, None, SleepReport, deadline_s=tools.deadlines.sleep_s)
    reached("capture.asleep")


def inspect_all(tools: Tools, op: Operation, units: Mapping[str, RunningUnit]) -> dict[str, Inspected]:
    """Look at every tree. Raises Refused with everything that must not be frozen."""
    with op.span("inspect"):
        inspected = {name: inspect_unit(tools, unit) for name, unit in units.items()}
        refuse_unless_clean({name: one.report for name, one in inspected.items()})
    reached("capture.inspected")
    return inspected


def dump_all(
    tools: Tools, op: Operation, units: Mapping[str, RunningUnit], scratch: Path, *, leave_running: bool = False
) -> dict[str, DumpReport]:
    """Dump every unit. One that fails lets all of them run on; otherwise they end together, unless left running."""
    several = len(units) > 1

    def dump(name: str, unit: RunningUnit, cancel: threading.Event) -> DumpReport:
        deadline_s = tools.deadlines.dump_s
        with telling_deaths(tools, {name: unit}, "freeze"):
            return tools.units.dump(
                unit, scratch / f"images-{name}", deadline_s=deadline_s, leave_running=leave_running or several
            )

    hosts = tools.place(tuple(units)).hosts
    steps = {name: (hosts[name], partial(dump, name, unit)) for name, unit in units.items()}
    with op.span("freeze"), tools.reporter.phase("freeze the process tree"):
        dumps = together("freeze", steps, deadline_s=tools.deadlines.dump_s + 10)
        if several and not leave_running:
            end_all(tools, units)
    for name, dumped in dumps.items():
        for note in dumped.notes:
            tools.reporter.warn(f"unit {name}: {note}")
    return dumps


def end_all(tools: Tools, units: Mapping[str, RunningUnit]) -> None:
    """End every unit."""

    def end(unit: RunningUnit, cancel: threading.Event) -> None:
        unit.kill(tools.deadlines.kill_s)

    hosts = tools.place(tuple(units)).hosts
    steps = {name: (hosts[name], partial(end, unit)) for name, unit in units.items()}
    together("end", steps, deadline_s=tools.deadlines.kill_s + 10)


def barrier_of(tools: Tools, units: Sequence[str]) -> Barrier:
    """A barrier whose acts run on the hosts of their units."""
    hosts = tools.place(tuple(units)).hosts

    def run(phase: str, acts: Sequence[tuple[str, Callable[[], None]]], *, deadline_s: float) -> None:
        def step(act: Callable[[], None], cancel: threading.Event) -> None:
            act()

        together(
            phase,
            {f"{unit}[{position}]": (hosts[unit], partial(step, act)) for position, (unit, act) in enumerate(acts)},
            deadline_s=deadline_s,
        )

    return run
