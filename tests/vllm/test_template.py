"""Real trees that wait as templates: one is placed and loads, others build the same model and read none of it."""

from __future__ import annotations

import os
import shutil
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
    PlaceBody,
    Placed,
    Prompt,
    SleepReport,
    Verb,
    WakeBody,
    WakeReport,
    WorkerState,
)
from coldsnap.engines.frames import error_frame
from coldsnap.errors import EngineError, IntegrityError, UsageError, UserError
from coldsnap.store.stateroot import StateRoot

from .trees import MODEL, START_S, Tree, started, wait_listening, wait_until  # isort: skip

pytestmark = pytest.mark.timeout(3600)

R = TypeVar("R", bound=BaseModel)
PROMPTS = (
    Prompt(text="The capital of France is", max_tokens=8),
    Prompt(text="Water boils at a temperature of", max_tokens=12),
    Prompt(text="Once upon a time there was a fox that", max_tokens=16),
)
OPTIONS = ("--load-format", "coldsnap")


@dataclass(frozen=True)
class Template:
    """A tree in state `template`, or placed, and the verbs."""

    tree: Tree
    state_root: Path
    model: Path

    def call(self, verb: Verb, body: BaseModel | None, reply: type[R]) -> R:
        try:
            return self.tree.control.call(verb, body, reply=reply, deadline_s=START_S)
        except (EngineError, UsageError) as error:
            raise AssertionError(f"{self.tree.control.status().error}\n{self.tree.log}") from error

    def load(self) -> Placed:
        return self.call(Verb.PLACE, PlaceBody(environment={"WHO": "loaded"}), Placed)

    def build(self, exported: Exported, source: PackSource) -> Placed:
        return self.call(Verb.PLACE, PlaceBody(wake=self.wake_body(exported, source)), Placed)

    def answers(self) -> tuple[Answer, ...]:
        return self.call(Verb.ANSWER, AnswerBody(prompts=PROMPTS), Answers).answers

    def export(self, name: str) -> Exported:
        out = self.tree.folder / name
        out.mkdir(mode=0o700)
        body = ExportBody(state_root=str(self.state_root), out_dir=str(out), capture_id="c" * 32)
        return self.call(Verb.EXPORT, body, Exported)

    def wake_body(self, exported: Exported, source: PackSource) -> WakeBody:
        assert exported.pack is not None
        assert exported.residual is not None
        return WakeBody(
            source=source,
            native_manifest=exported.native_manifest.path,
            recovery_manifest=exported.recovery_manifest.path,
            pack=exported.pack.path,
            pack_sha256=exported.pack.sha256,
            pack_bytes=exported.pack.bytes,
            residual=exported.residual.path,
            residual_sha256=exported.residual.sha256,
            model_path=str(self.model),
            state_root=str(self.state_root),
        )


def forget_data(path: Path) -> None:
    """Only the header is left of a checkpoint's file, and a hole of the rest's size."""
    size, header = path.stat().st_size, 8 + int.from_bytes(path.read_bytes()[:8], "little")
    os.truncate(path, header)
    os.truncate(path, size)


@contextmanager
def waiting(state_root: Path, folder: Path) -> Iterator[Template]:
    """A tree over a copy of the model in `folder`, when it waits to be placed."""
    model = folder / "smollm2"
    shutil.copytree(MODEL, model)
    with started(*OPTIONS, tls=False, model=model, template=True) as tree:
        wait_listening(tree)

        def is_ready() -> bool:
            status = tree.control.status()
            assert status.state is not WorkerState.FAILED, status.error
            return status.state is WorkerState.TEMPLATE

        wait_until(is_ready, lambda: tree.log, deadline_s=START_S)
        yield Template(tree, state_root, model)
        tree.end()


@pytest.fixture(scope="module")
def state_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("state") / "root"
    folder.mkdir(mode=0o700)
    StateRoot.open(folder)
    return folder


@pytest.fixture(scope="module")
def captured(state_root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Exported, tuple[Answer, ...]]:
    """A template that was placed and loaded: its export, whose files stay, and its answers."""
    folder = tmp_path_factory.mktemp("captured")
    with waiting(state_root, folder) as template:
        assert template.tree.descendants().keys() == {template.tree.process.pid}, "a template has no engine process"
        placed = template.load()
        assert placed.wake is None
        exported, answers = template.export("out"), template.answers()
        kept = folder / "out"
        shutil.copytree(template.tree.folder / "out", kept)

    def moved(name: str) -> str:
        return str(kept / Path(name).name)

    assert exported.residual is not None
    residual = exported.residual.model_copy(update={"path": moved(exported.residual.path)})
    changes: dict[str, object] = {"residual": residual}
    for name in ("native_manifest", "recovery_manifest"):
        file = getattr(exported, name)
        changes[name] = file.model_copy(update={"path": moved(file.path)})
    return exported.model_copy(update=changes), answers


