"""Random-weight checkpoints of real architectures, from a seed and nothing else.

They serve where size or shape matters and the words do not: benchmarks (Qwen3 dimensions) and tests (three
tiny architectures whose tensors are laid out differently: Qwen3, Llama, GPT-2).

Why the weights are drawn as they are. The usual N(0, 0.02) makes a poor subject: with tied embeddings the
model mostly repeats its last token, and norms that are all ones are byte-equal to one another, so a loader
that puts the wrong norm in a place is never noticed. So a matrix gets 1/sqrt(fan-in), which makes every block
count in the answer, norms get ones plus noise, biases get noise: no two tensors are equal and a change in any
of them changes the logits.

Every tensor has a generator of its own, seeded from (seed, name): bytes do not depend on the order of drawing
nor on how the tensors are cut into shards.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coldsnap.engines.transformers.checkpoints.byte_tokenizer import (
    FIRST_FILLER_ID,
    write_byte_tokenizer,
)
from coldsnap.engines.transformers.checkpoints.drawing import BYTES_PER_VALUE, draw_files
from coldsnap.engines.transformers.checkpoints.folder import is_made, written_aside
from coldsnap.errors import UsageError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DEFAULT_SHARD_BYTES = 4 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Dimensions of a decoder. `architecture` is the model type in its config: qwen3, llama, gpt2."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    intermediate: int
    vocabulary: int
    head_dim: int
    tied_embeddings: bool = True


def _qwen3(hidden: int, layers: int, heads: int, intermediate: int, tied: bool) -> ModelShape:
    return ModelShape(
        architecture="qwen3",
        hidden=hidden,
        layers=layers,
        heads=heads,
        key_value_heads=8,
        intermediate=intermediate,
        vocabulary=151_936,
        head_dim=128,
        tied_embeddings=tied,
    )


def _tiny(architecture: str, *, key_value_heads: int) -> ModelShape:
    return ModelShape(
        architecture=architecture,
        hidden=64,
        layers=2,
        heads=4,
        key_value_heads=key_value_heads,
        intermediate=128,
        vocabulary=320,
        head_dim=16,
    )


SIZES: Mapping[str, ModelShape] = {
    "tiny": _tiny("qwen3", key_value_heads=2),
    "tiny-llama": _tiny("llama", key_value_heads=2),
    "tiny-gpt2": _tiny("gpt2", key_value_heads=4),
    "0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "8b": _qwen3(4096, 36, 32, 12288, tied=False),
}


def make_random(
    out: Path,
    *,
    size: str,
    seed: int = 0,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Write a checkpoint of `size` (a key of SIZES) into `out` and return `out`.

    Equal arguments give equal bytes under the same version of torch, whatever the number of cores. A shard holds at
    most `shard_bytes` of tensor data, or one tensor. Does nothing when `out` was already made with the same arguments.
    Raises UsageError on an unknown size, a shard limit below 1, or an `out` that was made otherwise.
    """
    if size not in SIZES:
        raise UsageError(f"checkpoint size {size!r} is not known", cure=f"choose one of {', '.join(SIZES)}")
    if shard_bytes < 1:
        raise UsageError(f"shard_bytes is {shard_bytes}", cure="give at least 1")
    card: dict[str, object] = {
        "maker": "random-weights",
        "size": size,
        "seed": seed,
        "shard_bytes": shard_bytes,
    }
    if is_made(out, card):
        return out
    shape = SIZES[size]
    config = _config(shape)
    shapes = _tensor_shapes(config)
    shards = plan_shards({name: math.prod(dims) * BYTES_PER_VALUE for name, dims in shapes.items()}, shard_bytes)
    with written_aside(out, card) as folder:
        config.save_pretrained(folder)
        _write_generation_config(folder, config)
        write_byte_tokenizer(folder, vocabulary=shape.vocabulary)
        _write_weights(folder, shapes, shards, seed, progress or (lambda _line: None))
    return out


def plan_shards(sizes: Mapping[str, int], limit: int) -> Sequence[Sequence[str]]:
    """Names cut, in their order, into runs of at most `limit` bytes; a larger tensor stands alone."""
    shards: list[list[str]] = []
    used = 0
    for name, num_bytes in sizes.items():
        if not shards or used + num_bytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += num_bytes
    return shards


def _config(shape: ModelShape) -> "PretrainedConfig":
    import torch
    from transformers import GPT2Config, LlamaConfig, PretrainedConfig, Qwen3Config

    special = {"eos_token_id": FIRST_FILLER_ID - 1, "pad_token_id": FIRST_FILLER_ID - 1}
    config: PretrainedConfig
    if shape.architecture == "gpt2":
        config = GPT2Config(
            vocab_size=shape.vocabulary,
            n_embd=shape.hidden,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_inner=shape.intermediate,
            n_positions=2048,
            tie_word_embeddings=shape.tied_embeddings,
            bos_token_id=None,
            **special,
        )
        config.architectures = ["GPT2LMHeadModel"]
    else:
        family = {"qwen3": Qwen3Config, "llama": LlamaConfig}[shape.architecture]
        config = family(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.key_value_heads,
            intermediate_size=shape.intermediate,
            head_dim=shape.head_dim,
            max_position_embeddings=40_960,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            tie_word_embeddings=shape.tied_embeddings,
            bos_token_id=None,
            **special,
        )
        config.architectures = [{"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[shape.architecture]]
    config.dtype = torch.bfloat16
    return config


def _tensor_shapes(config: "PretrainedConfig") -> dict[str, tuple[int, ...]]:
    """Name -> dimensions of every tensor a checkpoint of this config holds, tied copies left out."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    return shapes


def _write_generation_config(folder: Path, config: "PretrainedConfig") -> None:
    from transformers import GenerationConfig

    GenerationConfig(
        do_sample=False, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)


def _write_weights(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    shards: Sequence[Sequence[str]],
    seed: int,
    progress: Callable[[str], None],
) -> None:
    files = {folder / _file_name(number, len(shards)): names for number, names in enumerate(shards, start=1)}
    draw_files(files, shapes, seed=seed, num_threads=len(os.sched_getaffinity(0)), progress=progress)
    if len(shards) > 1:
        index = {name: path.name for path, names in files.items() for name in names}
        total = sum(math.prod(dims) * BYTES_PER_VALUE for dims in shapes.values())
        document = {"metadata": {"total_size": total}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )


def _file_name(number: int, num_files: int) -> str:
    return f"model-{number:05d}-of-{num_files:05d}.safetensors" if num_files > 1 else "model.safetensors"
