"""The loader against Transformers' own: the same logits, and every byte accounted for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig

from coldsnap.core.extents import residual_ranges
from coldsnap.engines.local_model import checkpoint_files
from coldsnap.engines.observer import Observation, Observer, reason_bytes
from coldsnap.engines.transformers.arena import PADDING
from coldsnap.engines.transformers.checkpoints import make_random
from coldsnap.engines.transformers.filling import COMPUTED, DERIVED
from coldsnap.engines.transformers.loading import load_model, read_config
from coldsnap.engines.transformers.options import parse_options
from coldsnap.errors import InvalidDocument, ResourceBusy, UserError
from coldsnap.hydrate.host import HostMemory

pytestmark = pytest.mark.model

IDS = torch.tensor([[5, 17, 99, 3, 250]])


@dataclass(frozen=True, kw_only=True)
class Loaded:
    model: Any
    memory: HostMemory
    observation: Observation

    def logits(self) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self.model(input_ids=IDS).logits
        return logits

    def copied(self) -> set[str]:
        return {name for one in self.observation.extents for name, _, _ in one.range.tensors}

    def reasons(self) -> dict[str, int]:
        kept = [(one.range.ptr, one.range.size) for one in self.observation.extents]
        left = residual_ranges(self.memory.allocations, kept)
        return reason_bytes([(ptr, size) for ptr, size, _ in left], self.observation.labels)


Load = Callable[..., Loaded]


@pytest.fixture
def load() -> Iterator[Load]:
    with HostMemory(base=0x5100_0000_0000) as memory:

        def act(folder: Path, **options: object) -> Loaded:
            observer = Observer()
            model = load_model(
                folder, read_config(folder), checkpoint_files(folder), parse_options(options), memory, observer
            )
            observation = observer.observation(memory.allocations)
            return Loaded(model=model, memory=memory, observation=observation)

        yield act


def state(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a one-file checkpoint."""
    return dict(load_file(folder / "model.safetensors"))


def changed_copy(
    folder: Path,
    out: Path,
    tensors: Mapping[str, torch.Tensor] | None = None,
    config: Mapping[str, object] | None = None,
) -> Path:
    """A copy of `folder` with other tensors, or with members of its configuration changed."""
    shutil.copytree(folder, out)
    if tensors is not None:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    if config is not None:
        path = out / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return out


def reference(folder: Path, **options: object) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=IDS).logits
    return logits


@pytest.mark.parametrize("size", ["tiny", "tiny-llama", "tiny-gpt2"])
def test_a_plain_checkpoint_is_copied_byte_for_byte(tmp_path: Path, load: Load, size: str) -> None:
    folder = make_random(tmp_path / "m", size=size, shard_bytes=60_000)
    loaded = load(folder)
    assert torch.equal(loaded.logits(), reference(folder))
    assert loaded.copied() == {tensor.name for file in checkpoint_files(folder) for tensor in file.tensors}
    assert set(loaded.reasons()) <= {PADDING, COMPUTED}
    arena = loaded.memory.allocations[0]
    for name, tensor in (*loaded.model.named_parameters(), *loaded.model.named_buffers()):
        assert arena.ptr <= tensor.data_ptr() < arena.ptr + arena.size, name
        assert tensor.data_ptr() % (4096 if tensor.numel() * tensor.element_size() >= 4096 else 64) == 0, name


def test_tied_weights_stay_one_tensor(tiny: Path, load: Load) -> None:
    model = load(tiny).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tied_weights_stored_twice_and_equal_are_copied_once(tmp_path: Path, tiny: Path, load: Load) -> None:
    tensors = state(tiny)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    folder = changed_copy(tiny, tmp_path / "m", tensors)
    loaded = load(folder)
    assert torch.equal(loaded.logits(), reference(folder))
    assert len(loaded.copied() & {"lm_head.weight", "model.embed_tokens.weight"}) == 1
    assert DERIVED not in loaded.reasons()


def test_tied_weights_stored_twice_and_different_follow_transformers(tmp_path: Path, tiny: Path, load: Load) -> None:
    tensors = state(tiny)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0)
    folder = changed_copy(tiny, tmp_path / "m", tensors)
    loaded = load(folder)
    assert torch.equal(loaded.logits(), reference(folder))
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= loaded.copied()


