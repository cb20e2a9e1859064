"""What a proof of vLLM works on: vLLM on this machine's GPU, vLLM on the processor, or the fake engine.

One record says everything that differs, so that the steps are the same for all three.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._proof_tools import FAKE_TENSORS
from benchmarks._vllm_fake import fake_tools
from benchmarks.drivers import library_path

from coldsnap.cli.wiring import installed_engines, make_tools
from coldsnap.core.drivers import DriverId
from coldsnap.engines.protocol import EnginePlugin
from coldsnap.ops.copies import drop_copies, unused_copies
from coldsnap.ops.demo_parts import ACCEPTANCE
from coldsnap.ops.live import stop_service
from coldsnap.ops.planning import choose_engine
from coldsnap.ops.tools import Tools
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.engine import PLUGIN

CPU_MODEL = "smollm2"
FAKE_MODEL = "fake"
_ENGINE = "vllm"
_MODEL_S = 540
_SHARD_BYTES = 1 << 30  # many threads hash a checkpoint when it is pinned
# A prompt that is asked again must be computed as it was the first time, with as many rows.
_SERVE = {"enable_prefix_caching": False}
# FlashInfer is not in the bundle, and no kernel may be compiled by it.
_GPU_ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0"}
_CPU_ENVIRONMENT = {
    "GOMP_SPINCOUNT": "1000",
    "KMP_BLOCKTIME": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Engine, tools and models; ``program`` is the command ``coldsnap``.

    ``drivers``: that of the main step first. ``plain``: whether the engine has a server of its own to start cold.
    ``keys``: more of the recipe. ``another_order``: options with which the same weights lie elsewhere in memory.
    """

    kind: str
    tools: Tools
    plugin: EnginePlugin
    program: Sequence[str]
    folder: Path
    drivers: Sequence[DriverId]
    serve: Mapping[str, Any]
    model: Callable[[str], Path]
    environment: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    another_order: Mapping[str, Any] = field(default_factory=dict)
    plain: bool = False

    @property
    def caches(self) -> Path:
        """Where compiled files go: those of cold starts and of captures, and what a capture seeds."""
        return self.folder / "caches"

    def recipe(self, name: str, model: Path, driver: DriverId, **changes: Any) -> Path:
        """Write a recipe's file (JSON is YAML); ``changes`` are its keys."""
        recipe = {
            "name": name,
            "engine": self.plugin.name,
            "model": str(model),
            "driver": driver.value,
            "serve": {**self.serve, **changes.pop("serve", {})},
            "environment": {**self.environment, **changes.pop("environment", {})},
            "validation": {"prompts": [prompt.model_dump() for prompt in ACCEPTANCE]},
            **self.keys,
            **changes,
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(recipe, indent=1), encoding="utf-8")
        return path

    def tidy(self) -> None:
        """End what a failed step, or a call before this one, left running, and take its packs out of memory."""
        for name in self.tools.services.names():
            stop_service(self.tools, name)
        drop_copies(self.tools, unused_copies(self.tools))

    def close(self) -> None:
        """Tidy, and let go of the tools."""
        self.tidy()
        self.tools.host.close()


def gpu_subject(folder: Path, serve: Mapping[str, Any], environment: Mapping[str, str]) -> Subject:
    """vLLM on the first GPU, with CUDA graphs, `torch.compile` and sleep mode."""
    own = _GPU_ENVIRONMENT | library_path(os.environ) | _cache_environment(folder)
    return Subject(
        kind="gpu",
        tools=make_tools(_state(folder)),
        plugin=choose_engine(installed_engines(), _ENGINE),
        program=(sys.executable, "-m", "coldsnap.cli"),
        folder=folder,
        drivers=(DriverId.N610, DriverId.N580),
        serve={"max_model_len": 4096, **_SERVE, **serve},
        environment={**own, **environment},
        another_order={"max_num_seqs": 64},
        model=lambda size: random_model(folder / "models", size),
        plain=True,
    )


def cpu_subject(
    folder: Path,
    model: Path | None,
    serve: Mapping[str, Any],
    environment: Mapping[str, str],
    *,
    python: Path | None,
) -> Subject:
    """vLLM's build for processors in ``python``, with a small real model that is made elsewhere (`./run model`)."""

    def found(size: str) -> Path:
        if size != CPU_MODEL:
            return random_model(folder / "models", size)
        if model is None:
            raise ValueError("--model is missing: ./run model makes it and prints its folder")
        return model

    return Subject(
        kind="cpu",
        tools=make_tools(_state(folder)),
        plugin=choose_engine(installed_engines(), _ENGINE),
        program=(sys.executable, "-m", "coldsnap.cli"),
        folder=folder,
        drivers=(DriverId.HOST,),
        keys={"python": str(python)} if python is not None else {},
        serve={"device": "cpu", "max_model_len": 512, "enforce_eager": True, **_SERVE, **serve},
        environment={**_CPU_ENVIRONMENT, **_cache_environment(folder), **environment},
        model=found,
    )


def fake_subject(folder: Path, serve: Mapping[str, Any], environment: Mapping[str, str]) -> Subject:
    """The fake engine in real processes on fake GPUs."""
    rack, state = folder / "gpus", _state(folder)
    return Subject(
        kind="fake",
        tools=fake_tools(rack, state),
        plugin=PLUGIN,
        program=(sys.executable, "-m", "benchmarks._vllm_fake", str(rack)),
        folder=folder,
        drivers=(DriverId.N610, DriverId.N580),
        serve={"gpu": str(rack), **serve},
        environment=environment,
        model=lambda size: write_checkpoint(folder / f"models-{size}", tensors=FAKE_TENSORS),
    )


def random_model(models: Path, size: str) -> Path:
    """A checkpoint of random weights; ``0.6b-fp8`` is one of ``0.6b`` in FP8. Made by processes of their own."""
    out = models / size
    if size.endswith("-fp8"):
        source = random_model(models, size.removesuffix("-fp8"))
        words = ["benchmarks._vllm_fp8", str(source), str(out)]
        if out.exists():
            return out
    else:
        words = ["coldsnap.engines.transformers.checkpoints", "random", str(out), "--size", size]
        words += ["--shard-bytes", str(_SHARD_BYTES)]
    subprocess.run([sys.executable, "-m", *words], check=True, timeout=_MODEL_S)
    return out


def _state(folder: Path) -> Path:
    return folder / "state"


def _cache_environment(folder: Path) -> dict[str, str]:
    """Compiled files in one place, which outlives a call."""
    caches = folder / "caches"
    if (away := folder / "caches-away").exists():  # a call before this one was killed
        shutil.rmtree(caches, ignore_errors=True)
        away.rename(caches)
    names = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    for name in names:
        (caches / name.lower()).mkdir(parents=True, exist_ok=True)
    return {name: str(caches / name.lower()) for name in names}
