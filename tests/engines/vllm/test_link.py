"""What engine processes ask of the front, over its socket."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coldsnap.core.messages import Answer, Prompt
from coldsnap.engines.vllm.link import FrontClient, FrontServer, FrontState, inner_socket_name
from coldsnap.errors import (
    ColdsnapError,
    DeadlineExceeded,
    EngineError,
    InternalError,
    Problem,
    Refused,
    ResourceBusy,
    UserError,
)

PROMPT = Prompt(text="hello", max_tokens=3)
LONG_S = 60.0


class Script:
    """Implements `Service` by what the test says of each method."""

    def __init__(self, **acts: Callable[..., Any]) -> None:
        self._acts = acts
        self.asked: list[tuple[object, ...]] = []

    def state(self) -> FrontState:
        found: FrontState = self._do("state")
        return found

    def answer(self, prompt: Prompt) -> Answer:
        found: Answer = self._do("answer", prompt)
        return found

    def open(self, host: str, port: int) -> None:
        self._do("open", host, port)

    def close(self, *, drain_s: float) -> int:
        found: int = self._do("close", drain_s)
        return found

    def quiet(self, worker: str) -> None:
        self._do("quiet", worker)

    def resume(self, worker: str) -> None:
        self._do("resume", worker)

    def fail(self, error: ColdsnapError) -> None:
        self._do("fail", error)

    def _do(self, name: str, *arguments: object) -> Any:
        self.asked.append((name, *arguments))
        return self._acts[name](*arguments) if name in self._acts else None


def phases(*names: str) -> Callable[[], FrontState]:
    """One after the other, the last one from then on."""
    left = list(names)

    def state() -> FrontState:
        name = left.pop(0) if len(left) > 1 else left[0]
        return FrontState.model_validate({"phase": name, "in_flight": 0, "serving": False})

    return state


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "front.sock"


@pytest.fixture
def serve(path: Path) -> Iterator[Callable[[Script], FrontClient]]:
    servers: list[FrontServer] = []

    def begin(service: Script) -> FrontClient:
        server = FrontServer(path, service)
        server.start()
        servers.append(server)
        return FrontClient(path)

    yield begin
    for server in servers:
        server.close()


def raising(error: Exception) -> Callable[..., Any]:
    def act(*arguments: object) -> Any:
        raise error

    return act


def test_each_question_arrives_as_it_was_asked_and_its_answer_too(serve: Callable[[Script], FrontClient]) -> None:
    answer = Answer(token_ids=(7, 8), text=" é")
    service = Script(answer=lambda prompt: answer, close=lambda drain_s: 3, state=phases("up"))
    client = serve(service)
    assert client.state() == FrontState(phase="up", in_flight=0, serving=False)
    assert client.answer(PROMPT) == answer
    client.open("::1", 8080)
    assert client.close(drain_s=2.5) == 3
    client.quiet("w1")
    client.resume("w1")
    assert service.asked == [
        ("state",),
        ("answer", PROMPT),
        ("open", "::1", 8080),
        ("close", 2.5),
        ("quiet", "w1"),
        ("resume", "w1"),
    ]


@pytest.mark.parametrize(
    "error",
    [
        ResourceBusy("taken", cure="another", facts={"port": 80}),
        Refused("r", [Problem(field="f", message="m")]),
        UserError("no such file", facts={"path": "/x"}),
    ],
)
def test_an_error_arrives_as_it_was_raised(serve: Callable[[Script], FrontClient], error: ColdsnapError) -> None:
    client = serve(Script(open=raising(error)))
    with pytest.raises(type(error)) as caught:
        client.open("127.0.0.1", 80)
    assert (str(caught.value), caught.value.facts) == (str(error), error.facts)


def test_a_worker_s_failure_arrives_as_what_it_is(serve: Callable[[Script], FrontClient]) -> None:
    service = Script()
    serve(service).fail(UserError("no such file", cure="another", facts={"path": "/x"}))
    [(name, error)] = service.asked
    assert name == "fail"
    assert isinstance(error, UserError)
    assert (str(error), error.facts) == ("no such file; another", {"path": "/x"})


def test_a_bug_of_the_front_is_told_as_one(serve: Callable[[Script], FrontClient]) -> None:
    client = serve(Script(quiet=raising(ZeroDivisionError("odd"))))
    with pytest.raises(InternalError, match="ZeroDivisionError: odd"):
        client.quiet("w0")


def test_the_state_is_told_while_an_answer_is_computed(serve: Callable[[Script], FrontClient]) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def answer(prompt: Prompt) -> Answer:
        begun.set()
        assert go_on.wait(LONG_S)
        return Answer(token_ids=(1,), text="a")

    client = serve(Script(answer=answer, state=phases("up")))
    found: list[Answer] = []
    thread = threading.Thread(target=lambda: found.append(client.answer(PROMPT)))
    thread.start()
    assert begun.wait(LONG_S)
    assert client.state().phase == "up"
    go_on.set()
    thread.join()
    assert found == [Answer(token_ids=(1,), text="a")]


def test_nothing_is_open_when_a_call_has_returned(serve: Callable[[Script], FrontClient]) -> None:
    def sockets() -> int:
        return sum(str(one.readlink()).startswith("socket:") for one in Path("/proc/self/fd").iterdir() if one.exists())

    client = serve(Script(state=phases("up")))
    client.state()
    before = sockets()
    for _ in range(20):
        client.state()
        assert sockets() == before


def test_waiting_ends_when_the_engine_is_up(serve: Callable[[Script], FrontClient]) -> None:
    service = Script(state=phases("loading", "loading", "up"))
    serve(service).wait_up(deadline_s=LONG_S)
    assert service.asked == [("state",)] * 3


def test_waiting_raises_what_the_engine_failed_with(serve: Callable[[Script], FrontClient]) -> None:
    failed = {"kind": "UserError", "message": "no memory for this", "cure": "a smaller model", "facts": {}}
    state = {"phase": "failed", "in_flight": 0, "serving": False, "error": failed}
    with pytest.raises(UserError, match="no memory for this; a smaller model"):
        serve(Script(state=lambda: FrontState.model_validate(state))).wait_up(deadline_s=LONG_S)


def test_waiting_ends_at_its_deadline(serve: Callable[[Script], FrontClient]) -> None:
    with pytest.raises(DeadlineExceeded, match="did not come up"):
        serve(Script(state=phases("loading"))).wait_up(deadline_s=0.0)


def test_a_front_that_is_gone_is_an_engine_error_that_names_its_socket(path: Path) -> None:
    with pytest.raises(EngineError, match=str(path)):
        FrontClient(path).quiet("w0")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (b"", "closed its socket before"),
        (b'{"result":{},"error":{}}\n', "malformed"),
        (b'{"result":{}}\n{"result":{}}\n', "malformed"),
        (b'{"result":{"phase":"odd"}}\n', "malformed"),
        (b"nonsense\n", "not JSON"),
    ],
)
def test_a_front_that_breaks_the_protocol_is_an_engine_error(path: Path, said: bytes, message: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def speak() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(said)

        thread = threading.Thread(target=speak)
        thread.start()
        with pytest.raises(EngineError, match=message):
            FrontClient(path).state()
        thread.join()


@pytest.mark.parametrize(
    "frame",
    [
        {},
        {"ask": "restart"},
        {"ask": "open", "body": {"host": "h", "port": 0}},
        {"ask": "open", "body": {"host": "h"}},
        {"ask": "close", "body": {"drain_s": -1}},
        {"ask": "quiet", "body": {"worker": 3}},
        {"ask": "answer", "body": {"text": "x", "max_tokens": 0}},
        {"ask": "state", "more": 1},
    ],
)
def test_a_malformed_question_is_refused_and_reaches_nobody(
    serve: Callable[[Script], FrontClient], path: Path, frame: dict[str, object]
) -> None:
    service = Script()
    serve(service)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(LONG_S)
        connection.connect(str(path))
        connection.sendall(json.dumps(frame).encode() + b"\n")
        reply = json.loads(connection.makefile("rb").read())
    assert reply["error"]["kind"] == "EngineError"
    assert "malformed" in reply["error"]["message"]
    assert service.asked == []


def test_a_closed_server_leaves_no_socket_and_can_be_opened_again(path: Path) -> None:
    for _ in range(2):
        server = FrontServer(path, Script(state=phases("up")))
        server.start()
        assert FrontClient(path).state().phase == "up"
        server.close()
        assert not path.exists()
    deadline = time.monotonic() + LONG_S
    while any(thread.name == "coldsnap-front" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_inner_sockets_have_names_of_their_own_and_of_one_length() -> None:
    names = {inner_socket_name(worker) for worker in ("w0", "w1", "x" * 128)}
    assert len(names) == 3
    assert {len(name) for name in names} == {len("i-.sock") + 16}
