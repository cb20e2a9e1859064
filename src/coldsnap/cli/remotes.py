"""The stores elsewhere, as this user's environment and files describe them. Values of credentials go no further.

HF_TOKEN or the file that a login of the hub writes (HF_TOKEN_PATH, HF_HOME); HF_ENDPOINT; HF_HUB_OFFLINE;
DOCKER_CONFIG, REGISTRY_AUTH_FILE, podman's file in XDG_RUNTIME_DIR; http_proxy, https_proxy, no_proxy.
"""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from coldsnap.errors import UsageError
from coldsnap.ship.access import DEFAULT_ENDPOINT, HubAccess
from coldsnap.ship.remotes import Remotes
from coldsnap.ship.secret import Secret

__all__ = ["make_remotes"]

_TRUE = frozenset({"1", "true", "yes", "on"})
_TOKEN_BYTES = 4096


def make_remotes(*, offline: bool = False, peers: Sequence[str] = ()) -> Remotes:
    """``offline`` forbids the network; ``peers`` are asked before it. No store is opened yet.

    Raises UsageError for a peer that is no URL and no folder of a peer.
    """
    for peer in peers:
        if not peer:
            raise UsageError("--peer is empty", cure="name a folder or a URL, or leave it out")
        if "://" not in peer:
            from coldsnap.ship.peer import check_peer

            check_peer(Path(peer))
    why = "--offline was given" if offline else ""
    if not why and os.environ.get("HF_HUB_OFFLINE", "").strip().lower() in _TRUE:
        why = "HF_HUB_OFFLINE is set"
    return Remotes(
        proxy=_proxy,
        hub_access=HubAccess(
            endpoint=os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or DEFAULT_ENDPOINT, token=_token()
        ),
        login_files=_login_files(),
        offline=why,
        peers=tuple(peers),
    )


def _home() -> Path:
    """The user's folder; the root folder for a user who has none, where nothing of theirs is found."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def _token() -> Secret | None:
    if value := os.environ.get("HF_TOKEN", "").strip():
        return Secret(value)
    home = Path(os.environ.get("HF_HOME") or _home() / ".cache" / "huggingface")
    path = Path(os.environ.get("HF_TOKEN_PATH") or home / "token")
    try:
        with path.open(encoding="utf-8") as file:
            value = file.read(_TOKEN_BYTES).strip()
    except (OSError, UnicodeDecodeError):
        return None
    return Secret(value) if value else None


def _login_files() -> tuple[Path, ...]:
    files = []
    if value := os.environ.get("REGISTRY_AUTH_FILE"):
        files.append(Path(value))
    files.append(Path(os.environ.get("DOCKER_CONFIG") or _home() / ".docker") / "config.json")
    if value := os.environ.get("XDG_RUNTIME_DIR"):
        files.append(Path(value) / "containers" / "auth.json")
    return tuple(files)


def _proxy(url: str) -> str | None:
    parts = urlsplit(url)
    if urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    return urllib.request.getproxies().get(parts.scheme)
