"""The HTTP client that huggingface_hub is given: bounded in time, in redirects and in how long it may be sent away.

It follows a redirect of the hub's own questions only to the same path: a hub sends on what is asked of a repository
that was renamed, so that a commit would be made in one that nobody named. Bytes may be taken anywhere, by digest.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import huggingface_hub
from huggingface_hub.utils._http import default_client_factory

from coldsnap.ship.base import PIECE_BYTES
from coldsnap.ship.faults import other_name, remote_error
from coldsnap.ship.limits import Limits, asked_to_wait_s
from coldsnap.ship.secret import public_url

__all__ = ["bounded_session"]

_LOCK = threading.Lock()
_users: list[None] = []


class _Bounded(httpx2.SyncByteStream):  # type: ignore[misc] # the extra is optional, so its types are not seen
    """An answer's body that ends when it takes too long as a whole: the client reads documents only."""

    def __init__(self, stream: Any, ends: float, place: str) -> None:
        self._stream = stream
        self._ends = ends
        self._place = place

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._stream:
            if time.monotonic() > self._ends:
                raise remote_error("too_slow", f"{self._place} drips its answer", place=self._place)
            yield piece

    def close(self) -> None:
        self._stream.close()


class _Transport(httpx2.HTTPTransport):  # type: ignore[misc] # as above
    def __init__(self, limits: Limits, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._limits = limits

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        if hasattr(request.stream, "CHUNK_SIZE"):  # of a file; what the client reads at a time is small for a fast link
            request.stream.CHUNK_SIZE = PIECE_BYTES
        response = super().handle_request(request)
        place = public_url(str(request.url))
        if response.is_redirect and _is_question(request.url.path):
            there = request.url.join(response.headers.get("location", ""))
            if there.path != request.url.path:
                response.close()
                raise other_name(place, str(there))
        asked = asked_to_wait_s(response.headers.get("retry-after", "")) or 0.0
        if response.status_code in (429, 503) and asked > self._limits.retry_after_s:
            response.close()
            message = f"{place} wants us to come back in {asked:.0f} s"
            raise remote_error("rate_limited", message, place=place, retry_after_s=asked)
        response.stream = _Bounded(response.stream, time.monotonic() + self._limits.answer_s, place)
        return response


@contextlib.contextmanager
def bounded_session(limits: Limits, proxy: str | None = None) -> Iterator[None]:
    """While any such block runs, the client's one session of this process has the bounds of the first of them."""
    with _LOCK:
        _users.append(None)
        if len(_users) == 1:
            huggingface_hub.set_client_factory(lambda: _make(limits, proxy))
    try:
        yield
    finally:
        with _LOCK:
            _users.pop()
            if not _users:
                huggingface_hub.set_client_factory(default_client_factory)


def _make(limits: Limits, proxy: str | None) -> httpx2.Client:
    timeout = httpx2.Timeout(limits.idle_s, connect=limits.connect_s)
    transport = _Transport(limits, proxy=proxy)
    return httpx2.Client(transport=transport, follow_redirects=True, max_redirects=limits.redirects, timeout=timeout)


def _is_question(path: str) -> bool:
    return "/api/" in path or ".git/" in path
