"""``coldsnap gc`` and ``coldsnap delete``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coldsnap.cli.options import DEFAULT_STATE_ROOT, Artifact, AsJson, DryRun, StateRootPath, Yes
from coldsnap.cli.output import print_json, print_lines, print_table, size
from coldsnap.errors import OperationInterrupted, UsageError

if TYPE_CHECKING:
    from coldsnap.ops.tidy import DeletePlan
    from coldsnap.ops.unpublishing import UnpublishPlan

__all__ = ["add_to"]


class Scope(StrEnum):
    """Where ``delete`` deletes."""

    LOCAL = "local"
    PUBLISHED = "published"
    BOTH = "both"


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(delete)
    app.command()(gc)


def gc(
    dry_run: DryRun = False,
    forget_missing: Annotated[
        bool, typer.Option("--forget-missing", help="Also let go of artifacts whose descriptor file is gone.")
    ] = False,
    state_root: StateRootPath = DEFAULT_STATE_ROOT,
    as_json: AsJson = False,
) -> None:
    """Remove what no artifact needs and what killed operations left. Committed things stay.

    Packs and capsules are counted by who refers to them: every artifact that was captured, prepared or restored here
    holds a lease, its overlay with it, and a shared pack goes with the last of its users. A lease ends with
    `coldsnap delete`, or here with --forget-missing once the descriptor is gone and no service runs from it.

    Exit code 0: done, or shown. 4: an operation is running; try again when it has ended.

    Example: coldsnap gc --dry-run
    """
    from coldsnap.cli.progress import TerminalReporter
    from coldsnap.cli.wiring import make_tools
    from coldsnap.ops.tidy import plan_tidy, run_tidy

    tools = make_tools(state_root, reporter=TerminalReporter(quiet=True))
    plan = plan_tidy(tools, forget_missing=forget_missing)
    report = None if dry_run else run_tidy(tools, plan)
    items = plan.items if report is None else report.removed
    kept = plan.sweep.kept_objects()
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "items": [{"kind": i.kind, "path": str(i.path), "bytes": i.bytes, "reason": i.reason} for i in items],
                "bytes": sum(item.bytes for item in items),
                "forgotten": [one.path for one in plan.forgotten],
                "kept": [
                    {"kind": one.kind, "digest": str(one.digest), "needed_by": list(one.needed_by)} for one in kept
                ],
                "spared": [] if report is None else [{"path": str(i.path), "reason": why} for i, why in report.spared],
            }
        )
        return
    print_table(("kind", "size", "reason", "path"), [(i.kind, size(i.bytes), i.reason, str(i.path)) for i in items])
    verb = "would free" if dry_run else "freed"
    print_lines([f"{verb} {size(sum(item.bytes for item in items))} in {len(items)} items"])
    shared = sum(len(one.needed_by) > 1 for one in kept)
    users = len({label for one in kept for label in one.needed_by})
    print_lines([f"keeps {len(kept)} packs and capsules that {users} artifacts need, {shared} of them shared"])


def delete(
    artifact: Artifact,
    scope: Annotated[
        Scope, typer.Option("--scope", help="What is here, what was published from it, or both.", case_sensitive=True)
    ] = Scope.LOCAL,
    dry_run: DryRun = False,
    yes: Yes = False,
    state_root: StateRootPath = DEFAULT_STATE_ROOT,
    as_json: AsJson = False,
) -> None:
    """Remove an artifact and the files only it needs; what others share stays. Its signature and then the
    descriptor go last.

    With --scope published or both also what it names at servers: manifests from registries, packs from the head of a
    hub's branch main. Servers come first; with published alone everything here stays, the descriptor too. Blobs that a
    registry has not collected yet, and older commits of a hub, stay there.

    Exit code 0: done, or shown. 4: it is in use. 6: a server refused; nothing here was removed.

    Example: coldsnap delete smollm2.json --scope both --dry-run
    """
    from coldsnap.cli.progress import TerminalReporter
    from coldsnap.cli.wiring import make_tools
    from coldsnap.ops.artifacts import load_artifact
    from coldsnap.ops.tidy import plan_delete, run_delete
    from coldsnap.ops.unpublishing import plan_unpublish, run_unpublish

    tools = make_tools(state_root, reporter=TerminalReporter(quiet=True))
    local = plan_delete(tools, artifact) if scope is not Scope.PUBLISHED else None
    published = plan_unpublish(tools, load_artifact(artifact)) if scope is not Scope.LOCAL else None
    if not as_json:
        _show(local, published)
    parts = published.parts if published is not None else ()
    if not dry_run:
        _confirm(yes=yes)
        with _told_when_interrupted(artifact):
            if published is not None:
                parts = run_unpublish(tools, published)
            if local is not None:
                run_delete(tools, local)
    if as_json:
        items = local.sweep.items if local is not None else ()
        print_json(
            {
                "dry_run": dry_run,
                "artifact": str(artifact.absolute()),
                "scope": scope.value,
                "items": [{"kind": i.kind, "path": str(i.path), "bytes": i.bytes} for i in items],
                "bytes": sum(item.bytes for item in items),
                "signature": str(local.signature) if local is not None and local.signature is not None else None,
                "shared": [{"digest": d, "needed_by": p} for d, p in (local.shared if local is not None else ())],
                "published": [part.document() for part in parts],
                "notes": list(published.notes) if published is not None else [],
            }
        )
    elif not dry_run:
        print_lines(f"{part.outcome}: {part.item} at {part.place}" for part in parts if part.outcome)
        print_lines([f"deleted {artifact}" if local is not None else f"{artifact} stays, and so does all that is here"])


def _show(local: DeletePlan | None, published: UnpublishPlan | None) -> None:
    """The plan, in the order in which it is done."""
    if published is not None:
        print_table(
            ("kind", "digest", "place", "goes"),
            [
                (part.item.kind.value, str(part.item.digest), part.place, "no" if part.kept_by else "yes")
                for part in published.parts
            ],
        )
        print_lines(
            f"  stays: {part.item} at {part.place}, named by {', '.join(part.kept_by)}"
            for part in published.parts
            if part.kept_by
        )
        print_lines([f"  note: {note}" for note in published.notes] or ["  nothing of it goes from a server"])
    if local is not None:
        print_table(("kind", "size", "path"), [(i.kind, size(i.bytes), str(i.path)) for i in local.sweep.items])
        print_lines([f"  stays: {digest}, needed by {path}" for digest, path in local.shared])
        print_lines([f"  then: {local.signature}"] if local.signature is not None else [])
        print_lines([f"  last: {local.artifact.path}"])


@contextmanager
def _told_when_interrupted(artifact: Path) -> Iterator[None]:
    """Say what an interrupted delete left. One whose descriptor is gone had come to its end."""
    try:
        yield
    except KeyboardInterrupt as error:
        if not artifact.exists():
            raise
        message = f"delete was interrupted: what is gone stays gone, and {artifact} still says what is left"
        raise OperationInterrupted(message, cure="run it again, it goes on from there") from error


def _confirm(*, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("nobody can be asked here", cure="add --yes, or look with --dry-run first")
    if not typer.confirm("Delete these?"):
        raise OperationInterrupted("nothing was deleted")
