"""``coldsnap doctor`` and ``coldsnap capabilities``: what this machine has, and what it lacks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coldsnap.cli.options import DEFAULT_STATE_ROOT, AsJson, StateRootPath
from coldsnap.cli.output import print_json, print_lines, print_table

if TYPE_CHECKING:
    from coldsnap.engines.protocol import Installed

__all__ = ["add_to"]

_NONE: list[str] = []


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(doctor)
    app.command()(capabilities)


Pythons = Annotated[
    list[str],
    typer.Option("--python", metavar="PATH", help="Also look for engines in this interpreter; may be repeated."),
]


def doctor(state_root: StateRootPath = DEFAULT_STATE_ROOT, python: Pythons = _NONE, as_json: AsJson = False) -> None:
    """Check every need of coldsnap on this machine and print the cure for what is missing.

    Exit code 0: captures and restores can run here. 4: something must be done first.

    Example: coldsnap doctor --json
    """
    from coldsnap.cli.wiring import container_runtimes, installed_engines, this_accelerator
    from coldsnap.ops.doctor import examine

    needs = examine(state_root, installed_engines(), this_accelerator(), container_runtimes(), pythons=python)
    healthy = not any(need.blocking for need in needs)
    if as_json:
        print_json({"healthy": healthy, "needs": [need.document() for need in needs]})
    else:
        print_table(("need", "state", "found"), [(need.name, need.state, need.found) for need in needs])
        for need in needs:
            if need.cure:
                print_lines([f"{need.name}: {need.cure}"])
        print_lines(["everything is there" if healthy else "captures and restores cannot run here yet"])
    if not healthy:
        raise typer.Exit(4)


def capabilities(state_root: StateRootPath = DEFAULT_STATE_ROOT, as_json: AsJson = False) -> None:
    """List GPUs, engines and snapshot drivers, and for each driver which of its features this machine passes.

    A driver is usable when its base features pass; the others are for units with several communicating workers. A
    feature is proved by doing it, which takes some seconds the first time after a start of the machine.

    Example: coldsnap capabilities
    """
    from coldsnap.cli.wiring import make_tools
    from coldsnap.core.drivers import DRIVERS

    tools = make_tools(state_root)
    inventory = tools.accelerator.inventory()
    results = {
        driver.value: [
            (one, one.feature in contract.base_features)
            for one in tools.probe((*contract.base_features, *contract.communicating_features))
        ]
        for driver, contract in DRIVERS.items()
    }
    engines = sorted(tools.engines.items())
    if as_json:
        print_json(
            {
                "drivers": [
                    {
                        "driver": driver,
                        "usable": all(one.state.value == "passed" for one, base in found if base),
                        "features": [
                            {"feature": one.feature, "state": one.state.value, "reason": one.reason, "base": base}
                            for one, base in found
                        ],
                    }
                    for driver, found in results.items()
                ],
                "gpus": [gpu.model_dump(mode="json") for gpu in inventory.gpus],
                "cuda_userspace": inventory.cuda_userspace,
                "engines": [
                    {
                        "engine": name,
                        "drivers": sorted(plugin.supports.drivers),
                        "warm": plugin.supports.warm,
                        "materialize": sorted(plugin.supports.materialize),
                        "installed": _installed(plugin.installed(sys.executable, {})),
                    }
                    for name, plugin in engines
                ],
            }
        )
        return
    print_table(
        ("driver", "feature", "state", "reason"),
        [(driver, one.feature, one.state.value, one.reason) for driver, found in results.items() for one, _ in found],
    )
    if inventory.gpus:
        print_table(
            ("gpu", "name", "compute capability", "uuid"),
            [(str(gpu.index), gpu.name, gpu.compute_capability, gpu.uuid) for gpu in inventory.gpus],
        )
    print_table(
        ("engine", "drivers", "warm", "here"),
        [
            (
                name,
                ", ".join(sorted(p.supports.drivers)) or "none",
                _yes(p.supports.warm),
                _told(p.installed(sys.executable, {})),
            )
            for name, p in engines
        ],
    )


def _installed(found: Installed) -> dict[str, Any]:
    return {
        "python": found.python,
        "versions": dict(found.versions),
        "problems": [problem.document() for problem in found.problems],
    }


def _told(found: Installed) -> str:
    if found.problems:
        return "; ".join(f"{one.field} {one.message}" for one in found.problems)
    return ", ".join(f"{name} {version}" for name, version in found.versions.items()) or "yes"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
