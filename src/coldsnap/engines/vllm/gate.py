"""The door of vLLM's application: counts requests, lets none in while it is closing, and cuts off who is inside."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

__all__ = ["Gate"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_GOING = "the engine is going to sleep; ask again when it is back"
_BODY = json.dumps(
    {"error": {"message": _GOING, "type": "server_error", "param": None, "code": "unavailable"}}
).encode()


class Gate:
    """The ASGI application around another one. Everything but `num_in_flight` belongs to the event loop."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._inside: set[asyncio.Task[Any]] = set()
        self.draining = False

    @property
    def num_in_flight(self) -> int:
        """Requests let in and not yet answered to the end."""
        return len(self._inside)

    def cut_off(self) -> None:
        """End every request now, with a word to its client."""
        for task in list(self._inside):
            task.cancel()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        task = asyncio.current_task()
        if task is None or scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        reply = _Reply(send)
        if self.draining:
            return await reply.end()
        self._inside.add(task)
        try:
            await self._app(scope, receive, reply)
        except asyncio.CancelledError:
            if not task.uncancel():
                await reply.end()
            else:
                raise
        finally:
            self._inside.discard(task)


class _Reply:
    """A `send` that remembers how far an answer is, so that it can be ended early in the way that its client reads."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._begun = self._done = self._is_stream = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._begun = True
            headers = {bytes(name).lower(): bytes(value) for name, value in message.get("headers", ())}
            self._is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        elif message["type"] == "http.response.body":
            self._done = not message.get("more_body", False)
        elif message["type"].startswith("websocket."):
            self._done = True  # its client sees the connection end
        await self._send(message)

    async def end(self) -> None:
        """Say why there is no more. An answer of a length that was told is left incomplete, and so seen to be cut."""
        if self._done:
            return
        if not self._begun:
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(_BODY)).encode())]
            await self._send({"type": "http.response.start", "status": 503, "headers": headers})
            await self._send({"type": "http.response.body", "body": _BODY})
        elif self._is_stream:
            await self._send({"type": "http.response.body", "body": b"data: " + _BODY + b"\n\ndata: [DONE]\n\n"})
