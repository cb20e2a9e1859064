"""``coldsnap prepare``: everything that can be done before a restore."""

from __future__ import annotations

import typer

from coldsnap.cli.options import (
    DEFAULT_STATE_ROOT,
    Artifact,
    AsJson,
    MountSources,
    Offline,
    Peers,
    Quiet,
    RequireSignature,
    Stage,
    StateRootPath,
    Weights,
)
from coldsnap.cli.output import print_json, print_lines, size

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(prepare)


def prepare(
    artifact: Artifact,
    weights: Weights = None,
    stage: Stage = None,
    mount: MountSources = None,
    require_signature: RequireSignature = None,
    offline: Offline = False,
    peer: Peers = None,
    state_root: StateRootPath = DEFAULT_STATE_ROOT,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Fetch what is missing, verify and unpack everything a restore needs, so that the restore only reads. Idempotent.

    Capsules come from the registry and packs from the hub that the artifact names; only what this host needs.

    Never touches a running service. Packs that --stage copied into memory stay there until `coldsnap stop` or
    `coldsnap gc` finds that no service runs from them.

    Example: coldsnap prepare smollm2.json --stage
    """
    from coldsnap.cli.activation import activation
    from coldsnap.cli.progress import TerminalReporter
    from coldsnap.cli.wiring import make_tools
    from coldsnap.ops.preparing import prepare as run

    tools = make_tools(state_root, reporter=TerminalReporter(quiet=quiet), offline=offline, peers=peer or ())
    wanted = activation(
        tools,
        artifact,
        verb="prepare",
        weights=weights,
        stage=stage,
        mounts=tuple(mount or ()),
        require_signature=require_signature,
    )
    result = run(tools, wanted.loaded, wanted.request)
    if as_json:
        print_json(result.document())
        return
    print_lines(
        [
            f"prepared {artifact}: weights from {result.source} ({result.reason})",
            *(
                f"fetched {one.item.kind} {one.item.digest}, {size(one.bytes)}, from {one.source}"
                for one in result.fetched
            ),
            *([f"overlay: {result.overlay}"] if result.overlay is not None else []),
            *(f"pack {'in memory' if one.there else 'not in memory'}: {one.reason}" for one in result.staging),
            "everything was proved before" if result.from_record else f"proved in {result.seconds['total']:.2f} s",
        ]
    )