def test_another_number_type_is_a_cast_and_not_a_copy(tiny: Path, load: Load) -> None:
    loaded = load(tiny, dtype="float32")
    assert torch.equal(loaded.logits(), reference(tiny, dtype=torch.float32))
    assert loaded.copied() == set()
    (cast,) = (reason for reason in loaded.reasons() if reason.startswith("cast from BF16"))
    assert loaded.reasons()[cast] == sum(2 * t.size for file in checkpoint_files(tiny) for t in file.tensors)


def test_one_tensor_of_another_type_is_the_only_one_cast(tmp_path: Path, tiny: Path, load: Load) -> None:
    tensors = state(tiny)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float32)
    folder = changed_copy(tiny, tmp_path / "m", tensors)
    loaded = load(folder)
    assert torch.equal(loaded.logits(), reference(folder))
    assert loaded.copied() == tensors.keys() - {"model.norm.weight"}


def test_names_without_the_base_models_prefix_are_still_copies(tmp_path: Path, load: Load) -> None:
    folder = make_random(tmp_path / "a", size="tiny-gpt2")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in state(folder).items()}
    loaded = load(changed_copy(folder, tmp_path / "b", tensors))
    assert torch.equal(loaded.logits(), reference(folder))
    assert loaded.copied() == tensors.keys()


def test_buffers_that_old_checkpoints_hold_are_left_aside(tmp_path: Path, tiny: Path, load: Load) -> None:
    tensors = state(tiny)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    loaded = load(changed_copy(tiny, tmp_path / "m", tensors))
    assert torch.equal(loaded.logits(), reference(tiny))
    assert DERIVED not in loaded.reasons()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_that_transformers_fuses_are_accounted_for(tmp_path: Path, load: Load, dtype: str) -> None:
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
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "m")
    loaded = load(tmp_path / "m", dtype=dtype)
    assert torch.equal(loaded.logits(), reference(tmp_path / "m", dtype=getattr(torch, dtype)))
    if dtype == "float32":
        stored = sum(tensor.size for file in checkpoint_files(tmp_path / "m") for tensor in file.tensors)
        assert (loaded.copied(), loaded.reasons()[DERIVED]) == (set(), 2 * stored)
        return
    # Every expert lies whole in the fused tensor, so it is the checkpoint's, slice by slice, and keeps its own name.
    assert loaded.copied() == {tensor.name for file in checkpoint_files(tmp_path / "m") for tensor in file.tensors}
    assert DERIVED not in loaded.reasons()


@pytest.mark.parametrize(
    ("change", "names", "says"),
    [
        (lambda t: t.pop("model.norm.weight"), {"model.norm.weight"}, "no source"),
        (lambda t: t.update(stray=torch.ones(3)), {"stray"}, "no destination"),
        (lambda t: t.update({"model.norm.weight": torch.ones(7)}), {"model.norm.weight"}, "another shape"),
    ],
)
def test_a_tensor_without_a_partner_is_named(
    tmp_path: Path,
    tiny: Path,
    load: Load,
    change: Callable[[dict[str, torch.Tensor]], object],
    names: set[str],
    says: str,
) -> None:
    tensors = state(tiny)
    change(tensors)
    folder = changed_copy(tiny, tmp_path / "m", tensors)
    with pytest.raises((InvalidDocument, UserError), match=says) as caught:
        load(folder)
    assert all(name in str(caught.value) for name in names)


def test_order_and_address_are_options_and_the_bytes_are_the_same(tiny: Path) -> None:
    placed: list[list[int]] = []
    logits: list[torch.Tensor] = []
    for options in ({}, {"load_order": "reverse"}, {"load_order": "shuffled:3", "arena_base": "0x540000000000"}):
        with HostMemory(base=0x5100_0000_0000) as memory:
            observer = Observer()
            model = load_model(
                tiny, read_config(tiny), checkpoint_files(tiny), parse_options(options), memory, observer
            )
            with torch.inference_mode():
                logits.append(model(input_ids=IDS).logits.clone())
            placed.append([tensor.data_ptr() for tensor in model.parameters()])
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    assert placed[0] != placed[1] != placed[2] != placed[0]
    assert min(placed[2]) >= 0x5400_0000_0000


def test_a_taken_address_is_named(tiny: Path, load: Load) -> None:
    load(tiny, arena_base="0x550000000000")
    with pytest.raises(ResourceBusy, match="0x550000000000"):
        load(tiny, arena_base="0x550000000000")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "no-such-model"}, "cannot read the configuration"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "cannot build a causal language model"),
    ],
)
def test_what_is_no_causal_model_of_ours_is_named(
    tmp_path: Path, tiny: Path, load: Load, config: dict[str, object], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        load(changed_copy(tiny, tmp_path / "m", config=config))
