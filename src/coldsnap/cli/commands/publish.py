"""``coldsnap publish`` and ``coldsnap publish-native``: capsules to a registry, packs to a hub."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from coldsnap.cli.options import (
    DEFAULT_STATE_ROOT,
    Artifact,
    AsJson,
    DryRun,
    NewArtifact,
    PublishWithSecrets,
    Quiet,
    ReceiptJson,
    StateRootPath,
    TimingEvents,
)
from coldsnap.cli.output import print_json, print_lines, print_table, size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from coldsnap.ops.publication import Published
    from coldsnap.ops.publishing import PublishedObject, PublishPlan

__all__ = ["add_to"]

ToRegistry = Annotated[str, typer.Option("--to", metavar="oci://HOST/PATH", help="A repository of a registry.")]
ToHub = Annotated[str, typer.Option("--to", metavar="hf://ORG/REPO[@BRANCH]", help="A model repository of a hub.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(publish)
    app.command("publish-native")(publish_native)


def publish(
    artifact: Artifact,
    to: ToRegistry,
    output: NewArtifact,
    publish_with_secrets: PublishWithSecrets = False,
    state_root: StateRootPath = DEFAULT_STATE_ROOT,
    receipt_json: ReceiptJson = None,
    timing_events: TimingEvents = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Push every unit's capsule to a registry by digest, and write a new descriptor that says where. Idempotent.

    Logins are those of `docker login`. Example: coldsnap publish a.json --to oci://ghcr.io/org/capsules -o b.json
    """
    from coldsnap.cli.progress import TerminalReporter
    from coldsnap.cli.recording import outlet
    from coldsnap.cli.requests import new_operation_id
    from coldsnap.cli.wiring import make_tools
    from coldsnap.ops.artifacts import load_artifact
    from coldsnap.ops.publish import plan_publish, publish_capsules_request
    from coldsnap.ops.publish import publish as run
    from coldsnap.ship.names import parse_registry

    target = parse_registry(to)
    tools = make_tools(state_root, reporter=TerminalReporter(quiet=quiet))
    loaded = load_artifact(artifact)
    request = publish_capsules_request(
        loaded,
        operation_id=new_operation_id("publish", loaded.artifact.launch.engine),
        to=target,
        output=output,
        with_secrets=publish_with_secrets,
    )
    if dry_run:
        _show_plan(plan_publish(tools, loaded, request), as_json=as_json)
        return
    with outlet(receipt_json, timing_events) as out:
        result = run(tools, loaded, request, outlet=out)
    references = (f"{unit}: {reference}" for unit, reference in result.at.references.items())
    _show_result(result, references, as_json=as_json)


def publish_native(
    artifact: Artifact,
    to: ToHub,
    output: NewArtifact,
    publish_with_secrets: PublishWithSecrets = False,
    state_root: StateRootPath = DEFAULT_STATE_ROOT,
    receipt_json: ReceiptJson = None,
    timing_events: TimingEvents = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Upload every distinct pack to a hub once, and write a new descriptor that pins the commit. Idempotent.

    The token is HF_TOKEN or that of a hub login. Example: coldsnap publish-native a.json --to hf://org/repo -o b.json
    """
    from coldsnap.cli.progress import TerminalReporter
    from coldsnap.cli.recording import outlet
    from coldsnap.cli.requests import new_operation_id
    from coldsnap.cli.wiring import make_tools
    from coldsnap.ops.artifacts import load_artifact
    from coldsnap.ops.publish_native import plan_publish_native, publish_packs_request
    from coldsnap.ops.publish_native import publish_native as run
    from coldsnap.ship.names import parse_hub

    target = parse_hub(to)
    tools = make_tools(state_root, reporter=TerminalReporter(quiet=quiet))
    loaded = load_artifact(artifact)
    request = publish_packs_request(
        loaded,
        operation_id=new_operation_id("publish-native", loaded.artifact.launch.engine),
        to=target,
        output=output,
        with_secrets=publish_with_secrets,
    )
    if dry_run:
        _show_plan(plan_publish_native(tools, loaded, request), as_json=as_json)
        return
    with outlet(receipt_json, timing_events) as out:
        result = run(tools, loaded, request, outlet=out)
    _show_result(result, [f"hf://{result.at.repository} at commit {result.at.revision}"], as_json=as_json)


def _show_result(result: Published[Any], addresses: Iterable[str], *, as_json: bool) -> None:
    if as_json:
        print_json(result.document())
        return
    _show_objects(result.objects)
    print_lines(addresses)
    print_lines([f"wrote {result.artifact_path}; moved {size(result.sent_bytes)} in {result.seconds['total']:.2f} s"])


def _show_plan(plan: PublishPlan, *, as_json: bool) -> None:
    if as_json:
        print_json(plan.document())
        return
    _show_objects(plan.objects)
    print_lines([f"would send {size(plan.to_send_bytes)} to {plan.target}"])
    if plan.unknown:
        print_lines([f"nobody was asked what is there already: {plan.unknown}"])


def _show_objects(objects: tuple[PublishedObject, ...]) -> None:
    print_table(
        ("kind", "digest", "size", "outcome"),
        [(one.item.kind.value, str(one.item.digest), size(one.bytes), one.outcome) for one in objects],
    )
