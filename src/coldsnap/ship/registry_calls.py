"""Requests to one repository of an OCI registry, with the token each needs."""

from __future__ import annotations

import posixpath
import threading
from collections.abc import Collection
from urllib.parse import unquote, urlsplit

from coldsnap.errors import RemoteError
from coldsnap.ship.addresses import is_web_address, joined
from coldsnap.ship.faults import other_name, remote_error
from coldsnap.ship.http import Answer, Body, Http
from coldsnap.ship.limits import retried
from coldsnap.ship.logins import Login
from coldsnap.ship.names import RegistryName
from coldsnap.ship.secret import Secret
from coldsnap.ship.tokens import Authorizer

__all__ = ["RegistryCalls"]


class RegistryCalls:
    """``base`` is the repository's address in the API; ``pull`` and ``push`` are the scopes of tokens for it."""

    def __init__(self, repository: RegistryName, http: Http, login: Login | None) -> None:
        self.name = str(repository)
        self.path = repository.path
        self.base = f"{repository.url}/v2/{repository.path}"
        self.pull = f"repository:{repository.path}:pull"
        self.push = f"repository:{repository.path}:pull,push"
        self.http = http
        self.limits = http.limits
        self.tokens = Authorizer(http, login, registry_url=repository.url)

    def call(
        self,
        method: str,
        url: str,
        scope: str,
        what: str,
        *,
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
        ok: Collection[int] = (200,),
        cancel: threading.Event | None = None,
    ) -> Answer:
        """A request that may be repeated, with the token it needs."""

        def work() -> Answer:
            return self.once(method, url, scope, what, headers=headers, body=body, ok=ok)

        return retried(self.limits, work, cancel=cancel)

    def once(
        self,
        method: str,
        url: str,
        scope: str,
        what: str,
        *,
        headers: dict[str, str] | None = None,
        body: bytes | Body | None = None,
        ok: Collection[int] = (200,),
    ) -> Answer:
        """One attempt; a refusal for want of a token is answered within."""
        refused = False
        follow = method in ("GET", "HEAD")
        while True:
            sent: dict[str, str | Secret] = {**(headers or {}), **self.tokens.header(scope)}
            try:
                return self.http.send(method, url, what=what, headers=sent, body=body, ok=ok, follow=follow)
            except RemoteError as error:
                if refused or error.reason != "unauthorized" or not self.tokens.answer(error, scope, sent):
                    raise
                refused = True

    def location(self, answer: Answer) -> str:
        """The next address of an upload: relative or absolute, but with us it stays at this registry and repository."""
        if "location" not in answer.headers:
            raise remote_error("bad_answer", f"{self.name} names no address for an upload", place=self.name)
        found = joined(answer.url, answer.headers["location"])
        self.check_upload(found)
        return found

    def check_upload(self, url: str) -> None:
        """Raise RemoteError unless an upload may be sent to ``url``: this registry, and no other repository of it.

        Where a registry takes uploads is its own affair, except that in the API a path names a repository.
        """
        if not is_web_address(url):
            raise remote_error("bad_answer", f"{self.name} names no address for an upload", place=self.name)
        here, there = urlsplit(self.base), urlsplit(url)
        if here.scheme == "https" and there.scheme != "https":
            raise remote_error("unsafe_redirect", f"{self.name} wants an upload sent without https", place=self.name)
        if here.hostname != there.hostname:
            raise remote_error("unsafe_redirect", f"{self.name} wants an upload sent to {there.hostname}", place=self.name)  # fmt: skip # noqa: E501
        self.check_name(url)

    def check_name(self, url: str) -> None:
        """Raise RemoteError for an address that names another repository of a registry than ours."""
        path = posixpath.normpath("/" + unquote(urlsplit(url).path).lstrip("/"))
        if path.startswith("/v2/") and not path.startswith(f"/v2/{self.path}/"):
            raise other_name(self.name, url)
