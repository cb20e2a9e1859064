"""``coldsnap demo``: the whole story on one machine, with the checks that make it believable."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coldsnap.cli.options import AsJson, Quiet
from coldsnap.cli.output import print_json, print_lines, print_table, size

if TYPE_CHECKING:
    from coldsnap.ops.outside import StartupTimeline

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(demo)


def demo(
    model: Annotated[
        Path | None, typer.Option("--model", help="A local checkpoint; SmolLM2-135M-Instruct is made by default.")
    ] = None,
    engine: Annotated[str, typer.Option("--engine", help="Which engine serves it.")] = "transformers",
    num_runs: Annotated[int, typer.Option("--runs", min=1, max=50, help="Timed cold starts, and restores.")] = 3,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Keep everything here; a temporary folder by default.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Start a real model cold, capture it, kill it, restore it, ask the same questions, compare every token.

    Exit code 0 only if all tokens are equal, a restore without hydration was caught, the captured processes are gone
    and no window of the weights is in the process image; 7 otherwise.

    Example: coldsnap demo --model ./my-checkpoint --runs 5
    """
    import tempfile
    from contextlib import ExitStack

    from coldsnap.cli.progress import TerminalReporter
    from coldsnap.cli.wiring import installed_engines, make_tools
    from coldsnap.ops.demo import run_demo
    from coldsnap.ops.demo_parts import QUESTION, Story
    from coldsnap.ops.examples import example_model
    from coldsnap.ops.planning import choose_engine

    reporter = TerminalReporter(quiet=quiet)
    plugin = choose_engine(installed_engines(), engine, field="--engine")
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coldsnap-demo-")))
        else:
            folder = folder.absolute()
            folder.mkdir(parents=True, exist_ok=True)
        if model is None:
            with reporter.phase("make the example model"):
                model = example_model(plugin)
        tools = make_tools(folder / "state", reporter=reporter)
        story = Story(num_cold_starts=num_runs, num_restores=num_runs)
        result = run_demo(tools, plugin, model, folder, story=story)
    cold = result.cold_starts.timelines
    if as_json:
        print_json({"passed": result.passed, **result.document()})
    else:
        rows = [
            (what, f"{before:.2f} s", f"{after:.2f} s")
            for what, before, after in (
                (
                    "port open",
                    _median(cold, "port_open_s"),
                    _median(result.restored, "port_open_s"),
                ),
                (
                    "HTTP ready",
                    _median(cold, "http_ready_s"),
                    _median(result.restored, "http_ready_s"),
                ),
                ("first token", result.cold_s, result.restore_s),
            )
        ]
        print_table((f"seen from outside (median of {num_runs})", "cold start", "restore"), rows)
        print_table(
            ("", ""),
            [
                ("speedup", f"{result.cold_s / result.restore_s:.1f}x"),
                ("prepare, before the restore", f"{result.prepare_s:.2f} s"),
                ("process image", size(result.capture.image_bytes)),
                ("pack", size(result.capture.pack_bytes)),
                ("residual", size(result.capture.residual_bytes)),
                (QUESTION, result.restored_answer.strip()),
                (f"all tokens equal ({result.num_prompts} prompts)", _yes(result.tokens_equal)),
                ("restore without hydration caught", _yes(result.negative_control_detected)),
                ("captured processes gone", _yes(result.old_pids_gone)),
                ("windows of the pack in the image", str(result.windows_in_image)),
            ],
        )
        print_lines(["passed" if result.passed else "FAILED"])
    if not result.passed:
        raise typer.Exit(7)


def _median(samples: Sequence[StartupTimeline], name: str) -> float:
    import statistics

    return float(statistics.median(getattr(one, name) for one in samples))


def _yes(value: bool) -> str:
    return "yes" if value else "NO"
