"""What can go wrong with a store elsewhere, by name, and which of it is worth another try."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from coldsnap.errors import RemoteError
from coldsnap.ship.secret import public_url

__all__ = ["REASONS", "TRANSIENT", "other_name", "remote_error", "status_error"]

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "unreachable": "check the address and the network; is the server up?",
        "broken": "the connection broke too often; try again, finished parts are kept",
        "truncated": "the server ends its answers early; report it to whoever keeps it",
        "too_slow": "the server sends too little; try again, or use another source",
        "rate_limited": "wait as long as the server says, then run it again",
        "server_error": "the server has a fault of its own; try again later, or tell whoever keeps it",
        "redirect_loop": "the server sends its clients in a circle; tell whoever keeps it",
        "unsafe_redirect": "the server sends its clients to an unprotected address; tell whoever keeps it",
        "wrong_length": "the object there is not the one that was published; publish it again",
        "wrong_bytes": "the object there is not the one that was published; publish it again",
        "bad_answer": "is it really a server of this kind? check the address",
        "not_found": "check the name; a private one looks the same without a token (HF_TOKEN) or login",
        "unauthorized": "set HF_TOKEN if this is a hub; run `docker login` or `podman login` if it is a registry",
        "forbidden": "these credentials may not do this; ask whoever owns the repository",
        "gated": "accept the conditions of the repository on its page, with the account of HF_TOKEN",
        "too_large": "the server does not take files of this size; the hub takes them with hf_xet installed",
        "conflict": "somebody else changed the repository at the same time; run it again",
        "unsupported": "the server is set up to delete nothing: ask whoever keeps it, or use --scope local",
        "refused": "read what the server says",
        "offline": "run it without offline mode",
    }
)
"""Each reason with its usual cure."""

TRANSIENT = frozenset({"unreachable", "broken", "truncated", "too_slow", "rate_limited", "server_error"})
"""Reasons that may be gone a moment later."""


def remote_error(reason: str, message: str, *, place: str, cure: str | None = None, **facts: object) -> RemoteError:
    """A RemoteError with the usual cure of its reason. Nothing secret may be in ``message``, ``place`` or ``facts``."""
    return RemoteError(reason, message, place=place, cure=cure or REASONS[reason], facts=facts)


def other_name(place: str, url: str) -> RemoteError:
    """The error for a server that sends us on to another repository than was named."""
    message = f"{place} sends us on to another name, {public_url(url)[:200]}"
    return remote_error("unsafe_redirect", message, place=place, cure="name the repository as it is called now")


def status_error(status: int, what: str, *, place: str, said: str = "", gated: bool = False) -> RemoteError:
    """The error for an HTTP status that says no. ``said`` is the server's own text, already without secrets."""
    reason = {401: "unauthorized", 403: "forbidden", 404: "not_found", 409: "conflict", 412: "conflict", 413: "too_large", 429: "rate_limited"}.get(status)  # fmt: skip # noqa: E501
    if reason is None:
        reason = "server_error" if status >= 500 else "refused"
    if gated:
        reason = "gated"
    text = f"{place} answered {status} when asked to {what}"
    return remote_error(reason, f"{text}: {said}" if said else text, place=place, status=status)
