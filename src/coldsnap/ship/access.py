"""Which hub, and who we are there."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from coldsnap.errors import UsageError
from coldsnap.ship.addresses import is_web_address
from coldsnap.ship.secret import Secret, is_sendable, public_url

__all__ = ["DEFAULT_ENDPOINT", "HubAccess"]

DEFAULT_ENDPOINT = "https://huggingface.co"


@dataclass(frozen=True, kw_only=True, slots=True)
class HubAccess:
    """An address without a slash at its end, and a token."""

    endpoint: str = DEFAULT_ENDPOINT
    token: Secret | None = None

    def check(self) -> None:
        """Raise UsageError unless the endpoint is a plain web address and the token one that a header can carry."""
        if not _is_plain(self.endpoint):
            cure = "unset it, or write https://HOST"
            raise UsageError(f"HF_ENDPOINT is no address of a hub: {public_url(self.endpoint)}", cure=cure)
        if self.token is not None and not is_sendable(self.token):
            cure = "set HF_TOKEN again, or log in again"
            raise UsageError("the token of the hub holds a space, a line break or a letter outside ASCII", cure=cure)

    def headers(self) -> dict[str, Secret]:
        """The Authorization header, if there is a token."""
        return {"Authorization": Secret(f"Bearer {self.token.reveal()}")} if self.token is not None else {}


def _is_plain(endpoint: str) -> bool:
    if not is_web_address(endpoint):
        return False
    parts = urlsplit(endpoint)
    return not (parts.query or parts.fragment or "@" in parts.netloc)
