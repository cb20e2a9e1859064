"""Authorization at a registry: nobody, Basic, or a bearer token that another server sells for a login.

A registry says in its refusal where tokens are to be had and for which scope. A token is kept for the scope and
bought again when it is refused. The login goes to the realm that the registry names, over https unless the registry
itself is reached without.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from urllib.parse import urlencode, urlsplit

from coldsnap.errors import RemoteError
from coldsnap.ship.addresses import is_web_address
from coldsnap.ship.faults import remote_error
from coldsnap.ship.http import Http
from coldsnap.ship.logins import Login
from coldsnap.ship.secret import Secret, is_sendable, public_url

__all__ = ["Authorizer"]

_PARAMETER = re.compile(r'([a-zA-Z_]+)="?([^",]*)"?')
_DOCUMENT_BYTES = 1 << 20


class Authorizer:
    """Knows which Authorization header goes with which scope. Any number of threads may ask at a time."""

    def __init__(self, http: Http, login: Login | None, *, registry_url: str) -> None:
        self._http = http
        self._login = login
        self._secure = urlsplit(registry_url).scheme == "https"
        self._headers: dict[str, Secret] = {}
        self._lock = threading.Lock()

    def header(self, scope: str) -> dict[str, Secret]:
        """The headers to try first."""
        with self._lock:
            found = self._headers.get(scope)
        return {"Authorization": found} if found is not None else {}

    def answer(self, refusal: RemoteError, scope: str, tried: Mapping[str, str | Secret]) -> bool:
        """Whether there is something else to try than the headers ``tried`` after this refusal; ``header`` gives it.

        Raises RemoteError when the token server refuses the login.
        """
        challenge = str(refusal.facts.pop("challenge", ""))
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic" and self._login is not None:
            header = self._login.basic()
        elif scheme.lower() == "bearer":
            header = Secret(f"Bearer {self._buy(dict(_PARAMETER.findall(rest)), scope, refusal.place).reveal()}")
        else:
            return False
        with self._lock:
            self._headers[scope] = header
        return tried.get("Authorization") != header

    def _buy(self, challenge: dict[str, str], scope: str, place: str) -> Secret:
        realm = challenge.get("realm", "")
        if not is_web_address(realm):
            raise remote_error("bad_answer", f"{place} names no address to get a token from", place=place)
        if self._login is not None and self._secure and urlsplit(realm).scheme != "https":
            message = f"{place} wants the login sent to {public_url(realm)}, which is not protected"
            raise remote_error("unsafe_redirect", message, place=place)
        query = [("service", challenge.get("service", "")), ("client_id", "coldsnap")]
        query += [("scope", one) for one in scope.split()]
        login = self._login
        if login is not None and login.identity_token is not None:
            form = [*query, ("grant_type", "refresh_token"), ("refresh_token", login.identity_token.reveal())]
            answer = self._http.send(
                "POST",
                realm,
                what="give a token",
                headers={"Content-Type": "application/x-www-form-urlencoded"},
                body=urlencode(form).encode(),
                follow=False,
            )
        else:
            joint = "&" if "?" in realm else "?"
            headers = {"Authorization": login.basic()} if login is not None else {}
            answer = self._http.send("GET", f"{realm}{joint}{urlencode(query)}", what="give a token", headers=headers)
        with answer:
            found = answer.json(_DOCUMENT_BYTES)
        token = found.get("token") or found.get("access_token") if isinstance(found, dict) else None
        if not isinstance(token, str) or not is_sendable(Secret(token)):
            raise remote_error("bad_answer", f"{public_url(realm)} gave no token", place=public_url(realm))
        return Secret(token)
