"""``coldsnap schema``: the JSON Schema of a document."""

from __future__ import annotations

from typing import Annotated

import typer

from coldsnap.cli.options import AsJson
from coldsnap.cli.output import print_json, print_lines
from coldsnap.errors import UsageError

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(schema)


def schema(
    name: Annotated[str | None, typer.Argument(help="Which document; without it the names are listed.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the JSON Schema of a document, or the names of all.

    Example: coldsnap schema artifact
    """
    from coldsnap.core.schema import SCHEMAS, json_schema

    if name is None:
        if as_json:
            print_json({"schemas": sorted(SCHEMAS)})
        else:
            print_lines(sorted(SCHEMAS))
        return
    if name not in SCHEMAS:
        raise UsageError(f"no document is called {name!r}", cure=f"known: {', '.join(sorted(SCHEMAS))}")
    print_json(json_schema(name))
