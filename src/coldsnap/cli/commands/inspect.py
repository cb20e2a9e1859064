"""``coldsnap inspect`` and ``coldsnap verify``: what an artifact says, and whether its files say the same."""

from __future__ import annotations

from typing import Annotated

import typer

from coldsnap.cli.options import DEFAULT_STATE_ROOT, Artifact, AsJson, Quiet, RequireSignature, StateRootPath
from coldsnap.cli.output import print_json, print_lines, print_table, size

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(inspect)
    app.command()(verify)


def inspect(artifact: Artifact, as_json: AsJson = False) -> None:
    """Show what an artifact holds: model, driver, sizes by owner, acceptance, hygiene. Reads the descriptor alone.

    Example: coldsnap inspect smollm2.json
    """
    from coldsnap.core.artifact import artifact_document
    from coldsnap.core.bindings import hygiene_of, process_images_of, worker_exports_of
    from coldsnap.ops.artifacts import load_artifact

    loaded = load_artifact(artifact)
    if as_json:
        print_json({"digest": str(loaded.digest), "artifact": artifact_document(loaded.artifact)})
        return
    document = loaded.artifact
    bindings = document.runtime.bindings
    prompts, answers = loaded.acceptance()
    print_table(
        ("artifact", ""),
        [
            ("digest", str(loaded.digest)),
            ("capture", document.capture_id),
            ("model", f"{document.launch.model.id} at {document.launch.model.revision}"),
            ("engine", document.launch.engine),
            ("driver", f"{document.snapshot_driver.id.value} ({document.snapshot_driver.capture_boundary})"),
            ("needs", ", ".join(document.requires.features)),
            ("units, workers", f"{len(document.launch.units)}, {len(document.launch.execution.workers)}"),
        ],
    )
    rows = [
        (f"unit/{one.unit}", "process image", str(len(one.files)), size(sum(file.bytes for file in one.files)))
        for one in process_images_of(bindings)
    ]
    rows += [(str(one.owner), one.role, "1", size(one.bytes)) for one in document.capsule.objects]
    rows += [(f"worker/{worker}", "pack (shared)", "1", size(one.bytes)) for worker, one in loaded.packs().items()]
    print_table(("owner", "what", "files", "size"), rows)
    for export in worker_exports_of(bindings):
        for reason, num_bytes in sorted(export.residual_reasons.items(), key=lambda item: -item[1]):
            print_lines([f"  residual of {export.worker}: {size(num_bytes)} {reason}"])
    for prompt, answer in zip(prompts, answers, strict=True):
        print_lines([f"  accepts {prompt.text!r} -> {answer.text!r} ({len(answer.token_ids)} tokens)"])
    for report in hygiene_of(bindings):
        for finding in report.findings:
            print_lines([f"  {finding.severity.value}: {finding.subject}: {finding.message}"])
        if not report.publishable:
            print_lines([f"  not publishable: holds {', '.join(report.allowed_secrets)}"])


def verify(
    artifact: Artifact,
    cover: Annotated[
        bool, typer.Option("--cover", help="Prove the workers' manifests alone; no pack, no process image is read.")
    ] = False,
    require_signature: RequireSignature = None,
    state_root: StateRootPath = DEFAULT_STATE_ROOT,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Prove every byte the artifact names, believing no earlier proof. Needs neither root nor a GPU.

    The capsules are unpacked aside and every file's digest compared; each worker's manifests must keep every
    preserved byte exactly once and agree with each other and with the artifact; packs are proved extent by extent and
    as a whole. With --cover only the manifests are proved, from the prepared folder or straight out of the capsules:
    seconds for any size of model.

    With --require-signature a signature that is missing, damaged, another key's or another artifact's ends it at once.

    Exit code 0: proved. 5: something is wrong; all of it is listed.

    Example: coldsnap verify smollm2.json --json
    """
    from coldsnap.cli.progress import TerminalReporter
    from coldsnap.ops.artifacts import load_artifact

    reporter = TerminalReporter(quiet=quiet)
    loaded = load_artifact(artifact)
    signed = None
    if require_signature is not None:
        from coldsnap.ops.signing import require_signature as insist

        signed = insist(loaded, require_signature)
    if cover:
        from coldsnap.ops.verify import verify_covers

        proofs = verify_covers(state_root, loaded, reporter=reporter)
    else:
        from coldsnap.cli.wiring import make_tools
        from coldsnap.ops.verify import verify_artifact

        proofs = verify_artifact(make_tools(state_root, reporter=reporter), loaded)
    proved = not any(proof.problems for proof in proofs)
    if as_json:
        print_json(
            {
                "proved": proved,
                "scope": "cover" if cover else "everything",
                "digest": str(loaded.digest),
                **({"signed_by": str(signed.key)} if signed is not None else {}),
                "proofs": [proof.document() for proof in proofs],
            }
        )
    else:
        print_table(
            ("what", "size", "proved"),
            [(proof.subject, size(proof.bytes), "no" if proof.problems else "yes") for proof in proofs],
        )
        print_lines(f"  {problem}" for proof in proofs for problem in proof.problems)
        done = "every preserved byte is kept exactly once" if cover else "every byte is proved"
        print_lines([done if proved else "NOT proved"])
        print_lines([f"signed by key {signed.key}"] if signed is not None else [])
    if not proved:
        raise typer.Exit(5)
