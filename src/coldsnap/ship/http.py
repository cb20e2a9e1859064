"""HTTP as the stores need it, on the standard library: one request, one answer, bounded in every direction.

One attempt a call; ``limits.retried`` decides about another. Redirects are followed a bounded number of times, never
from https to http, and credentials stay with the origin they were meant for. Errors name the place without query or
user, and show of the server's own text one line without the credentials that were sent.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from coldsnap import __version__
from coldsnap.errors import RemoteError
from coldsnap.ship.addresses import joined
from coldsnap.ship.base import PIECE_BYTES
from coldsnap.ship.faults import remote_error, status_error
from coldsnap.ship.limits import Limits, asked_to_wait_s
from coldsnap.ship.secret import Secret, public_url, scrub
from coldsnap.ship.wire import Connection, Pool, Proxy, TooSlow, origin_of

__all__ = ["Answer", "Body", "Http"]

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_BROKEN = (ConnectionError, http.client.HTTPException, ssl.SSLError, EOFError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Body:
    """What to send: ``size`` bytes that ``pieces`` gives afresh at each call."""

    size: int
    pieces: Callable[[], Iterator[bytes | memoryview]]


class Answer:
    """The head of an answer, and its body to be read once. Closing gives the connection back, or ends it."""

    def __init__(self, response: http.client.HTTPResponse, url: str, connection: Connection, pool: Pool) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.url = url
        self.place = public_url(url)
        self._response = response
        self._connection = connection
        self._pool = pool

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def length(self) -> int | None:
        """The announced size of the body in bytes."""
        text = self.headers.get("content-length", "")
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None

    def pieces(self) -> Iterator[memoryview]:
        """The body; a piece is good until the next one is asked for. Raises RemoteError when it ends early or drips."""
        buffer = bytearray(PIECE_BYTES)
        view, done = memoryview(buffer), 0
        while True:
            with _translated(self.place, "read its answer"):
                count = self._response.readinto(buffer)
            if count == 0:
                break
            done += count
            yield view[:count]
        if self.length is not None and done < self.length:
            message = f"{self.place} ended its answer after {done} of {self.length} bytes"
            raise remote_error("truncated", message, place=self.place)

    def document(self, limit_bytes: int) -> bytes:
        """The whole body, which may be no longer than ``limit_bytes``."""
        data = bytearray()
        for piece in self.pieces():
            data += piece
            if len(data) > limit_bytes:
                message = f"{self.place} answers with more than {limit_bytes} bytes where a document is due"
                raise remote_error("wrong_length", message, place=self.place)
        return bytes(data)

    def json(self, limit_bytes: int) -> Any:
        """The body as JSON."""
        try:
            return json.loads(self.document(limit_bytes))
        except (ValueError, RecursionError) as error:
            raise remote_error("bad_answer", f"{self.place} answered no JSON", place=self.place) from error

    def close(self) -> None:
        """Done with it. A body that was not read to its end costs the connection."""
        whole = self._response.isclosed() or self._response.length == 0
        will_close = self._response.will_close
        self._response.close()
        if whole and not will_close:
            self._pool.give(self._connection)
        else:
            self._connection.close()


class Http:
    """Sends requests. Any number of threads may use one at a time."""

    def __init__(
        self, limits: Limits | None = None, *, context: ssl.SSLContext | None = None, proxy: Proxy | None = None
    ) -> None:
        self.limits = limits or Limits()
        self.proxy_for: Proxy = proxy or (lambda url: None)
        self._pool = Pool(self.limits, context=context, proxy=proxy)

    def close(self) -> None:
        """Close idle connections. It can be used again afterwards."""
        self._pool.close()

    def __enter__(self) -> Http:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(
        self,
        method: str,
        url: str,
        *,
        what: str,
        headers: Mapping[str, str | Secret] | None = None,
        body: bytes | Body | None = None,
        ok: Collection[int] = (200,),
        follow: bool = True,
    ) -> Answer:
        """One request, with its redirects when ``follow``. The answer's status is one of ``ok``.

        ``what`` completes "answered 500 when asked to". Raises RemoteError.
        """
        sent = dict(headers or {})
        seen: list[str] = []
        while True:
            answer = self._once(method, url, sent, body, what)
            if answer.status in ok or not follow or answer.status not in _REDIRECTS:
                if answer.status in ok:
                    return answer
                with answer:
                    raise self._refused(answer, what, sent)
            with answer:
                target = joined(url, answer.headers.get("location", ""))
            seen.append(url)
            self._check_redirect(url, target, seen)
            if origin_of(target) != origin_of(url):
                sent = {name: value for name, value in sent.items() if not isinstance(value, Secret)}
            url = target
            if answer.status == 303:
                method, body = "GET", None

    def _check_redirect(self, url: str, target: str, seen: list[str]) -> None:
        place = public_url(seen[0])
        if not target:
            raise remote_error("bad_answer", f"{place} redirects to no web address", place=place)
        if len(seen) > self.limits.redirects or target in seen:
            message = f"{place} redirected {len(seen)} times" + (" and in a circle" if target in seen else "")
            raise remote_error("redirect_loop", message, place=place)
        if urlsplit(url).scheme == "https" and urlsplit(target).scheme != "https":
            message = f"{place} redirects from https to {public_url(target)}"
            raise remote_error("unsafe_redirect", message, place=place)

    def _once(
        self, method: str, url: str, headers: Mapping[str, str | Secret], body: bytes | Body | None, what: str
    ) -> Answer:
        place = public_url(url)
        connection = self._pool.take(url, fresh=isinstance(body, Body))  # a long body is never sent twice by itself
        try:
            return self._exchange(connection, method, url, headers, body, what)
        except RemoteError as error:
            # An idle connection may have been closed by the other side long ago: that is no failure of the server.
            if not connection.used or error.reason != "broken":
                raise
        return self._exchange(self._pool.take(url, fresh=True), method, url, headers, body, f"{what} ({place})")

    def _exchange(
        self,
        connection: Connection,
        method: str,
        url: str,
        headers: Mapping[str, str | Secret],
        body: bytes | Body | None,
        what: str,
    ) -> Answer:
        place = public_url(url)
        try:
            try:
                connection.open()
            except OSError as error:
                message = f"{place} cannot be reached: {error.strerror or error}"
                raise remote_error("unreachable", message, place=place) from error
            with _translated(place, what):
                # It may have answered before it closed its ears; if not, reading says so.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self._put(connection, method, url, headers, body)
                response = connection.http.getresponse()
        except BaseException:
            connection.close()
            raise
        return Answer(response, url, connection, self._pool)

    def _put(
        self,
        connection: Connection,
        method: str,
        url: str,
        headers: Mapping[str, str | Secret],
        body: bytes | Body | None,
    ) -> None:
        parts = urlsplit(url)
        target = url if connection.absolute else (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        wire = connection.http
        wire.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        wire.putheader("Host", parts.netloc.rpartition("@")[2])
        wire.putheader("User-Agent", f"coldsnap/{__version__}")
        for name, value in headers.items():
            wire.putheader(name, value.reveal() if isinstance(value, Secret) else value)
        size = body.size if isinstance(body, Body) else len(body or b"")
        if body is not None or method in ("POST", "PUT", "PATCH"):
            wire.putheader("Content-Length", str(size))
        wire.endheaders()
        if isinstance(body, Body):
            for piece in body.pieces():
                wire.send(piece)
        elif body:
            wire.send(body)

    def _refused(self, answer: Answer, what: str, headers: Mapping[str, str | Secret]) -> RemoteError:
        said = ""
        with contextlib.suppress(RemoteError):
            said = _words(answer.document(64 << 10), answer.headers)
        secrets = [value for value in headers.values() if isinstance(value, Secret)]
        bare = [Secret(one.reveal().partition(" ")[2]) for one in secrets if " " in one.reveal()]
        gated = "gatedrepo" in answer.headers.get("x-error-code", "").lower()
        error = status_error(answer.status, what, place=answer.place, said=scrub(said, [*secrets, *bare]), gated=gated)
        if (seconds := asked_to_wait_s(answer.headers.get("retry-after", ""))) is not None:
            error.facts["retry_after_s"] = seconds
        if "www-authenticate" in answer.headers:
            error.facts["challenge"] = answer.headers["www-authenticate"]
        return error


def _words(data: bytes, headers: Mapping[str, str]) -> str:
    """What a server says about its refusal: the hub's header, an OCI registry's errors, or plain text."""
    if text := headers.get("x-error-message"):
        return text
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return data.decode("utf-8", "replace") if not data.lstrip().startswith(b"<") else ""
    if isinstance(found, dict):
        errors = found.get("errors")
        if isinstance(errors, list) and errors and isinstance(errors[0], dict):
            return f"{errors[0].get('code', '')} {errors[0].get('message', '')}".strip()
        return str(found.get("error") or found.get("message") or "")
    return ""


@contextlib.contextmanager
def _translated(place: str, what: str) -> Iterator[None]:
    """What the network and http.client raise, in our words."""
    try:
        yield
    except TooSlow as error:
        raise remote_error("too_slow", f"{place} is too slow: {error}", place=place) from error
    except TimeoutError as error:
        raise remote_error("too_slow", f"{place} took nothing more when asked to {what}", place=place) from error
    except http.client.IncompleteRead as error:
        raise remote_error("truncated", f"{place} ended its answer early", place=place) from error
    except _BROKEN as error:
        message = f"the connection to {place} broke when it was asked to {what}: {type(error).__name__}"
        raise remote_error("broken", message, place=place) from error
    except OSError as error:
        message = f"{place} cannot be reached: {error.strerror or type(error).__name__}"
        raise remote_error("unreachable", message, place=place) from error