def test_a_build_reads_no_tensor_and_answers_from_the_pack(
    captured: tuple[Exported, tuple[Answer, ...]], state_root: Path, tmp_path: Path
) -> None:
    exported, answers = captured
    assert exported.model_bytes == 269_030_016, "every stored byte of SmolLM2"
    with waiting(state_root, tmp_path) as template:
        for file in template.model.glob("*.safetensors"):
            forget_data(file)
        placed = template.build(exported, PackSource.NATIVE)
        assert placed.wake is not None
        assert placed.wake.model_bytes == exported.model_bytes
        assert placed.wake.residual_bytes == exported.residual_bytes
        assert {"build", "wake"} <= placed.seconds.keys()
        assert template.answers() == answers
        status = template.tree.control.status()
        assert (status.state, status.mapped_bytes) == (
            WorkerState.IDLE,
            exported.model_bytes + exported.residual_bytes,
        )
        template.call(Verb.SLEEP, None, SleepReport)
        assert template.tree.control.status().mapped_bytes == 0
        template.call(Verb.WAKE, template.wake_body(exported, PackSource.NATIVE), WakeReport)
        assert template.answers() == answers


def test_a_built_model_is_filled_from_the_checkpoint_and_exports_the_same_pack(
    captured: tuple[Exported, tuple[Answer, ...]], state_root: Path, tmp_path: Path
) -> None:
    exported, answers = captured
    with waiting(state_root, tmp_path) as template:
        placed = template.build(exported, PackSource.RECOVERY)
        assert placed.wake is not None
        assert placed.wake.model_bytes == exported.model_bytes
        assert template.answers() == answers
        again = template.export("again")
        assert again.pack == exported.pack
        assert again.residual is not None
        assert exported.residual is not None
        assert again.residual.sha256 == exported.residual.sha256
        assert again.residual_reasons == exported.residual_reasons


def test_a_build_refused_while_it_is_filled_says_why_and_its_tree_ends_in_order(
    captured: tuple[Exported, tuple[Answer, ...]], state_root: Path, tmp_path: Path
) -> None:
    exported, _ = captured
    assert exported.residual is not None
    blob = tmp_path / "weights.blob"
    data = bytearray(Path(exported.residual.path).read_bytes())
    data[0] ^= 0xFF
    blob.write_bytes(data)
    residual = exported.residual.model_copy(update={"path": str(blob)})
    with waiting(state_root, tmp_path) as template:
        wake = template.wake_body(exported.model_copy(update={"residual": residual}), PackSource.NATIVE)
        with pytest.raises(IntegrityError, match=r"weights\.blob") as caught:
            template.tree.control.call(Verb.PLACE, PlaceBody(wake=wake), reply=Placed, deadline_s=START_S)
        status = template.tree.control.status()
        assert (status.state, status.error) == (WorkerState.FAILED, error_frame(caught.value))
    # `waiting` has ended it: with status 0, where a process that waits on would have been cut short with another


def test_a_loader_that_reads_into_the_device_is_refused_for_a_template() -> None:
    from vllm.config.load import LoadConfig

    from coldsnap.engines.observer import Observer
    from coldsnap.engines.vllm.hostpool import HostPool
    from coldsnap.engines.vllm.loader import ColdsnapLoader
    from coldsnap.engines.vllm.loading import Load, Way

    extra = {"load_format": "fastsafetensors"}
    loader = ColdsnapLoader(LoadConfig(load_format="coldsnap", model_loader_extra_config=extra))
    for load in (
        Load(observer=Observer(), memory=HostPool(), files=(), is_template=True),
        Load(observer=Observer(), memory=HostPool(), files=(), way=Way.BUILD),
    ):
        with pytest.raises(UserError, match="'fastsafetensors' takes memory of the device"):
            loader._load(load, None, None, "")


def test_what_an_engine_process_runs_is_imported_ahead(play: Any) -> None:
    found = play("imports.py", MODEL)
    assert found["missing"] == []
    assert not found["touched"]
    wanted = {
        "coldsnap.engines.vllm.loader",
        "vllm.model_executor.models.llama",
        "vllm.v1.attention.backends.cpu_attn",
        "vllm.v1.executor.multiproc_executor",
        "vllm.v1.worker.cpu_model_runner",
    }
    assert wanted <= set(found["ahead"])
    engine = ("model_executor.models", "model_executor.model_loader", "v1.attention", "v1.core", "v1.worker")
    late = [name for name in found["late"] if name.startswith(tuple(f"vllm.{one}." for one in engine))]
    assert late == []
