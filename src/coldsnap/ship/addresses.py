"""Web addresses that others gave us: a hub's variable, a redirect, where an upload goes on. Imports next to nothing."""

from __future__ import annotations

from urllib.parse import urljoin, urlsplit

__all__ = ["is_web_address", "joined"]


def is_web_address(url: str) -> bool:
    """Whether a request can be sent there: http or https, a host, a port that exists, plain ASCII."""
    try:
        parts = urlsplit(url)
        found = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port beyond 65535, a bracket without the other
        return False
    return bool(found) and all("!" <= letter <= "~" for letter in url)


def joined(url: str, location: str) -> str:
    """Where an answer from ``url`` points with ``location``, relative or absolute; empty for what is no web address."""
    try:
        found = urljoin(url, location)
    except ValueError:
        return ""
    return found if is_web_address(found) else ""
