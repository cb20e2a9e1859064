"""A Hugging Face repository at one exact revision, in the ordinary local cache.

A branch or tag names different bytes tomorrow, so only a full commit is taken. The cache is the one every other
program of this user shares; what is already there is not fetched again.
"""

from __future__ import annotations

import re
from pathlib import Path

from coldsnap.engines.local_model import checkpoint_files
from coldsnap.engines.protocol import ResolvedModel
from coldsnap.engines.safetensors import metadata_sha256
from coldsnap.errors import MissingCapability, PeerError, UserError

__all__ = ["resolve_pinned"]

_COMMIT = re.compile(r"[0-9a-f]{40}")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+|[A-Za-z0-9][\w.-]*")
_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def resolve_pinned(repository: str, revision: str | None) -> ResolvedModel:
    """Fetch `repository` at `revision`, unless the cache has it.

    Raises UserError when the revision is not 40 hexadecimal digits, MissingCapability without huggingface_hub,
    PeerError when the hub does not deliver.
    """
    if _REPOSITORY.fullmatch(repository) is None:
        raise UserError(
            f"model {repository!r} is neither a folder nor a repository name",
            cure="give a local checkpoint folder or OWNER/NAME",
        )
    if revision is None or _COMMIT.fullmatch(revision) is None:
        raise UserError(
            f"model {repository!r} is not pinned: revision {revision!r} is not a commit",
            cure="there is no such local folder; for a hub model give the commit's 40 hexadecimal digits, "
            "because a branch or tag can move",
            facts={"model": repository, "revision": revision},
        )
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise MissingCapability(
            "huggingface_hub is not installed", cure="pip install 'coldsnap[transformers]', or use a local folder"
        ) from error
    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=list(_PATTERNS)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise PeerError(
            f"the hub did not deliver {repository} at {revision}: {error}",
            cure="check the name, the revision and the network, or use a local folder",
            facts={"model": repository, "revision": revision},
        ) from error
    return ResolvedModel(
        id=repository,
        revision=revision,
        source="huggingface",
        path=folder,
        metadata_sha256=metadata_sha256(checkpoint_files(folder)),
    )
