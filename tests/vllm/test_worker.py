"""A real tree with its inner half, vLLM's front, core and worker, driven as a controller does: from load to wake."""

from __future__ import annotations

import http.client
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pydantic import BaseModel

from coldsnap.core.messages import (
    Answer,
    AnswerBody,
    Answers,
    ExportBody,
    Exported,
    PackSource,
    Prompt,
    ServeBody,
    Serving,
    SleepReport,
    Verb,
    WakeBody,
    WakeReport,
    WorkerState,
)
from coldsnap.engines.export import DIFFERS
from coldsnap.engines.observer import UNOBSERVED
from coldsnap.errors import EngineError, PayloadRejected, UsageError
from coldsnap.store.stateroot import StateRoot
from coldsnap.testing.engine_harness import free_port
from coldsnap.testing.repack import repack_with_change

from .trees import LONG_S, MODEL, START_S, Tree, started  # isort: skip

pytestmark = pytest.mark.timeout(3600)

R = TypeVar("R", bound=BaseModel)
PROMPTS = (
    Prompt(text="The capital of France is", max_tokens=8),
    Prompt(text="Water boils at a temperature of", max_tokens=12),
    Prompt(text="Once upon a time there was a fox that", max_tokens=16),
    Prompt(text="one two three four", max_tokens=4),
)
OPTIONS = ("--load-format", "coldsnap")
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Life:
    """A loaded worker of a real tree, and the verbs."""

    tree: Tree
    state_root: Path

    def call(self, verb: Verb, body: BaseModel | None, reply: type[R]) -> R:
        try:
            return self.tree.control.call(verb, body, reply=reply, deadline_s=START_S)
        except EngineError as error:
            raise AssertionError(self.tree.log) from error

    def answers(self) -> tuple[Answer, ...]:
        return self.call(Verb.ANSWER, AnswerBody(prompts=PROMPTS), Answers).answers

    def export(self) -> Exported:
        out = self.tree.folder / f"out-{next(_NUMBERS)}"
        out.mkdir(mode=0o700)
        body = ExportBody(state_root=str(self.state_root), out_dir=str(out), capture_id="c" * 32)
        return self.call(Verb.EXPORT, body, Exported)

    def sleep(self) -> SleepReport:
        return self.call(Verb.SLEEP, None, SleepReport)

    def wake(self, exported: Exported, source: PackSource = PackSource.NATIVE, **changes: object) -> WakeReport:
        assert exported.pack is not None
        assert exported.residual is not None
        body: dict[str, object] = {
            "source": source,
            "native_manifest": exported.native_manifest.path,
            "recovery_manifest": exported.recovery_manifest.path,
            "pack": exported.pack.path,
            "pack_sha256": exported.pack.sha256,
            "pack_bytes": exported.pack.bytes,
            "residual": exported.residual.path,
            "residual_sha256": exported.residual.sha256,
            "model_path": str(MODEL),
            "state_root": str(self.state_root),
        }
        return self.call(Verb.WAKE, WakeBody.model_validate({**body, **changes}), WakeReport)

    def serve(self) -> int:
        return self.call(Verb.SERVE, ServeBody(port=free_port()), Serving).port or 0


@contextmanager
def living(state_root: Path) -> Iterator[Life]:
    with started(*OPTIONS, tls=False) as tree:
        life = Life(tree, state_root)
        try:
            tree.control.wait_loaded(deadline_s=START_S, alive=lambda: tree.process.poll() is None)
        except Exception as error:
            raise AssertionError(tree.log) from error
        yield life
        tree.end()


@pytest.fixture(scope="module")
def state_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("state") / "root"
    folder.mkdir(mode=0o700)
    StateRoot.open(folder)
    return folder


@pytest.fixture(scope="module")
def cold(state_root: Path) -> tuple[Exported, tuple[Answer, ...]]:
    """What a tree of its own exports and answers that never slept."""
    with living(state_root) as life:
        return life.export(), life.answers()


@pytest.fixture(scope="module")
def life(cold: object, state_root: Path) -> Iterator[Life]:
    """Its end is a test too: every process of it ends, and every socket is gone."""
    with living(state_root) as life:
        yield life


@pytest.fixture
def awake(life: Life) -> Iterator[Life]:
    """Idle before and after a test."""
    assert life.tree.control.status().state is WorkerState.IDLE
    yield life
    assert life.tree.control.status().state is WorkerState.IDLE, life.tree.log[-4000:]


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_the_status_is_that_of_the_process_with_the_weights(awake: Life) -> None:
    status = awake.tree.control.status()
    assert (status.engine, status.worker, status.rank, status.in_flight) == ("vllm", "w0", 0, 0)
    assert status.engine_versions["vllm"]
    assert status.pid in set(awake.tree.descendants()) - {awake.tree.process.pid}
    assert status.mapped_bytes > 250 << 20
    assert status.loaded_seconds is not None


