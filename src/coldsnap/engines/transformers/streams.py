"""Pieces from the compute thread into an event loop, and cancellation the other way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from starlette.requests import Request

from coldsnap.engines.transformers.completion import Completion, Piece
from coldsnap.engines.transformers.runtime import Runtime

__all__ = ["CutOffError", "Cuts", "FailedError", "pieces_of", "until_disconnect"]


class FailedError(Exception):
    """The model failed while it computed an answer."""


class CutOffError(Exception):
    """The engine goes to sleep before the answer is complete."""


class Cuts:
    """The generations of one event loop that can be cut off, all at once."""

    def __init__(self) -> None:
        self._acts: set[Callable[[], None]] = set()

    @contextmanager
    def watched(self, act: Callable[[], None]) -> Iterator[None]:
        """Call `act` if the cut comes while the block runs."""
        self._acts.add(act)
        try:
            yield
        finally:
            self._acts.discard(act)

    def cut_off(self) -> None:
        """Now."""
        for act in list(self._acts):
            act()


async def pieces_of(runtime: Runtime, completion: Completion, cuts: Cuts) -> AsyncIterator[Piece]:
    """The pieces as they are generated. Whoever stops iterating cancels the generation.

    Raises FailedError, and CutOffError when `cuts` says so.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()
    cancelled = threading.Event()

    def tell(item: Piece | Exception | None) -> None:
        if not cancelled.is_set():
            loop.call_soon_threadsafe(queue.put_nowait, item)

    def compute() -> None:
        try:
            runtime.run(completion, tell, cancelled.is_set)
            tell(None)
        except Exception as error:  # noqa: BLE001 - it belongs to the request, and the thread goes on
            tell(error)

    take_back = runtime.submit(compute)
    cut = CutOffError("the engine goes to sleep; ask again when it is back")
    try:
        with cuts.watched(lambda: queue.put_nowait(cut)):
            while (item := await queue.get()) is not None:
                if isinstance(item, CutOffError):
                    raise item
                if isinstance(item, Exception):
                    raise FailedError(f"the model failed to compute: {item}") from item
                yield item
    finally:
        cancelled.set()
        take_back()


async def until_disconnect(request: Request, pieces: AsyncIterator[Piece]) -> list[Piece] | None:
    """All the pieces, or None as soon as the client has gone away."""

    async def collect() -> list[Piece]:
        return [piece async for piece in pieces]

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    collecting, waiting = asyncio.ensure_future(collect()), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({collecting, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return collecting.result() if collecting.done() else None
    finally:
        for task in (collecting, waiting):
            task.cancel()
        await asyncio.gather(collecting, waiting, return_exceptions=True)
