"""``coldsnap restore`` and ``coldsnap warm``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from coldsnap.cli.options import (
    DEFAULT_STATE_ROOT,
    AsJson,
    CachePath,
    Devices,
    DryRun,
    IgnoreQuarantine,
    Materialize,
    MountSources,
    Name,
    Port,
    Quiet,
    ReceiptJson,
    RequestJson,
    RequireSignature,
    Stage,
    StateRootPath,
    TargetLocal,
    TimingEvents,
    Weights,
)
from coldsnap.cli.output import print_json, print_lines, print_table

__all__ = ["add_to"]

OptionalArtifact = Annotated[
    Path | None, typer.Argument(metavar="ARTIFACT.json", help="The descriptor that a capture wrote.")
]


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(restore)
    app.command()(warm)


def restore(
    artifact: OptionalArtifact = None,
    name: Name = None,
    port: Port = None,
    weights: Weights = None,
    materialize: Materialize = None,
    cache_path: CachePath = None,
    target_local: TargetLocal = False,
    devices: Devices = None,
    stage: Stage = None,
    mount: MountSources = None,
    require_signature: RequireSignature = None,
    state_root: StateRootPath = DEFAULT_STATE_ROOT,
    request_json: RequestJson = None,
    receipt_json: ReceiptJson = None,
    timing_events: TimingEvents = None,
    ignore_quarantine: IgnoreQuarantine = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Bring a captured engine back and return once it serves and has given its captured answers.

    Prepares first; a service of the same name is replaced only when everything is ready. The command returns, the
    service goes on: `coldsnap status` shows it, `coldsnap stop NAME` ends it.

    Example: coldsnap restore smollm2.json --name chat --port 8000
    """
    _activate(
        "restore",
        _Options(
            artifact=artifact,
            name=name,
            port=port,
            weights=weights,
            materialize=materialize,
            cache_paths=tuple(cache_path or ()),
            target_local=target_local,
            devices=devices,
            stage=stage,
            mounts=tuple(mount or ()),
            require_signature=require_signature,
            state_root=state_root,
            request_json=request_json,
            receipt_json=receipt_json,
            timing_events=timing_events,
            ignore_quarantine=ignore_quarantine,
            dry_run=dry_run,
            as_json=as_json,
            quiet=quiet,
        ),
    )


def warm(
    artifact: OptionalArtifact = None,
    name: Name = None,
    port: Port = None,
    weights: Weights = None,
    cache_path: CachePath = None,
    devices: Devices = None,
    stage: Stage = None,
    mount: MountSources = None,
    require_signature: RequireSignature = None,
    state_root: StateRootPath = DEFAULT_STATE_ROOT,
    request_json: RequestJson = None,
    receipt_json: ReceiptJson = None,
    timing_events: TimingEvents = None,
    ignore_quarantine: IgnoreQuarantine = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Bring a captured engine back up to, and without, its weights: `coldsnap wake NAME` does the rest.

    Example: coldsnap warm smollm2.json --name chat
    """
    _activate(
        "warm",
        _Options(
            artifact=artifact,
            name=name,
            port=port,
            weights=weights,
            materialize=None,
            cache_paths=tuple(cache_path or ()),
            target_local=False,
            devices=devices,
            stage=stage,
            mounts=tuple(mount or ()),
            require_signature=require_signature,
            state_root=state_root,
            request_json=request_json,
            receipt_json=receipt_json,
            timing_events=timing_events,
            ignore_quarantine=ignore_quarantine,
            dry_run=dry_run,
            as_json=as_json,
            quiet=quiet,
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    artifact: Path | None
    name: str | None
    port: int | None
    weights: str | None
    materialize: str | None
    cache_paths: tuple[str, ...]
    target_local: bool
    devices: str | None
    stage: bool | None
    mounts: tuple[str, ...]
    require_signature: Path | None
    state_root: Path
    request_json: str | None
    receipt_json: Path | None
    timing_events: Path | None
    ignore_quarantine: bool
    dry_run: bool
    as_json: bool
    quiet: bool


def _activate(verb: str, options: _Options) -> None:
    from coldsnap.cli.activation import activation
    from coldsnap.cli.progress import TerminalReporter
    from coldsnap.cli.recording import outlet
    from coldsnap.cli.wiring import make_tools
    from coldsnap.core.request import request_document
    from coldsnap.ops.ladder import plan_route
    from coldsnap.ops.restore import restore as run

    tools = make_tools(options.state_root, reporter=TerminalReporter(quiet=options.quiet))
    wanted = activation(
        tools,
        options.artifact,
        verb=verb,
        name=options.name,
        port=options.port,
        weights=options.weights,
        materialize=options.materialize,
        cache_paths=options.cache_paths,
        target_local=options.target_local,
        devices=options.devices,
        stage=options.stage,
        mounts=options.mounts,
        require_signature=options.require_signature,
        request_json=options.request_json,
    )
    if options.dry_run:
        address, ignore = (wanted.host, wanted.port), options.ignore_quarantine
        plan_route(tools, wanted.loaded, wanted.request, address=address, ignore_quarantine=ignore)
        print_json(request_document(wanted.request))
        return
    with outlet(options.receipt_json, options.timing_events) as out:
        result = run(
            tools,
            wanted.loaded,
            wanted.request,
            host=wanted.host,
            port=wanted.port,
            outlet=out,
            ignore_quarantine=options.ignore_quarantine,
        )
    if options.as_json:
        print_json(result.document())
        return
    print_table(("phase", "seconds"), [(phase, f"{value:.3f}") for phase, value in result.seconds.items()])
    print_lines(f"  {step}" for step in result.ladder if len(result.ladder) > 1)
    if result.overlay is not None:
        print_lines([f"  overlay {result.overlay.outcome}: {result.overlay.reason}"])
    if result.state == "warm":
        print_lines([f"{result.name} is warm; next: coldsnap wake {result.name}"])
        return
    how = "started cold" if result.rung == "cold" else f"weights from {result.source}"
    print_lines([f"{result.name} serves at http://{result.host}:{result.port}, {how}"])
