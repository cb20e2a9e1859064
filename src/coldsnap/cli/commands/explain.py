"""``coldsnap explain``: would it restore here, and if not, who must do what."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from coldsnap.cli.options import (
    DEFAULT_STATE_ROOT,
    Artifact,
    AsJson,
    MountSources,
    Name,
    Offline,
    Peers,
    Port,
    StateRootPath,
    Weights,
)
from coldsnap.cli.output import print_json, print_lines, print_table

if TYPE_CHECKING:
    from coldsnap.ops.explain import Explanation

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(explain)


def explain(
    artifact: Artifact,
    name: Name = None,
    port: Port = None,
    weights: Weights = None,
    mount: MountSources = None,
    offline: Offline = False,
    peer: Peers = None,
    state_root: StateRootPath = DEFAULT_STATE_ROOT,
    as_json: AsJson = False,
) -> None:
    """Say whether the artifact would restore here, with every reason, before a byte moves.

    Asks every gate that a restore asks and shows all mismatches at once, grouped by who must act; then the ways it
    could come up, best first: overlay, native (from packs), recovery (from the pinned checkpoint), and a cold start
    where the recipe allows one. Needs no GPU; without root, the features that take root count as missing.

    Exit code 0: it would come up. 2: the artifact is wrong. 3: it would not come up.

    Example: coldsnap explain smollm2.json --port 8000
    """
    from coldsnap.cli.activation import mount_sources
    from coldsnap.cli.progress import TerminalReporter
    from coldsnap.cli.requests import new_operation_id
    from coldsnap.cli.wiring import make_tools
    from coldsnap.ops.activating import activation_request
    from coldsnap.ops.artifacts import load_artifact
    from coldsnap.ops.explain import explain as run

    tools = make_tools(state_root, reporter=TerminalReporter(quiet=True), offline=offline, peers=peer or ())
    loaded = load_artifact(artifact)
    operation_id = new_operation_id("explain", name or "service")
    request = activation_request(
        loaded,
        operation_id=operation_id,
        name=name,
        port=port,
        weights=weights,
        mounts=mount_sources(mount or ()),
    )
    found = run(tools, loaded, request)
    if as_json:
        print_json(found.document())
    else:
        _show(found)
    if found.rung is None:
        raise typer.Exit(3)


def _show(found: Explanation) -> None:
    rows = [(gate.name, "no" if gate.problems else "yes", gate.detail) for gate in found.gates]
    print_table(("gate", "open", "looked at"), rows)
    for actor, problems in found.to_do().items():
        print_lines([f"to be done by {actor.value}:"])
        print_lines(f"  {problem}" for problem in problems)
    if found.rungs:
        ways = [(one.rung.value, "yes" if one.open else "no", one.reason) for one in found.rungs]
        print_table(("way", "open", "why"), ways)
    rung = found.rung
    print_lines(["it would not restore here" if rung is None else f"it would come up here: {rung.rung.value}"])