def test_it_answers_as_a_tree_that_nobody_touched(awake: Life, cold: tuple[Exported, tuple[Answer, ...]]) -> None:
    assert awake.answers() == cold[1]
    assert len({answer.token_ids for answer in cold[1]}) == len(PROMPTS)


def test_every_byte_is_accounted_for_and_two_trees_have_one_pack(
    awake: Life, cold: tuple[Exported, tuple[Answer, ...]]
) -> None:
    exported = awake.export()
    assert exported.model_bytes + exported.residual_bytes == awake.tree.control.status().mapped_bytes
    assert not {UNOBSERVED, DIFFERS} & set(exported.residual_reasons)
    assert exported.model_bytes == 269_030_016, "every stored byte of SmolLM2"
    for ours, theirs in ((exported.pack, cold[0].pack), (exported.residual, cold[0].residual)):
        assert ours is not None
        assert theirs is not None
        assert ours.sha256 == theirs.sha256
    assert exported.pack_shared


@pytest.mark.parametrize("source", [PackSource.NATIVE, PackSource.RECOVERY])
def test_it_sleeps_without_weights_and_wakes_with_the_same_answers(awake: Life, source: PackSource) -> None:
    before, exported = awake.answers(), awake.export()
    status = awake.tree.control.status()
    resident = resident_bytes(status.pid)
    slept = awake.sleep()
    asleep = awake.tree.control.status()
    assert (asleep.state, asleep.mapped_bytes) == (WorkerState.ASLEEP, 0)
    assert slept.unmapped_bytes == status.mapped_bytes
    assert resident - resident_bytes(status.pid) >= status.mapped_bytes
    with pytest.raises(UsageError, match="asleep cannot answer"):
        awake.answers()
    report = awake.wake(exported, source)
    assert (report.model_bytes, report.residual_bytes) == (exported.model_bytes, exported.residual_bytes)
    assert awake.answers() == before
    again = awake.export()
    assert (again.pack, again.residual and again.residual.sha256) == (
        exported.pack,
        exported.residual and exported.residual.sha256,
    )


def test_memory_that_nobody_filled_gives_other_answers(awake: Life) -> None:
    before, exported = awake.answers(), awake.export()
    awake.sleep()
    awake.wake(exported, PackSource.NONE)
    assert awake.answers() != before
    awake.sleep()
    awake.wake(exported)
    assert awake.answers() == before


def test_one_changed_tensor_in_a_rehashed_pack_gives_other_answers(awake: Life) -> None:
    before, exported = awake.answers(), awake.export()
    awake.sleep()
    changed = repack_with_change(exported, awake.tree.folder / "changed")
    awake.wake(
        exported,
        native_manifest=str(changed.native_manifest),
        pack=str(changed.pack),
        pack_sha256=changed.sha256,
        pack_bytes=changed.bytes,
    )
    assert awake.answers() != before
    awake.sleep()
    awake.wake(exported)
    assert awake.answers() == before


def test_one_flipped_bit_is_refused_and_it_can_be_woken_again(awake: Life) -> None:
    before, exported = awake.answers(), awake.export()
    assert exported.pack is not None
    awake.sleep()
    damaged = awake.tree.folder / "damaged.pack"
    data = bytearray(Path(exported.pack.path).read_bytes())
    data[len(data) // 3] ^= 1
    damaged.write_bytes(data)
    damaged.chmod(0o600)
    with pytest.raises(PayloadRejected):
        awake.wake(exported, pack=str(damaged))
    assert awake.tree.control.status().state is WorkerState.ASLEEP
    awake.wake(exported)
    assert awake.answers() == before


def post(port: int, body: dict[str, Any]) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        reply = connection.getresponse()
        data = reply.read()
        assert reply.status == 200, data
        return data
    finally:
        connection.close()


def test_http_after_a_wake_gives_the_tokens_of_the_control_socket(awake: Life) -> None:
    expected, exported = awake.answers(), awake.export()
    first = awake.serve()
    awake.sleep()
    with pytest.raises(ConnectionRefusedError):
        post(first, {})
    awake.wake(exported)
    port = awake.serve()
    assert awake.tree.control.status().state is WorkerState.SERVING
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        body = {"model": "smol", "prompt": prompt.text, "max_tokens": prompt.max_tokens, "temperature": 0}
        [choice] = json.loads(post(port, {**body, "return_token_ids": True}))["choices"]
        assert (tuple(choice["token_ids"]), choice["text"]) == (answer.token_ids, answer.text)
        lines = [
            line[6:] for line in post(port, {**body, "stream": True}).decode().splitlines() if line[:6] == "data: "
        ]
        assert lines.pop() == "[DONE]"
        assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == answer.text
    awake.call(Verb.STOP_SERVING, None, Serving)
