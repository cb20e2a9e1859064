"""The fake engine's listener: the few OpenAI routes a test needs, from the standard library."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pydantic import ValidationError

from coldsnap.core.messages import Answer, Prompt
from coldsnap.errors import ResourceBusy

__all__ = ["FakeListener"]

_POLL_S = 0.01


class FakeListener:
    """Listens from construction to `close`. One connection carries one request."""

    def __init__(self, host: str, port: int, *, model: str, answer: Callable[[Prompt], Answer]) -> None:
        self.model = model
        self.answer = answer
        self._idle = threading.Condition()
        self._connections: set[socket.socket] = set()
        try:
            self._server = _Server((host, port), self)
        except OSError as error:
            raise ResourceBusy(
                f"cannot listen on {host}:{port}: {error.strerror}",
                cure="choose another port, or stop what listens there",
                facts={"host": host, "port": port},
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": _POLL_S}, name="fake-http", daemon=True
        )
        self._thread.start()

    @property
    def num_in_flight(self) -> int:
        """Requests accepted and not yet answered."""
        with self._idle:
            return len(self._connections)

    def close(self, drain_s: float) -> int:
        """Stop listening, wait up to `drain_s` for requests in flight, cut the rest off; how many there were."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        with self._idle:
            in_flight = len(self._connections)
            if not self._idle.wait_for(lambda: not self._connections, timeout=drain_s):
                for connection in self._connections:
                    with contextlib.suppress(OSError):  # its handler may just have closed it
                        connection.shutdown(socket.SHUT_RDWR)
                self._idle.wait_for(lambda: not self._connections)
        return in_flight

    def began(self, connection: socket.socket) -> None:
        """A connection was accepted."""
        with self._idle:
            self._connections.add(connection)

    def ended(self, connection: socket.socket) -> None:
        """A connection was closed."""
        with self._idle:
            self._connections.discard(connection)
            self._idle.notify_all()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # `FakeListener.close` waits, with a bound

    def __init__(self, address: tuple[str, int], listener: FakeListener) -> None:
        self.listener = listener
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.listener.began(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.listener.ended(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        if self.path == "/health":
            self._reply(200, {"status": "ok"})
        elif self.path == "/v1/models":
            self._reply(200, {"object": "list", "data": [{"id": self.server.listener.model, "object": "model"}]})
        else:
            self._fault(404, f"no route {self.path}")

    def do_POST(self) -> None:
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            self._fault(404, f"no route {self.path}")
            return
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length", "0"))))
            chat = self.path.startswith("/v1/chat")
            text = body["messages"][-1]["content"] if chat else body["prompt"]
            prompt = Prompt(text=text, max_tokens=body.get("max_tokens", 16))
        except (ValueError, KeyError, IndexError, TypeError, ValidationError) as error:
            self._fault(400, f"bad request: {error}")
            return
        answer = self.server.listener.answer(prompt)
        ids = list(answer.token_ids)
        choice: dict[str, object] = {"index": 0, "finish_reason": "length", "token_ids": ids}
        if body.get("stream"):
            self._stream(answer, chat=chat)
            return
        choice |= {"message": {"role": "assistant", "content": answer.text}} if chat else {"text": answer.text}
        self._reply(200, {"object": "text_completion", "choices": [choice], "usage": {"completion_tokens": len(ids)}})

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the overridden name
        """Silent: the engine's log is for the engine."""

    def _stream(self, answer: Answer, *, chat: bool) -> None:
        """Server-sent events, one a token; the connection's end is the stream's."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for token in answer.token_ids:
            text = f" {token:02x}"
            part = {"delta": {"content": text}} if chat else {"text": text}
            chunk = {"object": "text_completion", "choices": [{"index": 0, "token_ids": [token], **part}]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def _reply(self, status: int, document: object) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _fault(self, status: int, message: str) -> None:
        self._reply(status, {"error": {"message": message, "type": "invalid_request_error", "code": status}})
