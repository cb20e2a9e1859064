"""A real served tree, whose weights are loaded by vLLM alone: all that the front does.

There is no worker half in these engine processes, so the front is driven over the socket that such halves use.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from coldsnap.core.messages import Answer, Prompt, WorkerState
from coldsnap.engines.vllm.link import FRONT_SOCKET, inner_socket_name
from coldsnap.errors import EngineError, IntegrityError, Refused, ResourceBusy, UserError
from coldsnap.testing.engine_harness import free_port

from .trees import (  # isort: skip
    KEY,
    LONG_S,
    MODEL,
    START_S,
    Tree,
    environment,
    events,
    started,
    wait_listening,
    wait_until,
)

pytestmark = pytest.mark.timeout(3600)

PROMPTS = (
    Prompt(text="The capital of France is", max_tokens=8),
    Prompt(text="Water boils at a temperature of", max_tokens=12),
    Prompt(text="one two three four", max_tokens=4),
)
_IN_PROCESS = """
import json, sys
from vllm import LLM, SamplingParams
model, prompts = sys.argv[1], json.loads(sys.argv[2])
llm = LLM(model, enforce_eager=True, max_model_len=512)
answers = []
for text, max_tokens in prompts:
    (output,) = llm.generate([text], SamplingParams(temperature=0, max_tokens=max_tokens))
    answers.append([list(output.outputs[0].token_ids), output.outputs[0].text])
print("ANSWERS " + json.dumps(answers))
"""


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    """What vLLM itself answers, all of it in one process, to one prompt after the other."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        prompts = json.dumps([(one.text, one.max_tokens) for one in PROMPTS])
        variables = environment(Path(folder), VLLM_ENABLE_V1_MULTIPROCESSING="0")
        done = subprocess.run(
            [sys.executable, "-c", _IN_PROCESS, str(MODEL), prompts],
            env=variables,
            capture_output=True,
            text=True,
            timeout=START_S,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
        assert lines, done.stdout + done.stderr
        return [Answer(token_ids=tuple(ids), text=text) for ids, text in json.loads(lines[0].removeprefix("ANSWERS "))]


@pytest.fixture(scope="module")
def tree() -> Iterator[Tree]:
    """A tree that is up, with an API key and TLS; its end is a test of its own."""
    with started(VLLM_API_KEY=KEY) as tree:
        wait_listening(tree)
        assert tree.control.status().state is WorkerState.LOADING
        try:
            tree.front.wait_up(deadline_s=START_S)
        except Exception as error:
            raise AssertionError(tree.log) from error
        yield tree
        tree.end()


@pytest.fixture
def port(tree: Tree) -> Iterator[int]:
    """Where it serves for one test."""
    port = free_port()
    tree.front.open("127.0.0.1", port)
    yield port
    tree.front.close(drain_s=LONG_S)


def test_http_and_the_front_give_the_tokens_of_vllm_in_one_process(
    tree: Tree, port: int, expected: list[Answer]
) -> None:
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        assert tree.front.answer(prompt) == answer
        status, reply = tree.complete(port, prompt, return_token_ids=True)
        assert status == 200, reply
        (choice,) = reply["choices"]
        assert (tuple(choice["token_ids"]), choice["text"]) == (answer.token_ids, answer.text)
    assert len({answer.token_ids for answer in expected}) == len(PROMPTS)


def test_a_stream_brings_the_same_text_piece_by_piece(tree: Tree, port: int, expected: list[Answer]) -> None:
    status, data = tree.complete(port, PROMPTS[0], stream=True)
    *chunks, last = events(data)
    texts = [json.loads(chunk)["choices"][0]["text"] for chunk in chunks]
    assert (status, last, "".join(texts)) == (200, "[DONE]", expected[0].text)
    assert len(texts) > 1


def test_chat_and_the_list_of_models_are_there(tree: Tree, port: int) -> None:
    models = json.loads(tree.request(port, "GET", "/v1/models")[1])
    assert [one["id"] for one in models["data"]] == ["smol"]
    body = {"model": "smol", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "temperature": 0}
    status, data = tree.request(port, "POST", "/v1/chat/completions", body)
    assert (status, json.loads(data)["usage"]["completion_tokens"]) == (200, 3)


def test_the_api_key_of_the_environment_is_asked_for(tree: Tree, port: int) -> None:
    assert tree.request(port, "GET", "/v1/models", key=None)[0] == 401
    assert tree.request(port, "GET", "/v1/models", key="another")[0] == 401
    assert tree.request(port, "GET", "/v1/models")[0] == 200
    assert tree.request(port, "GET", "/health", key=None)[0] == 200


def test_nobody_is_served_without_tls(tree: Tree, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=LONG_S) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        try:
            said = plain.recv(1 << 16)
        except ConnectionError:
            said = b""
    assert not said.startswith(b"HTTP"), "an alert of TLS at most"


@pytest.mark.parametrize(
    "path",
    [
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/collective_rpc",
        "/server_info",
        "/reset_prefix_cache",
        "/pause",
        "/resume",
    ],
)
def test_there_are_no_development_endpoints(tree: Tree, port: int, path: str) -> None:
    for method in ("GET", "POST"):
        assert tree.request(port, method, path, {} if method == "POST" else None)[0] == 404


def test_it_closes_and_opens_on_another_port(tree: Tree, expected: list[Answer]) -> None:
    ports = free_port(), free_port()
    for port in ports:
        tree.front.open("127.0.0.1", port)
        assert tree.front.state().serving
        with pytest.raises(EngineError, match="already"):
            tree.front.open("127.0.0.1", free_port())
        status, reply = tree.complete(port, PROMPTS[0])
        assert (status, reply["choices"][0]["text"]) == (200, expected[0].text)
        assert tree.front.close(drain_s=LONG_S) == 0
        assert not tree.front.state().serving
        with pytest.raises(ConnectionRefusedError):
            tree.complete(port, PROMPTS[0])
    assert tree.front.close(drain_s=LONG_S) == 0


def test_a_taken_port_is_named_and_changes_nothing(tree: Tree, port: int) -> None:
    tree.front.close(drain_s=LONG_S)
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ResourceBusy, match=str(port)):
        tree.front.open("127.0.0.1", port)
    assert not tree.front.state().serving


