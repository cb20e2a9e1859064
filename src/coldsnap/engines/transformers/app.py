"""The OpenAI-compatible HTTP API: `/health`, `/v1/models`, `/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from coldsnap.engines.transformers.completion import Completion
from coldsnap.engines.transformers.generation import Sampling
from coldsnap.engines.transformers.replies import ChatReply, CompletionReply, Reply
from coldsnap.engines.transformers.requests import (
    BadRequestError,
    ChatRequest,
    CompletionRequest,
    parse_request,
)
from coldsnap.engines.transformers.runtime import Runtime
from coldsnap.engines.transformers.streams import CutOffError, Cuts, FailedError, pieces_of, until_disconnect

__all__ = ["Api"]

_log = logging.getLogger(__name__)
_BODY_LIMIT_BYTES = 16 << 20
_DEFAULT_COMPLETION_TOKENS = 16
_CHAT_TOKENS_WITHOUT_LIMIT = 1024
_UNAVAILABLE = "unavailable"


class Api:
    """The ASGI application around one runtime. It counts requests in flight, and refuses new ones while draining."""

    def __init__(self, runtime: Runtime, *, model: str) -> None:
        self._runtime = runtime
        self._model = model
        self._created = int(time.time())
        self._lock = threading.Lock()
        self._in_flight = 0
        self.draining = False
        self._cuts = Cuts()
        self._app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ],
            exception_handlers={
                BadRequestError: _bad_request,
                ClientDisconnect: _gone,
                CutOffError: _cut_off,
                HTTPException: _http_fault,
                Exception: _failure,
            },
        )

    @property
    def num_in_flight(self) -> int:
        """Requests accepted and not yet answered to the end."""
        return self._in_flight

    def cut_off(self) -> None:
        """End every generation with an error that says why. On the event loop."""
        self._cuts.cut_off()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            return
        if self.draining:
            unavailable = _fault("the engine is going to sleep", status=503, code=_UNAVAILABLE)
            await unavailable(scope, receive, send)
            return
        with self._lock:
            self._in_flight += 1
        try:
            await self._app(scope, receive, send)
        finally:
            with self._lock:
                self._in_flight -= 1

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _models(self, request: Request) -> Response:
        card = {"id": self._model, "object": "model", "created": self._created, "owned_by": "coldsnap"}
        return JSONResponse({"object": "list", "data": [card | {"max_model_len": self._runtime.max_model_len}]})

    async def _completions(self, request: Request) -> Response:
        body = parse_request(CompletionRequest, await _json(request))
        self._check_model(body.model)
        prompt = body.prompt[0] if isinstance(body.prompt, list) and isinstance(body.prompt[0], str) else body.prompt
        ids = self._runtime.prompt_ids(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        field = "prompt"
        if any(not 0 <= token < self._runtime.vocabulary for token in ids):
            raise BadRequestError(f"prompt: a token id is not below {self._runtime.vocabulary}", param=field)
        max_tokens = self._max_tokens(ids, body.max_tokens, _DEFAULT_COMPLETION_TOKENS, field)
        return await self._reply(request, body, ids, max_tokens, CompletionReply)

    async def _chat(self, request: Request) -> Response:
        body = parse_request(ChatRequest, await _json(request))
        self._check_model(body.model)
        messages = [{"role": message.role, "content": message.text} for message in body.messages]
        try:
            ids = self._runtime.chat_ids(messages)
        except Exception as error:  # a template is a program of the model's author and may raise anything
            raise BadRequestError(
                f"messages: the model's chat template refuses them: {error}", param="messages"
            ) from error
        limit = self._runtime.max_model_len
        default = max(1, limit - len(ids)) if limit is not None else _CHAT_TOKENS_WITHOUT_LIMIT
        asked = body.max_completion_tokens or body.max_tokens
        max_tokens = self._max_tokens(ids, asked, default, "messages")
        return await self._reply(request, body, ids, max_tokens, ChatReply)

    def _check_model(self, asked: str | None) -> None:
        if asked is not None and asked != self._model:
            raise BadRequestError(
                f"model {asked!r} is not served here; {self._model!r} is",
                param="model",
                status=404,
                code="model_not_found",
            )

    def _max_tokens(self, ids: list[int], asked: int | None, default: int, field: str) -> int:
        if not ids:
            raise BadRequestError(f"{field}: holds no token", param=field)
        wanted, limit = asked if asked is not None else default, self._runtime.max_model_len
        if limit is not None and len(ids) + wanted > limit:
            too_long = asked is None or len(ids) >= limit
            name = field if too_long else "max_tokens"
            raise BadRequestError(
                f"{name}: a prompt of {len(ids)} tokens and {wanted} more do not fit into the model's {limit}",
                param=name,
                code="context_length_exceeded",
            )
        return wanted

    async def _reply(
        self,
        request: Request,
        body: CompletionRequest | ChatRequest,
        ids: list[int],
        max_tokens: int,
        shape: Callable[..., Reply],
    ) -> Response:
        sampling = Sampling(
            temperature=body.temperature if body.temperature is not None else 1.0,
            top_p=body.top_p if body.top_p is not None else 1.0,
            seed=body.seed,
        )
        completion = Completion(prompt_ids=ids, max_tokens=max_tokens, sampling=sampling, stop=body.stops)
        reply = shape(
            request_id=uuid.uuid4().hex,
            model=self._model,
            created=int(time.time()),
            prompt_tokens=len(ids),
            with_token_ids=body.return_token_ids,
        )
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            events = self._events(completion, reply, with_usage)
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        pieces = await until_disconnect(request, pieces_of(self._runtime, completion, self._cuts))
        return JSONResponse(reply.whole(pieces)) if pieces is not None else Response(status_code=499)

    async def _events(self, completion: Completion, reply: Reply, with_usage: bool) -> AsyncIterator[str]:
        try:
            for chunk in reply.opening():
                yield _event(chunk)
            async for piece in pieces_of(self._runtime, completion, self._cuts):
                for chunk in reply.chunks(piece):
                    yield _event(chunk)
            if with_usage:
                yield _event(reply.usage_chunk())
        except CutOffError as error:
            yield _event({"error": _error(str(error), "server_error", code=_UNAVAILABLE)})
        except FailedError as error:
            _log.exception("a streamed request failed")
            yield _event({"error": _error(str(error), "server_error")})
        yield "data: [DONE]\n\n"


def _event(document: Any) -> str:
    return f"data: {json.dumps(document, separators=(',', ':'))}\n\n"


async def _json(request: Request) -> Any:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _BODY_LIMIT_BYTES:
            raise BadRequestError(f"the request body is over {_BODY_LIMIT_BYTES} bytes", status=413)
    try:
        value = json.loads(body)
        if b"\\u" in body:  # an escape can be half of a surrogate pair, which is no text and no tokenizer takes
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the request body is not JSON: {error}") from error


def _fault(message: str, *, status: int, param: str | None = None, code: str | None = None) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": _error(message, kind, param=param, code=code)}, status_code=status)


def _error(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> dict[str, str | None]:
    return {"message": message, "type": kind, "param": param, "code": code}


async def _bad_request(request: Request, error: Exception) -> Response:
    if not isinstance(error, BadRequestError):
        raise error
    return _fault(error.message, status=error.status, param=error.param, code=error.code)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; the client hung up in the middle of its request


async def _cut_off(request: Request, error: Exception) -> Response:
    return _fault(str(error), status=503, code=_UNAVAILABLE)


async def _http_fault(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    return _fault(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code)


async def _failure(request: Request, error: Exception) -> Response:
    return _fault(f"the engine failed: {error}", status=500)
