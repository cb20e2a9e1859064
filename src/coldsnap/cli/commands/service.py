"""Commands on services that are there: ``status``, ``sleep``, ``wake``, ``stop``, ``logs``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coldsnap.cli.exits import exit_code
from coldsnap.cli.options import (
    DEFAULT_STATE_ROOT,
    AsJson,
    Materialize,
    Quiet,
    ReceiptJson,
    RequestJson,
    StateRootPath,
    TimingEvents,
)
from coldsnap.cli.output import error_object, print_error, print_json, print_lines, print_table, size

if TYPE_CHECKING:
    from coldsnap.core.messages import Materialization
    from coldsnap.core.request import OperationRequest
    from coldsnap.ops.live import ServiceStatus
    from coldsnap.ops.tools import Tools

__all__ = ["add_to"]

OptionalName = Annotated[
    str | None, typer.Argument(metavar="NAME", help="The service's name; `coldsnap status` lists them.")
]
ServiceName = Annotated[str, typer.Argument(metavar="NAME", help="The service's name; `coldsnap status` lists them.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (status, sleep, wake, stop, logs):
        app.command()(command)


def status(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One service; all of them by default.")] = None,
    state_root: StateRootPath = DEFAULT_STATE_ROOT,
    as_json: AsJson = False,
) -> None:
    """Show the services of this machine and what their workers say. Changes nothing.

    A service whose record cannot be read is told after the others, and decides the exit code.

    Example: coldsnap status chat --json
    """
    tools = _tools(state_root, quiet=True)
    from coldsnap.core.quarantine import quarantine_problem
    from coldsnap.ops.live import service_status, service_statuses
    from coldsnap.ops.quarantine import quarantined

    found, unknown = service_statuses(tools) if name is None else ((service_status(tools, name),), {})
    failed = quarantined(tools)
    if as_json:
        print_json(
            {
                "services": [one.document() for one in found],
                "unknown": {one: error_object(error) for one, error in unknown.items()},
                "quarantined": [one.document() for one in failed],
            }
        )
    elif found:
        _print_services(found)
    elif not unknown:
        print_lines(["no service is recorded here"])
    if not as_json:
        print_lines(f"{one.path} is in quarantine: {quarantine_problem(one)}" for one in failed)
        for error in unknown.values():
            print_error(error, as_json=False)
    if unknown:
        raise typer.Exit(max(exit_code(error) for error in unknown.values()))


def _print_services(found: Sequence[ServiceStatus]) -> None:
    rows = []
    for one in found:
        mapped = sum(w.mapped_bytes for w in one.workers.values() if not isinstance(w, str))
        where = f"{one.record.host}:{one.record.port}"
        rows.append((one.record.name, one.state, where, one.record.source or "cold", size(mapped), str(len(one.pids))))
    print_table(("name", "state", "address", "weights from", "mapped", "processes"), rows)
    print_lines(f"  {one.problem}" for one in found if one.problem is not None)
    print_lines(
        f"  {one.record.name}: {'; '.join(one.record.reasons)}"
        for one in found
        if one.record.rung not in (None, "native")
    )
    print_lines(
        f"  {one.record.name}: pack of {worker} {_told(status.materialization)}"
        for one in found
        for worker, status in one.workers.items()
        if not isinstance(status, str) and status.materialization is not None
        if status.materialization.pack_sha256 is not None
    )


def _told(pack: Materialization) -> str:
    done = (
        f" {100 * pack.done_bytes // pack.total_bytes} %" if pack.state.value == "running" and pack.total_bytes else ""
    )
    return f"{pack.state.value}{done}: {pack.reason}"


def sleep(
    name: OptionalName = None,
    state_root: StateRootPath = DEFAULT_STATE_ROOT,
    request_json: RequestJson = None,
    receipt_json: ReceiptJson = None,
    timing_events: TimingEvents = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Finish requests in flight, close the port, give the weights' memory back. The process stays.

    Example: coldsnap sleep chat
    """
    from coldsnap.cli.recording import outlet
    from coldsnap.ops.live import sleep_service

    tools = _tools(state_root, quiet=quiet)
    request = _request(tools, "sleep", name, request_json)
    name = request.workload.cluster_id
    with outlet(receipt_json, timing_events) as out:
        reports = sleep_service(tools, request, outlet=out)
    if as_json:
        print_json({"name": name, "workers": {w: r.model_dump(mode="json") for w, r in reports.items()}})
        return
    print_lines([f"{name} is asleep; {size(sum(r.unmapped_bytes for r in reports.values()))} given back"])


