"""``coldsnap clear-quarantine``: let an artifact be restored again that failed too often on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from coldsnap.cli.options import DEFAULT_STATE_ROOT, AsJson, StateRootPath
from coldsnap.cli.output import print_json, print_lines

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("clear-quarantine")(clear_quarantine)


def clear_quarantine(
    artifact: Annotated[
        str, typer.Argument(metavar="ARTIFACT.json|sha256:...", help="The descriptor, or its digest when it is gone.")
    ],
    state_root: StateRootPath = DEFAULT_STATE_ROOT,
    as_json: AsJson = False,
) -> None:
    """Forget the failures of an artifact and of its overlay here. Mend their cause first: `coldsnap status` shows it.

    Example: coldsnap clear-quarantine smollm2.json
    """
    from coldsnap.cli.wiring import make_tools
    from coldsnap.ops.quarantine import artifact_digest_of, clear_artifact

    tools = make_tools(state_root)
    digest = artifact_digest_of(tools, artifact)
    cleared = clear_artifact(tools, digest)
    if as_json:
        print_json({"artifact": str(digest), "cleared": [str(one) for one in cleared]})
        return
    print_lines([f"{artifact} may be restored again" if cleared else f"{artifact} had no failures here"])
