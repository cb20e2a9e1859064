"""The HTTP API as a client sees it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from coldsnap.core.messages import Prompt
from coldsnap.engines import listening
from coldsnap.engines.observer import Observer
from coldsnap.engines.settings import model_source_from
from coldsnap.engines.transformers.engine import TransformersEngine
from coldsnap.engines.transformers.options import parse_options
from coldsnap.engines.transformers.plugin import PLUGIN
from coldsnap.engines.transformers.replies import CompletionReply
from coldsnap.hydrate.host import HostMemory
from coldsnap.testing.engine_harness import free_port, post

pytestmark = pytest.mark.model

_DEADLINE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Served:
    engine: TransformersEngine
    port: int

    def post(self, path: str, **body: object) -> tuple[int, Any]:
        return post(self.port, path, body)

    def get(self, path: str, method: str = "GET") -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_DEADLINE_S)
        try:
            connection.request(method, path)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        finally:
            connection.close()

    def stream(self, path: str, **body: object) -> list[Any]:
        """The documents of a stream that ends as it should."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_DEADLINE_S)
        try:
            connection.request("POST", path, json.dumps({**body, "stream": True}))
            reply = connection.getresponse()
            assert reply.headers["content-type"].startswith("text/event-stream")
            events = reply.read().decode().split("\n\n")
        finally:
            connection.close()
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


@pytest.fixture(scope="module")
def served(tiny: Path) -> Iterator[Served]:
    model = PLUGIN.resolve_model(str(tiny))
    source = model_source_from(PLUGIN.settings_options(model, {}))
    options = parse_options({"num_threads": 1, "served_model_name": "tiny-model", "max_model_len": 100})
    engine = TransformersEngine(model.path, source, options)
    with HostMemory(base=0x5100_0000_0000) as memory:
        engine.load(memory, Observer())
        port = free_port()
        engine.start_serving("127.0.0.1", port)
        yield Served(engine=engine, port=port)
        engine.stop_serving()


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]


def test_health_and_models(served: Served) -> None:
    assert served.get("/health") == (200, {"status": "ok"})
    code, models = served.get("/v1/models")
    assert (code, models["object"], [one["id"] for one in models["data"]]) == (200, "list", ["tiny-model"])


def test_a_completion_is_the_answer_of_the_control_socket(served: Served) -> None:
    answer = served.engine.answer(Prompt(text="Hello", max_tokens=7))
    code, reply = served.post(
        "/v1/completions", model="tiny-model", prompt="Hello", max_tokens=7, temperature=0, return_token_ids=True
    )
    assert code == 200
    (choice,) = reply["choices"]
    assert (choice["text"], tuple(choice["token_ids"])) == (answer.text, answer.token_ids)
    assert (reply["object"], choice["index"], choice["finish_reason"]) == ("text_completion", 0, "length")
    assert reply["usage"] == {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}


def test_a_prompt_of_tokens_is_the_prompt_of_their_text(served: Served) -> None:
    ids = AutoTokenizer.from_pretrained(served.engine.model_path)("Hello")["input_ids"]
    replies = [
        served.post("/v1/completions", prompt=prompt, max_tokens=4, temperature=0)[1]["choices"]
        for prompt in ("Hello", ids, ["Hello"])
    ]
    assert replies[0] == replies[1] == replies[2]


@pytest.mark.parametrize(
    ("path", "body"), [("completions", {"prompt": "Hi"}), ("chat/completions", {"messages": MESSAGES})]
)
def test_a_stream_is_the_whole_answer_in_pieces(served: Served, path: str, body: dict[str, object]) -> None:
    asked = {**body, "max_tokens": 9, "temperature": 0, "return_token_ids": True}
    code, whole = served.post(f"/v1/{path}", **asked)
    assert code == 200
    chunks = served.stream(f"/v1/{path}", **asked, stream_options={"include_usage": True})
    *pieces, usage = chunks
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in pieces]
    text = "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)
    (expected,) = whole["choices"]
    assert text == (expected["text"] if "text" in expected else expected["message"]["content"])
    assert [token for c in choices for token in c["token_ids"]] == expected["token_ids"]
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + [expected["finish_reason"]]
    if path.startswith("chat"):
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert (whole["object"], pieces[0]["object"]) == ("chat.completion", "chat.completion.chunk")


