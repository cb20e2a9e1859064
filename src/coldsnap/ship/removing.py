"""Deleting from stores elsewhere. Both functions may be called again after any interruption."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from coldsnap.core.digest import Digest
from coldsnap.errors import RemoteError
from coldsnap.ship.base import Item
from coldsnap.ship.directory import relative_path
from coldsnap.ship.faults import remote_error
from coldsnap.ship.hub_write import hub_client, quiet, translated_for
from coldsnap.ship.logins import find_login
from coldsnap.ship.names import RegistryName
from coldsnap.ship.registry_calls import RegistryCalls
from coldsnap.ship.remotes import Remotes

if TYPE_CHECKING:
    from coldsnap.ship.hub import Hub

__all__ = ["remove_manifest", "remove_packs"]

_ROUNDS = 5
_TITLE = "Remove model payloads"
_UNSUPPORTED = (400, 405)


def remove_manifest(remotes: Remotes, name: RegistryName, digest: Digest) -> bool:
    """Delete a manifest, and with it every tag that leads to it; False when it was not there.

    Its blobs stay until the registry collects them: other manifests may name them. Raises RemoteError, with reason
    ``unsupported`` for a registry that deletes nothing.
    """
    calls = RegistryCalls(name, remotes.http, find_login(name.host, remotes.login_files))
    url = f"{calls.base}/manifests/{digest}"
    scope = f"repository:{name.path}:pull,push,delete"
    try:
        with calls.call("DELETE", url, scope, "delete a capsule", ok=(200, 202, 204)):
            return True
    except RemoteError as error:
        if error.reason == "not_found":
            return False
        if error.facts.get("status") in _UNSUPPORTED:
            message = f"{calls.name} does not delete what it holds"
            raise remote_error("unsupported", message, place=calls.name) from error
        raise


def remove_packs(hub: Hub, items: Sequence[Item]) -> frozenset[Item]:
    """Take packs out of the head of the branch, in one commit; those that were there. No commit when none was.

    Commits before it keep them. Raises RemoteError.
    """
    with hub_client(hub) as api, translated_for(hub), quiet():
        from huggingface_hub import CommitOperationDelete
        from huggingface_hub.errors import HfHubHTTPError

        for _ in range(_ROUNDS):
            head = hub.head()
            there = frozenset() if head is None else frozenset(i for i in items if hub.at(head).file(i) is not None)
            if not there:
                return there
            try:
                api.create_commit(
                    hub.repository,
                    [CommitOperationDelete(relative_path(item), is_folder=False) for item in sorted(there)],
                    commit_message=_TITLE,
                    revision=hub.branch,
                    parent_commit=head,
                )
            except HfHubHTTPError as error:
                if error.response.status_code not in (409, 412):
                    raise
                time.sleep(hub.http.limits.first_pause_s)
            else:
                return there
    raise remote_error("conflict", f"{hub.name} changed {_ROUNDS} times while a commit was made", place=hub.name)
