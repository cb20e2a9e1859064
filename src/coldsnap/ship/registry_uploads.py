"""Blobs into an OCI registry, through upload sessions.

A session that breaks is asked how far it came and continued from there, or begun anew when the registry forgot it;
without progress a bounded number of times. Where it goes on is kept in a record, so that the next process continues
what a killed one left. A blob that a neighbouring repository has is mounted instead.

What a session holds only the registry knows, and it is believed about the offset and nothing else: it proves the
digest of the whole at the end, we prove that of our file and look whether the blob is there. A continued session that
is refused in the end held other bytes, and the blob is sent once more from its start.

docker-registry 2.8 and its kin sign the offset into the address. Cut off within a chunk they have more bytes than
the last address says, answer 404 to every question, and the blob begins anew; cut off between chunks, or behind a proxy
that passes on whole chunks only, they go on.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode, urlsplit

from coldsnap.errors import PayloadRejected, RemoteError
from coldsnap.ship.base import Outgoing, Progress
from coldsnap.ship.faults import TRANSIENT, remote_error
from coldsnap.ship.http import Body
from coldsnap.ship.limits import pause, stop_if_cancelled
from coldsnap.ship.local import LocalFile
from coldsnap.ship.registry_calls import RegistryCalls
from coldsnap.ship.upload_records import UploadRecords

__all__ = ["Session", "Uploader"]

_SESSION_RANGE = re.compile(r"(?:bytes=)?0-(\d{1,18})")


@dataclass(frozen=True, slots=True)
class Session:
    """An upload at the registry: its address, what it has of the blob, and whether an earlier process began it."""

    location: str
    offset: int = 0
    continued: bool = False


class Uploader:
    """Sends blobs to one repository. ``neighbours`` are repositories of the registry to mount from."""

    def __init__(self, calls: RegistryCalls, neighbours: Sequence[str], records: UploadRecords) -> None:
        self._calls = calls
        self._limits = calls.limits
        self._neighbours = tuple(one for one in neighbours if one != calls.path)
        self._records = records

    def begin(self, one: Outgoing, cancel: threading.Event | None) -> Session | None:
        """Where to send a blob, or None when it was mounted from a neighbour."""
        if (found := self._continued(one, cancel)) is not None:
            return found
        session: str | None = None
        for neighbour in self._neighbours:
            query = urlencode({"mount": str(one.item.digest), "from": neighbour})
            scope = f"{self._calls.push} repository:{neighbour}:pull"
            url = f"{self._calls.base}/blobs/uploads/?{query}"
            try:
                with self._calls.call("POST", url, scope, "mount a blob", ok=(201, 202), cancel=cancel) as answer:
                    if session is not None:
                        self._give_up(session)
                    if answer.status == 201:
                        return None
                    session = self._calls.location(answer)  # there was nothing to mount: it began an upload instead
            except RemoteError as error:
                if error.reason not in ("not_found", "unauthorized", "forbidden"):
                    raise
        return self._fresh(one, cancel) if session is None else self._begun(one, session)

    def _continued(self, one: Outgoing, cancel: threading.Event | None) -> Session | None:
        """What an earlier process left, if the registry still knows it."""
        if (location := self._records.find(one)) is None:
            return None
        try:
            self._calls.check_upload(location)
            if (found := self._ask(one, location, cancel)) is not None:
                return Session(*found, continued=True)
            self._give_up(location)
        except RemoteError as error:
            if error.reason in TRANSIENT:
                raise
        self._records.forget(one)
        return None

    def _fresh(self, one: Outgoing, cancel: threading.Event | None) -> Session:
        url = f"{self._calls.base}/blobs/uploads/"
        with self._calls.call("POST", url, self._calls.push, "begin an upload", ok=(202,), cancel=cancel) as answer:
            return self._begun(one, self._calls.location(answer))

    def _begun(self, one: Outgoing, location: str) -> Session:
        self._records.keep(one, location)
        return Session(location)

    def send(self, one: Outgoing, session: Session, progress: Progress, cancel: threading.Event | None) -> None:
        """Send a blob through the session that ``begin`` gave. Raises RemoteError, PayloadRejected."""
        with LocalFile(one) as file:
            try:
                self._send(one, file, session, progress, cancel)
            except RemoteError as error:
                if not session.continued or error.reason in TRANSIENT:
                    raise
                self._send(one, file, self._fresh(one, cancel), progress, cancel)
        self._records.forget(one)

    def _send(
        self, one: Outgoing, file: LocalFile, session: Session, progress: Progress, cancel: threading.Event | None
    ) -> None:
        told = 0

        def advance(num_bytes: int) -> None:
            nonlocal told
            told += num_bytes
            progress(num_bytes)

        location = session.location
        try:
            location = self._send_rest(one, file, session, advance, cancel)
            file.prove()
            self._finish(one, location, cancel)
        except PayloadRejected:
            self._records.forget(one)
            self._give_up(location)
            raise
        except RemoteError:
            progress(-told)
            raise

    def _send_rest(
        self, one: Outgoing, file: LocalFile, session: Session, progress: Progress, cancel: threading.Event | None
    ) -> str:
        """Everything from the session's offset; the address to finish at."""
        location, offset, failures = session.location, session.offset, 0
        progress(offset)
        while offset < one.bytes:
            stop_if_cancelled(cancel)
            size = min(self._limits.chunk_bytes, one.bytes - offset)
            try:
                location = self._patch(location, file, offset, size, progress, cancel)
                offset, failures = offset + size, 0
                self._records.keep(one, location)
            except RemoteError as error:
                gone = error.reason == "not_found" or error.facts.get("status") == 416
                failures += 1
                if failures >= self._limits.attempts or not (gone or error.reason in TRANSIENT):
                    raise
                asked = error.facts.get("retry_after_s")
                asked_s = float(asked) if isinstance(asked, int | float) else None
                if asked_s is not None and asked_s > self._limits.retry_after_s:
                    raise
                pause(self._limits, failures, asked_s=asked_s, cancel=cancel)
                before = offset
                location, offset = self._resume(one, location, cancel)
                progress(offset - before)
        return location

    def _patch(
        self,
        session: str,
        file: LocalFile,
        offset: int,
        size: int,
        progress: Progress,
        cancel: threading.Event | None,
    ) -> str:
        sent = 0

        def pieces() -> Iterator[memoryview]:
            nonlocal sent
            progress(-sent)
            sent = 0
            for piece in file.pieces(offset, size):
                stop_if_cancelled(cancel)
                yield piece
                sent += len(piece)
                progress(len(piece))

        headers = {"Content-Type": "application/octet-stream", "Content-Range": f"{offset}-{offset + size - 1}"}
        try:
            body = Body(size=size, pieces=pieces)
            with self._calls.once(
                "PATCH", session, self._calls.push, "take a chunk", headers=headers, body=body, ok=(202,)
            ) as answer:
                return self._calls.location(answer)
        except RemoteError:
            progress(-sent)
            raise

    def _resume(self, one: Outgoing, location: str, cancel: threading.Event | None) -> tuple[str, int]:
        """Where to go on: the same session from what the registry has of it, or a new one from the start."""
        if (found := self._ask(one, location, cancel)) is not None:
            return found
        self._give_up(location)
        return self._fresh(one, cancel).location, 0

    def _ask(self, one: Outgoing, location: str, cancel: threading.Event | None) -> tuple[str, int] | None:
        """Where a session goes on, and how far it came; None for one that is gone, or is no part of this blob."""
        what = "say how far an upload came"
        try:
            with self._calls.call("GET", location, self._calls.push, what, ok=(204,), cancel=cancel) as answer:
                match = _SESSION_RANGE.fullmatch(answer.headers.get("range", ""))
                there = self._calls.location(answer) if "location" in answer.headers else location
        except RemoteError as error:
            if error.reason in TRANSIENT or error.reason in ("unauthorized", "forbidden"):
                raise
            return None
        # An empty session says 0-0 as well as one of a single byte.
        if match is None or not 1 < (has := int(match[1]) + 1) <= one.bytes:
            return None
        return there, has

    def _finish(self, one: Outgoing, session: str, cancel: threading.Event | None) -> None:
        joint = "&" if urlsplit(session).query else "?"
        url = f"{session}{joint}{urlencode({'digest': str(one.item.digest)})}"
        try:
            with self._calls.call("PUT", url, self._calls.push, "finish an upload", ok=(201,), cancel=cancel):
                pass
        except RemoteError:
            # The answer may have been lost after the work was done.
            if not self._is_there(one):
                raise
        else:
            if not self._is_there(one):  # it went into another repository, or nowhere
                message = f"{self._calls.name} took {one.item} and does not have it"
                raise remote_error("bad_answer", message, place=self._calls.name)

    def _is_there(self, one: Outgoing) -> bool:
        url = f"{self._calls.base}/blobs/{one.item.digest}"
        try:
            with self._calls.call("HEAD", url, self._calls.pull, "look up an object") as answer:
                self._calls.check_name(answer.url)
                return answer.length == one.bytes
        except RemoteError as error:
            if error.reason == "not_found":
                return False
            raise

    def _give_up(self, session: str) -> None:
        try:
            with self._calls.once("DELETE", session, self._calls.push, "forget an upload", ok=(204,)):
                pass
        except RemoteError:
            return  # the registry forgets it by itself
