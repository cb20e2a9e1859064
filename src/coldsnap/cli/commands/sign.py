"""``coldsnap sign``: a detached signature beside an artifact, or a new key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coldsnap.cli.options import AsJson
from coldsnap.cli.output import print_json, print_lines
from coldsnap.errors import UsageError

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(sign)


def sign(
    artifact: Annotated[
        Path | None, typer.Argument(metavar="ARTIFACT.json", help="The descriptor to sign, as it will be used.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", metavar="FILE", help="An Ed25519 private key in PEM that only you can read.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.sig", help="ARTIFACT.json.sig by default.")
    ] = None,
    make_key: Annotated[
        Path | None,
        typer.Option("--new-key", metavar="FILE", help="Make a key instead: FILE, and FILE.pub for others."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Sign an artifact; `--require-signature` of restore, warm, prepare and verify then insists on that signature.

    Everything an artifact names is bound by digests, so one signature covers its packs and capsules. Publishing writes
    a new descriptor: sign that one. Needs `pip install 'coldsnap[sign]'`.

    Example: coldsnap sign shipped.json --key release.pem
    """
    from coldsnap.ops.artifacts import load_artifact
    from coldsnap.ops.signing import new_key, sign_artifact

    if make_key is not None:
        if artifact is not None or key is not None or output is not None:
            raise UsageError("--new-key makes a key and signs nothing", cure="coldsnap sign --new-key FILE")
        made = new_key(make_key)
        if as_json:
            print_json(made.document())
        else:
            print_lines([f"wrote {made.private}, which stays secret, and {made.public} for others: key {made.key}"])
        return
    if artifact is None or key is None:
        raise UsageError("name an ARTIFACT.json and --key", cure="coldsnap sign ARTIFACT.json --key FILE")
    signed = sign_artifact(load_artifact(artifact), key, output)
    if as_json:
        print_json(signed.document())
        return
    print_lines([f"{signed.path}: {signed.artifact} signed by key {signed.key}"])
