"""``coldsnap du``: where the bytes are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coldsnap.cli.options import DEFAULT_STATE_ROOT, AsJson, StateRootPath
from coldsnap.cli.output import print_json, print_lines, print_table, size

if TYPE_CHECKING:
    from coldsnap.ops.usage import ArtifactUsage

__all__ = ["add_to"]

_MANIFESTS = ("native-manifest", "recovery-manifest")


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("du")(du)


def du(
    artifacts: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[ARTIFACT.json]...", help="Descriptors; all that the state root keeps by default."),
    ] = None,
    state_root: StateRootPath = DEFAULT_STATE_ROOT,
    as_json: AsJson = False,
) -> None:
    """Show where the bytes are: of artifacts by owner, of packs by who shares them, of the state root by folder.

    Units own process images and cache seeds, workers own residual and manifests, and packs belong to whoever has
    the same model bytes: each is stored once, and "saved" is what copies would take. Sizes of owners are
    those of the files as a restore reads them; sizes of folders are what the disk really holds, so the two do not add
    up. Changes nothing; `coldsnap gc --dry-run` says what may go.

    Exit code 0: shown. 2: a named artifact, or the state root, cannot be read.

    Example: coldsnap du
    """
    from coldsnap.ops.usage import find_usage

    found = find_usage(state_root, artifacts or ())
    if as_json:
        print_json(found.document())
        return
    for artifact in found.artifacts:
        _show(artifact)
    print_table(
        ("pack", "size", "workers", "artifacts", "here", "saved"),
        [
            (
                f"{pack.digest.hex[:12]}..",
                size(pack.bytes),
                str(sum(count for _, count in pack.references)),
                str(len(pack.references)),
                "yes" if pack.here else "no",
                size(pack.saved_bytes),
            )
            for pack in found.packs
        ],
    )
    print_lines([f"sharing packs saves {size(found.saved_bytes)}", ""])
    if found.folders:
        print_table(
            (str(state_root), "files", "on disk"),
            [(one.name, str(one.num_files), size(one.disk_bytes)) for one in found.folders],
        )
    total = f"takes {size(found.disk_bytes)}" if found.folders else "does not exist"
    print_lines([f"the state root {total}"])
    for path, reason in found.unread:
        print_lines([f"not counted: {path}: {reason} (`coldsnap gc --forget-missing` lets go of its files)"])


def _show(artifact: ArtifactUsage) -> None:
    print_table(
        ("owner", "process images", "cache seeds", "residual", "manifests", "pack", "total"),
        [
            (
                one.owner,
                *(
                    _cell(sum(one.bytes_by_role.get(role, 0) for role in roles))
                    for roles in (("process images",), ("cache-seed",), ("residual",), _MANIFESTS, ("pack",))
                ),
                size(one.bytes),
            )
            for one in artifact.owners
        ],
        title=f"{artifact.path}: {artifact.model}",
    )
    here = [
        f"{what} {size(num_bytes)}"
        for what, num_bytes in (
            ("capsules on disk", artifact.capsule_disk_bytes),
            ("prepared", artifact.prepared_disk_bytes),
        )
        if num_bytes
    ]
    print_lines(
        [
            f"names {size(artifact.named_bytes)}; {size(artifact.unique_bytes)} when equal files count once",
            "; ".join(here) or "none of its capsules is in the state root",
            "",
        ]
    )


def _cell(num_bytes: int) -> str:
    return size(num_bytes) if num_bytes else ""
