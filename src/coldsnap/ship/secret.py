"""Credentials: values that cannot be printed by accident, and texts from outside with every credential struck out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import urlsplit, urlunsplit

__all__ = ["Secret", "is_sendable", "public_url", "scrub"]

_QUERY = re.compile(r"\?[^\s\"'<>]*")
_USER = re.compile(r"(?<=://)[^/@\s]+@")
_WORD = re.compile(r"[!-~]+")
_SAID_CHARACTERS = 300


class Secret:
    """A token or password. Its text form is ``***``; ``reveal`` gives the value to whoever sends it."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The value itself, to go into a request header and nowhere else."""
        return self._value

    def __repr__(self) -> str:
        return "***"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return "***"

    def __reduce__(self) -> str:
        raise TypeError("a secret is not written anywhere")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)


def is_sendable(secret: Secret) -> bool:
    """Whether a header can carry it as one word. What http.client says of one that it cannot send shows it whole."""
    return _WORD.fullmatch(secret.reveal()) is not None


def scrub(text: str, secrets: Iterable[Secret] = ()) -> str:
    """``text`` of somebody else as one short line, without these secrets, URL queries (signatures) and user parts."""
    for secret in secrets:
        if value := secret.reveal():
            text = text.replace(value, "***")
    text = _USER.sub("", _QUERY.sub("", text))
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _SAID_CHARACTERS else f"{line[:_SAID_CHARACTERS]}..."


def public_url(url: str) -> str:
    """A URL without user, query and fragment: those may hold credentials or signatures."""
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets that fit no address
        return "an address that is none"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
