"""Credentials for registries, from the files that ``docker login`` and ``podman login`` write.

    {"auths": {"ghcr.io": {"auth": "<base64 of user:password>"}, "...": {"identitytoken": "..."}},
     "credHelpers": {"ecr.example.org": "ecr-login"}, "credsStore": "secretservice"}

A helper is the program ``docker-credential-<name>``: it reads the registry's name and prints user and secret.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldsnap.errors import HostError, MissingCapability
from coldsnap.ship.secret import Secret

__all__ = ["Login", "find_login"]

_HELPER = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HELPER_S = 30.0
_LIMIT_BYTES = 1 << 20
_DOCKER_HUB = "https://index.docker.io/v1/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Login:
    """Who we are at a registry: user and password, or an identity token that buys access tokens."""

    user: str
    password: Secret
    identity_token: Secret | None = None

    def basic(self) -> Secret:
        """The value of an Authorization header."""
        pair = f"{self.user}:{self.password.reveal()}".encode()
        return Secret(f"Basic {base64.b64encode(pair).decode('ascii')}")


def find_login(host: str, files: Sequence[Path]) -> Login | None:
    """The first login for ``host`` in ``files``; missing files are passed by.

    Raises HostError for an unreadable file, MissingCapability when it leaves this host to a program that is not here.
    """
    for path in files:
        if path.is_file() and (found := _in_file(host, path)) is not None:
            return found
    return None


def _in_file(host: str, path: Path) -> Login | None:
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(_LIMIT_BYTES))
        auths = dict(document.get("auths") or {})
        helpers = dict(document.get("credHelpers") or {})
        helper = helpers.get(host, document.get("credsStore"))  # an empty name switches the store off for this host
    except (OSError, ValueError, AttributeError, TypeError) as error:
        cure = "log in again with `docker login`, or remove it"
        raise HostError(f"the credential file {path} cannot be read: {type(error).__name__}", cure=cure) from None
    names = [host, f"https://{host}", f"http://{host}", f"https://{host}/v1/", f"https://{host}/v2/"]
    if host == "docker.io":
        names.append(_DOCKER_HUB)
    if isinstance(helper, str) and helper:
        if host in helpers and _program(helper) is None:
            raise MissingCapability(
                f"{path} says that docker-credential-{helper} has the login for {host}, and there is no such program",
                cure=f"install it, or take {host} out of credHelpers and log in with `docker login`",
            )
        for name in (_DOCKER_HUB,) if host == "docker.io" else (host, f"https://{host}"):
            if (found := _from_helper(helper, name)) is not None:
                return found
    for name in names:
        if isinstance(entry := auths.get(name), Mapping) and (found := _from_entry(entry, path)) is not None:
            return found
    return None


def _from_entry(entry: Mapping[str, Any], path: Path) -> Login | None:
    user, password = str(entry.get("username") or ""), str(entry.get("password") or "")
    if auth := entry.get("auth"):
        try:
            user, _, password = base64.b64decode(str(auth), validate=True).decode().rstrip("\0").partition(":")
        except (binascii.Error, UnicodeDecodeError):
            cure = "log in again with `docker login`"
            raise HostError(f"the credential file {path} holds a damaged entry", cure=cure) from None
    token = entry.get("identitytoken")
    if not user and not token:
        return None
    return Login(user=user, password=Secret(password), identity_token=Secret(str(token)) if token else None)


def _program(helper: str) -> str | None:
    return shutil.which(f"docker-credential-{helper}") if _HELPER.fullmatch(helper) else None


def _from_helper(helper: str, name: str) -> Login | None:
    program = _program(helper)
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "get"], input=name.encode(), capture_output=True, timeout=_HELPER_S, check=False
        )
        found = json.loads(done.stdout) if done.returncode == 0 else {}
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    user, secret = str(found.get("Username") or ""), str(found.get("Secret") or "")
    if not secret:
        return None
    if user == "<token>":
        return Login(user="", password=Secret(""), identity_token=Secret(secret))
    return Login(user=user, password=Secret(secret))