def test_the_key_file_is_read_at_each_opening_and_named_when_it_is_gone(tree: Tree) -> None:
    key, away = tree.folder / "key.pem", tree.folder / "away.pem"
    key.rename(away)
    with pytest.raises(UserError, match=f"--ssl-keyfile: {key}"):
        tree.front.open("127.0.0.1", free_port())
    key.write_text("nonsense")
    with pytest.raises(UserError, match="TLS options"):
        tree.front.open("127.0.0.1", free_port())
    away.rename(key)
    port = free_port()
    tree.front.open("127.0.0.1", port)
    assert tree.request(port, "GET", "/health")[0] == 200
    tree.front.close(drain_s=LONG_S)


def test_a_stream_in_flight_is_counted_and_cut_off_with_a_word(tree: Tree) -> None:
    port = free_port()
    tree.front.open("127.0.0.1", port)
    body = {"model": "smol", "prompt": "x", "max_tokens": 480, "ignore_eos": True, "stream": True}
    trust = ssl.create_default_context(cafile=tree.certificate)
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=trust, timeout=LONG_S)
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    reply = connection.getresponse()
    first = reply.readline()
    assert first.startswith(b"data: ")
    assert tree.front.state().in_flight == 1
    assert tree.front.close(drain_s=0.0) == 1
    *_, error, last = events(first + reply.read())
    connection.close()
    assert json.loads(error)["error"]["code"] == "unavailable"
    assert last == "[DONE]"
    assert tree.front.state().in_flight == 0
    assert len(tree.front.answer(PROMPTS[0]).token_ids) == PROMPTS[0].max_tokens, "the engine lives"


def test_a_quiet_engine_answers_and_serves_nobody_until_its_workers_resumed(tree: Tree, expected: list[Answer]) -> None:
    tree.front.quiet("w0")
    tree.front.quiet("w1")
    assert tree.front.state().phase == "quiet"
    tree.front.resume("w1")
    with pytest.raises(EngineError, match=r"quiet, and waits for w0"):
        tree.front.answer(PROMPTS[0])
    with pytest.raises(EngineError, match="quiet"):
        tree.front.open("127.0.0.1", free_port())
    tree.front.resume("w0")
    assert tree.front.state().phase == "up"
    assert [tree.front.answer(prompt) for prompt in PROMPTS] == expected


