"""``coldsnap predict``: what a prepare and a restore would move here, and how long that would take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from coldsnap.cli.options import DEFAULT_STATE_ROOT, Artifact, AsJson, Quiet, StateRootPath, Weights
from coldsnap.cli.output import print_json, print_lines, print_table, size

if TYPE_CHECKING:
    from coldsnap.core.forecast import ForecastStep
    from coldsnap.ops.predict import Prediction

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(predict)


def predict(
    artifact: Artifact,
    weights: Weights = None,
    calibrate: Annotated[
        bool | None,
        typer.Option(
            "--calibrate/--no-calibrate",
            help="Measure this machine anew, or never; by default only when a rate is known from nowhere else.",
        ),
    ] = None,
    state_root: StateRootPath = DEFAULT_STATE_ROOT,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Say how many bytes a prepare and a restore would move on this machine, and how long that would take.

    No rate is assumed: each comes from the receipts of operations in this boot, of this artifact when there are any,
    else from a calibration that takes about a second and is kept in the state root for this boot and disk. The table
    says which. What nothing measured has no time, and the total is then "at least".

    Nothing is restored; neither root nor a GPU is needed.

    Exit code 0: predicted. 3: no weight provider can be chosen (`coldsnap explain` says all about that).

    Example: coldsnap predict smollm2.json
    """
    from coldsnap.cli.progress import TerminalReporter
    from coldsnap.cli.requests import new_operation_id
    from coldsnap.cli.wiring import make_tools
    from coldsnap.ops.activating import activation_request
    from coldsnap.ops.artifacts import load_artifact
    from coldsnap.ops.predict import predict as run

    tools = make_tools(state_root, reporter=TerminalReporter(quiet=quiet))
    loaded = load_artifact(artifact)
    request = activation_request(loaded, operation_id=new_operation_id("predict", "service"), weights=weights)
    found = run(tools, loaded, request, measure=calibrate)
    if as_json:
        print_json(found.document())
    else:
        _show(found)


def _show(found: Prediction) -> None:
    from coldsnap.core.forecast import Phase

    print_lines([f"weights: {found.source} ({found.reason})"])
    sources = list(dict.fromkeys(one.source for one in found.forecast.steps if one.source))
    print_table(("phase", "step", "bytes", "rate", "seconds", ""), [_row(one, sources) for one in found.forecast.steps])
    print_lines(f"[{number}] {source}" for number, source in enumerate(sources, start=1))
    for phase in Phase:
        seconds = f"{found.forecast.seconds(phase):.2f} s"
        bound = "" if found.forecast.is_whole(phase) else "at least "
        print_lines([f"{phase.value}: {bound}{seconds} for {size(found.forecast.bytes(phase))}"])
    print_lines(f"note: {note}" for note in found.notes)


def _row(step: ForecastStep, sources: list[str]) -> tuple[str, ...]:
    reference = f"[{sources.index(step.source) + 1}]" if step.source else ""
    return (
        step.phase.value,
        step.name,
        "" if step.bytes is None else size(step.bytes),
        "" if step.bytes_per_s is None else f"{size(int(step.bytes_per_s))}/s",
        "?" if step.seconds is None else f"{step.seconds:.2f}",
        f"{reference} {step.why}".strip(),
    )
