"""Options that several commands share, spelled once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "DEFAULT_STATE_ROOT",
    "Artifact",
    "AsJson",
    "CachePath",
    "Devices",
    "Driver",
    "DryRun",
    "IgnoreQuarantine",
    "Materialize",
    "MountSources",
    "Name",
    "NewArtifact",
    "Offline",
    "Peers",
    "Port",
    "PublishWithSecrets",
    "Quiet",
    "ReceiptJson",
    "RecipePort",
    "RequestJson",
    "RequireSignature",
    "Stage",
    "StateRootPath",
    "TargetLocal",
    "TimingEvents",
    "Weights",
    "Yes",
]

DEFAULT_STATE_ROOT = Path("/var/lib/coldsnap")

StateRootPath = Annotated[
    Path, typer.Option("--state-root", help="Folder that holds packs, capsules and services.", show_default=True)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables and sentences.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress; warnings and errors only.")]
Devices = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="LIST",
        help="GPUs to restore onto, by index or UUID, such as 1 or 2,3; as captured by default.",
    ),
]
Driver = Annotated[
    str | None,
    typer.Option("--driver", metavar="NAME", help="auto, host, n580 or n610; what the recipe says by default."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Artifact = Annotated[Path, typer.Argument(metavar="ARTIFACT.json", help="The descriptor that a capture wrote.")]
Name = Annotated[str | None, typer.Option("--name", help="Service name; the recipe's own name by default.")]
Port = Annotated[int | None, typer.Option("--port", min=1, max=65535, help="HTTP port; the captured one by default.")]
CachePath = Annotated[
    list[str] | None,
    typer.Option(
        "--cache-path", metavar="FOLDER", help="Write missing cache seeds of the capsule below it; repeatable."
    ),
]
Weights = Annotated[
    str | None,
    typer.Option("--weights", metavar="MODE", help="auto, native, recovery or cache-only-auto; auto by default."),
]
Materialize = Annotated[
    str | None,
    typer.Option(
        "--materialize",
        metavar="WHEN",
        help="After a recovery, write the missing pack again: off, async (beside the service) or required (before "
        "success); the engine's own default otherwise.",
    ),
]
MountSources = Annotated[
    list[str] | None,
    typer.Option(
        "--mount",
        metavar="TARGET=SOURCE",
        help="Where on this host the mount of the artifact at TARGET comes from; as captured by default; repeatable.",
    ),
]
RequireSignature = Annotated[
    Path | None,
    typer.Option(
        "--require-signature",
        metavar="PUBLIC_KEY",
        help="Refuse unless ARTIFACT.json.sig is this key's signature of this very artifact.",
    ),
]
IgnoreQuarantine = Annotated[
    bool,
    typer.Option("--ignore-quarantine", help="Try once although it failed too often here; a success clears that."),
]
TargetLocal = Annotated[
    bool,
    typer.Option("--target-local", help="Afterwards make this machine's overlay of it, which later restores prefer."),
]
Stage = Annotated[
    bool | None,
    typer.Option(
        "--stage/--no-stage",
        help="Copy packs into memory first, from where a GPU is filled fastest; the recipe's `stage` otherwise.",
    ),
]
RecipePort = Annotated[int | None, typer.Option("--port", min=1, max=65535, help="HTTP port instead of the recipe's.")]
RequestJson = Annotated[
    str | None,
    typer.Option("--request-json", metavar="FILE|-", help="A strict format-4 request instead of flags; - is stdin."),
]
ReceiptJson = Annotated[
    Path | None, typer.Option("--receipt-json", metavar="FILE", help="Write the operation's receipt here as well.")
]
TimingEvents = Annotated[
    Path | None,
    typer.Option("--timing-events", metavar="FILE", help="Append one JSON line per finished span while running."),
]
NewArtifact = Annotated[
    Path, typer.Option("--output", "-o", metavar="NEW.json", help="The new descriptor; never an existing file.")
]
PublishWithSecrets = Annotated[
    bool,
    typer.Option("--publish-with-secrets", help="Publish although the capture allowed secrets to be in the capsule."),
]
Offline = Annotated[bool, typer.Option("--offline", help="Ask no server; say what is missing and what would fetch it.")]
Peers = Annotated[
    list[str] | None,
    typer.Option(
        "--peer", metavar="FOLDER|URL", help="Look for packs and capsules there before any server; repeatable."
    ),
]
