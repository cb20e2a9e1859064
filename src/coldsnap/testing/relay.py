"""A reverse proxy on loopback before a server that cannot count or lie itself.

It passes on a request's body as it comes, so that a client that dies cuts it off at the server too; or, ``whole``, only
once it has all of it, as nginx does unless told otherwise, so that the server never sees a part of one.
"""

from __future__ import annotations

import http.client

from coldsnap.testing.web import Reply, Request, Web

__all__ = ["Relay"]

_DROPPED = frozenset({"connection", "transfer-encoding", "content-length"})
_PATIENCE_S = 60.0


class Relay(Web):
    """``behind`` is the address and port of the server."""

    def __init__(self, behind: str, *, whole: bool = False) -> None:
        super().__init__()
        self.behind = behind
        self.whole = whole

    def handle(self, request: Request) -> Reply:
        """What the server answers."""
        connection = http.client.HTTPConnection(self.behind, timeout=_PATIENCE_S)
        try:
            body = iter([request.body()] if self.whole else request.read())
            connection.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                if name != "connection":
                    connection.putheader(name, value)
            connection.endheaders()
            for piece in body:
                connection.send(piece)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in _DROPPED}
        if request.method == "HEAD":
            headers["X-Size"] = answer.headers.get("Content-Length", "0")
        return Reply(status=answer.status, headers=headers, data=data)
