"""An HTTP listener that can be opened and closed again and again in one process.

It has a thread and an event loop of its own while it is open, and nothing at all while it is closed: no socket,
no epoll, no thread that a frozen process would carry along. How it closes is in `coldsnap.engines.listening`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

import uvicorn
import uvicorn.lifespan.off
import uvicorn.loops.asyncio
import uvicorn.protocols.http.h11_impl

from coldsnap.engines.listening import Listening, bind
from coldsnap.errors import EngineError

__all__ = ["Application", "Listener"]

_log = logging.getLogger(__name__)


class Application(Protocol):
    """An ASGI application that can be told to end what it is doing."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...

    def cut_off(self) -> None:
        """End every request now, with a word to its client. Called on the event loop."""
        ...


class Listener:
    """Listens from construction to `close`."""

    def __init__(self, app: Application, host: str, port: int) -> None:
        """Raises ResourceBusy when the address cannot be had, EngineError when the server does not come up."""
        self._app = app
        self._socket = bind(host, port)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told_to_close: asyncio.Future[float] | None = None
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="http", daemon=True)
        self._thread.start()
        try:
            ready.result()
        except BaseException as error:
            self._thread.join()
            self._socket.close()
            if isinstance(error, EngineError):
                raise
            raise EngineError(f"the HTTP server did not start: {error}") from error

    def close(self, drain_s: float) -> None:
        """As `Listening.close`, and the thread and its loop are gone too."""
        if self._loop is not None and self._told_to_close is not None:
            with suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._told_to_close.set_result, drain_s)
        self._thread.join()
        self._socket.close()

    def _run(self, ready: Future[None]) -> None:
        try:
            asyncio.run(self._serve(ready))
        except BaseException as error:  # noqa: BLE001 - the constructor raises it, or the log keeps it
            if ready.done():
                _log.exception("the HTTP server ended by a bug")
            else:
                ready.set_exception(error)

    async def _serve(self, ready: Future[None]) -> None:
        config = uvicorn.Config(
            self._app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
        )
        listening = Listening(self._socket, config, self._app.cut_off)
        self._loop = asyncio.get_running_loop()
        self._told_to_close = self._loop.create_future()
        await listening.open()
        ready.set_result(None)
        await listening.close(await self._told_to_close)
