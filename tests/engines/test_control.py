"""Both ends of the control socket, against each other and against ends that misbehave."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeGuard

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from coldsnap import errors
from coldsnap.core.messages import PackSource, Prompt, Serving, Verb, WakeBody, WorkerStatus
from coldsnap.core.policy import Materialize
from coldsnap.engines import control
from coldsnap.engines.control import Call, ControlClient, ControlServer
from coldsnap.engines.frames import encode_frame, error_frame, error_from_frame
from coldsnap.errors import (
    ColdsnapError,
    DeadlineExceeded,
    EngineError,
    InternalError,
    InvalidDocument,
    OperationInterrupted,
    PayloadRejected,
    Problem,
    Refused,
    RemoteError,
    ResourceBusy,
    SignatureRejected,
    UsageError,
)

NOTHING = Serving(host=None, port=None)


class Script:
    """A handler that does what the test says, verb by verb."""

    def __init__(self, **acts: Callable[[Call], BaseModel]) -> None:
        self._acts = acts

    def __call__(self, call: Call) -> BaseModel:
        return self._acts[call.request.verb.value](call)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "w.sock"


def ask(path: Path, verb: Verb = Verb.STOP_SERVING, deadline_s: float = 60, **more: Any) -> Serving:
    return ControlClient(path).call(verb, reply=Serving, deadline_s=deadline_s, **more)


def raising(error: Exception) -> Callable[[Call], BaseModel]:
    def act(call: Call) -> BaseModel:
        raise error

    return act


def test_a_reply_comes_after_its_progress(path: Path) -> None:
    def act(call: Call) -> BaseModel:
        advance = call.phase("read", 100)
        advance(40)
        advance(60)
        return Serving(host="h", port=7)

    seen: list[Any] = []
    with ControlServer(path, Script(stop_serving=act)):
        assert ask(path, on_progress=seen.append) == Serving(host="h", port=7)
    assert seen[0] == {"phase": "read", "done_bytes": 40, "total_bytes": 100}
    assert seen[-1] == {"phase": "read", "done_bytes": 100, "total_bytes": 100}


def test_when_a_call_returns_the_worker_has_closed_its_end(path: Path) -> None:
    def sockets() -> int:
        links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return sum(link.startswith("socket:") for link in links)

    with ControlServer(path, Script(stop_serving=lambda call: NOTHING)):
        before = sockets()
        for _ in range(20):
            ask(path)
            assert sockets() == before


@pytest.mark.parametrize(
    "error",
    [
        UsageError("no", cure="yes", facts={"a": 1}),
        PayloadRejected("digest_mismatch", "bad", cure="fetch", facts={"path": "/x"}),
        InvalidDocument("m", [Problem(field="a.b", message="is odd", value="3", cure="even")], facts={"n": [1, 2]}),
        Refused("r", [Problem(field="x", message="y"), Problem(field="z", message="w")]),
        DeadlineExceeded("slow", facts={"phase": "p", "deadline_s": 1.5}),
    ],
)
def test_an_error_arrives_as_it_was_raised(path: Path, error: ColdsnapError) -> None:
    with ControlServer(path, Script(stop_serving=raising(error))), pytest.raises(type(error)) as caught:
        ask(path)
    assert str(caught.value) == str(error)
    assert caught.value.facts == error.facts
    assert getattr(caught.value, "problems", None) == getattr(error, "problems", None)
    assert getattr(caught.value, "reason", None) == getattr(error, "reason", None)


def is_error(found: object) -> TypeGuard[type[ColdsnapError]]:
    return isinstance(found, type) and issubclass(found, ColdsnapError)


@pytest.mark.parametrize("kind", [one for name in errors.__all__ if is_error(one := getattr(errors, name))])
def test_every_error_class_survives_the_socket(kind: type[ColdsnapError]) -> None:
    error: ColdsnapError
    if issubclass(kind, InvalidDocument | Refused):
        error = kind("s", [Problem(field="f", message="m")])
    elif issubclass(kind, PayloadRejected | SignatureRejected):
        error = kind("unusable_path", "m")
    elif issubclass(kind, RemoteError):
        error = kind("refused", "m", place="registry.example")
    else:
        error = kind("m", cure="c", facts={"path": Path("/a")})
    back = error_from_frame(error_frame(error))
    assert type(back) is kind
    assert str(back) == str(error)


def test_a_kind_nobody_knows_is_an_engine_error() -> None:
    frame = error_frame(UsageError("m")).model_copy(update={"kind": "SystemExit"})
    assert isinstance(error_from_frame(frame), EngineError)


@pytest.mark.parametrize("bug", [ValueError("x"), OSError(5, "io"), KeyError("k")])
def test_a_bug_in_a_verb_is_reported_and_the_next_verb_served(path: Path, bug: Exception) -> None:
    with ControlServer(path, Script(stop_serving=raising(bug), serve=lambda call: NOTHING)):
        with pytest.raises(InternalError, match=type(bug).__name__):
            ask(path)
        assert ask(path, Verb.SERVE) == NOTHING


def test_a_second_verb_is_refused_and_status_is_not(path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hold(call: Call) -> BaseModel:
        begun.set()
        assert go_on.wait(60)
        return NOTHING

    def status(call: Call) -> BaseModel:
        return Serving(host="status", port=None)

    with ControlServer(path, Script(wake=hold, serve=lambda call: NOTHING, status=status)):
        replies: list[Serving] = []
        first = threading.Thread(target=lambda: replies.append(ask(path, Verb.WAKE)))
        first.start()
        assert begun.wait(60)
        with pytest.raises(ResourceBusy, match="wake"):
            ask(path, Verb.SERVE)
        assert ask(path, Verb.STATUS).host == "status"
        go_on.set()
        first.join(60)
        assert replies == [NOTHING]
        assert ask(path, Verb.SERVE) == NOTHING


def test_a_worker_that_takes_too_long_is_not_waited_for(path: Path) -> None:
    release = threading.Event()

    def hold(call: Call) -> BaseModel:
        release.wait(60)
        return NOTHING

    with ControlServer(path, Script(stop_serving=hold)):
        with pytest.raises(DeadlineExceeded) as caught:
            ask(path, deadline_s=0.05)
        release.set()
    assert caught.value.facts == {"phase": "stop_serving", "deadline_s": 0.05}


def test_a_caller_that_is_stopped_does_not_wait(path: Path) -> None:
    begun, release = threading.Event(), threading.Event()

    def hold(call: Call) -> BaseModel:
        begun.set()
        release.wait(60)
        return NOTHING

    with ControlServer(path, Script(stop_serving=hold)):
        with pytest.raises(OperationInterrupted):
            ask(path, cancelled=begun.is_set)
        release.set()


def test_a_caller_that_goes_away_is_noticed(path: Path) -> None:
    begun, noticed, gone = threading.Event(), threading.Event(), threading.Event()

    def act(call: Call) -> BaseModel:
        begun.set()
        gone.wait(60)
        for number in range(10_000):
            call.progress(f"phase {number}", done_bytes=0, total_bytes=1)
            if call.cancelled.is_set():
                noticed.set()
                break
        return NOTHING

    with ControlServer(path, Script(stop_serving=act)):
        with pytest.raises(OperationInterrupted):
            ask(path, cancelled=begun.is_set)
        gone.set()
        assert noticed.wait(60)


def test_nobody_listening_is_an_engine_error(path: Path) -> None:
    with pytest.raises(EngineError, match=r"w\.sock"):
        ask(path)


def test_waiting_for_a_process_that_ended_says_so(path: Path) -> None:
    with pytest.raises(EngineError, match="ended while it was loading"):
        ControlClient(path).wait_loaded(deadline_s=60, alive=lambda: False)


def test_waiting_for_ever_ends_at_the_deadline(path: Path) -> None:
    with pytest.raises(DeadlineExceeded):
        ControlClient(path).wait_loaded(deadline_s=0.05, poll_s=0.01)


def test_a_path_too_long_for_a_socket_is_reached_through_its_folder(tmp_path: Path) -> None:
    short, deep = tmp_path / "s", tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    with ControlServer(short, Script(stop_serving=lambda call: NOTHING)):
        (deep / "w.sock").hardlink_to(short)
        assert ask(deep / "w.sock") == NOTHING


def test_a_server_says_when_its_path_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="107"):
        ControlServer(tmp_path / ("x" * 110), Script()).start()


def test_a_taken_socket_is_not_stolen(path: Path) -> None:
    with ControlServer(path, Script(stop_serving=lambda call: NOTHING)):
        with pytest.raises(ResourceBusy):
            ControlServer(path, Script()).start()
        assert ask(path) == NOTHING


def test_the_socket_is_ours_alone_and_gone_after_close(path: Path) -> None:
    with ControlServer(path, Script()):
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()


@pytest.mark.parametrize(
    "sent",
    [
        b"not json\n",
        b"[]\n",
        b'{"id":0,"verb":"status","body":{}}\n',
        b'{"id":1,"verb":"fly","body":{}}\n',
        b'{"id":1,"verb":"status","body":{},"more":1}\n',
        b'{"id":true,"verb":"status"}\n',
    ],
)
def test_nonsense_is_answered_with_an_error(path: Path, sent: bytes) -> None:
    with ControlServer(path, Script()), socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(60)
        raw.connect(str(path))
        raw.sendall(sent)
        reply = json.loads(raw.makefile("rb").read())
    assert reply["error"]["kind"] == "EngineError"


def test_a_silent_client_is_dropped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "REQUEST_TIMEOUT_S", 0.05)
    with ControlServer(path, Script()), socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(60)
        raw.connect(str(path))
        reply = json.loads(raw.makefile("rb").read())
    assert reply["error"]["kind"] == "DeadlineExceeded"


@pytest.fixture
def answer_with(path: Path) -> Iterator[Callable[[bytes], None]]:
    """A worker that sends the given bytes to its first caller, whatever was asked."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        threads: list[threading.Thread] = []

        def give(data: bytes) -> None:
            def run() -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(data)

            threads.append(threading.Thread(target=run))
            threads[-1].start()

        yield give
        for thread in threads:
            thread.join(60)


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"", "closed its control socket before"),
        (b'{"id":1,"resul', "in the middle of a frame"),
        (b"hello\n", "not JSON"),
        (b"[" * 100_000 + b"\n", "not JSON"),
        (b"7\n", "not an object"),
        (b'{"id":9,"result":{}}\n', "answered request 9"),
        (b'{"id":1}\n', "neither result nor error"),
        (b'{"id":1,"result":{"host":3,"port":null}}\n', "malformed: host"),
        (b'{"id":1,"result":{"host":null,"port":null}}\nmore', "in the middle of a frame"),
        (b'{"id":1,"result":{"host":null,"port":null}}\n{"id":1}\n', "after its last frame"),
    ],
)
def test_a_worker_that_breaks_the_protocol_is_an_engine_error(
    path: Path, answer_with: Callable[[bytes], None], sent: bytes, says: str
) -> None:
    answer_with(sent)
    with pytest.raises(EngineError, match=says):
        ask(path)