def wake(
    name: OptionalName = None,
    materialize: Materialize = None,
    state_root: StateRootPath = DEFAULT_STATE_ROOT,
    request_json: RequestJson = None,
    receipt_json: ReceiptJson = None,
    timing_events: TimingEvents = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Fill a sleeping or warm service's memory again, compare its answers with the capture's, serve.

    Example: coldsnap wake chat
    """
    from coldsnap.cli.recording import outlet
    from coldsnap.ops.live import wake_service

    tools = _tools(state_root, quiet=quiet)
    request = _request(tools, "wake", name, request_json, materialize=materialize)
    name = request.workload.cluster_id
    with outlet(receipt_json, timing_events) as out:
        reports, seconds = wake_service(tools, request, outlet=out)
    if as_json:
        workers = {w: r.model_dump(mode="json") for w, r in reports.items()}
        print_json({"name": name, "seconds": dict(seconds), "workers": workers})
        return
    print_lines([f"{name} serves again after {seconds['total']:.2f} s"])


def stop(name: ServiceName, state_root: StateRootPath = DEFAULT_STATE_ROOT, as_json: AsJson = False) -> None:
    """End a service. Its artifact, capsule and pack stay.

    Example: coldsnap stop chat
    """
    from coldsnap.ops.live import stop_service

    ended = stop_service(_tools(state_root, quiet=True), name)
    if as_json:
        print_json({"name": name, "ended_units": ended})
        return
    print_lines([f"{name} is stopped" if ended else f"{name} was not running; its record is gone"])


def logs(
    name: ServiceName,
    num_lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=100_000, help="Lines from the end.")] = 50,
    state_root: StateRootPath = DEFAULT_STATE_ROOT,
    as_json: AsJson = False,
) -> None:
    """Print the end of a service's log; units one after the other.

    Example: coldsnap logs chat -n 200
    """
    from collections import deque

    from coldsnap.errors import UserError

    folder = _tools(state_root, quiet=True).services.folder(name)
    files = sorted(folder.glob("*.log"))
    if not files:
        raise UserError(f"no log is kept for {name!r}", cure="`coldsnap status` lists the services")
    ends: dict[str, list[str]] = {}
    for file in files:
        with file.open(encoding="utf-8", errors="replace") as lines:
            ends[file.stem] = [line.rstrip("\n") for line in deque(lines, maxlen=num_lines)]
    if as_json:
        print_json({"name": name, "units": ends})
        return
    for end in ends.values():
        print_lines(end, as_is=True)


def _tools(state_root: Path, *, quiet: bool) -> Tools:
    from coldsnap.cli.progress import TerminalReporter
    from coldsnap.cli.wiring import make_tools

    return make_tools(state_root, reporter=TerminalReporter(quiet=quiet))


def _request(
    tools: Tools, verb: str, name: str | None, request_json: str | None, *, materialize: str | None = None
) -> OperationRequest:
    from coldsnap.cli.requests import new_operation_id, read_request
    from coldsnap.core.request import Operation
    from coldsnap.errors import UsageError
    from coldsnap.ops.activating import live_request
    from coldsnap.ops.live import artifact_of

    if (name is None) == (request_json is None):
        raise UsageError("give either a NAME or --request-json", cure=f"coldsnap {verb} NAME")
    if request_json is not None:
        if materialize is not None:
            raise UsageError("--materialize belongs to a NAME", cure="the request says it itself")
        return read_request(request_json, Operation(verb))
    assert name is not None  # noqa: S101 - said above, for the type checker
    loaded = artifact_of(tools.services.must_load(name))
    return live_request(loaded, verb, operation_id=new_operation_id(verb, name), name=name, materialize=materialize)
