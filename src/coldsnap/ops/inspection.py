"""Hygiene around a freeze: what the tree holds before it, what the image holds after it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from coldsnap.capsule.driver import DumpReport, RunningUnit
from coldsnap.capsule.hostfiles import PROOFS_NAME, host_files
from coldsnap.capsule.hygiene import HygieneReport, inspect_tree
from coldsnap.capsule.identity import start_ticks
from coldsnap.capsule.secrets import scan_secrets
from coldsnap.capsule.tree import read_tree
from coldsnap.core.bindings import HostFile, HygieneFinding
from coldsnap.errors import Problem, Refused
from coldsnap.hosts.holding import signals_held_back
from coldsnap.ops.tools import Tools

__all__ = ["Inspected", "hashing_ahead", "inspect_unit", "refuse_unless_clean", "scan_unit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspected:
    """One unit just before it is frozen. ``processes``: (host PID, start time in ticks)."""

    findings: tuple[HygieneFinding, ...]
    environments: tuple[Mapping[str, str], ...]
    host_files: tuple[HostFile, ...]
    processes: tuple[tuple[int, int], ...]

    @property
    def report(self) -> HygieneReport:
        """What is known before the image exists."""
        return HygieneReport(findings=self.findings, allowed_secrets=(), publishable=True)


def inspect_unit(tools: Tools, unit: RunningUnit) -> Inspected:
    """Read the unit's processes from the outside: descriptors, mappings, environments, files they depend on."""
    pids = unit.pids()
    tree = read_tree(pids)
    started = ((pid, start_ticks(pid)) for pid in pids)
    return Inspected(
        findings=inspect_tree(tree, known_pipes=(unit.record().log_pipe,)),
        environments=tuple(process.environ for process in tree.processes),
        host_files=host_files(tree, proofs=tools.state.prepared / PROOFS_NAME),
        processes=tuple((pid, ticks) for pid, ticks in started if ticks is not None),
    )


@contextmanager
def hashing_ahead(tools: Tools, units: Mapping[str, RunningUnit]) -> Iterator[None]:
    """Prove the libraries that the units map while the block does something else; the inspection then only looks.

    The first capture on a machine reads some gigabytes of them.
    """

    def prove() -> None:
        try:
            for unit in units.values():
                host_files(read_tree(unit.pids()), proofs=tools.state.prepared / PROOFS_NAME)
        except Exception:  # noqa: BLE001 - the inspection does it again, and says what is wrong
            return

    thread = threading.Thread(target=prove, name="hash-ahead")
    with signals_held_back():
        thread.start()
    try:
        yield
    finally:
        thread.join()


def scan_unit(inspected: Inspected, dump: DumpReport, *, allow: Sequence[str]) -> HygieneReport:
    """Look for likely secrets in the frozen image; the report holds the findings of before as well."""
    return scan_secrets(dump.images_dir, inspected.environments, allow=allow, findings=inspected.findings)


def refuse_unless_clean(reports: Mapping[str, HygieneReport]) -> None:
    """Raise Refused with every finding that stops a capture, of every unit."""
    problems = [
        Problem(field=f"{unit}: {one.field}", message=one.message, cure=one.cure)
        for unit, report in reports.items()
        for one in report.stop_problems()
    ]
    if problems:
        raise Refused("the process tree cannot be captured", problems)
