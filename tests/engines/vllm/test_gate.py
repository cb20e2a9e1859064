"""The door of the application: counting, draining, and cutting off in the way a client reads."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from coldsnap.engines.vllm.gate import Gate

HTTP = {"type": "http", "path": "/v1/completions"}
START = {"type": "http.response.start", "status": 200, "headers": [(b"Content-Type", b"application/json")]}
STREAM = {**START, "headers": [(b"Content-Type", b"text/event-stream; charset=utf-8")]}
END = {"type": "http.response.body", "body": b"all"}


class App:
    """Sends `first`, waits until it is told or cut off, and sends `last`."""

    def __init__(self, first: list[dict[str, Any]], last: list[dict[str, Any]]) -> None:
        self._first, self._last = first, last
        self.inside, self.go_on = asyncio.Event(), asyncio.Event()
        self.cut = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            for message in self._first:
                await send(message)
            self.inside.set()
            await self.go_on.wait()
            for message in self._last:
                await send(message)
        except asyncio.CancelledError:
            self.cut = True
            raise


async def nothing() -> dict[str, Any]:
    return {"type": "http.disconnect"}


def asked(gate: Gate, scope: Any = HTTP) -> tuple[asyncio.Task[None], list[dict[str, Any]]]:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(dict(message))

    return asyncio.ensure_future(gate(scope, nothing, send)), sent


def body(sent: list[dict[str, Any]]) -> bytes:
    return b"".join(one["body"] for one in sent if one["type"] == "http.response.body")


def test_a_request_is_counted_until_it_is_answered_to_the_end() -> None:
    async def main() -> None:
        app = App([START], [END])
        gate = Gate(app)
        task, sent = asked(gate)
        await app.inside.wait()
        assert gate.num_in_flight == 1
        app.go_on.set()
        await task
        assert gate.num_in_flight == 0
        assert sent == [START, END]

    asyncio.run(main())


def test_a_draining_gate_says_so_and_lets_nobody_in() -> None:
    async def main() -> None:
        app = App([], [])
        gate = Gate(app)
        gate.draining = True
        task, sent = asked(gate)
        await task
        assert sent[0]["status"] == 503
        assert json.loads(body(sent))["error"]["code"] == "unavailable"
        assert not app.inside.is_set()

    asyncio.run(main())


async def cut(first: list[dict[str, Any]], scope: Any = HTTP) -> list[dict[str, Any]]:
    app = App(first, [END])
    gate = Gate(app)
    task, sent = asked(gate, scope)
    await app.inside.wait()
    gate.cut_off()
    await task
    assert app.cut
    assert gate.num_in_flight == 0
    return sent


def test_a_request_without_an_answer_yet_is_cut_off_with_an_error() -> None:
    sent = asyncio.run(cut([]))
    assert sent[0]["status"] == 503
    assert (b"content-length", str(len(body(sent))).encode()) in sent[0]["headers"]
    assert "going to sleep" in json.loads(body(sent))["error"]["message"]


def test_a_stream_is_cut_off_with_an_event_and_ended() -> None:
    event = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}
    sent = asyncio.run(cut([STREAM, event]))
    events = body(sent).decode().split("\n\n")
    assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == "unavailable"
    assert events[2:] == ["data: [DONE]", ""]
    assert not sent[-1].get("more_body", False)


@pytest.mark.parametrize("begun", [[START], [START, END]])
def test_an_answer_of_known_length_gets_nothing_added(begun: list[dict[str, Any]]) -> None:
    assert asyncio.run(cut(begun)) == begun


def test_a_websocket_is_cut_off_without_http() -> None:
    accept = {"type": "websocket.accept"}
    assert asyncio.run(cut([accept], {"type": "websocket"})) == [accept]


def test_a_cancellation_that_is_not_ours_goes_on_as_one() -> None:
    async def main() -> None:
        app = App([START], [])
        task, _ = asked(Gate(app))
        await app.inside.wait()
        task.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_the_lifespan_of_the_application_is_no_request() -> None:
    async def main() -> None:
        app = App([], [])
        gate = Gate(app)
        gate.draining = True
        task, _ = asked(gate, {"type": "lifespan"})
        await app.inside.wait()
        assert gate.num_in_flight == 0
        app.go_on.set()
        await task

    asyncio.run(main())
