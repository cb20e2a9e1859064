"""A Hugging Face model repository as a store of packs, at one revision.

    <repository>/model-payloads/sha256/<hex>.pack, an LFS file whose object id is that very SHA-256

So the hub says itself which bytes a pack has, without moving any. Reading is done here with ranges, which has no limit
of size and resumes; writing is in ``hub_write.py``, through huggingface_hub. The token goes to the hub's own origin
and to nobody it redirects to.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from coldsnap.core.digest import Digest
from coldsnap.errors import RemoteError
from coldsnap.ship.access import DEFAULT_ENDPOINT, HubAccess
from coldsnap.ship.addresses import joined
from coldsnap.ship.base import Item, Kind, Outgoing, Progress, Stored, Written
from coldsnap.ship.directory import item_of, relative_path
from coldsnap.ship.faults import other_name, remote_error
from coldsnap.ship.http import Answer, Http
from coldsnap.ship.limits import retried
from coldsnap.ship.names import HubName, is_commit
from coldsnap.ship.ranges import read_range
from coldsnap.ship.secret import Secret
from coldsnap.ship.wire import origin_of

__all__ = ["DEFAULT_ENDPOINT", "Hub", "HubAccess"]

_FOLDER = "model-payloads/sha256"
_REGULAR_BYTES = 16 << 20
_MAX_PAGES = 10_000


class Hub:
    """One repository. ``revision`` is a commit to read from; without one the head of the name's branch counts."""

    kinds = frozenset({Kind.PACK})

    def __init__(self, name: HubName, http: Http, access: HubAccess | None = None, *, revision: str = "") -> None:
        self._access = access or HubAccess()
        self._http = http
        self.repository = name.repository
        self.branch = name.branch
        self.revision = revision or name.branch
        pinned = f"hf://{name.repository}@{revision}" if revision else str(name)
        standard = self._access.endpoint == DEFAULT_ENDPOINT
        self.name = pinned if standard else f"{pinned} at {self._access.endpoint}"

    @property
    def access(self) -> HubAccess:
        """Which hub and who we are there."""
        return self._access

    @property
    def http(self) -> Http:
        """What sends the requests."""
        return self._http

    def at(self, commit: str) -> Hub:
        """The same repository at a commit."""
        return Hub(HubName(repository=self.repository, branch=self.branch), self._http, self._access, revision=commit)

    def head(self) -> str | None:
        """The commit that the revision leads to now; None when the repository or the branch is not there.

        Whoever writes asks this first, so a repository that leads to another one is refused here.
        """
        url = f"{self._api}/revision/{quote(self.revision, safe='')}"
        found = self._json("GET", url, "tell its newest commit", absent_ok=True, same_name=True)
        if found is None:
            return None
        sha = found.get("sha") if isinstance(found, dict) else None
        if not isinstance(sha, str) or not is_commit(sha):
            raise remote_error("bad_answer", f"{self.name} names no commit of 40 hex digits", place=self.name)
        return sha

    def exists(self) -> bool:
        """Whether there is such a repository that we may see."""
        return self._json("GET", self._api, "describe itself", absent_ok=True, same_name=True) is not None

    def list(self) -> Iterator[Stored]:
        """Every pack of the revision, by its name; ``stat`` compares the object id too."""
        url = f"{self._api}/tree/{quote(self.revision, safe='')}/{_FOLDER}?recursive=false&expand=false"
        for _ in range(_MAX_PAGES):
            try:
                with retried(self._http.limits, lambda url=url: self._send("GET", url, "list its files")) as answer:  # type: ignore[misc] # fmt: skip
                    found = answer.json(self._http.limits.document_bytes)
                    link = answer.headers.get("link", "")
            except RemoteError as error:
                if error.reason == "not_found":
                    return
                raise
            for entry in found if isinstance(found, list) else ():
                item = item_of(str(entry.get("path"))) if isinstance(entry, dict) else None
                if item is not None and isinstance(entry.get("size"), int):
                    yield Stored(item=item, bytes=entry["size"])
            match = re.match(r'<([^>]+)>;\s*rel="?next"?', link)
            if match is None:
                return
            following = joined(url, match[1])
            if not following or origin_of(following) != origin_of(url):
                raise remote_error("bad_answer", f"{self.name} lists more files at another server", place=self.name)
            url = following
        raise remote_error("bad_answer", f"{self.name} lists files without end", place=self.name)

    def stat(self, item: Item) -> Stored | None:
        """Asked of paths-info. A file at the pack's path with another object id is refused: ``wrong_bytes``."""
        if item.kind not in self.kinds:
            return None
        entry = self.file(item)
        if entry is None:
            return None
        size, oid = entry
        if oid is not None and oid != item.digest.hex:
            message = f"{self.name} keeps other bytes at {relative_path(item)}: their SHA-256 is {oid[:64]}"
            raise remote_error("wrong_bytes", message, place=self.name)
        if oid is None and not self._is_regular_item(item, size):
            message = f"{self.name} keeps other bytes at {relative_path(item)}"
            raise remote_error("wrong_bytes", message, place=self.name)
        return Stored(item=item, bytes=size)

    def file(self, item: Item) -> tuple[int, str | None] | None:
        """(size, LFS object id) of what is at the pack's path; no object id for a file in git itself."""
        path = relative_path(item)
        url = f"{self._api}/paths-info/{quote(self.revision, safe='')}"
        form = urlencode([("paths", path), ("expand", "false")]).encode()
        found = self._json("POST", url, "look up a pack", form=form, absent_ok=True)
        if found is None:
            return None
        if not isinstance(found, list):
            raise remote_error("bad_answer", f"{self.name} answered no list of files", place=self.name)
        for entry in found:
            if isinstance(entry, dict) and entry.get("path") == path and entry.get("type") == "file":
                lfs = entry.get("lfs")
                size = lfs.get("size") if isinstance(lfs, dict) else entry.get("size")
                oid = lfs.get("oid") or lfs.get("sha256") if isinstance(lfs, dict) else None
                if not isinstance(size, int) or (lfs is not None and not isinstance(oid, str)):
                    raise remote_error("bad_answer", f"{self.name} describes {path} without its size", place=self.name)
                return size, oid
        return None

    def read(self, item: Item, offset: int, size: int) -> Iterator[memoryview]:
        """From the resolve address, following it to where the bytes are."""
        url = f"{self._access.endpoint}/{self.repository}/resolve/{quote(self.revision, safe='')}/{relative_path(item)}"
        yield from read_range(self._http, url, offset, size, headers=self._access.headers(), what="read a pack")

    def write(
        self,
        objects: Sequence[Outgoing],
        *,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
    ) -> Written:
        """See ``base.py``: at most one commit on the branch, none when every pack is there. Needs the extra ``[hub]``.

        A repository or branch that is missing is made; a new repository is private. ``revision`` of the result is a
        commit that holds all of them.
        """
        from coldsnap.ship.hub_write import write_packs

        return write_packs(self, objects, progress=progress, cancel=cancel)

    @property
    def _api(self) -> str:
        return f"{self._access.endpoint}/api/models/{self.repository}"

    def _is_regular_item(self, item: Item, size: int) -> bool:
        """A small file may lie in git itself, whose object id is no SHA-256: it is read."""
        if size > _REGULAR_BYTES:
            return False
        state = hashlib.sha256()
        for piece in self.read(item, 0, size):
            state.update(piece)
        return Digest.from_hash(state) == item.digest

    def _json(
        self,
        method: str,
        url: str,
        what: str,
        *,
        form: bytes | None = None,
        absent_ok: bool = False,
        same_name: bool = False,
    ) -> Any | None:
        try:
            with retried(self._http.limits, lambda: self._send(method, url, what, form)) as answer:
                if same_name and urlsplit(answer.url).path != urlsplit(url).path:
                    raise other_name(self.name, answer.url)
                return answer.json(self._http.limits.document_bytes)
        except RemoteError as error:
            # Without a token the hub answers 401 for what does not exist: whether it is private nobody may know.
            missing = error.reason == "not_found" or (error.reason == "unauthorized" and self._access.token is None)
            if absent_ok and missing:
                return None
            raise

    def _send(self, method: str, url: str, what: str, form: bytes | None = None) -> Answer:
        headers: Mapping[str, str | Secret] = self._access.headers()
        if form is not None:
            headers = {**headers, "Content-Type": "application/x-www-form-urlencoded"}
        return self._http.send(method, url, what=what, headers=headers, body=form)
