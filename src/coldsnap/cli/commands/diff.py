"""``coldsnap diff``: what differs between two captures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coldsnap.cli.exits import DIFFERS
from coldsnap.cli.options import DEFAULT_STATE_ROOT, AsJson, StateRootPath
from coldsnap.cli.output import print_json, print_lines, print_table, size

if TYPE_CHECKING:
    from coldsnap.core.artifactdiff import Section
    from coldsnap.ops.diff import ArtifactDifference, WorkerDifference

__all__ = ["add_to"]

_DIGEST = re.compile("sha256:([0-9a-f]{12})[0-9a-f]{52}")


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(diff)


def diff(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="A descriptor that a capture wrote.")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="The descriptor to compare it with.")],
    limit: Annotated[
        int, typer.Option("--limit", min=0, help="Lines shown of each list; --json always has all of them.")
    ] = 20,
    state_root: StateRootPath = DEFAULT_STATE_ROOT,
    as_json: AsJson = False,
) -> None:
    """Say what differs between two captures by meaning, down to the tensor, and which bytes they share.

    Nothing is restored, and neither root nor a GPU is needed. Descriptors are compared first; a worker's extent
    manifests are opened only when their digests differ, from the prepared folder or straight out of the capsule in
    the state root. Without them everything else is still said.

    Which capture it is and where it was placed (hosts, ports, mount sources) differ between any two captures and
    do not count.

    Exit code 0: the same. 1: something that counts differs, or could not be compared. 2: a descriptor is wrong.

    Example: coldsnap diff base.json fine-tuned.json
    """
    from coldsnap.ops.artifacts import load_artifact
    from coldsnap.ops.diff import compare

    before, after = load_artifact(a), load_artifact(b)
    found = compare(before, after, state_root=state_root)
    if as_json:
        sides = {
            name: {"path": str(one.path), "digest": str(one.digest)} for name, one in (("a", before), ("b", after))
        }
        print_json({**sides, **found.document()})
    else:
        _show(found, limit)
    if not found.same:
        raise typer.Exit(DIFFERS)


def _show(found: ArtifactDifference, limit: int) -> None:
    rows = [(one.name, _verdict(one), _detail(one)) for one in found.sections]
    states = Counter(worker.state.value for worker in found.workers)
    memory = "same" if all(worker.same for worker in found.workers) else "DIFFERS"
    rows.append(("memory", memory, ", ".join(f"{count} workers: {state}" for state, count in states.items())))
    print_table(("what", "", "compared"), rows)
    for section in found.sections:
        lines = [f"  {one.field}: {_short(one.before)} -> {_short(one.after)}" for one in section.changes]
        print_lines(_limited([f"{section.name}:", *lines], limit) if lines else [])
    differing = [worker for worker in found.workers if not worker.same]
    for worker in differing[:limit]:
        print_lines(_limited(list(_worker_lines(worker)), limit))
    if len(differing) > limit:
        print_lines([f"... and {len(differing) - limit} more workers; --limit or --json shows them"])
    shared = found.bytes
    once = size(shared.stored_once_bytes)
    print_lines([f"files in both: {size(shared.shared_bytes)}, of which packs, which are stored once: {once}"])
    print_lines([f"only in A: {size(shared.only_a_bytes)}; only in B: {size(shared.only_b_bytes)}"])
    print_lines(["the same" if found.same else "they differ"])


def _verdict(section: Section) -> str:
    if section.same:
        return "same"
    return f"{'DIFFERS' if section.counts else 'differs'}, {len(section.changes)}"


def _detail(section: Section) -> str:
    return section.detail if section.shared_bytes is None else f"{section.detail}, {size(section.shared_bytes)}"


def _short(text: str) -> str:
    """Enough of each digest to tell them apart; --json has all of it."""
    return _DIGEST.sub(r"\1..", text)


def _worker_lines(worker: WorkerDifference) -> Iterator[str]:
    yield f"memory of {worker.worker}: {worker.state.value} ({worker.reason})"
    memory = worker.memory
    if memory is None:
        return
    total = memory.equal_bytes + sum(one.bytes_before or 0 for one in memory.changes)
    share = f" ({memory.equal_bytes / total:.2%})" if total else ""
    yield f"  equal model bytes: {size(memory.equal_bytes)} in {memory.num_equal} extents{share}"
    if memory.num_moved:
        yield f"  equal but at another address: {size(memory.moved_bytes)} in {memory.num_moved} extents"
    if not memory.same_allocations:
        yield "  the allocations themselves differ"
    if not memory.residual.same:
        residual = memory.residual
        yield (
            f"  residual: {size(residual.changed_bytes)} changed in {residual.num_changed} places, "
            f"{size(residual.only_before_bytes)} only in A, {size(residual.only_after_bytes)} only in B"
        )
    for change in memory.changes:
        names = ", ".join(change.tensors) or f"extent {change.semantic_id[:16]}"
        sizes = " -> ".join(size(one) for one in (change.bytes_before, change.bytes_after) if one is not None)
        yield f"  {change.kind.value} {names} ({sizes})"


def _limited(lines: list[str], limit: int) -> list[str]:
    head, rest = lines[: limit + 1], lines[limit + 1 :]
    return [*head, f"  ... and {len(rest)} more; --limit or --json shows them"] if rest else head