def test_a_prompt_that_does_not_fit_is_the_users_error(tree: Tree) -> None:
    with pytest.raises(UserError, match="512"):
        tree.front.answer(Prompt(text="word " * 600, max_tokens=4))


def test_nothing_in_the_tree_keeps_it_from_being_frozen(tree: Tree) -> None:
    """No io_uring anywhere; and the engine process holds none of the sockets that are the front's."""
    lines = tree.descendants()
    assert any("EngineCore" in line for line in lines.values()), lines
    links: dict[int, set[str]] = {
        pid: {str(one.readlink()) for one in Path(f"/proc/{pid}/fd").iterdir() if one.is_symlink()} for pid in lines
    }
    assert not [link for found in links.values() for link in found if "io_uring" in link]
    ours = {str(tree.folder / name) for name in ("w.sock", FRONT_SOCKET, inner_socket_name("w0"))}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    inodes = {f"socket:[{row[6]}]" for row in rows if row[-1] in ours}
    assert len(inodes & links[tree.process.pid]) == 2
    for pid in set(lines) - {tree.process.pid}:
        assert not inodes & links[pid]


def test_a_tree_that_is_told_to_end_while_its_engine_process_starts_ends_in_order() -> None:
    with started(tls=False) as tree:
        wait_until(lambda: "(EngineCore pid=" in tree.log, lambda: tree.log, deadline_s=START_S)
        tree.end()
        assert "told to end" in tree.log


def test_an_engine_process_that_dies_fails_the_worker_and_the_front_stays_to_tell() -> None:
    with started() as tree:
        wait_listening(tree)
        tree.front.wait_up(deadline_s=START_S)
        (core,) = [pid for pid, line in tree.descendants().items() if "EngineCore" in line]
        os.kill(core, signal.SIGKILL)
        wait_until(lambda: tree.front.state().phase == "failed", lambda: tree.log)
        with pytest.raises(EngineError, match="died"):
            tree.front.answer(PROMPTS[0])
        status = tree.control.status()
        assert status.state is WorkerState.FAILED
        assert status.error is not None
        assert "died" in status.error.message
        tree.end()


@pytest.mark.parametrize(
    ("options", "how", "error", "words"),
    [
        (("--api-key", "k"), {}, UserError, "VLLM_API_KEY"),
        ((), {"digest": "sha256:" + "0" * 64}, IntegrityError, "changed since it was pinned"),
    ],
)
def test_what_cannot_be_served_is_told_by_a_front_that_stays(
    options: tuple[str, ...], how: Mapping[str, Any], error: type[Exception], words: str
) -> None:
    with started(*options, **how) as tree:
        wait_listening(tree)
        with pytest.raises(error, match=words):
            tree.control.wait_loaded(deadline_s=START_S)
        with pytest.raises(error, match=words):
            tree.front.wait_up(deadline_s=START_S)
        tree.end()


def test_a_checkpoint_that_asks_for_a_quantised_cache_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    model = tmp_path / "m"
    shutil.copytree(MODEL, model)
    told = json.loads((model / "config.json").read_bytes())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    quantised = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}}
    (model / "config.json").write_text(
        json.dumps({**told, "quantization_config": {**quantised, "kv_cache_scheme": scheme}})
    )
    with started(tls=False, model=model) as tree:
        wait_listening(tree)
        with pytest.raises(Refused, match=r"quant_config\.kv_cache_scheme.*kv-cache-dtype: bfloat16"):
            tree.control.wait_loaded(deadline_s=START_S)
        tree.end()


def test_development_mode_is_refused_before_anything_begins() -> None:
    with started(VLLM_SERVER_DEV_MODE="1") as tree:
        assert tree.process.wait(LONG_S) == 2
        assert "VLLM_SERVER_DEV_MODE" in tree.log
        assert "unset" in tree.log
