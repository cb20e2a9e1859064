"""``coldsnap capture``: a recipe (or strict request) in, a committed artifact out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coldsnap.cli.options import (
    DEFAULT_STATE_ROOT,
    AsJson,
    Driver,
    DryRun,
    Quiet,
    ReceiptJson,
    RecipePort,
    RequestJson,
    StateRootPath,
    TimingEvents,
)
from coldsnap.cli.output import print_json, print_lines, print_table, size

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(capture)


def capture(
    recipe: Annotated[Path | None, typer.Argument(metavar="RECIPE.yaml", help="What to capture.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="ARTIFACT.json", help="Descriptor to write; must not exist."),
    ] = None,
    port: RecipePort = None,
    driver: Driver = None,
    state_root: StateRootPath = DEFAULT_STATE_ROOT,
    request_json: RequestJson = None,
    receipt_json: ReceiptJson = None,
    timing_events: TimingEvents = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Start an engine, write its weights once, freeze the rest, commit the artifact.

    The engine is started from the recipe, answers the validation prompts, is put to sleep and frozen; its
    process is gone afterwards. Example: coldsnap capture smollm2.yaml -o smollm2.json
    """
    from coldsnap.cli.planned import planned_capture
    from coldsnap.cli.progress import TerminalReporter
    from coldsnap.cli.recording import outlet
    from coldsnap.cli.wiring import make_tools
    from coldsnap.core.request import request_document
    from coldsnap.ops.capture import capture as run
    from coldsnap.ops.gates import check_capture

    tools = make_tools(state_root, reporter=TerminalReporter(quiet=quiet))
    planned = planned_capture(tools, recipe, output, request_json, port=port, driver=driver)
    if dry_run:
        check_capture(tools, planned.request)
        print_json(request_document(planned.request))
        return
    with outlet(receipt_json, timing_events) as out:
        result = run(tools, planned.request, planned.model, outlet=out)
    if as_json:
        print_json(result.document())
        return
    print_table(
        ("captured", ""),
        [
            ("artifact", str(result.artifact_path)),
            ("digest", str(result.artifact_digest)),
            ("process image", size(result.image_bytes)),
            ("capsule", size(result.capsule_bytes)),
            ("pack", size(result.pack_bytes) + (" (already in the store)" if result.pack_shared else "")),
            ("residual", size(result.residual_bytes)),
            ("seconds", ", ".join(f"{name} {value:.2f}" for name, value in result.seconds.items())),
        ],
    )
    print_lines(f"next: coldsnap restore {result.artifact_path}" for _ in range(1))