def test_a_chat_uses_the_models_template(served: Served) -> None:
    tokenizer = AutoTokenizer.from_pretrained(served.engine.model_path)
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False)
    parts = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in MESSAGES]
    for messages in (MESSAGES, parts):
        _, reply = served.post(
            "/v1/chat/completions", messages=messages, max_tokens=3, temperature=0, return_token_ids=True
        )
        _, raw = served.post("/v1/completions", prompt=ids, max_tokens=3, temperature=0, return_token_ids=True)
        assert reply["choices"][0]["token_ids"] == raw["choices"][0]["token_ids"]
        assert reply["usage"]["prompt_tokens"] == len(ids)


def test_sampling_with_a_seed_repeats(served: Served) -> None:
    def ask(seed: int) -> object:
        body = {"prompt": "x", "max_tokens": 12, "temperature": 2, "top_p": 0.9, "seed": seed}
        return served.post("/v1/completions", **body)[1]["choices"]

    assert ask(1) == ask(1) != ask(2)


def test_a_stop_string_stops(served: Served) -> None:
    _, whole = served.post("/v1/completions", prompt="Hello", max_tokens=12, temperature=0)
    text = whole["choices"][0]["text"]
    _, stopped = served.post("/v1/completions", prompt="Hello", max_tokens=12, temperature=0, stop=[text[2:4], "zz"])
    assert stopped["choices"][0]["text"] == text[: text.index(text[2:4])]
    assert stopped["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [5, 100_000]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 100}, "max_tokens"),
        ({"prompt": "x" * 200}, "prompt"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "top_p": 0}, "top_p"),
        ({"prompt": "x", "n": 2}, "n"),
        ({"prompt": "x", "logprobs": 5}, "logprobs"),
        ({"prompt": "x", "stop": [""]}, "stop"),
        ({"prompt": "x", "beam_width": 4}, "beam_width"),
        ({"prompt": "x", "max_tokens": 0, "top_p": 7}, "top_p, max_tokens"),
    ],
)
def test_a_bad_request_names_its_field(served: Served, body: dict[str, object], param: str) -> None:
    code, reply = served.post("/v1/completions", **body)
    assert code == 400
    assert (reply["error"]["type"], reply["error"]["param"]) == ("invalid_request_error", param)
    assert param.split(",")[0] in reply["error"]["message"]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        [{"role": "robot", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image"}]}],
    ],
)
def test_bad_messages_are_named(served: Served, messages: object) -> None:
    code, reply = served.post("/v1/chat/completions", messages=messages)
    assert (code, reply["error"]["param"]) == (400, "messages")


def test_half_a_surrogate_pair_is_no_text(served: Served) -> None:
    code, reply = served.post("/v1/completions", prompt="\ud800", max_tokens=1)
    assert (code, reply["error"]["type"]) == (400, "invalid_request_error")
    assert served.post("/v1/completions", prompt="\U0001f9ca", max_tokens=1)[0] == 200


def test_a_client_that_hangs_up_in_its_request_is_no_failure(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=_DEADLINE_S) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{")
        _until(lambda: served.engine.num_in_flight == 1)
    _until(lambda: served.engine.num_in_flight == 0)
    assert served.get("/health")[0] == 200  # by the same loop, so what it had to say of the other was said
    assert not [one for one in caplog.records if one.exc_info]


def test_what_asks_for_nothing_is_taken(served: Served) -> None:
    neutral = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logprobs": None, "user": "me", "echo": False}
    assert served.post("/v1/completions", prompt="x", max_tokens=1, **neutral)[0] == 200


def test_other_faults_are_told_in_the_same_shape(served: Served) -> None:
    code, reply = served.post("/v1/completions", model="gpt-9", prompt="x")
    assert (code, reply["error"]["code"]) == (404, "model_not_found")
    assert served.get("/v2/none")[0] == 404
    assert served.get("/v1/completions")[0] == 405
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=_DEADLINE_S)
    try:
        connection.request("POST", "/v1/completions", "not json")
        reply = connection.getresponse()
        assert (reply.status, json.loads(reply.read())["error"]["type"]) == (400, "invalid_request_error")
    finally:
        connection.close()


