"""The engine's contract on a real GPU. Not collected by name:

    pytest -p no:cacheprovider tests/engines/transformers/gpu_contract.py

The same promises as on the processor, each answer computed by a captured graph over a fixed cache, and what only a GPU
can break: descriptors that no checkpoint takes along, and answers that differ between processes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what the entry point does

import pytest

from coldsnap.core.messages import (
    Answer,
    AnswerBody,
    Answers,
    PlaceBody,
    Placed,
    Prompt,
    SleepReport,
    Verb,
    WorkerSettings,
    WorkerState,
    WorkerStatus,
)
from coldsnap.engines.control import ControlClient
from coldsnap.engines.process import EXIT_S
from coldsnap.engines.settings import model_source_from
from coldsnap.engines.transformers.device import CudaAccelerator
from coldsnap.engines.transformers.engine import TransformersEngine
from coldsnap.engines.transformers.options import parse_options
from coldsnap.engines.transformers.plugin import PLUGIN
from coldsnap.hydrate.cuda import CudaMemory, open_driver
from coldsnap.testing.engine_suite import EngineContract

PROMPTS = (
    Prompt(text="The capital of France is", max_tokens=32),
    Prompt(text="one two three four", max_tokens=32),
    Prompt(text="x", max_tokens=8),
)
ON_GPU: dict[str, object] = {"device": "cuda", "kv_cache_tokens": 256}


def engine_of(folder: Path, **options: object) -> TransformersEngine:
    model = PLUGIN.resolve_model(str(folder))
    source = model_source_from(PLUGIN.settings_options(model, {}))
    return TransformersEngine(model.path, source, parse_options({**ON_GPU, **options}))


class OnGpu(EngineContract):
    BASES = (0x4000_0000_0000, 0x4400_0000_0000)
    OPTIONS: dict[str, object] = {}  # noqa: RUF012 - a constant of each subclass

    @pytest.fixture(autouse=True)
    def _checkpoint(self, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        self.checkpoint = tiny
        caches: list[CudaMemory] = []

        def cache_memory(accelerator: CudaAccelerator) -> CudaMemory:
            caches.append(CudaMemory(open_driver(), base=0x4800_0000_0000 + (len(caches) << 40)))
            return caches[-1]

        monkeypatch.setattr(CudaAccelerator, "cache_memory", cache_memory)  # several engines in one process
        yield
        for cache in caches:
            cache.close()

    def make_memory(self, base: int) -> CudaMemory:
        return CudaMemory(open_driver(), base=base)

    def make(self, variant: int) -> TransformersEngine:
        other: dict[str, object] = {"load_order": "shuffled:7", "arena_base": "0x530000000000"} if variant else {}
        return engine_of(self.checkpoint, **self.OPTIONS, **other)

    def make_damaged(self, folder: Path) -> TransformersEngine:
        shutil.copytree(self.checkpoint, folder)
        engine = engine_of(folder, **self.OPTIONS)
        (folder / "model.safetensors").write_bytes(b"\xff" * 100)
        return engine


class TestCapturedGraph(OnGpu):
    pass


class TestFixedCacheWithoutGraph(OnGpu):
    OPTIONS = {"cuda_graph": False}  # noqa: RUF012


class TestGrowingCache(OnGpu):
    OPTIONS = {"cuda_graph": False, "kv_cache_tokens": 0}  # noqa: RUF012


@contextmanager
def process(folder: Path, model_folder: Path, *, template: bool) -> Iterator[tuple[ControlClient, int]]:
    """The engine as coldsnap starts it, and its pid."""
    folder.mkdir()
    model = PLUGIN.resolve_model(str(model_folder))
    settings = WorkerSettings(
        worker="w0",
        unit="u0",
        rank=0,
        socket=str(folder / "w.sock"),
        template=template,
        options=PLUGIN.settings_options(model, {}),
    )
    (folder / "settings.json").write_text(settings.model_dump_json())
    command = PLUGIN.unit_command(model, PLUGIN.options(ON_GPU), host="127.0.0.1", port=8000, python=sys.executable)
    environment = {**os.environ, **PLUGIN.unit_environment(()), "COLDSNAP_SETTINGS": str(folder / "settings.json")}
    with (folder / "log").open("wb") as log, subprocess.Popen(command, env=environment, stdout=log, stderr=log) as one:
        try:
            client = ControlClient(folder / "w.sock")
            client.wait_loaded(deadline_s=300, alive=lambda: one.poll() is None)
            yield client, one.pid
        finally:
            one.send_signal(signal.SIGTERM)
            try:
                assert one.wait(EXIT_S + 5) == 0
            finally:
                say((folder / "log").read_text())


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def ask(client: ControlClient, prompts: Sequence[Prompt] = PROMPTS) -> tuple[Answer, ...]:
    return client.call(Verb.ANSWER, AnswerBody(prompts=tuple(prompts)), reply=Answers, deadline_s=120).answers


def device_files(pid: int) -> list[str]:
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        target = str(link.readlink())
        if "nvidia" in target:
            found.append(target)
    return sorted(found)


def driver_libraries(pid: int) -> list[str]:
    """Libraries of the NVIDIA driver itself, which belong to one version of it."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    mapped = {line.split(maxsplit=5)[-1] for line in lines if line.count(" ") > 4}
    return sorted(one for one in mapped if any(name in one for name in ("libcuda.so", "libnvidia-", "/dev/nvidia")))


def test_a_template_touches_no_device_and_answers_like_a_cold_start(tiny: Path, tmp_path: Path) -> None:
    with process(tmp_path / "cold", tiny, template=False) as (cold, _):
        expected = ask(cold)
        assert ask(cold) == expected
    with process(tmp_path / "template", tiny, template=True) as (client, pid):
        status = client.status()
        libraries = driver_libraries(pid)
        say(f"the template maps {libraries}")  # importing torch alone maps libcuda
        assert (status.state, device_files(pid)) == (WorkerState.TEMPLATE, [])
        assert [one for one in libraries if "libcuda.so" not in one] == []
        environment = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
        placed = client.call(Verb.PLACE, PlaceBody(environment=environment), reply=Placed, deadline_s=300)
        say(f"placed in {placed.seconds}")
        assert ask(client) == expected


def test_a_sleeping_process_holds_nothing_of_nvml(tiny: Path, tmp_path: Path) -> None:
    with process(tmp_path / "cold", tiny, template=False) as (client, pid):
        ask(client)
        report = client.call(Verb.SLEEP, reply=SleepReport, deadline_s=60)
        say(f"asleep: {report}, {device_files(pid)}, {driver_libraries(pid)}")
        assert report.held_device_bytes < 512 << 20
        assert [one for one in driver_libraries(pid) if "libnvidia-ml" in one] == []
        status = client.call(Verb.STATUS, reply=WorkerStatus, deadline_s=60)
        assert (status.state, status.mapped_bytes) == (WorkerState.ASLEEP, 0)
