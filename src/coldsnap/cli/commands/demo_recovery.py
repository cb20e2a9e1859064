"""``coldsnap demo-recovery``: delete the pack, and restore all the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coldsnap.cli.options import AsJson, Quiet
from coldsnap.cli.output import print_json, print_lines, print_table, size

if TYPE_CHECKING:
    from coldsnap.engines.protocol import EnginePlugin
    from coldsnap.ops.demo_recovery import RecoveryDemoResult
    from coldsnap.ops.report import Reporter

__all__ = ["add_to"]

_RANDOM, _QUICK = "0.6b", "tiny"


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo-recovery")(demo_recovery)


def demo_recovery(
    model: Annotated[
        list[Path] | None,
        typer.Option(
            "--model",
            help="A local checkpoint; repeatable. SmolLM2-135M-Instruct and a Qwen3-0.6B of random weights are made "
            "by default.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only a tiny Qwen3 of random weights.")] = False,
    engine: Annotated[str, typer.Option("--engine", help="Which engine serves it.")] = "transformers",
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Keep everything here; a temporary folder by default.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Delete the pack of a capture, restore from the pinned checkpoint, rebuild the pack, restore from it again.

    Every token is compared with those of a separate cold process. Exit code 0 only if all are equal, the rebuilt pack
    has the identical digest and the next restore used it; 7 otherwise. Example: coldsnap demo-recovery --quick

    Example: coldsnap demo-recovery --json
    """
    import tempfile
    from contextlib import ExitStack

    from coldsnap.cli.progress import TerminalReporter
    from coldsnap.cli.wiring import installed_engines, make_tools
    from coldsnap.ops.demo_recovery import run_recovery_demo
    from coldsnap.ops.planning import choose_engine

    reporter = TerminalReporter(quiet=quiet)
    plugin = choose_engine(installed_engines(), engine, field="--engine")
    results = []
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coldsnap-demo-")))
        for index, path in enumerate(model or _examples(plugin, reporter, quick=quick)):
            place = folder.absolute() / f"{index}-{path.name}"
            place.mkdir(parents=True, exist_ok=True)
            tools = make_tools(place / "state", reporter=reporter)
            results.append(run_recovery_demo(tools, plugin, path, place))
    passed = all(result.passed for result in results)
    if as_json:
        print_json({"passed": passed, "models": [result.document() for result in results]})
    else:
        for result in results:
            _show(result)
        print_lines(["passed" if passed else "FAILED"])
    if not passed:
        raise typer.Exit(7)


def _examples(plugin: EnginePlugin, reporter: Reporter, *, quick: bool) -> list[Path]:
    from coldsnap.ops.examples import example_model

    with reporter.phase("make the example models"):
        if quick:
            return [example_model(plugin, random=_QUICK)]
        return [example_model(plugin), example_model(plugin, random=_RANDOM)]


def _show(result: RecoveryDemoResult) -> None:
    print_table(
        (result.model, ""),
        [
            ("1. the pack is deleted", f"{size(result.captured.pack_bytes)}, {result.pack}"),
            ("2. restore without it", f"{result.recovery.source}, {result.recovery.seconds['total']:.2f} s"),
            ("   because", result.recovery.reason),
            (f"   all tokens equal ({result.num_prompts} prompts)", _yes(result.recovery_equal)),
            ("3. the pack is rebuilt", f"{result.rebuild_s:.2f} s, {result.rebuilt or 'missing'}"),
            ("   the identical digest", _yes(result.rebuilt == result.pack)),
            ("4. the next restore", f"{result.native.source}, {result.native.seconds['total']:.2f} s"),
            (f"   all tokens equal ({result.num_prompts} prompts)", _yes(result.native_equal)),
        ],
    )


def _yes(value: bool) -> str:
    return "yes" if value else "NO"
