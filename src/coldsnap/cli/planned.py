"""From flags, or a strict request, to the request a capture runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from coldsnap.cli.requests import new_operation_id, read_request
from coldsnap.core.request import DriverId, Operation
from coldsnap.errors import UsageError
from coldsnap.ops.choosing import choose_driver
from coldsnap.ops.planning import PlannedCapture, choose_engine, engine_options, plan_capture, resolve_launch
from coldsnap.ops.recipe import load_recipe

if TYPE_CHECKING:
    from coldsnap.ops.tools import Tools

__all__ = ["planned_capture"]


def planned_capture(
    tools: Tools,
    recipe_path: Path | None,
    output: Path | None,
    request_json: str | None,
    *,
    port: int | None,
    driver: str | None = None,
) -> PlannedCapture:
    """Exactly one of a recipe and a strict request. Raises UsageError, and what reading either raises."""
    if (recipe_path is None) == (request_json is None):
        raise UsageError("name either a RECIPE.yaml or --request-json", cure="coldsnap capture RECIPE.yaml -o OUT.json")
    if request_json is not None:
        if output is not None or port is not None or driver is not None:
            raise UsageError(
                "--output, --port and --driver belong to a recipe", cure="the request names output, port and driver"
            )
        request = read_request(request_json, Operation.CAPTURE)
        plugin = choose_engine(tools.engines, request.launch.engine, field="launch.engine")
        model = resolve_launch(plugin, request.launch)
        return PlannedCapture(request=request, model=model)
    assert recipe_path is not None  # noqa: S101 - said above, for the type checker
    if output is None:
        raise UsageError("--output is missing", cure="add -o ARTIFACT.json, the descriptor to write")
    recipe = load_recipe(recipe_path)
    plugin = choose_engine(tools.engines, recipe.engine)
    wanted = driver or recipe.driver
    if wanted == "auto":
        execution = plugin.execution(plugin.options(engine_options(recipe)))
        chosen = choose_driver(tools, plugin, execution)
    else:
        chosen = _driver(wanted)
    with tools.reporter.phase("pin the model") as advance:
        return plan_capture(
            recipe,
            plugin,
            operation_id=new_operation_id("capture", recipe.name or "recipe"),
            output=output.absolute(),
            driver=chosen,
            port=port,
            progress=advance,
        )


def _driver(name: str) -> DriverId:
    try:
        return DriverId(name)
    except ValueError as error:
        known = ", ".join(driver.value for driver in DriverId)
        raise UsageError(f"--driver: no snapshot driver is called {name!r}", cure=f"use auto, {known}") from error
