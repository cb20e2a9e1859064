"""A template of a real model: built from what was read before the freeze, wherever it lands, or refused by name."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig

from coldsnap.core.messages import PackSource, Prompt, WorkerState
from coldsnap.engines.settings import model_source_from
from coldsnap.engines.transformers.engine import TransformersEngine
from coldsnap.engines.transformers.options import parse_options
from coldsnap.engines.transformers.plugin import PLUGIN
from coldsnap.errors import MissingCapability, Refused, UserError
from coldsnap.testing.engine_harness import driven

pytestmark = pytest.mark.model

THERE, HERE = 0x5100_0000_0000, 0x5200_0000_0000
PROMPTS = (Prompt(text="The capital of France is", max_tokens=8), Prompt(text="x", max_tokens=8))


def engine(folder: Path, **options: object) -> TransformersEngine:
    model = PLUGIN.resolve_model(str(folder))
    source = model_source_from(PLUGIN.settings_options(model, {}))
    return TransformersEngine(model.path, source, parse_options({"num_threads": 1, **options}))


@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}, {"load_order": "shuffled:3"}])
def test_it_needs_no_file_of_the_checkpoint_once_it_is_a_template(
    tiny: Path, tmp_path: Path, options: dict[str, object]
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "checkpoint")
    with (
        driven(engine(folder, **options), tmp_path / "a", base=THERE) as live,
        driven(engine(folder, **options), tmp_path / "t", base=HERE, template=True) as template,
    ):
        exported, answers = live.export(), live.answers(PROMPTS)
        shutil.rmtree(folder)
        placed = template.place(exported, model_path=None)
        assert placed.wake is not None
        assert {"memory", "build", "wake"} <= placed.seconds.keys()
        assert template.answers(PROMPTS) == answers


def test_a_recovery_reads_the_checkpoint_from_where_it_is_now(tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "checkpoint")
    with (
        driven(engine(folder), tmp_path / "a", base=THERE) as live,
        driven(engine(folder), tmp_path / "t", base=HERE, template=True) as template,
    ):
        exported, answers = live.export(), live.answers(PROMPTS)
        folder.rename(tmp_path / "moved")
        template.place(exported, PackSource.RECOVERY, pack=None, model_path=str(tmp_path / "moved"))
        assert template.answers(PROMPTS) == answers


def test_another_order_in_the_arena_is_refused(tiny: Path, tmp_path: Path) -> None:
    """Also where nothing but the tag could tell: every byte of a cast model is residual."""
    with (
        driven(engine(tiny, dtype="float32"), tmp_path / "a", base=THERE) as live,
        driven(engine(tiny, dtype="float32", load_order="reverse"), tmp_path / "t", base=HERE, template=True) as other,
    ):
        exported = live.export()
        with pytest.raises(Refused, match=r"entries\[0\]: was .* bytes of 'weights-"):
            other.place(exported)
        assert other.client.status().state is WorkerState.FAILED


def test_a_model_that_transformers_must_load_itself_is_refused_when_it_is_captured(tmp_path: Path, tiny: Path) -> None:
    config = MixtralConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=64,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "m")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path / "m")
    with driven(engine(tmp_path / "m"), tmp_path / "t", base=HERE, template=True) as template:
        with pytest.raises(UserError, match="cannot be built from its metadata") as caught:
            template.place()
        assert "experts" in caught.value.message
        assert caught.value.cure is not None
        assert "n610" in caught.value.cure
        assert template.memory.allocations == ()


def test_a_template_for_a_gpu_has_its_bindings_and_makes_no_call(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    driver = ModuleType("cuda.bindings.driver")
    driver.__getattr__ = asked.append  # type: ignore[method-assign] # what a call would look up
    package = ModuleType("cuda.bindings")
    package.driver = driver  # type: ignore[attr-defined]
    for name, module in {"cuda": ModuleType("cuda"), "cuda.bindings": package, "cuda.bindings.driver": driver}.items():
        monkeypatch.setitem(sys.modules, name, module)
    engine(tiny, device="cuda").prepare_template()
    assert [name for name in asked if not name.startswith("__")] == []


def test_a_template_for_a_gpu_without_its_bindings_is_told_at_once(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(MissingCapability, match="cuda-bindings"):
        engine(tiny, device="cuda").prepare_template()
