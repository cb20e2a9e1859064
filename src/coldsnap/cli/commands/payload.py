"""``coldsnap payload verify``: the one verifier of packs, for the host that has the file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coldsnap.cli.options import AsJson, Quiet
from coldsnap.cli.output import print_json, print_lines, size

__all__ = ["add_to"]

_HELP = """Ask the one verifier whether a file may be used as a pack.

Example: coldsnap payload verify --path P --expected-sha256 sha256:... --expected-bytes N
"""


def add_to(app: typer.Typer) -> None:
    """Add the command and the one below it."""
    group = typer.Typer(help=_HELP, no_args_is_help=True, rich_markup_mode=None)
    group.callback()(_group)
    group.command()(verify)
    app.add_typer(group, name="payload")


def _group() -> None:
    """Its own command, so that ``verify`` keeps its name."""


def verify(
    path: Annotated[Path, typer.Option("--path", metavar="FILE", help="The file, called HEX.pack by its digest.")],
    expected_sha256: Annotated[
        str, typer.Option("--expected-sha256", metavar="DIGEST", help="sha256: and 64 lower-case hex digits.")
    ],
    expected_bytes: Annotated[int, typer.Option("--expected-bytes", metavar="N", help="The size of the pack.")],
    worker: Annotated[
        str | None, typer.Option("--worker", metavar="ID", help="Whose pack it is; repeated in the answer.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Prove a pack on the host that has it, by an earlier proof of this very file or by all its bytes.

    This is the check that every restore makes before it uses a pack; whoever coordinates other hosts runs it there. A
    file whose name is not that of its digest is refused. The proof is remembered beside the file. Needs no root.

    Exit code 0: admitted. 5: rejected, for one of the reasons invalid_expected_digest, unusable_path, size_mismatch,
    changed_during_validation, digest_mismatch. 4: the file cannot be read to its end.

    Example: coldsnap payload verify --path P --expected-sha256 sha256:... --expected-bytes N --worker w0 --json
    """
    from coldsnap.cli.progress import TerminalReporter
    from coldsnap.ops.payload import verify_payload

    verdict = verify_payload(
        path, expected_sha256, expected_bytes, worker=worker, reporter=TerminalReporter(quiet=quiet or as_json)
    )
    if as_json:
        print_json(verdict.document())
        if verdict.rejection is not None:
            raise typer.Exit(5)
        return
    if verdict.rejection is not None:
        raise verdict.rejection
    how = "by an earlier proof" if verdict.from_record else f"in {verdict.seconds:.2f} s"
    print_lines([f"{verdict.path} is {verdict.sha256}, {size(verdict.bytes)}, proved {how}"])
