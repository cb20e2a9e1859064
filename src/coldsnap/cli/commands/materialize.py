"""``coldsnap materialize``: bring missing packs back from the pinned checkpoint, and make this machine's overlay."""

from __future__ import annotations

from typing import Annotated

import typer

from coldsnap.cli.options import (
    DEFAULT_STATE_ROOT,
    Artifact,
    AsJson,
    DryRun,
    Quiet,
    ReceiptJson,
    StateRootPath,
    TimingEvents,
)
from coldsnap.cli.output import print_json, print_lines, print_table, size

__all__ = ["add_to"]

Overlay = Annotated[
    bool,
    typer.Option("--overlay", help="Also freeze the tree again as this machine's overlay, which restores here prefer."),
]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(materialize)


def materialize(
    artifact: Artifact,
    overlay: Overlay = False,
    state_root: StateRootPath = DEFAULT_STATE_ROOT,
    receipt_json: ReceiptJson = None,
    timing_events: TimingEvents = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write the packs of an artifact that are missing here, from a temporary restore that is ended whatever happens.

    The temporary restore reads the pinned checkpoint, must give the captured answers, serves nobody and touches no
    service. Each pack is read back and proved. Example: coldsnap materialize smollm2.json --dry-run
    """
    from coldsnap.cli.progress import TerminalReporter
    from coldsnap.cli.recording import outlet
    from coldsnap.cli.requests import new_operation_id
    from coldsnap.cli.wiring import make_tools
    from coldsnap.ops.artifacts import load_artifact
    from coldsnap.ops.materialize import materialize as run
    from coldsnap.ops.materialize import materialize_request, plan_packs

    tools = make_tools(state_root, reporter=TerminalReporter(quiet=quiet))
    loaded = load_artifact(artifact)
    request = materialize_request(loaded, operation_id=new_operation_id("materialize", loaded.artifact.launch.engine))
    if dry_run:
        plan = plan_packs(tools, loaded, request, overlay=overlay)
        if as_json:
            print_json({"dry_run": True, "artifact": str(loaded.path), **plan.document()})
            return
        for outcome, packs in (("to be written", plan.missing), ("already here", plan.present)):
            print_lines(f"{pack.owner}: {digest}, {size(pack.bytes)}, {outcome}" for digest, pack in packs.items())
        restores = f"restores from {plan.provider.value}" if plan.missing or overlay else "restores nothing"
        print_lines([f"would write {size(plan.missing_bytes)}; {restores}"])
        return
    with outlet(receipt_json, timing_events) as out:
        result = run(tools, loaded, request, overlay=overlay, outlet=out)
    if as_json:
        print_json({"artifact": str(loaded.path), **result.document()})
        return
    print_table(
        ("owner", "pack", "size", "outcome", "seconds"),
        [(one.owner, str(one.sha256), size(one.bytes), one.outcome, f"{one.seconds:.2f}") for one in result.packs],
    )
    if result.overlay is not None:
        print_lines([f"overlay {result.overlay.outcome}: {result.overlay.reason}"])
