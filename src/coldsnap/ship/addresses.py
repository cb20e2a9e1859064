"""Web addresses that others gave us: a hub's variable, a redirect, where an upload goes on. Imports next to nothing."""

from __future__ import annotations

import ipaddress
from urllib.parse import urljoin, urlsplit

__all__ = ["is_host", "is_web_address", "joined"]

_LABEL_CHARACTERS = 63


def is_web_address(url: str) -> bool:
    """Whether a request can be sent there: http or https, a host, a port that exists, plain ASCII."""
    try:
        parts = urlsplit(url)
        found = parts.scheme in ("http", "https") and is_host(parts.hostname or "") and parts.port != 0
    except ValueError:  # a port beyond 65535, a bracket without the other
        return False
    return bool(found) and all("!" <= letter <= "~" for letter in url)


def is_host(name: str) -> bool:
    """Whether a name can be looked up, or is an address; without port and brackets.

    Parts of a name that are empty or too long end a look-up with an error that is none of the network's.
    """
    if ":" not in name:
        return all(0 < len(part) <= _LABEL_CHARACTERS for part in name.removesuffix(".").split("."))
    try:
        return ipaddress.ip_address(name).version == 6
    except ValueError:
        return False


def joined(url: str, location: str) -> str:
    """Where an answer from ``url`` points with ``location``, relative or absolute; empty for what is no web address."""
    try:
        found = urljoin(url, location)
    except ValueError:
        return ""
    return found if is_web_address(found) else ""
