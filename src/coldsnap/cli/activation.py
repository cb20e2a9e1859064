"""From flags, or a strict request, to what ``prepare``, ``restore``, ``warm`` and ``explain`` work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coldsnap.cli.requests import new_operation_id, read_request
from coldsnap.core.request import Operation, OperationRequest
from coldsnap.errors import UsageError
from coldsnap.ops.activating import activation_request, listen_address
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact

if TYPE_CHECKING:
    from coldsnap.ops.tools import Tools

__all__ = ["Activation", "activation", "mount_sources"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Activation:
    """An artifact, the request to activate it, and the address it will serve at."""

    loaded: LoadedArtifact
    request: OperationRequest
    host: str
    port: int


def activation(
    tools: Tools,
    artifact: Path | None,
    *,
    verb: str,
    name: str | None = None,
    port: int | None = None,
    weights: str | None = None,
    materialize: str | None = None,
    cache_paths: Sequence[str] = (),
    target_local: bool = False,
    devices: str | None = None,
    stage: bool | None = None,
    mounts: Sequence[str] = (),
    require_signature: Path | None = None,
    request_json: str | None = None,
) -> Activation:
    """Exactly one of an artifact and a strict request. Raises UsageError, and what reading either raises.

    ``require_signature`` is a public key: SignatureRejected unless the artifact is signed by it.
    """
    if (artifact is None) == (request_json is None):
        raise UsageError("name either an ARTIFACT.json or --request-json", cure=f"coldsnap {verb} ARTIFACT.json")
    if request_json is not None:
        flags = (
            name,
            port,
            weights,
            materialize,
            cache_paths or None,
            target_local or None,
            devices,
            stage,
            mounts or None,
        )
        if any(flag is not None for flag in flags):
            raise UsageError(
                "--name, --port, --weights, --materialize, --cache-path, --target-local, --devices, --stage, --mount "
                "belong to an ARTIFACT.json",
                cure="the request names them itself",
            )
        request = read_request(request_json, Operation.RESTORE)
        loaded = load_artifact(Path(request.artifact))
    else:
        assert artifact is not None  # noqa: S101 - said above, for the type checker
        loaded = load_artifact(artifact)
        request = activation_request(
            loaded, operation_id=new_operation_id(verb, name or "service"), warm=verb == "warm", name=name, port=port,
            weights=weights,
            materialize=materialize,
            cache_paths=cache_paths,
            target_local=target_local,
            devices=tuple(devices.split(",")) if devices is not None else (),
            stage=stage,
            mounts=mount_sources(mounts),
        )  # fmt: skip
    if require_signature is not None:
        from coldsnap.ops.signing import require_signature as insist

        insist(loaded, require_signature)
    host, wanted = listen_address(tools.engines, request)
    return Activation(loaded=loaded, request=request, host=host, port=wanted)


def mount_sources(words: Sequence[str]) -> dict[str, str]:
    """``TARGET=SOURCE`` words by target, sources absolute and without ``..``. Raises UsageError for other words."""
    found: dict[str, str] = {}
    for word in words:
        target, _, source = word.partition("=")
        if not target.startswith("/") or not source:
            raise UsageError(f"--mount {word} is not TARGET=SOURCE", cure="write --mount /models=/home/me/models")
        try:
            word.encode()
        except UnicodeEncodeError as error:
            cure = "give the folder another name, or make a link to it and name that"
            raise UsageError(f"--mount {word} is no UTF-8, and a request can hold nothing else", cure=cure) from error
        target = target.rstrip("/") or "/"
        if target in found:
            raise UsageError(f"--mount names two sources for {target}", cure="name one")
        path = Path(source).absolute()
        found[target] = str(path.resolve() if ".." in path.parts else path)
    return found