@pytest.fixture
def slow(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Generation waits before its second token: (it has begun, let it go on)."""
    from coldsnap.engines.transformers.decoders import GrowingDecoder

    begun, go_on = threading.Event(), threading.Event()
    forward = GrowingDecoder.forward

    def wait(self: GrowingDecoder, *arguments: Any) -> Any:
        if begun.is_set():
            assert go_on.wait(_DEADLINE_S)
        begun.set()
        return forward(self, *arguments)

    monkeypatch.setattr(GrowingDecoder, "forward", wait)
    yield begun, go_on
    go_on.set()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_generation(
    served: Served, slow: tuple[threading.Event, threading.Event], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coldsnap.engines.transformers.completion import Completion

    begun, go_on = slow
    finished: list[int] = []
    run = Completion.run

    def counted(self: Completion, *arguments: Any) -> Any:
        count = 0
        for piece in run(self, *arguments):
            count += 1
            yield piece
        finished.append(count)

    monkeypatch.setattr(Completion, "run", counted)
    body = json.dumps({"prompt": "x", "max_tokens": 90, "temperature": 0, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", served.port), timeout=_DEADLINE_S) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        assert begun.wait(_DEADLINE_S)
        assert served.engine.num_in_flight == 1
    _until(lambda: served.engine.num_in_flight == 0)
    go_on.set()
    served.engine.answer(Prompt(text="x", max_tokens=1))  # behind the cancelled one on the compute thread
    assert len(finished) == 2
    assert finished[0] < 90


def _until(done: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(int(_DEADLINE_S * 100)):
        if done():
            return
        waiting.wait(0.01)
    pytest.fail("it did not come to pass")


@pytest.fixture
def fresh(tiny: Path) -> Iterator[TransformersEngine]:
    """A loaded engine of its own; computing has ended before its memory goes."""
    model = PLUGIN.resolve_model(str(tiny))
    source = model_source_from(PLUGIN.settings_options(model, {}))
    engine = TransformersEngine(model.path, source, parse_options({"num_threads": 1}))
    with HostMemory(base=0x5200_0000_0000) as memory:
        engine.load(memory, Observer())
        yield engine
        engine.stop_serving(drain_s=0)
        engine.before_sleep()


def _begin_stream(
    port: int, max_tokens: int, receive_buffer_bytes: int | None = None
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_DEADLINE_S)
    if receive_buffer_bytes is not None:
        connection.sock = socket.socket()
        connection.sock.settimeout(_DEADLINE_S)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        connection.sock.connect(("127.0.0.1", port))
    body = {"prompt": "x", "max_tokens": max_tokens, "temperature": 0, "stream": True, "return_token_ids": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    return connection, connection.getresponse()


def test_stopping_lets_a_stream_end(fresh: TransformersEngine) -> None:
    expected = fresh.answer(Prompt(text="x", max_tokens=40))
    port = free_port()
    fresh.start_serving("127.0.0.1", port)
    connection, reply = _begin_stream(port, 40)
    assert fresh.stop_serving() <= 1
    events = reply.read().decode().split("\n\n")
    connection.close()
    assert events[-2:] == ["data: [DONE]", ""]
    assert "".join(json.loads(e[6:])["choices"][0]["text"] for e in events[:-2]) == expected.text


def test_a_stream_that_is_cut_off_says_so_and_ends_as_streams_do(fresh: TransformersEngine) -> None:
    port = free_port()
    fresh.start_serving("127.0.0.1", port)
    connection, reply = _begin_stream(port, 30_000)
    assert reply.readline().startswith(b"data: ")
    assert fresh.stop_serving(drain_s=0.0) == 1
    assert fresh.num_in_flight == 0
    events = reply.read().decode().split("\n\n")
    connection.close()
    assert events[-2:] == ["data: [DONE]", ""]
    error = json.loads(events[-3].strip().removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "unavailable")
    assert "goes to sleep" in error["message"]
    fresh.before_sleep()  # and the compute thread is free: this would wait for 30,000 tokens otherwise


def test_an_answer_that_is_cut_off_is_an_error(fresh: TransformersEngine) -> None:
    port = free_port()
    fresh.start_serving("127.0.0.1", port)
    replies: list[tuple[int, Any]] = []

    def ask() -> None:
        replies.append(post(port, "/v1/completions", {"prompt": "x", "max_tokens": 30_000, "temperature": 0}))

    client = threading.Thread(target=ask)
    client.start()
    _until(lambda: fresh.num_in_flight == 1)
    fresh.stop_serving(drain_s=0.0)
    client.join(_DEADLINE_S)
    ((code, reply),) = replies
    assert (code, reply["error"]["code"]) == (503, "unavailable")


def _stopped_within(engine: TransformersEngine, limit_s: float) -> None:
    began = time.monotonic()
    engine.stop_serving(drain_s=4 * limit_s)
    assert time.monotonic() - began < limit_s
    assert engine.num_in_flight == 0


def test_a_client_that_does_not_read_holds_nothing_up_for_long(
    fresh: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "STALLED_S", 0.5)
    monkeypatch.setattr(CompletionReply, "chunks", lambda self, piece: iter([{"padding": "x" * (1 << 20)}]))
    port = free_port()
    fresh.start_serving("127.0.0.1", port)
    body = json.dumps({"prompt": "x", "max_tokens": 64, "temperature": 0, "stream": True}).encode()
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(_DEADLINE_S)
        raw.connect(("127.0.0.1", port))
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        assert raw.recv(100).startswith(b"HTTP/1.1 200")
        _stopped_within(fresh, _DEADLINE_S)


def test_a_client_that_does_not_send_its_body_holds_nothing_up_for_long(
    fresh: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "STALLED_S", 0.5)
    port = free_port()
    fresh.start_serving("127.0.0.1", port)
    with socket.create_connection(("127.0.0.1", port), timeout=_DEADLINE_S) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        _until(lambda: fresh.num_in_flight == 1)
        _stopped_within(fresh, _DEADLINE_S)


def test_a_client_that_reads_slowly_but_reads_is_waited_for(
    fresh: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel holds some 4 MiB of the 26; the rest at 3 MiB/s takes longer than a client may stall."""
    monkeypatch.setattr(listening, "STALLED_S", 6.0)
    monkeypatch.setattr(CompletionReply, "chunks", lambda self, piece: iter([{"padding": "x" * (1 << 20)}]))
    port = free_port()
    fresh.start_serving("127.0.0.1", port)
    received: list[bytes] = []
    connection, reply = _begin_stream(port, 26, receive_buffer_bytes=1 << 16)

    def read() -> None:
        while part := reply.read(1 << 20):
            received.append(part)
            time.sleep(1 / 3)

    client = threading.Thread(target=read)
    client.start()
    began = time.monotonic()
    fresh.stop_serving(drain_s=_DEADLINE_S)
    assert time.monotonic() - began > listening.STALLED_S
    client.join(_DEADLINE_S)
    connection.close()
    assert b"".join(received).endswith(b"data: [DONE]\n\n")


def looks(stalls: listening.Stalls, begin: float, end: float, *, waits: bool = True, moved: int = 5) -> list[float]:
    """When connection "a" is found stalled, looked at every quarter of a second from begin to end."""
    times = [begin + number / 4 for number in range(int((end - begin) * 4) + 1)]
    return [now for now in times if stalls.look("a", now, waits=waits, moved=moved)]


def test_a_connection_stalls_when_no_byte_crosses_it_for_the_limit() -> None:
    assert looks(listening.Stalls(limit_s=3.0), 10.0, 13.25) == [13.0, 13.25]


def test_a_byte_that_crosses_begins_the_limit_anew_however_full_our_buffer_stays() -> None:
    stalls = listening.Stalls(limit_s=3.0)
    assert looks(stalls, 0.0, 2.75, moved=5) == []
    assert looks(stalls, 3.0, 6.0, moved=6) == [6.0]


def test_a_connection_that_waits_for_us_never_stalls() -> None:
    stalls = listening.Stalls(limit_s=3.0)
    assert looks(stalls, 0.0, 60.0, waits=False) == []
    assert looks(stalls, 60.25, 63.0) == [63.0]


def test_a_machine_that_stood_still_is_not_held_against_the_client() -> None:
    """Between 1.0 and 31.0 nobody looked: of those 30 seconds half a one counts."""
    stalls = listening.Stalls(limit_s=3.0)
    assert looks(stalls, 0.0, 1.0) == []
    assert looks(stalls, 31.0, 32.5) == [32.5]


def test_one_connection_is_not_judged_by_another() -> None:
    stalls = listening.Stalls(limit_s=1.0)
    steady = [stalls.look("a", now, waits=True, moved=5) for now in (0.0, 0.5)]
    assert not stalls.look("b", 0.5, waits=True, moved=5)
    assert [*steady, stalls.look("a", 1.0, waits=True, moved=5)] == [False, False, True]
    assert not stalls.look("b", 1.0, waits=True, moved=5)
