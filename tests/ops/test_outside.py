"""The client outside sees what a user would, when a user would, and says what went wrong."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from coldsnap.core.messages import Prompt
from coldsnap.errors import DeadlineExceeded, EngineError
from coldsnap.ops.coldstart import cold_engine
from coldsnap.ops.outside import OutsideClient
from coldsnap.testing.desk import plan
from coldsnap.testing.engine import PLUGIN
from coldsnap.testing.engine_harness import free_port

HOST = "127.0.0.1"


class Server:
    """Answers every request with what the test says."""

    def __init__(self) -> None:
        self.status = 200
        self.body = b"{}"
        self.raw: bytes | None = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply()

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self._reply()

            def _reply(self) -> None:
                if outer.raw is not None:
                    self.wfile.write(outer.raw)
                    self.close_connection = True
                    return
                self.send_response(outer.status)
                self.end_headers()
                self.wfile.write(outer.body)

            def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the overridden name
                return

        self.server = ThreadingHTTPServer((HOST, 0), Handler)
        self.port: int = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.close()


def client(server: Server) -> OutsideClient:
    return OutsideClient(host=HOST, port=server.port)


def test_startup_is_seen_in_order(server: Server) -> None:
    server.body = b'data: {"choices": []}\n\ndata: [DONE]\n\n'
    origin = time.monotonic()
    seen = client(server).observe_startup(origin=origin, prompt="x", deadline_s=60)
    assert 0 <= seen.port_open_s <= seen.http_ready_s <= seen.first_token_s <= time.monotonic() - origin


def test_a_port_that_does_not_open_is_waited_for_until_the_deadline() -> None:
    waiting = OutsideClient(host=HOST, port=free_port())
    with pytest.raises(DeadlineExceeded, match="for: port open") as caught:
        waiting.observe_startup(origin=time.monotonic(), prompt="x", deadline_s=0.05)
    assert caught.value.facts == {"phase": "port open"}


def test_an_engine_that_is_not_healthy_is_waited_for_until_the_deadline(server: Server) -> None:
    server.status = 503
    with pytest.raises(DeadlineExceeded, match="for: HTTP ready"):
        client(server).observe_startup(origin=time.monotonic(), prompt="x", deadline_s=0.2)


def test_an_engine_that_ended_is_not_waited_for() -> None:
    began = time.monotonic()
    with pytest.raises(EngineError, match="ended before an outside client saw: port open"):
        OutsideClient(host=HOST, port=free_port()).observe_startup(
            origin=began, prompt="x", deadline_s=600, alive=lambda: False
        )
    assert time.monotonic() - began < 60


def test_a_stream_without_a_token_is_an_error(server: Server) -> None:
    server.body = b"data: [DONE]\n\n"
    with pytest.raises(EngineError, match="ended before a first token"):
        client(server).first_token("x", timeout_s=60)


def test_refusals_carry_status_and_body(server: Server) -> None:
    server.status, server.body = 500, b"out of memory"
    for ask in (
        lambda: client(server).first_token("x", timeout_s=60),
        lambda: client(server).complete([Prompt(text="x", max_tokens=1)], timeout_s=60),
        lambda: client(server).chat("x", max_tokens=1, timeout_s=60),
    ):
        with pytest.raises(EngineError, match="answered 500") as caught:
            ask()
        assert caught.value.facts["body"] == "out of memory"


@pytest.mark.parametrize("body", [b"[]", b"not json", b"{}", b'{"choices": []}', b'{"choices": [{"text": "x"}]}'])
def test_answers_that_are_none_are_errors(server: Server, body: bytes) -> None:
    server.body = body
    with pytest.raises(EngineError):
        client(server).complete([Prompt(text="x", max_tokens=1)], timeout_s=60)
    with pytest.raises(EngineError):
        client(server).chat("x", max_tokens=1, timeout_s=60)


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 190\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{",
        b"",
        b"x\r\n",
    ],
    ids=["no body", "half a body", "nothing", "no HTTP"],
)
def test_an_engine_that_ends_in_the_middle_of_its_answer_is_an_error(server: Server, raw: bytes) -> None:
    server.raw = raw
    with pytest.raises(EngineError, match="did not answer"):
        client(server).complete([Prompt(text="x", max_tokens=1)], timeout_s=60)
    with pytest.raises(EngineError, match=r"did not stream a token|ended before a first token"):
        client(server).first_token("x", timeout_s=60)


def test_an_engine_that_speaks_no_http_is_not_healthy(server: Server) -> None:
    server.raw = b"x\r\n"
    with pytest.raises(DeadlineExceeded, match="for: HTTP ready"):
        client(server).observe_startup(origin=time.monotonic(), prompt="x", deadline_s=0.2)


def test_nobody_listening_is_an_error() -> None:
    with pytest.raises(EngineError, match="did not answer"):
        OutsideClient(host=HOST, port=free_port()).complete([Prompt(text="x", max_tokens=1)], timeout_s=60)


# -- a cold start -------------------------------------------------------------------------------------


def test_a_cold_engine_answers_and_ends_with_the_block(model: Path, tmp_path: Path) -> None:
    port = free_port()
    planned = plan(model, tmp_path / "a.json")
    prompts = (Prompt(text="one", max_tokens=2), Prompt(text="two", max_tokens=2))
    with cold_engine(
        planned.request, PLUGIN, planned.model, host=HOST, port=port, first_prompt="x", deadline_s=60
    ) as engine:
        assert Path(f"/proc/{engine.pid}").exists()
        answers = engine.client.complete(prompts, timeout_s=60)
        assert [len(answer.token_ids) for answer in answers] == [2, 2]
        assert engine.timeline.port_open_s <= engine.timeline.first_token_s
    assert not Path(f"/proc/{engine.pid}").exists()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((HOST, port), timeout=1)


def test_a_cold_engine_that_does_not_come_up_says_its_last_words(model: Path, tmp_path: Path) -> None:
    planned = plan(model, tmp_path / "a.json")
    unit = planned.request.launch.units[0]
    broken = unit.model_copy(update={"command": (*unit.command, "--no-such-flag")})
    launch = planned.request.launch.model_copy(update={"units": (broken,)})
    request = planned.request.model_copy(update={"launch": launch})
    with (
        pytest.raises(EngineError, match="ended before an outside client saw") as caught,
        cold_engine(request, PLUGIN, planned.model, host=HOST, port=free_port(), first_prompt="x", deadline_s=60),
    ):
        pytest.fail("the body ran")
    log = caught.value.facts["log"]
    assert isinstance(log, list)
    assert any("--no-such-flag" in line for line in log)