def test_a_frame_over_the_limit_is_refused_on_both_sides(
    path: Path, answer_with: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coldsnap.engines.frames.MAX_FRAME_BYTES", 200)
    with pytest.raises(EngineError, match="over the limit"):
        encode_frame({"id": 1, "result": "x" * 300})
    answer_with(b"x" * 500)
    with pytest.raises(EngineError, match="longer than the limit"):
        ask(path)


@given(text=st.text(max_size=50), tokens=st.integers(1, 4096))
@settings(max_examples=50)
def test_any_prompt_is_one_line_of_ascii(text: str, tokens: int) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):
        return
    data = encode_frame({"id": 1, "body": Prompt(text=text, max_tokens=tokens).model_dump(mode="json")})
    assert data.count(b"\n") == 1
    assert data.isascii()
    assert Prompt.model_validate_json(json.dumps(json.loads(data)["body"])).text == text


def test_a_status_is_what_it_was_on_the_other_side(path: Path) -> None:
    status = WorkerStatus.model_validate(
        {
            "worker": "w0",
            "unit": "u0",
            "rank": 0,
            "pid": 7,
            "state": "idle",
            "engine": "fake",
            "engine_versions": {"fake": "1"},
            "host": None,
            "port": None,
            "in_flight": 0,
            "mapped_bytes": 4096,
        },
        strict=False,
    )
    with ControlServer(path, Script(status=lambda call: status)):
        assert ControlClient(path).status() == status
        assert ControlClient(path).wait_loaded(deadline_s=60) == status


def test_what_is_a_default_is_not_sent(path: Path) -> None:
    """A worker that was frozen by an older version refuses members it does not know; it knows their absence."""
    seen: list[dict[str, Any]] = []

    def act(call: Call) -> BaseModel:
        seen.append(call.request.body)
        return NOTHING

    client = ControlClient(path)
    with ControlServer(path, Script(wake=act)):
        for materialize in Materialize:
            body = WakeBody(
                source=PackSource.NATIVE, native_manifest="n", recovery_manifest="r", materialize=materialize
            )
            client.call(Verb.WAKE, body, reply=Serving, deadline_s=60)
            assert WakeBody.model_validate_json(json.dumps(seen[-1])) == body
    plain = {"source": "native", "native_manifest": "n", "recovery_manifest": "r"}
    assert seen == [plain, {**plain, "materialize": "async"}, {**plain, "materialize": "required"}]
