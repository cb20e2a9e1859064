"""An OCI registry (distribution-spec 1.1) as a store of blobs and manifests.

A manifest also gets the tag ``capsule-<hex>``, which says nothing that its digest does not, and keeps it from a
registry's collection of what has no tag; nothing reads it but ``list``.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from coldsnap.core.digest import Digest
from coldsnap.errors import RemoteError
from coldsnap.ship.addresses import joined
from coldsnap.ship.base import Item, Kind, Outgoing, Progress, Stored, Tally, Written
from coldsnap.ship.faults import remote_error
from coldsnap.ship.http import Http
from coldsnap.ship.limits import pause, stop_if_cancelled
from coldsnap.ship.local import LocalFile
from coldsnap.ship.logins import Login
from coldsnap.ship.names import RegistryName
from coldsnap.ship.ranges import read_range
from coldsnap.ship.registry_calls import RegistryCalls
from coldsnap.ship.registry_uploads import Uploader
from coldsnap.ship.secret import Secret
from coldsnap.ship.upload_records import UploadRecords
from coldsnap.ship.wire import origin_of

__all__ = ["MANIFEST_TYPES", "Registry"]

MANIFEST_TYPES = "application/vnd.oci.image.manifest.v1+json"
_TAG = re.compile(r"capsule-([0-9a-f]{64})")
_MAX_PAGES = 1000


class Registry:
    """One repository of a registry. ``neighbours`` are repositories there that may already have blobs.

    ``records`` is a private folder where unfinished uploads are remembered for the next process; without one they begin
    anew.
    """

    kinds = frozenset({Kind.BLOB, Kind.MANIFEST})

    def __init__(
        self,
        repository: RegistryName,
        http: Http,
        login: Login | None = None,
        *,
        neighbours: Sequence[str] = (),
        records: Path | None = None,
    ) -> None:
        self._calls = RegistryCalls(repository, http, login)
        kept = UploadRecords(records, registry=repository.url, repository=repository.path)
        self._uploads = Uploader(self._calls, neighbours, kept)
        self.name = self._calls.name

    # -- reading ------------------------------------------------------------------------------------------------

    def list(self) -> Iterator[Stored]:
        """The manifests that ``write`` tagged, and the blobs they name."""
        seen: set[Item] = set()
        for tag in self._tags():
            if (match := _TAG.fullmatch(tag)) is None:
                continue
            item = Item(Kind.MANIFEST, Digest.from_hex(match[1]))
            if item in seen or (found := self.stat(item)) is None:
                continue
            seen.add(item)
            yield found
            data = b"".join(bytes(piece) for piece in self.read(item, 0, found.bytes))
            for blob in _blobs_of(data, self.name):
                if blob.item not in seen and self.stat(blob.item) is not None:
                    seen.add(blob.item)
                    yield blob

    def stat(self, item: Item) -> Stored | None:
        """Asked with HEAD; a registry that states another digest or no size is refused."""
        return self._look(item)

    def _look(self, item: Item, *, ours: bool = False) -> Stored | None:
        """As ``stat``; for ``ours`` it must be in this repository, and in none that the registry sends readers to."""
        if item.kind not in self.kinds:
            return None
        try:
            with self._calls.call(
                "HEAD", self._url(item), self._calls.pull, "look up an object", headers=_accept(item)
            ) as answer:
                if ours:
                    self._calls.check_name(answer.url)
                size, stated = answer.length, answer.headers.get("docker-content-digest")
        except RemoteError as error:
            if error.reason == "not_found":
                return None
            raise
        if stated is not None and stated != str(item.digest):
            message = f"{self.name} calls {item} {stated[:80]}"
            raise remote_error("wrong_bytes", message, place=self.name)
        if size is None:
            raise remote_error("bad_answer", f"{self.name} states no size for {item}", place=self.name)
        return Stored(item=item, bytes=size)

    def read(self, item: Item, offset: int, size: int) -> Iterator[memoryview]:
        """One attempt; a refusal for want of a token is answered within."""
        refused = False
        while True:
            headers: dict[str, str | Secret] = {**_accept(item), **self._calls.tokens.header(self._calls.pull)}
            try:
                yield from read_range(
                    self._calls.http, self._url(item), offset, size, headers=headers, what=f"read {item.kind}"
                )
            except RemoteError as error:
                if (
                    refused
                    or error.reason != "unauthorized"
                    or not self._calls.tokens.answer(error, self._calls.pull, headers)
                ):
                    raise
                refused = True
            else:
                return

    # -- writing ------------------------------------------------------------------------------------------------

    def write(
        self,
        objects: Sequence[Outgoing],
        *,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
    ) -> Written:
        """See ``base.py``. Raises RemoteError, PayloadRejected, OperationInterrupted."""
        tally = Tally()
        advance = progress or (lambda num_bytes: None)
        for one in objects:
            stop_if_cancelled(cancel)
            if tally.is_there(one, self._look(one.item, ours=True), advance, place=self.name):
                continue
            if one.item.kind is Kind.MANIFEST:
                self._put_manifest(one, cancel)
                tally.sent.append(one)
                advance(one.bytes)
            elif (session := self._uploads.begin(one, cancel)) is None:
                tally.mounted.append(one.item)
                advance(one.bytes)
            else:
                self._uploads.send(one, session, advance, cancel)
                tally.sent.append(one)
        return tally.written()

    def _put_manifest(self, one: Outgoing, cancel: threading.Event | None) -> None:
        with LocalFile(one) as file:
            file.prove()
            data = b"".join(bytes(piece) for piece in file.pieces(0, one.bytes))
        url = f"{self._calls.base}/manifests/capsule-{one.item.digest.hex}"
        headers = {"Content-Type": _media_type(data)}
        stated = str(one.item.digest)
        for attempt in range(1, self._calls.limits.attempts + 1):
            try:
                with self._calls.call(
                    "PUT",
                    url,
                    self._calls.push,
                    "take a manifest",
                    headers=headers,
                    body=data,
                    ok=(201,),
                    cancel=cancel,
                ) as answer:
                    stated = answer.headers.get("docker-content-digest", stated)
                break
            except RemoteError as error:
                # docker-registry refuses one of two writers of the same manifest at the same moment, with 400.
                if (found := self._look(one.item, ours=True)) is not None and found.bytes == one.bytes:
                    break
                if error.facts.get("status") != 400 or attempt == self._calls.limits.attempts:
                    raise
                pause(self._calls.limits, attempt, asked_s=None, cancel=cancel)
        if stated != str(one.item.digest):
            message = f"{self.name} took {one.item} as {stated[:80]}"
            raise remote_error("wrong_bytes", message, place=self.name)

    def _tags(self) -> Iterator[str]:
        url = f"{self._calls.base}/tags/list?n=1000"
        for _ in range(_MAX_PAGES):
            try:
                with self._calls.call("GET", url, self._calls.pull, "list its tags") as answer:
                    found = answer.json(self._calls.limits.document_bytes)
                    link = answer.headers.get("link", "")
            except RemoteError as error:
                if error.reason == "not_found":
                    return
                raise
            tags = found.get("tags") if isinstance(found, dict) else None
            yield from (tag for tag in tags or () if isinstance(tag, str))
            match = re.match(r'<([^>]+)>;\s*rel="?next"?', link)
            if match is None:
                return
            following = joined(url, match[1])
            if not following or origin_of(following) != origin_of(url):
                raise remote_error("bad_answer", f"{self.name} lists more tags at another server", place=self.name)
            url = following
        raise remote_error("bad_answer", f"{self.name} lists tags without end", place=self.name)

    def _url(self, item: Item) -> str:
        return f"{self._calls.base}/{'manifests' if item.kind is Kind.MANIFEST else 'blobs'}/{item.digest}"


def _accept(item: Item) -> dict[str, str]:
    return {"Accept": MANIFEST_TYPES if item.kind is Kind.MANIFEST else "application/octet-stream"}


def _media_type(data: bytes) -> str:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return MANIFEST_TYPES
    stated = found.get("mediaType") if isinstance(found, dict) else None
    return stated if isinstance(stated, str) and re.fullmatch(r"[\w.+/-]{1,127}", stated) else MANIFEST_TYPES


def _blobs_of(data: bytes, place: str) -> Iterator[Stored]:
    """The config and layers that a manifest names."""
    try:
        manifest: Any = json.loads(data)
        for entry in (manifest["config"], *manifest["layers"]):
            yield Stored(item=Item(Kind.BLOB, Digest.parse(entry["digest"])), bytes=int(entry["size"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise remote_error("bad_answer", f"{place} holds a manifest that is none", place=place) from error
