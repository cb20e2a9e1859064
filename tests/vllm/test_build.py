"""vLLM's own model, built without a byte of its checkpoint in one process, and loaded in another: laid out alike."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coldsnap.engines.settings import SETTINGS_VARIABLE
from coldsnap.engines.transformers.checkpoints import random_weights
from coldsnap.engines.transformers.checkpoints.random_weights import ModelShape, make_random
from coldsnap.engines.transformers.checkpoints.smollm2 import make_smollm2

OURS = {SETTINGS_VARIABLE: "/nowhere/settings.json"}
CACHE = Path(__file__).parents[2] / ".cache"
SMALL = ModelShape(
    architecture="qwen3",
    hidden=256,
    layers=2,
    heads=4,
    key_value_heads=2,
    intermediate=512,
    vocabulary=330,
    head_dim=64,
    tied_embeddings=False,
)


@dataclass(frozen=True)
class Pair:
    """A model, its copy with holes in the place of its data, and what a load of it found."""

    model: Path
    headers: Path
    folder: Path
    loaded: dict[str, Any]


@pytest.fixture(scope="module", params=["qwen3", "smollm2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, play: Any) -> Pair:
    folder = tmp_path_factory.mktemp("build", numbered=True)
    if request.param == "smollm2":
        model = make_smollm2(CACHE / "models/smollm2", cache=CACHE / "downloads")
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(random_weights, "SIZES", {"small": SMALL})
            model = make_random(folder / "model", size="small", shard_bytes=1 << 20)
    headers = folder / "headers"
    shutil.copytree(model, headers)
    for path in headers.glob("*.safetensors"):
        size, end = path.stat().st_size, 8 + int.from_bytes(path.read_bytes()[:8], "little")
        os.truncate(path, end)
        os.truncate(path, size)
    loaded = play("build.py", "load", model, folder, model, "bfloat16", environment=OURS)
    assert "error" not in loaded, loaded["error"]
    return Pair(model, headers, folder, loaded)


@pytest.mark.parametrize("source", ["native", "recovery"])
def test_a_build_is_laid_out_as_a_load_and_answers_when_it_is_filled(pair: Pair, play: Any, source: str) -> None:
    built = play("build.py", source, pair.headers, pair.folder, pair.model, "bfloat16", environment=OURS)
    assert "error" not in built, built["error"]
    assert built["layout"] == pair.loaded["layout"]
    assert built["allocated"] == pair.loaded["allocated"]
    assert built["wake"]["model_bytes"] == pair.loaded["exported"]["model_bytes"] > 0
    assert built["wake"]["residual_bytes"] == pair.loaded["exported"]["residual_bytes"]
    assert built["answers"] == pair.loaded["answers"]


def test_a_build_of_other_numbers_is_refused(pair: Pair, play: Any) -> None:
    """What was copied at capture would be cast here."""
    built = play("build.py", "native", pair.headers, pair.folder, pair.model, "float32", environment=OURS)
    assert "the model that was built here has" in built["error"]
    assert "answers" not in built
