"""``coldsnap plan``: the full request that a recipe stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coldsnap.cli.options import DEFAULT_STATE_ROOT, AsJson, Driver, Quiet, RecipePort, StateRootPath
from coldsnap.cli.output import print_json

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(plan)


def plan(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="The recipe to expand.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The output the request names.")] = Path(
        "artifact.json"
    ),
    port: RecipePort = None,
    driver: Driver = None,
    state_root: StateRootPath = DEFAULT_STATE_ROOT,
    as_json: AsJson = False,  # it prints nothing else
    quiet: Quiet = False,
) -> None:
    """Print the full format-4 request a recipe becomes, with every default resolved. Runs nothing.

    The model is read once, because its digest is part of the request. The output can be given to
    `coldsnap capture --request-json`.

    Example: coldsnap plan smollm2.yaml -o /srv/smollm2.json
    """
    from coldsnap.cli.planned import planned_capture
    from coldsnap.cli.progress import TerminalReporter
    from coldsnap.cli.wiring import make_tools
    from coldsnap.core.request import request_document

    tools = make_tools(state_root, reporter=TerminalReporter(quiet=quiet))
    print_json(request_document(planned_capture(tools, recipe, output, None, port=port, driver=driver).request))
