"""A client outside the process tree: what a user of the service would see, and when.

Startup is judged by this client alone: port open, HTTP ready, first token. Times are seconds on one
monotonic clock since ``origin``; nothing inside the engine is trusted for them.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coldsnap.core.messages import Answer, Prompt
from coldsnap.errors import DeadlineExceeded, EngineError

__all__ = ["OutsideClient", "StartupTimeline"]

_POLL_S = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class StartupTimeline:
    """Seconds after ``origin`` at which an outside client first saw each thing."""

    port_open_s: float
    http_ready_s: float
    first_token_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsideClient:
    """Talks to one served engine over its OpenAI-compatible HTTP API."""

    host: str
    port: int
    health_path: str = "/health"

    def observe_startup(
        self,
        *,
        origin: float,
        prompt: str,
        deadline_s: float,
        alive: Callable[[], bool] = lambda: True,
    ) -> StartupTimeline:
        """Poll until the first token of ``prompt`` streams in.

        ``origin`` is a ``time.monotonic()`` value. Raises DeadlineExceeded, or EngineError as soon as
        ``alive()`` says that the engine is gone.
        """
        ends = time.monotonic() + deadline_s
        self._poll("port open", self._port_open, ends, alive)
        port_open = time.monotonic() - origin
        self._poll("HTTP ready", self._healthy, ends, alive)
        ready = time.monotonic() - origin
        self.first_token(prompt, timeout_s=max(0.1, ends - time.monotonic()))
        return StartupTimeline(port_open_s=port_open, http_ready_s=ready, first_token_s=time.monotonic() - origin)

    def first_token(self, prompt: str, *, timeout_s: float) -> None:
        """Ask for a streamed completion and return when its first token has arrived."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": True}
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise EngineError(
                    f"the engine answered {response.status} to a streamed completion",
                    cure="look at the unit's log",
                    facts={"body": response.read(2000).decode(errors="replace")},
                )
            for line in response:
                if line.startswith(b"data: {"):
                    return
            raise EngineError("the engine's stream ended before a first token", cure="look at the unit's log")
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"the engine at {self.host}:{self.port} did not stream a token: {error}") from error
        finally:
            connection.close()

    def complete(self, prompts: Sequence[Prompt], *, timeout_s: float) -> tuple[Answer, ...]:
        """Greedy completions with token ids, one request at a time."""
        answers = []
        for prompt in prompts:
            reply = self.post(
                "/v1/completions",
                {
                    "prompt": prompt.text,
                    "max_tokens": prompt.max_tokens,
                    "temperature": 0,
                    "return_token_ids": True,
                },
                timeout_s=timeout_s,
            )
            try:
                choice = reply["choices"][0]  # type: ignore[index]
                answers.append(Answer(token_ids=tuple(choice["token_ids"]), text=choice["text"]))
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise EngineError("the engine's completion has no token ids", facts={"reply": reply}) from error
        return tuple(answers)

    def chat(self, question: str, *, max_tokens: int, timeout_s: float) -> str:
        """The text of one greedy chat answer."""
        reply = self.post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens, "temperature": 0},
            timeout_s=timeout_s,
        )
        try:
            return str(reply["choices"][0]["message"]["content"])  # type: ignore[index]
        except (KeyError, IndexError, TypeError) as error:
            raise EngineError("the engine's chat answer has no content", facts={"reply": reply}) from error

    def post(self, path: str, body: dict[str, object], *, timeout_s: float) -> dict[str, object]:
        """POST JSON, return JSON. Raises EngineError with the status and the first part of the body."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            text = response.read()
            if response.status != http.client.OK:
                raise EngineError(
                    f"the engine answered {response.status} to {path}",
                    cure="look at the unit's log",
                    facts={"body": text[:2000].decode(errors="replace")},
                )
            reply = json.loads(text)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise EngineError(f"the engine at {self.host}:{self.port} did not answer {path}: {error}") from error
        finally:
            connection.close()
        if not isinstance(reply, dict):
            raise EngineError(f"the engine's answer to {path} is not a JSON object")
        return reply

    def _port_open(self) -> bool:
        try:
            socket.create_connection((self.host, self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=10)
        try:
            connection.request("GET", self.health_path)
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _poll(self, what: str, ready: Callable[[], bool], ends: float, alive: Callable[[], bool]) -> None:
        while not ready():
            if not alive():
                raise EngineError(f"the engine ended before an outside client saw: {what}")
            if time.monotonic() > ends:
                raise DeadlineExceeded(
                    f"an outside client waited in vain at {self.host}:{self.port} for: {what}",
                    cure="raise the deadline, or look at the unit's log",
                    facts={"phase": what},
                )
            time.sleep(_POLL_S)
